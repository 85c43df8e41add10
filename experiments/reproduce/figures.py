"""Figures: gains and α as bars, Figure 1 and Figure 5 from one output, Figures 2 to 4."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.text import Text

from experiments import theory
from experiments.reproduce import gains
from experiments.reproduce.pages import Section, paper_alpha
from experiments.reproduce.study import Study, short
from specjax import decoding, files, report
from specjax.trace import Timeline, timeline, trace

TIMELINE_GAMMAS = (7, 3)  # the paper's Figure 5; plain decoding is its third row


def of_tables(config, workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """Bars of Table 3, and of Tables 2 and 4."""
    alphas = [row for row in rows if row["table"] == "alpha"]
    if alphas:
        drawn = [
            {**row, "paper": paper_alpha(config, short(row["draft"]), row["temperature"])}
            for row in alphas
        ]
        _save(workdir / "alphas.png", report.draw_alphas(drawn, [short(r["draft"]) for r in drawn]))
    if timed := [row for row in rows if row["table"] == "gain"]:
        labels = [f"{short(r['draft'])} T={r['temperature']:g} γ={r['gamma']}" for r in timed]
        _save(workdir / "gains.png", report.draw_gains(timed, labels))


def example(on: Study, workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> tuple[Any, Text]:
    """Figure 1: what happened to each token of one output. The section, and lines to print.

    It is the longest output of the timed inputs, with the best draft at the first temperature.
    """
    best = _best(on, rows)
    method = gains.method(on, best["draft"], best["temperature"], best["gamma"])
    texts, index = _longest(on)
    rounds = trace(method, *gains.start(on, method, texts, index))
    tokens = sum(len(r.accepted) + len(r.next_token) for r in rounds)
    said = f"{tokens} tokens in {len(rounds)} target calls"
    title = f"{on.examples[index].input}   ({said})"
    lines = report.spans(rounds, on.target.tokenizer.decode)
    _save(workdir / "trace.png", report.draw_trace(lines, title))
    files.write_text(workdir / "trace.html", report.html_trace(lines, title))
    section = Section(
        "Figure 1: one output, a line for each target call",
        words=f"{said}, where the paper's example has 38 in 9. In colour and as text: "
        "[trace.html](trace.html).",
        images=("trace.png",),
    )
    return section, Text(f"{title}\n", style="bold").append_text(report.coloured(lines))


def when(on: Study, workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> Section:
    """Figure 5: when each model ran for the same output, for γ = 7 and 3 and without a draft."""
    best = _best(on, rows)
    texts, index = _longest(on)
    methods: dict[str, Any] = {
        f"γ={gamma}": gains.method(on, best["draft"], best["temperature"], gamma)
        for gamma in TIMELINE_GAMMAS
    }
    methods["base"] = gains.plain_method(on, best["temperature"])
    runs: list[tuple[str, Timeline]] = [
        (label, timeline(method, functools.partial(gains.start, on, method, texts, index)))
        for label, method in methods.items()
    ]
    _save(workdir / "timeline.png", report.draw_timeline(runs))
    calls = ", ".join(f"{run.target_calls} ({label})" for label, run in runs)
    return Section(
        "Figure 5: what ran when",
        words=f"{len(runs[0][1].tokens)} tokens take {calls} calls of the target's decoder; in the "
        f"paper's example 4, 7 and 17. Draft: {short(best['draft'])}. Each phase is called and "
        "waited for by itself here, so that its time can be seen: the jitted loop gives the same "
        "tokens in less.",
        images=("timeline.png",),
    )


def formulas(workdir: pathlib.Path) -> Section:
    """Table 1 and Figures 2 to 4, which need no models."""
    theory.write(workdir / "theory")
    return Section(
        "Table 1, Figures 2 to 4: what the formulas give",
        words="In [theory/report.md](theory/report.md), beside the paper's digits.",
        images=("theory/figure2.png", "theory/figure3.png", "theory/figure4.png"),
    )


def _best(on: Study, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = on.config.temperatures[0]
    timed = [row for row in rows if row["table"] == "gain" and row["temperature"] == first]
    return max(timed, key=lambda row: row["gain_decode"])


def _longest(on: Study) -> tuple[list[list[int]], int]:
    """The timed inputs, and which of them has the longest output at the first temperature."""
    count = on.config.timed_inputs
    ids = decoding.tokenize(on.target, on.texts(count), on.config.max_source_len or None)
    rows = on.decode(None, on.config.temperatures[0], count)
    return ids, max(range(len(rows)), key=lambda i: rows[i].emitted)


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
