"""Speedup of each race, and how long drafts were."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
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
    figure, grid = _grid(len(found), 1.9, 0.7 + 0.17 * len(methods), sharey=True)
    for axes, rows in zip(grid, found, strict=True):
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
    grid[0].set_yticks(range(len(methods)), methods)
    grid[0].set_ylim(-0.6, len(methods) - 0.4)
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


def example(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """The rounds of one output: what was drafted where, and what was kept."""
    _save(workdir / "example.png", draw_example(board.races(rows)))
    return Section(
        "Draft lengths along one output",
        words="The first timed output of each race, from left to right. A bar for each round, at "
        "the tokens that it drafted: those accepted, and then those rejected. Above the best "
        "static γ, below a policy.",
        images=("example.png",),
    )


def draw_example(found: Sequence[Sequence[Row]]) -> Figure:
    """A panel for each race."""
    figure = Figure(figsize=(8.5, 0.5 + 0.75 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, rows in zip(panels, found, strict=True):
        shown = sorted((row for row in rows if "trail" in row), key=lambda row: row["static"])
        for line, row in enumerate(shown):
            for (start, drafted), (following, _) in itertools.pairwise(row["trail"]):
                kept = min(following - start - 1, drafted)
                axes.barh(line, kept, left=start, height=0.7, color=ACCEPTED)
                left, lost = start + kept, drafted - kept
                axes.barh(line, lost, left=left, height=0.35, color=REJECTED, alpha=0.8)
                axes.plot([start, start], [line - 0.4, line + 0.4], color="0.3", linewidth=0.4)
        axes.set_yticks(range(len(shown)), [row["method"] for row in shown], fontsize=7)
        axes.set_title(board.label(rows[0]), fontsize=7, loc="left", pad=2)
        axes.tick_params(axis="x", labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("tokens of the output", fontsize=8)
    return figure


def regrets(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """What was lost to the fastest way, as outputs grow."""
    _save(workdir / "regret.png", draw_regrets(board.races(rows)))
    return Section(
        "Regret",
        words="In replay of the timed outputs: time lost to the fastest way by when there are so "
        "many tokens, in tokens of plain decoding. That way takes the cheapest loop in every "
        "round. A policy that learns bends downwards.",
        images=("regret.png",),
    )


def draw_regrets(found: Sequence[Sequence[Row]]) -> Figure:
    """A panel for each race: the best static γ, and the five policies that lose least."""
    figure, grid = _grid(len(found), 2.1, 1.8)
    for axes, rows in zip(grid, found, strict=True):
        policies = sorted((r for r in rows if not r["static"]), key=lambda row: row["regret"][-1])
        still = board.still(rows)
        axes.plot(still["regret_at"], still["regret"], color=REJECTED, label=still["method"])
        for i, row in enumerate(policies[:5]):
            axes.plot(row["regret_at"], row["regret"], label=row["method"], linewidth=0.9,
                      color=colormaps["viridis"](i / 5))  # fmt: skip
        axes.set_title(board.label(rows[0]), fontsize=8)
        axes.legend(frameon=False, fontsize=5)
        axes.tick_params(labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("lost, in tokens of plain decoding", fontsize=8)
    return figure


def _grid(count: int, width: float, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and so many panels of this size in inches, four in a line."""
    columns = min(4, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(1 + width * columns, height * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, **options).ravel()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def _methods(found: Sequence[Sequence[Row]], *, static: bool) -> list[str]:
    """Names of the methods in any race: static γ in their order, policies by their name."""
    names = {row["method"] for rows in found for row in rows if row["static"] == static}
    return sorted(names, key=(lambda name: int(name.removeprefix("γ="))) if static else None)


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
