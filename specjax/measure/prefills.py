"""Prefills that methods share which differ in their policy alone, with the seconds they took."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.loop import Method
from specjax.policies.base import first_state
from specjax.policies.constant import Undecided
from specjax.state import State

MOST_KEPT = 2**31  # bytes of states that wait for another policy


class Begun:
    """States before the first round, with the seconds that they took."""

    def __init__(self, begin: Callable[..., tuple[Any, State]], share: bool):
        """Keep begin(method, batch=…), and whether policies share its result."""
        self.begin, self.share, self.lock = begin, share, threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Drop what is shared: the next turn times prefills of its own."""
        self.batch: range | None = None
        self.kept: list[tuple[Method, float, Any, State]] = []

    def __call__(self, method: Method, batch: range) -> tuple[float, Any, State]:
        """Return seconds, context and a state that `loop.decode` may consume."""
        if not self.share or method.policy is None:
            return self._timed(method, batch)
        with self.lock:  # the warm-up has threads, and policies have one program to compile
            seconds, context, state = self._shared(method, batch)
            policy = first_state(method.policy, state.keys, method.gamma_max)
            # `decode` consumes each array once, so none may be shared.
            state = jax.tree.map(jnp.copy, state.replace(policy=policy))
            return seconds, context, jax.block_until_ready(state)

    def _timed(self, method: Method, batch: range) -> tuple[float, Any, State]:
        first = time.perf_counter()
        context, state = jax.block_until_ready(self.begin(method, batch=batch))
        return time.perf_counter() - first, context, state

    def _shared(self, method: Method, batch: range) -> tuple[float, Any, State]:
        if batch != self.batch:
            self.batch, self.kept = batch, []
        # Each policy would compile a `start` of its own.
        plan: Method = dataclasses.replace(method, policy=Undecided())  # type: ignore[type-var]
        for other, *begun in self.kept:
            if equal(plan, other):
                return tuple(begun)
        seconds, context, state = self._timed(plan, batch)
        size = sum(x.nbytes for x in jax.tree.leaves(state)) * (1 + len(self.kept))
        if size <= MOST_KEPT:
            self.kept.append((plan, seconds, context, state))
        return seconds, context, state


def equal(one: Method, other: Method) -> bool:
    """Whether two methods have equal arrays and structure."""
    (first, *form), (second, *other_form) = map(jax.tree.flatten, (one, other))
    return form == other_form and all(
        mine is yours or np.array_equal(mine, yours)
        for mine, yours in zip(first, second, strict=True)
    )
