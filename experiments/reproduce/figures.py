"""Figures: speedups as bars, Figure 1 and Figure 5 from one output."""

import math
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import figure1, plots
from experiments.reproduce import timelines, traces
from specjax.support.named import short


def draw(config, workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """All that there are rows for."""
    of = {
        name: [row for row in rows if row["table"] == name] for name in {r["table"] for r in rows}
    }
    if timed := of.get("speedup"):
        labels = [_label(row) for row in timed]
        plots.save(workdir / "speedups.png", draw_speedups(timed, labels))
        plots.save(
            workdir / "positions.png",
            draw_positions(timed, [short(r["draft"]) for r in timed]),
        )
    if traced := of.get("trace"):
        (row,) = traced
        shown = row["lines"], row["input"], traces.setting(row)
        plots.save(workdir / "trace.png", figure1.draw(*shown))
    if stepped := of.get("timeline"):
        plots.save(workdir / "timeline.png", timelines.draw(timelines.runs(stepped)))


def _label(row: dict[str, Any]) -> str:
    return f"{short(row['draft'])}\nT={row['temperature']:g} γ={row['gamma']}"


def draw_speedups(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Draw measured speedups as bars, with quartiles; both predictions as marks over them.

    The axis covers the measurements and their own predictions. Where the paper's formula exceeds
    it, an arrow at the top has its number.

    Args:
      rows: with speedup_decode, speedup_decode_low, speedup_decode_high, speedup_end_to_end,
        predicted, which may be None, and predicted_paper.
      labels: labels of the rows; their lines are kept, and long ones are cut.
    """
    figure = Figure(figsize=(max(7, 1.05 * len(rows)), 4), layout="constrained")
    axes = figure.add_subplot()
    places, width = np.arange(len(rows)), 0.36

    def of(field: str) -> np.ndarray:
        return np.array([math.nan if row[field] is None else row[field] for row in rows])

    loop, whole, predicted = of("speedup_decode"), of("speedup_end_to_end"), of("predicted")
    low, high, paper = of("speedup_decode_low"), of("speedup_decode_high"), of("predicted_paper")
    top = 1.12 * np.nanmax([np.ones(len(rows)), high, whole, predicted])
    above = paper > top
    bars: dict[str, Any] = {"width": width * 0.94, "error_kw": {"linewidth": 1.2, "capsize": 3}}
    made: list[Any] = [
        axes.bar(places - width / 2, loop, yerr=(loop - low, high - loop), color="#6f9bd1", **bars),
        axes.bar(places + width / 2, whole, color="#e08a2e", **bars),
        *axes.plot(places - width / 2, predicted, "_", color="#b0124d", markersize=17,
                   markeredgewidth=2.5),
        *axes.plot(places, np.where(above, math.nan, paper), "D", color="0.15", markersize=5),
    ]  # fmt: skip
    axes.plot(places[above], np.full(above.sum(), 0.97 * top), "^", color="0.15", markersize=5)
    for place, value in zip(places[above], paper[above], strict=True):
        axes.annotate(f"{value:.1f}", (place, 0.97 * top), (7, 0), textcoords="offset points",
                      fontsize=8, va="center")  # fmt: skip
    axes.axhline(1, color="0.35", linestyle=":", linewidth=1)
    axes.set_ylim(0, top)
    lines = [[textwrap.fill(line, 12) for line in label.split("\n")] for label in labels]
    axes.set_xticks(places, ["\n".join(label) for label in lines])
    axes.set_ylabel("times plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    names = (
        "measured, decode only, with quartiles",
        "measured, end to end",
        "predicted, τ/(γc+v+overhead)",
        "predicted, Thm 3.8 (v = 1); ▲ where beyond the axis",
    )
    figure.legend(made, names, frameon=False, fontsize=8, loc="outside upper center", ncols=2)
    return figure


def draw_positions(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Draw how often the n-th drafted token is accepted after those before it, a line per draft.

    Args:
      rows: with temperature and acceptance_by_position, in which None stands for no such token.
      labels: of each row's draft.
    """
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(figsize=(4.2 * len(temperatures) + 1.6, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(temperatures), sharey=True))
    styles = {name: {"color": f"C{i % 10}", "marker": "osD^v<>P*X"[i % 10]}
              for i, name in enumerate(dict.fromkeys(labels))}  # fmt: skip
    for axes, temperature in zip(panels, temperatures, strict=True):
        for row, name in zip(rows, labels, strict=True):
            if row["temperature"] == temperature:
                rates = [math.nan if r is None else r for r in row["acceptance_by_position"]]
                axes.plot(range(1, len(rates) + 1), rates, markersize=4, label=name, **styles[name])
        axes.set_title(f"T={temperature:g}", fontsize=10)
        axes.set_xlabel("drafted token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accepted, if those before were")
    named = {
        name: line
        for axes in panels
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8,
                  loc="outside right upper")  # fmt: skip
    return figure
