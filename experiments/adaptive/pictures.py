"""Speedup of each race, and how long drafts were."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.adaptive import board
from experiments.adaptive.board import Row
from experiments.reproduce.pages import Section
from specjax.support import files

ACCEPTED, REJECTED = "#1f4e8c", "#e08a2e"


def panels(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """A panel for each race: policies as rows, with intervals."""
    _save(workdir / "speedups.png", draw_panels(board.races(rows)))
    return Section(
        "Speedup of each race",
        words="A panel for each draft and temperature. Dots are policies, with 95% intervals over "
        "inputs. Lines: plain decoding (dotted), the best static γ (solid), and the oracle in "
        "replay of the same outputs (dashed).",
        images=("speedups.png",),
    )


def draw_panels(found: Sequence[Sequence[Row]]) -> Figure:
    """Policies in the order of their means over all races."""
    methods = _methods(found, static=False)

    def mean(method):
        return np.mean([r["of_best"] for rows in found for r in rows if r["method"] == method])

    methods.sort(key=mean)
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    size = 1.4 + 1.9 * columns, (0.7 + 0.17 * len(methods)) * lines
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    for axes, rows in zip(grid, found, strict=False):
        by, still = {row["method"]: row for row in rows}, board.still(rows)
        for i, method in enumerate(methods):
            if method in by:
                row = by[method]
                low, high = row["speedup_decode_low"], row["speedup_decode_high"]
                axes.plot([low, high], [i, i], color=ACCEPTED, linewidth=1)
                axes.plot(row["speedup_decode"], i, "o", color=ACCEPTED, markersize=3.5)
        axes.axvline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes.axvline(still["speedup_decode"], color=REJECTED, linewidth=1)
        axes.axvline(still["oracle_timed"], color=REJECTED, linewidth=1, linestyle="--")
        title = f"{board.label(rows[0])}, α = {rows[0]['alpha']:.2f}\nbest {still['method']}"
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(found) :]:
        axes.set_axis_off()
    grid[0].set_yticks(range(len(methods)), methods)
    figure.supxlabel("times plain decoding", fontsize=8)
    return figure


def lengths(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """How long the drafts of each method were, and how much of them was kept."""
    _save(workdir / "lengths.png", draw_lengths(board.races(rows)))
    return Section(
        "Draft lengths",
        words="Drafted tokens per target call, over all timed inputs, by what became of them. A "
        "method without a bar drafted nothing, or was not in that race.",
        images=("lengths.png",),
    )


def draw_lengths(found: Sequence[Sequence[Row]]) -> Figure:
    """A panel for each race, a bar for each method."""
    methods = [*_methods(found, static=True), *_methods(found, static=False)]
    size = 1.2 + 1.5 * len(found), 1.2 + 0.2 * len(methods)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, sharex=True, squeeze=False)[0]
    for axes, rows in zip(panels, found, strict=True):
        by = {row["method"]: row for row in rows}
        there = [i for i, method in enumerate(methods) if method in by]
        of = [by[methods[i]] for i in there]
        kept = [row["accepted"] / row["target_calls"] for row in of]
        lost = [(row["drafted"] - row["accepted"]) / row["target_calls"] for row in of]
        axes.barh(there, kept, color=ACCEPTED, label="accepted")
        axes.barh(there, lost, left=kept, color=REJECTED, label="rejected")
        axes.set_title(f"{board.label(rows[0])}\nα = {rows[0]['alpha']:.2f}", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(methods)), methods, fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("drafted tokens per target call", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside upper right", ncols=2)  # fmt: skip
    return figure


def _methods(found: Sequence[Sequence[Row]], *, static: bool) -> list[str]:
    """Of all races: static γ in their order, policies by their name."""
    names = {row["method"] for rows in found for row in rows if row["static"] == static}
    return sorted(names, key=(lambda name: int(name.removeprefix("γ="))) if static else None)


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
