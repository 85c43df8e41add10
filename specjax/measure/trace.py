"""One run, round by round: the outcome of each token (Figure 1), and a timeline (Figure 5)."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import speculative
from specjax.dice import dice_for
from specjax.loop import Method
from specjax.models import sharding
from specjax.rounds import Round
from specjax.speculative import Contexts
from specjax.state import State, unfinished
from specjax.support import memory_maps


@jax.jit
def _step(method, context, state):
    after, round_ = method.step(context, state)
    return after, visible(round_)


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


@jax.jit
def _alive(state, row):
    return unfinished(state) & ~state.done[row]


class Branch(NamedTuple):
    """A part of a tree that was not kept: a node, its first child, the first child of that, …"""

    behind: list[int]  # the round's drafted tokens on the path to it
    tokens: list[int]


class TracedRound(NamedTuple):
    """The outcome of one target call for one row."""

    accepted: list[int]  # drafted tokens that were kept
    rejected: list[int]  # the first drafted token not kept, and those after it, never tested
    next_token: list[int]  # the target's own: a correction, or one more after full acceptance
    branches: Sequence[Branch] = ()  # of a tree, in place of `rejected`: see `branches`


def trace(method: Method, contexts: Contexts, state: State, row: int = 0) -> list[TracedRound]:
    """Step the loop's own body from Python and record one row of the batch."""
    rounds, begin = [], sharding.fetch(state.length)[row]
    while _alive(state, row):
        state, round_ = _step(method, contexts, state)
        tokens, length = sharding.fetch((state.tokens, state.length))
        rounds.append(traced(round_, tokens[row, begin : length[row]].tolist(), row))
        begin = length[row]
    return rounds


def visible(round_: Round) -> Round:
    """Keep only what `traced` reads, so that distributions are not computed."""
    drafts, nodes = round_.drafts, round_.nodes
    no: Any = None
    found: dict[str, Any] = dict.fromkeys(Round._fields)
    found |= {
        "accepted": round_.accepted,
        "drafts": drafts and drafts._replace(logprobs=no, belief_logprob=no),
        "nodes": nodes and nodes._replace(logprobs=no, belief=no),
        "node": round_.node,
    }
    return Round(**found)


def traced(round_: Round, output: list[int], row: int = 0) -> TracedRound:
    """Read the outcome of a round for a row.

    Args:
      output: tokens that the row gained.
    """
    round_ = sharding.fetch(round_)
    kept = min(int(round_.accepted[row]), len(output))
    accepted, next_token = output[:kept], output[kept:]
    if round_.nodes is not None:
        return TracedRound(accepted, [], next_token, branches(round_, len(output), row))
    drafted = round_.drafts.tokens[row, : round_.drafts.length[row]].tolist()
    # An EOS among the drafts ends the row: what follows it was not rejected.
    return TracedRound(accepted, drafted[kept:] if next_token else [], next_token)


def branches(round_: Round, gained: int, row: int = 0) -> list[Branch]:
    """List the branches of a row's tree without the accepted path, each node once, the last first.

    Args:
      gained: number of tokens that the row gained. Behind an EOS among them nothing was rejected.
    """
    nodes, last = round_.nodes, round_.node
    assert last is not None
    parent = np.broadcast_to(nodes.parent, (len(nodes.tokens), nodes.size + 1))[row].tolist()
    tokens = [0, *nodes.tokens[row].tolist()]
    below: dict[int, list[int]] = {node: [] for node in range(len(parent))}
    for node in range(1, len(parent)):
        if nodes.submitted[row, node - 1]:
            below[parent[node]].append(node)
    path = [int(last[row])]
    while path[0]:
        path.insert(0, parent[path[0]])
    found = []

    def follow(node: int, behind: list[int]) -> None:
        line = [node]
        while below[line[-1]]:
            line.append(below[line[-1]][0])
        drafted = [tokens[one] for one in line]
        found.append(Branch(behind, drafted))
        for at in reversed(range(len(line))):
            for other in below[line[at]][1:]:
                follow(other, behind + drafted[: at + 1])

    for depth, node in reversed([*enumerate(path)][:gained]):
        for child in below[node]:
            if child not in path:
                follow(child, [tokens[one] for one in path[1 : depth + 1]])
    return found


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
      prepare: returns the contexts and the state before the first round, as `decoding.prepare` and
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
    while _alive(state, row):
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
        return timed("step", _step, method, context, state)
    drafts, state = timed("draft", _draft, method, context.drafter, state)
    known = method, context.target, state, drafts
    logprobs, hidden, state = timed("verify", _verify, *known)
    verdict = timed("accept", _accept, method, state, drafts, logprobs, hidden)
    return timed("learn", _learn, method, context.drafter, state, drafts, verdict)
