"""Costs of rounds with smaller trees, for policies that choose the size of the next tree."""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax import policies
from specjax.measure import doubts, phases
from specjax.passes import widths
from specjax.policies import Costs
from specjax.policies.nodes import cut
from specjax.speculative import Contexts
from specjax.state import State
from specjax.trees.shapes import FixedTree
from specjax.trees.speculative import TreeSpeculative


def measure(
    method: TreeSpeculative,
    contexts: Contexts,
    state: State,
    by_nodes: bool,
    *,
    steps: int = 10,
    repeats: int = 5,
) -> Costs:
    """Time whole rounds, in seconds, by the number of their nodes, or else by their depth.

    By nodes, only those sizes are timed after which a wider verify pass or a deeper level begins.
    Any other takes what the next larger one takes.

    Args:
      contexts, state: from `loop.start`, with a budget that leaves room for the whole tree.
    """
    whole = method.shape.depth, method.shape.nodes
    if by_nodes:
        asked = {method.shape.nodes: whole}
        ends = [0, *(width - 1 for width in widths(method, len(state.done))[:-1])]
        if isinstance(method.shape, FixedTree):
            deepest = np.maximum.accumulate(method.shape.depths)
            ends += np.flatnonzero(np.diff(deepest)).tolist()  # one node more is a level more
        asked |= {count: (method.shape.depth, count) for count in ends}
    else:
        asked = {depth: (depth, method.shape.nodes) for depth in range(method.shape.depth + 1)}
    timed = {"round": phases._same_round, "token": phases._target_step}
    runs = {name: jax.jit(partial(phases._repeat, phase, steps)) for name, phase in timed.items()}
    methods = {size: dataclasses.replace(method, policy=cut(*how)) for size, how in asked.items()}
    taken: dict[Any, list[float]] = {size: [] for size in ("token", *methods)}
    for _ in range(repeats + 1):  # the first compiles
        for size in taken:
            run = runs["token" if size == "token" else "round"]
            begin = time.perf_counter()
            jax.block_until_ready(run(methods.get(size, method), contexts, state=state))
            taken[size].append((time.perf_counter() - begin) / steps)
    medians = {size: float(np.median(times[1:])) for size, times in taken.items()}
    doubts.check_clock(medians.values())
    sizes = sorted(methods)
    rounds = [medians[min(s for s in sizes if s >= n)] for n in range(sizes[-1] + 1)]
    # Nothing is fitted, so there is no error.
    return policies.Costs(0.0, rounds, token=medians["token"], error=np.nan)
