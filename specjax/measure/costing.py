"""Costs of rounds and calls on this machine, from whole calls of the loops.

A round or a phase timed by itself takes another time than within a call, whose first rounds find
cold caches. So whole calls are timed, on real inputs, in loops that draft the same number of tokens
in every round, in turns with plain decoding. `fit` takes the calls apart.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import devices
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import common_width
from specjax.loop import Method, decode
from specjax.measure import counting
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
    unit_times,
)  # fmt: skip
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.measure.timing import PLAIN
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
    watch: Stopwatch,
    loops: Mapping[str, Speculative],
    texts: Texts,
    *,
    plain: Autoregressive | None = None,
    longest: int | None = None,
    passes_of: Mapping[str, str] | None = None,
    untimed: Texts = (),
    refusals: bool = False,
) -> dict[str, Costs]:
    """Time calls of the loops in turns, and fit their costs.

    α is counted by output, in the first loop, with drafts of medium length.

    Args:
      loops: by name, of one target and one drafter; each with its own γ_max and passes. Their
        policies decide, but draft lengths are given: those of `lengths_of`; γ_max alone where
        drafts are `fixed`, so these costs hold for no shorter draft; 1 and γ_max in a loop that
        shares the passes of another.
      texts: repeated to fill a batch, which lasts as long as the row with the most rounds.
      plain: the plain loop, to time its tokens; without it `token` is NaN.
      longest: the budget of timed calls of more than one token; default max_new_tokens.
      passes_of: loops that differ from another in their policy alone, and that other.
      untimed: more texts, which are decoded once each, for α alone, while there is time.
      refusals: also time drafter calls that yield no token, in the first loop, as replay needs
        them. The policy of that loop is not `fixed`.
    """
    passes_of, rows = passes_of or {}, watch.batch_size
    width = watch.width or common_width([*texts, *untimed])
    watch = dataclasses.replace(watch, width=width)
    waits = devices.is_accelerator(watch.target.model)
    timed = _timed_loops(loops, passes_of, refusals, waits, rows)
    made: dict[str, Method] = {PLAIN: plain} if plain else {}
    made |= {label: method for label, (_, _, method) in timed.items()}
    found = _whole_calls(watch, made, texts, longest or watch.max_new_tokens)
    calls = []
    for label, done, budget, seconds in found:
        name, length, _ = timed.get(label, (None, 0, None))
        refusing = budget if label == REFUSING else 0
        calls.append((_work(name, done.by_length(length), refusing), seconds))
    first = [label for label, (name, *_) in timed.items() if name == next(iter(loops))]
    middle = first[(len(first) - refusals) // 2]
    notes = [done for label, done, *_ in found if label == middle]
    counted = [done.tokens[:, :rows] for done in notes[len(notes) // 2 :]]
    counted = [np.hstack(counted)[:, : len(texts)]]  # without those that fill a batch
    counted += _counts(watch, made[middle], untimed, longest or watch.max_new_tokens)
    shares = acceptance(*np.hstack(counted))
    widths = {
        name: widths_of(loop, bucket(rows)) for name, loop in loops.items() if name not in passes_of
    }
    steady = {name for name in widths if waits and loops[name].policy.fixed}
    return fit(widths, calls, *shares, passes_of=passes_of, steady=steady)


def _counts(watch: Stopwatch, method: Method, texts: Texts, longest: int) -> list[np.ndarray]:
    """Count accepted and tested tokens of outputs that are not timed, while there is time."""
    if texts:
        watch.say(f"decoding {len(texts)} more texts for α")
    found, rows = [], watch.batch_size
    whole = filled(texts, rows)
    for at in range(0, len(texts), rows):
        if time.monotonic() > watch.until:
            break
        batch = range(at, min(at + rows, len(texts)))
        begun = watch.begin(method, whole, batch, [longest] * len(whole))
        found.append(counting.note(decode(method, *begun)).tokens[:, : len(batch)])
    return found


def filled(texts: Texts, rows: int) -> Texts:
    """Repeat texts to fill whole batches."""
    return [texts[i % len(texts)] for i in range(-(-len(texts) // rows) * rows)]


def _whole_calls(
    watch: Stopwatch, made: Mapping[str, Method], texts: Texts, longest: int
) -> list[tuple[str, counting.Note, int, float]]:
    """Time calls of one token and of up to `longest` tokens in each loop, in turns.

    Returns:
      for each call its loop, its counts, its budget and its seconds, the median over repeats.
    """
    whole = filled(texts, watch.batch_size)
    budgets = [1] * len(whole) + [longest] * len(whole)
    found = watch.race(made, [*whole, *whole], budgets, note=counting.note)
    seconds = {label: np.median(took, axis=0).tolist() for label, took in found.decode.items()}
    check_clock(took for each in seconds.values() for took in each)
    return [
        (label, done, budget, took)
        for label, notes in found.notes.items()
        for done, budget, took in zip(
            notes, budgets[:: watch.batch_size], seconds[label], strict=True
        )
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
        policy, usual = loop.policy, lengths_of(widths_of(loop, bucket(batch_size)))
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
    watch: Stopwatch, method: Any, texts: Texts, lengths: Sequence[int] = (), longest: int = 0
) -> Costs:
    """Costs of rounds whose drafts have one length, each in a loop of its own.

    Args:
      method: of chains; or with a tree, whose costs are by its depth.
      lengths: of drafts that are timed; default: γ_max. Those between are interpolated.
      longest: the budget of a timed call, at most max_new_tokens; default `TIMED_TOKENS`.
    """
    longest = min(longest or TIMED_TOKENS, watch.max_new_tokens)
    if method.branches:
        return of_tree(watch, method, texts, by_nodes=False, longest=longest)
    loops = {static(k): with_length(method, k) for k in sorted({*lengths} or {method.gamma_max})}
    found = measure(watch, loops, texts, plain=building.plain_of(method), longest=longest)
    return merged(found, steady=devices.is_accelerator(watch.target.model))


def with_length(method: Any, length: int) -> Speculative:
    """Build a loop that drafts this length in every round, with a single verify pass."""
    return dataclasses.replace(method, policy=constant(length), gamma_max=length, passes=())


def merged(found: Mapping[str, Costs], steady: bool = False) -> Costs:
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
    watch: Stopwatch, method: Any, texts: Texts, by_nodes: bool, longest: int = TIMED_TOKENS
) -> Costs:
    """Costs of rounds by the number of nodes of a tree, or else by its depth.

    By nodes, only those sizes are timed after which a wider verify pass or a deeper level begins.
    Any other takes what the next larger one takes.
    """
    depth, nodes = method.shape.depth, method.shape.nodes
    asked = {k: (k, nodes) for k in range(depth + 1)}
    if by_nodes:
        ends = [0, *(width - 1 for width in widths_of(method, bucket(watch.batch_size))[:-1])]
        if isinstance(method.shape, FixedTree):
            deepest = np.maximum.accumulate(method.shape.depths)
            ends += np.flatnonzero(np.diff(deepest)).tolist()  # one node more is a level more
        asked = {count: (depth, count) for count in (*ends, nodes)}
    made: dict[str, Any] = {PLAIN: building.plain_of(method)}
    made |= {str(n): dataclasses.replace(method, policy=cut(*how)) for n, how in asked.items()}
    took = _unit_times(watch, made, texts, longest, lambda size, done: {int(size): done.calls})
    sizes, token = sorted(asked), max(took[TOKEN], float(np.finfo(np.float32).tiny))
    rounds = np.array([took[min(s for s in sizes if s >= n)] for n in range(sizes[-1] + 1)])
    draft = 0.0 if by_nodes else max(0.0, (rounds[-1] - rounds[0]) / depth)
    verify = np.maximum(rounds - draft * np.arange(len(rounds)), 0.01 * token).tolist()
    call, plain_call = took[CALL], took[PLAIN_CALL]
    return Costs(draft, verify, token=token, call=call, plain_call=plain_call, error=np.nan)


def of_positions(watch: Stopwatch, method: Speculative, texts: Texts) -> Costs:
    """Costs of a batch's rounds by the positions of the target's call.

    Args:
      method: with the numbers of positions of its passes.
    """
    gamma, rows = method.gamma_max, bucket(watch.batch_size)
    whole = rows * (gamma + 1)
    sizes = sorted({size for size in method.passes if size < whole} | {whole})

    def verifying(slots: int, length: int) -> Speculative:
        return dataclasses.replace(method, policy=both(Sized(jnp.int32(length)), fixed(slots)))

    made: dict[str, Method] = {PLAIN: building.plain_of(method)}
    made |= {str(size): verifying(max(size - rows, 0), gamma) for size in sizes}
    made["one token"] = verifying(whole, 1)  # separates drafting from verifying

    def work(_, done: counting.Note) -> Work:
        found: dict[Hashable, float] = {DRAFT: done.draft_calls}
        for positions, count in enumerate(done.rounds or []):
            size = min(size for size in sizes if size >= positions)
            found[size] = found.get(size, 0.0) + count
        return found

    longest = min(TIMED_TOKENS, watch.max_new_tokens)
    took = _unit_times(watch, made, texts[: watch.batch_size], longest, work)
    known = [size for size in sizes if took.get(size)]
    times = np.interp(sizes, known, [took[size] for size in known]).tolist()
    return Costs(took[DRAFT], times, positions=sizes, token=took[TOKEN] or None)


def _unit_times(
    watch: Stopwatch,
    made: Mapping[str, Method],
    texts: Texts,
    longest: int,
    work: Callable[[str, counting.Note], Work],
) -> dict[Any, float]:
    """Estimate unit times from whole calls: fixed times, tokens of `PLAIN`, and `work` of others.

    Args:
      work: describes a call's rounds, by the name of its loop and its counts.
    """
    found = _whole_calls(watch, made, texts, longest)
    works: list[Work] = [
        {PLAIN_CALL: 1.0, TOKEN: done.calls} if name == PLAIN else {CALL: 1.0, **work(name, done)}
        for name, done, *_ in found
    ]
    return unit_times(works, [seconds for *_, seconds in found])


def static(gamma: int) -> str:
    """The name of the loop of a static draft length, whose only verify pass has γ + 1 positions."""
    return f"γ={gamma}"


def static_loops(found: Mapping[str, Costs]) -> list[Costs]:
    """Costs of the timed static γ, ascending."""
    timed = [of for name, of in found.items() if name == static(of.gamma_max)]
    return sorted(timed, key=lambda of: of.gamma_max)
