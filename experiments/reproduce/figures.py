"""Figures: speedups and α as bars, Figure 1 and Figure 5 from one output."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.reproduce import timelines, traces
from experiments.reproduce.pages import paper_alpha
from specjax.measure import report
from specjax.support import files
from specjax.support.named import short


def draw(config, workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """All that there are rows for."""
    of = {
        name: [row for row in rows if row["table"] == name] for name in {r["table"] for r in rows}
    }
    if alphas := of.get("alpha"):
        papers = [paper_alpha(config, short(row["draft"]), row["temperature"]) for row in alphas]
        drawn = [{**row, "paper": paper} for row, paper in zip(alphas, papers, strict=True)]
        _save(workdir / "alphas.png", report.draw_alphas(drawn, [short(r["draft"]) for r in drawn]))
    if timed := of.get("speedup"):
        labels = [_label(row) for row in timed]
        _save(workdir / "speedups.png", report.draw_speedups(timed, labels))
        _save(
            workdir / "positions.png",
            report.draw_positions(timed, [short(r["draft"]) for r in timed]),
        )
    if traced := of.get("trace"):
        (row,) = traced
        shown = row["lines"], row["input"], traces.setting(row)
        _save(workdir / "trace.png", report.draw_trace(*shown))
        files.write_text(workdir / "trace.html", report.html_trace(*shown))
    if stepped := of.get("timeline"):
        _save(workdir / "timeline.png", timelines.draw(timelines.runs(stepped)))


def _label(row: dict[str, Any]) -> str:
    return f"{short(row['draft'])}\nT={row['temperature']:g} γ={row['gamma']}"


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
