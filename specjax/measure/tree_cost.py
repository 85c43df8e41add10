"""What a round with a tree costs, phase by phase, beside a step of the target."""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import policies
from specjax import sampling as smp
from specjax.measure import cost
from specjax.policies import Prices
from specjax.policies.nodes import cut
from specjax.speculative import Contexts, dice_for
from specjax.state import State
from specjax.trees.drafting import Allowed
from specjax.trees.nodes import layout, lineage
from specjax.trees.shapes import FixedTree
from specjax.trees.speculative import TreeSpeculative, grow


class TreePrices(NamedTuple):
    """Seconds at batch 1, medians."""

    token: float  # a step of plain decoding
    draft: float  # a whole tree
    verify: float  # the target's call
    round: float  # all of it
    call: float = math.nan  # of a call of the loop, beyond its rounds
    plain_call: float = math.nan  # of a call of plain decoding, beyond its tokens

    @property
    def overhead(self) -> float:
        """What is neither drafting nor the target's call, in steps; phases are timed apart."""
        return (self.round - self.draft - self.verify) / self.token

    def speedup(self, tokens: float, rounds: float) -> float:
        """To expect over plain decoding, of an output; with the fixed times of calls where these
        are known."""
        plain, ours = (0.0 if math.isnan(x) else x for x in (self.plain_call, self.call))
        return (tokens * self.token + plain) / (rounds * self.round + ours)


def measure(
    method: TreeSpeculative, contexts: Contexts, state: State, *, steps: int = 20, repeats: int = 9
) -> TreePrices:
    """Time every phase in turns; see `stopwatch`."""
    take = stopwatch(method, contexts, state, steps=steps)
    return medians([take() for _ in range(repeats)])


def stopwatch(
    method: TreeSpeculative,
    contexts: Contexts,
    state: State,
    *,
    steps: int = 20,
    calls: Sequence[cost.Call] = (),
    plain: bool = True,
) -> Callable[[], cost.Sample]:
    """Compile the phases. What is returned times each of them once, `steps` dependent ones.

    Args:
      contexts, state: from `loop.start`, with a budget that leaves room for the whole tree.
      calls: of this loop and of plain decoding, as `cost.stopwatch` takes them.
      plain: whether to time plain decoding. If not, it is in another method's samples, with which
        these are to be joined.
    """
    phases = {"token": cost._target_step, "draft": _draft, "verify": _verify, "round": _round}
    if not plain:
        del phases["token"]
    runs = {name: partial(_looped(phase, steps), method) for name, phase in phases.items()}
    begins = {name: lambda: (contexts, state) for name in phases}
    parts = dict.fromkeys(runs, steps)
    for (loop, begin, count), name in zip(calls, ("call", "plain_call"), strict=False):
        runs[name] = partial(_looped(cost._any_round, count), loop)
        begins[name], parts[name] = begin, count

    def once(name: str) -> float:
        given = jax.block_until_ready(begins[name]())
        begin = time.perf_counter()
        jax.block_until_ready(runs[name](*given))
        return time.perf_counter() - begin

    def take() -> dict[Hashable, float]:
        found = {name: once(name) for name in runs}
        each: dict[Hashable, float] = {name: t / parts[name] for name, t in found.items()}
        for name, step in (("plain_call", "token"), ("call", "round")):
            if name in found:
                each[name] = found[name] - parts[name] * each[step]
        return each

    take()
    return take


def medians(samples: Sequence[cost.Sample]) -> TreePrices:
    """Prices from what a `stopwatch` showed."""
    found = {str(name): [sample[name] for sample in samples] for name in samples[0]}
    return TreePrices(**{name: float(np.median(times)) for name, times in found.items()})


def prices(
    method: TreeSpeculative,
    contexts: Contexts,
    state: State,
    by_nodes: bool,
    *,
    steps: int = 10,
    repeats: int = 5,
) -> Prices:
    """What whole rounds take, in seconds, by the number of their nodes, or else by their depth.

    Of numbers of nodes only those are timed after which a wider verify pass or a deeper level
    begins; any other takes what the next larger one takes.

    Args: as `measure`.
    """
    whole = method.shape.depth, method.shape.nodes
    if by_nodes:
        asked = {method.shape.nodes: whole}
        ends = [0, *(width - 1 for width in method.widths if width < method.slots)]
        if isinstance(method.shape, FixedTree):
            deepest = np.maximum.accumulate(method.shape.depths)
            ends += np.flatnonzero(np.diff(deepest)).tolist()  # one node more is a level more
        asked |= {count: (method.shape.depth, count) for count in ends}
    else:
        asked = {depth: (depth, method.shape.nodes) for depth in range(method.shape.depth + 1)}
    runs = {"round": _looped(_round, steps), "token": _looped(cost._target_step, steps)}
    methods = {size: dataclasses.replace(method, policy=cut(*how)) for size, how in asked.items()}
    taken: dict[Any, list[float]] = {size: [] for size in ("token", *methods)}
    for _ in range(repeats + 1):  # the first compiles
        for size in taken:
            run = runs["token" if size == "token" else "round"]
            begin = time.perf_counter()
            jax.block_until_ready(run(methods.get(size, method), contexts, state))
            taken[size].append((time.perf_counter() - begin) / steps)
    medians = {size: float(np.median(times[1:])) for size, times in taken.items()}
    sizes = sorted(methods)
    rounds = [medians[min(s for s in sizes if s >= n)] for n in range(sizes[-1] + 1)]
    return policies.prices(0.0, rounds, token=medians["token"], error=np.nan)  # nothing is fitted


def _looped(phase: Callable, steps: int) -> Callable:
    @jax.jit
    def run(method, contexts, state):
        return jax.lax.fori_loop(0, steps, lambda _, s: phase(method, contexts, s), state)

    return run


def _drafted(method, contexts, state) -> Any:
    depth, nodes = (jnp.full_like(state.length, n) for n in (method.gamma_max, method.shape.nodes))
    allowed = Allowed(depth, nodes)
    return grow(method)(method, contexts.drafter, state, allowed, dice_for(method))


def _draft(method, contexts, state):
    drafted = _drafted(method, contexts, state)
    # All of the tree is read, so that all of it is made.
    token = jnp.max(drafted.nodes.tokens, axis=1)
    kept = jax.tree.map(lambda old, new: new[:, 0], state.drafter, drafted.levels[0].states)
    return cost._with_last(state, token, drafter=kept)


def _verify(method, contexts, state):
    nodes = jnp.arange(method.slots - 1, dtype=jnp.int32)[None, :]
    last = cost._last(state)[:, None]
    tokens = (last + nodes) % method.target.vocab_size
    if method.dynamic:  # any tree will do: what it costs depends on its size
        parent = depth = jnp.minimum(jnp.arange(method.slots, dtype=jnp.int32), 1)[None, :]
        parent = parent * 0
    else:
        parent, depth = (jnp.asarray(x)[None] for x in (method.shape.parent, method.shape.depths))
    tree = layout(lineage(parent, depth, method.gamma_max), depth)
    block = jnp.concatenate([last, tokens], axis=1)
    root = state.length - 1
    hidden, cache = method.target(block, root, contexts.target, state.cache, layout=tree)
    logprobs = smp.standardize(method.target.logits(hidden), method.sampling)
    return cost._with_last(state, smp.argmax(jnp.max(logprobs, axis=1)), cache=cache)


def _round(method, contexts, state):
    after, _ = method.step(contexts, state)
    # Back to where it was, so that every round has the same work to do.
    return state.replace(
        tokens=after.tokens, cache=after.cache, drafter=after.drafter, rounds=after.rounds
    )
