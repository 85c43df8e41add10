"""The stopwatch: whole calls of methods on the same inputs, in turns, compilation excluded."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import loop
from specjax.batching import bucket
from specjax.decoding import starting
from specjax.decoding.outputs import check_finite, read_rows
from specjax.decoding.texts import common_width
from specjax.loop import Method
from specjax.measure import timing
from specjax.measure.compiling import at_once, compile_at_once
from specjax.measure.prefills import Begun
from specjax.measure.timing import Comparison, Run, Say, silent
from specjax.models.checkpoint import Checkpoint
from specjax.state import State
from specjax.support import memory_maps

Texts = Sequence[Sequence[int]]
"""Ids from `tokenize`, none empty."""


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Times methods of one target, by whole calls in turns.

    For example:

        watch = Stopwatch(target, 128, jax.random.key(0))
        watch.race({PLAIN: plain, SPECULATIVE: method}, texts).speedup
        costs_of(watch, method, texts, [1, 4])
    """

    target: Checkpoint
    max_new_tokens: int
    """The budget of real calls, which sets the shapes of buffers."""
    key: Key[Array, ""]
    batch_size: int = 1
    """Texts decoded at once."""
    repeats: int = 3
    names: tuple[str, str] = ("target", "draft")
    """Names of target and draft, for errors."""
    width: int | None = None
    """Width of the sources; None: `common_width` of the texts at hand."""
    turn: int = 1
    """Batches of a turn, as in `timing.in_turns`."""
    until: float = math.inf
    """The time of `time.monotonic` after which no more repeats begin."""
    order: random.Random | None = None
    """Draws the order of methods in each turn."""
    say: Say = silent
    """Reports what is compiled and timed."""
    _compiled: set[Hashable] = dataclasses.field(default_factory=set, repr=False)

    def begin(
        self,
        method: Method,
        texts: Texts,
        batch: Sequence[int] = (0,),
        budgets: Sequence[int] | None = None,
    ) -> tuple[Any, State]:
        """Prepare (context, state) of some texts before the first round, in the timed shapes."""
        return starting.prepare(
            method,
            self.target,
            [texts[index] for index in batch],
            [(index, 0) for index in batch],
            max_new_tokens=self.max_new_tokens,
            key=self.key,
            rows=bucket(min(self.batch_size, len(texts))),
            width=self.width or common_width(texts),
            budgets=None if budgets is None else [budgets[index] for index in batch],
        )

    def race(
        self,
        methods: Mapping[str, Method],
        texts: Texts,
        budgets: Sequence[int] | None = None,
        *,
        note: Callable[[State], Any] = lambda state: None,
        share: bool = False,
    ) -> Comparison:
        """Decode every text by every method, batch by batch, methods taking turns (`in_turns`).

        Programs that this stopwatch has not run yet are compiled before.

        Args:
          budgets: new tokens for each text, where fewer than max_new_tokens.
          note: returns what to keep of each batch's final state.
          share: whether methods that differ in their policy alone start from one prefill, and
            count its time each. Long prompts of many policies so take less.
        """
        count = range(len(texts))
        batches = [count[at : at + self.batch_size] for at in count[:: self.batch_size]]
        begun = Begun(partial(self.begin, texts=texts, budgets=budgets), share)

        def run(method: Method, batch: range) -> Run:
            before, context, state = begun(method, batch)
            first = time.perf_counter()
            state = jax.block_until_ready(loop.decode(method, context, state))
            took = time.perf_counter() - first
            check_finite(state, self.names, method.rule)
            rows = read_rows(state, [(index, 0) for index in batch], self.target)
            return took, before + took, rows, note(state)

        new = self._new(methods, texts, share).values()
        with memory_maps.kept(len({jax.tree.structure(method) for method in new})):
            self.warm(methods, texts, share)  # also those that were dropped to make room
            return timing.in_turns(
                {name: partial(run, method) for name, method in methods.items()},
                batches,
                self.repeats,
                turn=self.turn,
                between=begun.forget,
                order=self.order,
                until=self.until,
                say=self.say,
            )

    def warm(self, methods: Mapping[str, Method], texts: Texts, share: bool = False) -> None:
        """Compile the methods that have not run in these shapes, and decode a token by each."""
        new = self._new(methods, texts, share)
        if not new:
            return
        self.say(f"compiling {timing.named(new)}")
        # A budget changes no program: one token compiles as much as a whole output.
        begun = Begun(partial(self.begin, texts=texts, budgets=[1] * len(texts)), share)
        batch = range(min(self.batch_size, len(texts)))

        def run(method: Method) -> None:
            state = loop.decode(method, *begun(method, batch)[1:])
            check_finite(state, self.names, method.rule)

        if not share:  # one prefill of many policies compiles once
            self.compile(new.values(), texts)
        at_once(run, new.values())
        self._compiled.update(self._programs(new, texts, share).values())

    def compile(self, methods: Iterable[Method], texts: Texts) -> bool:
        """Compile methods side by side, as `compile_at_once` does."""
        batch = range(min(self.batch_size, len(texts)))
        return compile_at_once(methods, partial(self.begin, texts=texts, batch=batch))

    def _new(self, methods: Mapping[str, Method], texts: Texts, share: bool) -> dict[str, Method]:
        """Methods whose programs have not run in these shapes, or were dropped since."""
        programs = self._programs(methods, texts, share)
        return {name: methods[name] for name in methods if programs[name] not in self._compiled}

    def _programs(
        self, methods: Mapping[str, Method], texts: Texts, share: bool
    ) -> dict[str, Hashable]:
        """What programs differ in: structure, arrays, shapes, and how often JAX dropped them."""
        width = self.width or common_width(texts)
        shape = share, self.max_new_tokens, width, min(self.batch_size, len(texts))

        def program(method: Method) -> Hashable:
            leaves, structure = jax.tree.flatten(method)
            arrays = tuple((np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves)
            return structure, arrays, shape, memory_maps.clearings()

        return {name: program(method) for name, method in methods.items()}
