"""Figure 5: when each model ran for one output, for γ = 7 and 3 and without a draft."""

import functools
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.reproduce import speedups
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax.measure.trace import Event, Timeline, timeline
from specjax.support.named import short

GAMMAS = (7, 3, 0)  # the paper's; 0 is plain decoding
# The phases of a timeline. The plain step is a call of the target, like a verify pass.
PHASES = {
    "start": ("encoders and prefill", "#e0a526"),
    "draft": ("draft, a part for each token", "#1e88e5"),
    "verify": ("a call of the target", "#6a3d9a"),
    "step": ("a call of the target", "#6a3d9a"),
    "accept": ("accept and commit", "#d0d0d0"),
    "learn": ("accept and commit", "#d0d0d0"),
}


def keys(_) -> list[dict[str, Any]]:
    """A row of boxes for each γ."""
    return [{"gamma": gamma} for gamma in GAMMAS]


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """One output at the first temperature, stepped phase by phase."""
    best, gamma = speedups.best(on), cell["gamma"]
    method = (
        speedups.method(on, best["draft"], best["temperature"], gamma)
        if gamma
        else speedups.plain_method(on, best["temperature"])
    )
    run = timeline(method, functools.partial(speedups.start, on, method, *on.shown))
    return {
        **{name: best[name] for name in ("draft", "temperature")},
        "events": run.events,
        "output": run.tokens,
        "target_calls": run.target_calls,
        "batch": 1,
    }


def runs(rows: Sequence[dict[str, Any]]) -> list[tuple[str, Timeline]]:
    """What the picture shows."""
    return [
        (_label(row), Timeline([Event(*event) for event in row["events"]], row["output"]))
        for row in rows
    ]


def draw(rows: Sequence[tuple[str, Timeline]]) -> Figure:
    """Draw Figure 5: for each labelled run a row of boxes, one for each phase."""
    figure = Figure(figsize=(9, 0.62 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    longest = max(run.events[-1].end_ms for _, run in rows)
    for y, (_, run) in enumerate(rows):
        for event in run.events:
            name, colour = PHASES[event.phase]
            parts = max(event.tokens, 1) if event.phase == "draft" else 1
            width = (event.end_ms - event.begin_ms) / parts
            boxes = [(event.begin_ms + i * width, width) for i in range(parts)]
            # A white edge would cover boxes that are hardly wider than it is.
            edge = 0.2 if width > longest / 250 else 0
            axes.broken_barh(boxes, (y - 0.3, 0.6), facecolor=colour, edgecolor="white",
                             linewidth=edge, label=name)  # fmt: skip
        counted = f"  {len(run.tokens)} tokens, {run.target_calls} target calls"
        axes.text(run.events[-1].end_ms, y, counted, fontsize=8, va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * longest)
    axes.set_xlabel("ms, stepped phase by phase")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8, ncols=4,
                  loc="outside lower center")  # fmt: skip
    return figure


def _label(row: dict[str, Any]) -> str:
    return f"γ={row['gamma']}" if row["gamma"] else "base"


def section(_, rows: Sequence[dict[str, Any]]) -> Section:
    """The picture."""
    calls = ", ".join(f"{row['target_calls']} ({_label(row)})" for row in rows)
    first = rows[0]
    return Section(
        "Figure 5: what ran when",
        words=f"{len(first['output'])} tokens take {calls} calls of the target's decoder; in the "
        f"paper's example 4, 7 and 17. Draft: {short(first['draft'])}, T={first['temperature']:g}. "
        "Each phase is called and waited for by itself here, so that its time can be seen: the "
        "jitted loop gives the same tokens in less.",
        images=("timeline.png",),
        measured=rows,
    )
