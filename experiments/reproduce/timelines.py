"""Figure 5: when each model ran for one output, for γ = 7 and 3 and without a draft."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import figure1
from experiments.reproduce import speedups
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax import speculative
from specjax.dice import dice_for
from specjax.loop import Method
from specjax.models import sharding
from specjax.rounds import Round
from specjax.state import State
from specjax.support import memory_maps
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


# --- a run, stepped phase by phase ---------------------------------------------------------------


_verify = jax.jit(speculative.verify)


@jax.jit
def _draft(method, context, state):
    return speculative.draft(method, context, state, dice_for(method))


@jax.jit
def _accept(method, state, drafts, logprobs, hidden):
    return speculative.accept(method, state, drafts, logprobs, hidden, dice_for(method))


@jax.jit
def _learn(method, context, state, drafts, verdict):
    state = speculative.observe(method, context, state, drafts, verdict)
    return speculative.conclude(method, context, state, drafts, verdict)


class Event(NamedTuple):
    """One phase of a stepped run."""

    phase: str  # start, then draft, verify, accept, learn; in plain decoding start, then step
    round: int  # from 1; 0 is the start
    begin_ms: float
    end_ms: float
    tokens: int  # of the row: prompt, then drafted, scored, accepted, emitted; in a step, 1


class Timeline(NamedTuple):
    """The time of each phase, one after the other, and the tokens of the run."""

    events: list[Event]
    tokens: list[int]  # of the row, without the prompt

    @property
    def target_calls(self) -> int:
        """Number of calls of the target's decoder, its prefill not counted."""
        return sum(event.phase in ("verify", "step") for event in self.events)


@memory_maps.kept(methods=2)
def timeline(
    method: Method,
    prepare: Callable[[], tuple[Any, State]],
    *,
    row: int = 0,
    repeats: int = 5,
) -> Timeline:
    """Step a run phase by phase, each jitted by itself, and time one row of it (Figure 5).

    The run is stepped `repeats` times after a first one, which compiles; each phase of each round
    has the median time. Phases are dispatched from Python and waited for, and the times include
    that. The jitted loop gives the same tokens and is faster than their sum.

    Args:
      prepare: returns the contexts and the state before the first round, as `starting.prepare` and
        both `start` do; the same ones each time. Timed as the start.

    Raises:
      ValueError: repeats < 1, or a method whose drafts are trees.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be ≥ 1.")
    if method.branches:
        raise ValueError('A timeline has the phases of a chain: give a method with tree="chain".')
    runs = [_stepped(method, prepare, row) for _ in range(1 + repeats)][1:]
    lasted = np.median([[ms for *_, ms in phases] for phases, _ in runs], axis=0).tolist()
    phases, output = runs[0]
    events, now = [], 0.0
    for (phase, number, tokens, _), ms in zip(phases, lasted, strict=True):
        events.append(Event(phase, number, now, now + ms, tokens))
        now += ms
    return Timeline(events, output)


def _stepped(method, prepare, row) -> tuple[list[tuple[str, int, int, float]], list[int]]:
    """Step a run; return each step's phase, round, tokens and ms, and the row's output."""
    spent: list[tuple[str, int, float]] = []
    counts: list[int] = []
    number = 0

    def timed(phase, function, *args):
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        spent.append((phase, number, 1e3 * (time.perf_counter() - begin)))
        return result

    def of(array):
        return int(sharding.fetch(array)[row])

    context, state = timed("start", prepare)
    prompt_len = of(state.length)
    counts += [prompt_len]
    while figure1.is_running(state, row):
        number += 1
        known = of(state.length)
        state, round_ = _by_phases(method, context, state, timed)
        if len(counts) == len(spent) - 1:  # plain decoding: one phase, not four
            counts += [1]
        else:
            drafted, accepted = of(round_.drafts.length), of(round_.accepted)
            counts += [drafted, method.gamma_max + 1, accepted, of(state.length) - known]
    output = sharding.fetch(state.tokens)[row, prompt_len : of(state.length)].tolist()
    phases = [
        (phase, round_number, tokens, ms)
        for (phase, round_number, ms), tokens in zip(spent, counts, strict=True)
    ]
    return phases, output


def _by_phases(method, context, state, timed) -> tuple[State, Round]:
    """Run one round, each phase called through `timed(name, function, *arguments)`."""
    if method.drafter is None:
        return timed("step", figure1.step, method, context, state)
    drafts, state = timed("draft", _draft, method, context.drafter, state)
    known = method, context.target, state, drafts
    logprobs, hidden, state = timed("verify", _verify, *known)
    verdict = timed("accept", _accept, method, state, drafts, logprobs, hidden)
    return timed("learn", _learn, method, context.drafter, state, drafts, verdict)


# --- the table and the picture -------------------------------------------------------------------


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
