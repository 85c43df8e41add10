"""Speedup of each race, and how long drafts were."""

import pathlib
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.adaptive import board
from experiments.adaptive.board import Row
from experiments.reproduce.pages import Section
from specjax.support import files

ACCEPTED, REJECTED = "#1f4e8c", "#e08a2e"


def against_alpha(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """Every policy beside the best static γ, for all drafts and temperatures."""
    _save(workdir / "alpha.png", draw_against_alpha(_by_alpha(rows)))
    return Section(
        "Speedup of each race",
        words="A column for each race, by ascending α. Each mark is a policy; the bar is the best "
        "static γ, with its quartiles. At the dotted line decoding takes as long without a draft.",
        images=("alpha.png",),
    )


def draw_against_alpha(found: Sequence[Sequence[Row]]) -> Figure:
    """Races by ascending α, each in a column of its own: between them there is no data."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    columns = range(len(found))
    still = [board.still(rows) for rows in found]
    speedup = [row["speedup_decode"] for row in still]
    errors = [
        [row["speedup_decode"] - row["speedup_decode_low"] for row in still],
        [row["speedup_decode_high"] - row["speedup_decode"] for row in still],
    ]
    axes.errorbar(columns, speedup, errors, fmt="_", color="0.2", markersize=28, markeredgewidth=2,
                  capsize=3, label="best static γ")  # fmt: skip
    methods = _methods(found, static=False)
    for i, method in enumerate(methods):
        # Side by side, or they would hide each other.
        shift = 0.3 * (i / max(len(methods) - 1, 1) - 0.5) * 2
        points = [(at + shift, row["speedup_decode"]) for at, rows in enumerate(found)
                  for row in rows if row["method"] == method]  # fmt: skip
        axes.plot(*zip(*points, strict=True), "osDv^P"[i % 6], markersize=4,
                  color=colormaps["tab20"](i % 20), label=method)  # fmt: skip
    axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
    names = [f"{board.label(rows[0])}\nα = {rows[0]['alpha']:.2f}" for rows in found]
    axes.set_xticks(columns, names, fontsize=8)
    axes.set(ylabel="times plain decoding", xlim=(-0.5, len(found) - 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure


def lengths(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """How long the drafts of each method were, and how much of them was kept."""
    _save(workdir / "lengths.png", draw_lengths(_by_alpha(rows)))
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


def _by_alpha(rows: Sequence[Row]) -> list[list[Row]]:
    return sorted(board.races(rows), key=lambda race: race[0]["alpha"])


def _methods(found: Sequence[Sequence[Row]], *, static: bool) -> list[str]:
    """Of all races: static γ in their order, policies by their name."""
    names = {row["method"] for rows in found for row in rows if row["static"] == static}
    return sorted(names, key=(lambda name: int(name.removeprefix("γ="))) if static else None)


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
