"""The stopwatch: costs of rounds and calls on this machine, from whole calls of the loops.

A round or a phase timed by itself takes another time than within a call, whose first rounds find
cold caches. So whole calls are timed, on real inputs, in loops that draft the same number of tokens
in every round, in turns with plain decoding. `fit` takes the calls apart.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import devices
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import common_width
from specjax.loop import Method, decode
from specjax.measure import counting, timing
from specjax.measure.counting import Always, Sized, Undecided
from specjax.measure.doubts import check_clock
from specjax.measure.fit import (
    CALL,
    DRAFT,
    PLAIN_CALL,
    REFUSED,
    TOKEN,
    Work,
    acceptance,
    fit,
    lengths_of,
    passes,
    unit_times,
)  # fmt: skip
from specjax.measure.timing import PLAIN
from specjax.models.checkpoint import Checkpoint
from specjax.passes import widths as widths_of
from specjax.policies import Costs, both, constant, fixed
from specjax.policies.nodes import cut
from specjax.speculative import Speculative
from specjax.trees.shapes import FixedTree

POLICIES = "policies"  # the loop that all policies share
TIMED_TEXTS = 4  # texts that costs are measured on, or one batch
TIMED_TOKENS = 32  # of a call
REFUSING = "a refused call"


def measure(
    loops: Mapping[str, Speculative],
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    passes_of: Mapping[str, str] | None = None,
    plain: Autoregressive | None = None,
    longest: int | None = None,
    repeats: int = 5,
    batch_size: int = 1,
    turn: int = 1,
    untimed: Sequence[Sequence[int]] = (),
    refusals: bool = False,
    names: tuple[str, str] = ("target", "draft"),
    width: int | None = None,
    until: float = math.inf,
    say: timing.Say = timing.silent,
) -> dict[str, Costs]:
    """Time calls of the loops in turns, and fit their costs.

    α is counted by output, in the first loop, with drafts of medium length.

    Args:
      loops: by name, of one target and one drafter; each with its own γ_max and passes. Their
        policies decide, but draft lengths are given: those of `lengths_of`; γ_max alone where
        drafts are `fixed`, so these costs hold for no shorter draft; 1 and γ_max in a loop that
        shares the passes of another.
      texts: ids from `decoding.texts.tokenize`, none empty. They are repeated to fill a batch.
      max_new_tokens: the budget of real calls, which sets the shapes.
      passes_of: loops that differ from another in their policy alone, and that other.
      plain: the plain loop, to time its tokens; without it `token` is NaN.
      longest: the budget of timed calls of more than one token; default max_new_tokens.
      batch_size: rows of a call; a batch lasts as long as the row with the most rounds.
      turn: calls of a turn, as in `timing.in_turns`.
      untimed: ids of more texts, which are decoded once each, for α alone.
      refusals: also time drafter calls that yield no token, in the first loop, as replay needs
        them. The policy of that loop is not `fixed`.
      width: of the sources, as in `timing.start`; default: that of all texts here.
      until: the time of `time.monotonic` after which no more repeats or untimed texts begin.
      say: reports what is compiled and timed.
    """
    longest = longest or max_new_tokens
    width, passes_of = width or common_width([*texts, *untimed]), passes_of or {}
    waits = devices.is_accelerator(target.model)
    timed = _timed_loops(loops, passes_of, refusals, waits, batch_size)
    made: dict[str, Method] = {PLAIN: plain} if plain else {}
    made |= {label: method for label, (_, _, method) in timed.items()}
    run: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "key": key, "repeats": repeats, "turn": turn,
        "width": width, "names": names, "until": until, "say": say,
    }  # fmt: skip
    found = _whole_calls(made, target, texts, longest, batch_size, **run)
    calls = []
    for label, done, budget, seconds in found:
        name, length, _ = timed.get(label, (None, 0, None))
        refusing = budget if label == REFUSING else 0
        calls.append((_work(name, done.by_length(length), refusing), seconds))
    first = [label for label, (name, *_) in timed.items() if name == next(iter(loops))]
    middle = first[(len(first) - refusals) // 2]
    notes = [done for label, done, *_ in found if label == middle]
    counted = [done.tokens[:, :batch_size] for done in notes[len(notes) // 2 :]]
    counted = [np.hstack(counted)[:, : len(texts)]]  # without those that fill a batch
    begin = partial(
        timing.start, made[middle], target, untimed, max_new_tokens=max_new_tokens, key=key,
        rows=batch_size, budgets=[longest] * len(untimed), width=width,
    )  # fmt: skip
    if untimed:
        say(f"decoding {len(untimed)} more texts for α")
    for at in range(0, len(untimed), batch_size):
        if monotonic() > until:
            break
        batch = range(len(untimed))[at : at + batch_size]
        done = counting.note(decode(made[middle], *begin(batch=batch)))
        counted.append(done.tokens[:, : len(batch)])
    shares = acceptance(*np.hstack(counted))
    widths = {
        name: passes(loop, batch_size) for name, loop in loops.items() if name not in passes_of
    }
    steady = {name for name in widths if waits and loops[name].policy.fixed}
    return fit(widths, calls, *shares, passes_of=passes_of, steady=steady)


def _whole_calls(
    made: Mapping[str, Method],
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    longest: int,
    batch_size: int,
    **run: Any,
) -> list[tuple[str, counting.Note, int, float]]:
    """Time calls of one token and of up to `longest` tokens in each loop, in turns.

    The texts are repeated to fill whole batches.

    Returns:
      for each call its loop, its counts, its budget and its seconds, the median over repeats.
    """
    filled = [texts[i % len(texts)] for i in range(-(-len(texts) // batch_size) * batch_size)]
    budgets = [1] * len(filled) + [longest] * len(filled)
    found = timing.side_by_side(
        made, target, filled * 2, budgets=budgets, batch_size=batch_size, note=counting.note, **run
    )
    seconds = {label: np.median(took, axis=0).tolist() for label, took in found.decode.items()}
    check_clock(took for each in seconds.values() for took in each)
    return [
        (label, done, budget, took)
        for label, notes in found.notes.items()
        for done, budget, took in zip(notes, budgets[::batch_size], seconds[label], strict=True)
    ]


def _timed_loops(
    loops: Mapping[str, Speculative],
    passes_of: Mapping[str, str],
    refusals: bool,
    waits: bool,
    batch_size: int,
) -> dict[str, tuple[str, int, Speculative]]:
    """The loops to time, by label: the loop that each belongs to, its draft length and itself.

    Loops with fixed drafts run as they are. If there are no others, the longest also drafts single
    tokens, with the same program: one length of each pass does not separate drafts from passes.
    """
    timed = {}

    def add(name: str, length: int, method: Speculative) -> None:
        timed[f"{name}, {length} drafted"] = name, length, method

    name, longest = max(loops.items(), key=lambda item: item[1].gamma_max)
    if not waits and longest.gamma_max > 1 and all(loop.policy.fixed for loop in loops.values()):
        add(name, 1, dataclasses.replace(longest, policy=constant(1)))
    for name, loop in loops.items():
        policy, usual = loop.policy, lengths_of(passes(loop, batch_size))
        if name in passes_of:
            policy, usual = Undecided() if policy.fixed else policy, [1, loop.gamma_max]
        if policy.fixed:
            add(name, loop.gamma_max, loop)
            continue
        for length in usual:
            add(name, length, dataclasses.replace(loop, policy=Always(jnp.int32(length), policy)))
    if refusals:
        name, loop = next(iter(loops.items()))
        always = Always(jnp.int32(loop.gamma_max), loop.policy, refuses=True)
        timed[REFUSING] = name, 0, dataclasses.replace(loop, policy=always)
    return timed


def _work(loop: str | None, rounds: Sequence[int], refusing: int = 0) -> Work:
    """Describe a call in units of work.

    Args:
      loop: a name; None for plain decoding.
      rounds: by drafted tokens.
      refusing: the budget of a call whose rounds draft nothing. Its last token has no room for a
        draft, so the drafter is not called for it.
    """
    if loop is None:
        return {PLAIN_CALL: 1, TOKEN: rounds[0]}
    refused: Work = {REFUSED: rounds[0] - (rounds[0] == refusing)} if refusing > 1 else {}
    return {CALL: 1, **refused, **{(loop, k): count for k, count in enumerate(rounds) if count}}


# --- one method -----------------------------------------------------------------------------------


def costs_of(
    method: Any,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    lengths: Sequence[int] = (),
    **run: Any,
) -> Costs:
    """Costs of rounds whose drafts have one length, each in a loop of its own.

    Args:
      method: of chains; or with a tree, whose costs are by its depth.
      lengths: of drafts that are timed; default: γ_max. Those between are interpolated.
      run: as in `measure`, but for the loops and plain decoding.
    """
    run = {"longest": min(TIMED_TOKENS, run["max_new_tokens"]), **run}
    if method.branches:
        return of_tree(method, target, texts, by_nodes=False, **run)
    loops = {static(k): of_length(method, k) for k in sorted({*lengths} or {method.gamma_max})}
    found = measure(loops, target, texts, plain=building.plain_of(method), **run)
    return together(found, steady=devices.is_accelerator(target.model))


def of_length(method: Any, length: int) -> Speculative:
    """Build a loop that drafts this length in every round, with a single verify pass."""
    return dataclasses.replace(method, policy=constant(length), gamma_max=length, passes=())


def together(found: Mapping[str, Costs], steady: bool = False) -> Costs:
    """The table by drafted tokens of loops of a length each; `verify` has all but draft steps.

    Args:
      steady: whether rounds of a loop all take the same, so that they do not separate draft steps
        from passes. A draft step is then what a token more costs.
    """
    timed = static_loops(found)
    lengths = [of.gamma_max for of in timed]
    rounds = [float(of.round_times(of.gamma_max)[-1]) for of in timed]
    draft = float(timed[-1].draft)
    if steady and len(timed) > 1:
        draft = max(0.0, (rounds[-1] - rounds[0]) / (lengths[-1] - lengths[0]))
    verify = [max(of - k * draft, 0.01 * of) for k, of in zip(lengths, rounds, strict=True)]
    first = float(np.nan_to_num(timed[-1].token, nan=verify[0]))
    verify = np.interp(range(lengths[-1] + 1), [0, *lengths], [first, *verify]).tolist()
    return Costs(**timed[-1].as_row() | {"draft": draft, "verify": verify, "rest": 0.0})


def of_tree(
    method: Any,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    by_nodes: bool,
    *,
    longest: int,
    batch_size: int = 1,
    repeats: int = 3,
    **run: Any,
) -> Costs:
    """Costs of rounds by the number of nodes of a tree, or else by its depth.

    By nodes, only those sizes are timed after which a wider verify pass or a deeper level begins.
    Any other takes what the next larger one takes.
    """
    depth, nodes = method.shape.depth, method.shape.nodes
    asked = {k: (k, nodes) for k in range(depth + 1)}
    if by_nodes:
        ends = [0, *(width - 1 for width in widths_of(method, bucket(batch_size))[:-1])]
        if isinstance(method.shape, FixedTree):
            deepest = np.maximum.accumulate(method.shape.depths)
            ends += np.flatnonzero(np.diff(deepest)).tolist()  # one node more is a level more
        asked = {count: (depth, count) for count in (*ends, nodes)}
    made: dict[str, Any] = {PLAIN: building.plain_of(method)}
    made |= {str(n): dataclasses.replace(method, policy=cut(*how)) for n, how in asked.items()}
    run["repeats"] = repeats
    works: list[dict[Hashable, float]] = []
    seconds: list[float] = []
    for size, done, _, took_all in _whole_calls(made, target, texts, longest, batch_size, **run):
        kind = PLAIN_CALL if size == PLAIN else CALL
        works.append({kind: 1.0, size: done.calls})
        seconds.append(took_all)
    took = unit_times(works, seconds)
    sizes, token = sorted(asked), max(took[PLAIN], float(np.finfo(np.float32).tiny))
    rounds = np.array([took[str(min(s for s in sizes if s >= n))] for n in range(sizes[-1] + 1)])
    draft = 0.0 if by_nodes else max(0.0, (rounds[-1] - rounds[0]) / depth)
    verify = np.maximum(rounds - draft * np.arange(len(rounds)), 0.01 * token).tolist()
    call, plain_call = took[CALL], took[PLAIN_CALL]
    return Costs(draft, verify, token=token, call=call, plain_call=plain_call, error=np.nan)


def of_positions(
    method: Speculative,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    repeats: int = 3,
    **run: Any,
) -> Costs:
    """Costs of a batch's rounds by the positions of the target's call.

    Args:
      method: with the numbers of positions of its passes.
    """
    gamma, rows = method.gamma_max, bucket(batch_size)
    whole = rows * (gamma + 1)
    sizes = sorted({size for size in method.passes if size < whole} | {whole})

    def verifying(slots: int, length: int) -> Speculative:
        return dataclasses.replace(method, policy=both(Sized(jnp.int32(length)), fixed(slots)))

    made: dict[str, Method] = {PLAIN: building.plain_of(method)}
    made |= {str(size): verifying(max(size - rows, 0), gamma) for size in sizes}
    made["one token"] = verifying(whole, 1)  # separates drafting from verifying
    longest, texts = min(TIMED_TOKENS, run["max_new_tokens"]), texts[:batch_size]
    run["repeats"] = repeats
    works: list[dict[Hashable, float]] = []
    seconds: list[float] = []
    for name, done, _, took_all in _whole_calls(made, target, texts, longest, batch_size, **run):
        work: dict[Hashable, float] = {CALL: 1.0, DRAFT: done.drafted}
        for positions, count in enumerate(done.rounds or []):
            size = min(size for size in sizes if size >= positions)
            work[size] = work.get(size, 0.0) + count
        works.append({PLAIN_CALL: 1.0, TOKEN: done.calls} if name == PLAIN else work)
        seconds.append(took_all)
    took = unit_times(works, seconds)
    known = [size for size in sizes if took.get(size)]
    times = np.interp(sizes, known, [took[size] for size in known]).tolist()
    return Costs(took[DRAFT], times, positions=sizes, token=took[TOKEN] or None)


def static(gamma: int) -> str:
    """The name of the loop of a static draft length, whose only verify pass has γ + 1 positions."""
    return f"γ={gamma}"


def static_loops(found: Mapping[str, Costs]) -> list[Costs]:
    """Costs of the timed static γ, ascending."""
    timed = [of for name, of in found.items() if name == static(of.gamma_max)]
    return sorted(timed, key=lambda of: of.gamma_max)
