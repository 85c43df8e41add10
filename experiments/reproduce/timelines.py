"""Figure 5: when each model ran for one output, for γ = 7 and 3 and without a draft."""

import functools
from collections.abc import Sequence
from typing import Any

from experiments.reproduce import speedups
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax.measure.trace import Event, Timeline, timeline
from specjax.support.named import short

GAMMAS = (7, 3, 0)  # the paper's; 0 is plain decoding


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
