"""What a round with a tree costs, phase by phase, beside a step of the target."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from specjax.measure import cost
from specjax.speculative import Contexts
from specjax.state import State
from specjax.trees.speculative import TreeSpeculative


class TreePrices(NamedTuple):
    """Seconds at batch 1, medians."""

    token: float  # a step of plain decoding
    draft: float  # a whole tree
    verify: float  # the target's call
    round: float  # all of it

    @property
    def overhead(self) -> float:
        """What is neither drafting nor the target's call, in steps; phases are timed apart."""
        return (self.round - self.draft - self.verify) / self.token

    def speedup(self, tokens_per_round: float) -> float:
        """To expect over plain decoding."""
        return tokens_per_round * self.token / self.round


def measure(
    method: TreeSpeculative, contexts: Contexts, state: State, *, steps: int = 20, repeats: int = 9
) -> TreePrices:
    """Time every phase in turns, `steps` dependent ones in a jitted loop.

    Args:
      contexts, state: from `loop.start`, with a budget that leaves room for the whole tree.
    """
    phases = {"token": cost._target_step, "draft": _draft, "verify": _verify, "round": _round}
    runs = {name: _looped(phase, steps) for name, phase in phases.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):  # the first compiles
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(method, contexts, state))
            taken[name].append((time.perf_counter() - begin) / steps)
    return TreePrices(*(float(np.median(taken[name][1:])) for name in TreePrices._fields))


def _looped(phase: Callable, steps: int) -> Callable:
    @jax.jit
    def run(method, contexts, state):
        return jax.lax.fori_loop(0, steps, lambda _, s: phase(method, contexts, s), state)

    return run


_draft, _verify = cost._draft_tree, cost._verify_tree


def _round(method, contexts, state):
    after, _ = method.step(contexts, state)
    # Back to where it was, so that every round has the same work to do.
    return state.replace(
        tokens=after.tokens, cache=after.cache, drafter=after.drafter, rounds=after.rounds
    )
