"""Speedup of each race."""

import itertools
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments import plots
from experiments.adaptive import board
from experiments.adaptive.board import Row
from experiments.plots import ACCEPTED
from experiments.reproduce.pages import Section

MIN_WIDTH, MIN_HEIGHT = 6.0, 3.4  # inches of a figure with names of policies and a legend
LEVEL = 0.98  # of the best static γ, from which on a title counts a race as not lost


def panels(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """A panel for each race: policies as rows, with intervals."""
    plots.save(workdir / "speedups.png", draw_panels(board.races(rows)))
    return Section(
        "Speedup of each race",
        words="A panel for each draft and temperature. Dots are policies, with 95% intervals over "
        "inputs. The oracle is that of replay of the same outputs.",
        images=("speedups.png",),
    )


def draw_panels(found: Sequence[Sequence[Row]]) -> Figure:
    """Draw policies in the order of their means; the title counts what the best one reaches."""

    def mean(method):
        return np.mean([r["of_best"] for rows in found for r in rows if r["method"] == method])

    names = {row["method"] for rows in found for row in rows if not row["static"]}
    methods = sorted(sorted(names), key=mean)
    figure, grid = _grid(len(found), 2.1, 0.9 + 0.19 * len(methods), sharey=True)
    for axes, rows in zip(grid, found, strict=True):
        by, still = {row["method"]: row for row in rows}, board.still(rows)
        for i, method in enumerate(methods):
            if method in by:
                row = by[method]
                low, high = row["speedup_decode_low"], row["speedup_decode_high"]
                axes.plot([low, high], [i, i], color=ACCEPTED, linewidth=1.2)
                axes.plot(row["speedup_decode"], i, "o", color=ACCEPTED, markersize=4)
        axes.margins(x=0.08)
        axes.axvline(1, **plots.PLAIN)
        axes.axvline(still["speedup_decode"], **plots.BEST_STATIC)
        axes.axvline(still["oracle_timed"], **plots.ORACLE)
        title = f"{board.label(rows[0])}, α = {rows[0]['alpha']:.2f}\nbest {still['method']}"
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        plots.bare(axes)
    grid[0].set_yticks(range(len(methods)), methods)
    grid[0].set_ylim(-0.6, len(methods) - 0.4)
    marks: list[tuple[str, dict[str, Any]]] = [
        ("policy, with its 95% interval", {"color": ACCEPTED, "marker": "o", "markersize": 4}),
        ("plain decoding", plots.PLAIN),
        ("best static γ", plots.BEST_STATIC),
        ("oracle", plots.ORACLE),
    ]
    _legend(figure, [Line2D([], [], label=name, **style) for name, style in marks])
    for axes in grid[-4:]:
        axes.set_xlabel("speedup over plain (factor)", fontsize=9)
    figure.suptitle(textwrap.fill(levelled(found), int(11 * figure.get_figwidth())), fontsize=10)
    return figure


def levelled(found: Sequence[Sequence[Row]]) -> str:
    """Say which policy is level with the best static γ in most races."""
    reached: dict[str, list[float]] = {}
    for row in itertools.chain.from_iterable(found):
        if not row["static"]:
            reached.setdefault(row["method"], []).append(row["of_best"])
    if not reached:
        return ""

    def rank(name: str) -> tuple[int, float]:
        return sum(ratio >= LEVEL for ratio in reached[name]), float(np.mean(reached[name]))

    best = max(reached, key=rank)
    return (
        f"{best}: faster than the best static γ, or within {1 - LEVEL:.0%} of it, in "
        f"{rank(best)[0]} of {len(found)} race{'s' * (len(found) > 1)}"
    )


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend for all panels, below them; its columns fit the figure."""
    widest = max(len(handle.get_label()) for handle in handles)
    columns = int(14 * figure.get_figwidth() / (widest + 6))
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=max(1, min(5, columns)),
                  loc="outside lower center")  # fmt: skip


def _grid(count: int, width: float, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and so many panels of this size in inches, four in a line; wider if few."""
    columns = min(4, count)
    lines = -(-count // columns)
    size = max(MIN_WIDTH, 1 + width * columns), max(MIN_HEIGHT, height * lines)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, **options).ravel()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]
