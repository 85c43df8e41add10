"""Rows that decode together, and the requests that they hold."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from specjax import loop
from specjax.batching import bucket
from specjax.decoding.outputs import Outputs, check_finite, read
from specjax.decoding.run import Run
from specjax.decoding.starting import Past, Request, arguments, resume, start
from specjax.drafters.carrying import carry_over
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.state import FOREVER, until


class Running:
    """Holds a fixed number of rows that decode together, and their requests.

        running.admit(some)     # as many as are `free`
        running.run(ended=1)    # rounds until one of them ends
        ended, going = running.read()

    A row that has ended is free once it was read. All requests are encoded at one width, so that
    the loop and the admission compile once.
    """

    def __init__(
        self,
        method: Method,
        target: Checkpoint,
        spec: Run,
        *,
        rows: int,
        width: int,
        at_once: int = 1,
        past: Past | None = None,
    ):
        """Store the arguments; nothing is allocated before the first requests come.

        Args:
          spec: lengths, randomness, names, and whether rounds are logged.
          rows: number of rows that decode together.
          width: width of the sources or prompts.
          at_once: requests that one call admits.
          past: learned state that the first requests begin with.
        """
        self.method, self.target, self.spec = method, target, spec
        self.width, self.at_once = width, at_once
        self.held: list[Request | None] = [None] * rows
        self.placement = sharding.placement_of(target.model)
        # Rows of the arrays; those beyond `rows` are never used.
        self.size = sharding.padded_rows(bucket(rows), self.placement)
        self._inherited = past
        self._context: Any = None
        self._state: Any = None

    @property
    def live(self) -> int:
        """Number of rows that hold a request."""
        return sum(request is not None for request in self.held)

    @property
    def free(self) -> int:
        """Number of rows that hold none."""
        return len(self.held) - self.live

    def admit(self, requests: Sequence[Request]) -> None:
        """Encode requests into free rows, the first time all at once. ValueError: too many."""
        if len(requests) > self.free:
            raise ValueError(f"{len(requests)} requests are too many for {self.free} free rows.")
        if not requests:
            return
        # Whole batches one after the other need no second program.
        if self._state is None or (self.live == 0 and self.at_once == len(self.held)):
            self._context = self._state = None  # freed before the next ones are made
            self.held[: len(requests)] = requests
            shape = self.size, self.width
            begun = start(self.method, self.target, requests, self.spec, *shape)
            self._context, self._state = begun
            if self._inherited is not None:
                self._state = resume(self.method, self._state, self._inherited)
            return
        vacant = [row for row, request in enumerate(self.held) if request is None]
        for at in range(0, len(requests), self.at_once):
            some = dict(zip(vacant[at : at + self.at_once], requests[at:], strict=False))
            for row, request in some.items():
                self.held[row] = request
            # If there are fewer, the last one is repeated.
            count = sharding.padded_rows(self.at_once, self.placement)
            rows = [*some, *[row] * (count - len(some))]
            again = [some[row] for row in rows]
            inputs, keys, budget = arguments(
                self.target, again, rows=len(rows), width=self.width, key=self.spec.key
            )
            self._context, self._state = loop.admit(
                self.method,
                self._context,
                self._state,
                jnp.asarray(rows, jnp.int32),
                inputs,
                keys,
                budget,
            )

    def run(self, ended: int, rounds: int = FOREVER) -> None:
        """Run until `ended` of the live rows have ended, or `rounds` rounds have passed.

        Returns once the loop has been dispatched; `read` waits for it.
        """
        idle = self.size - self.live
        state = self._state.replace(until=until(idle + min(ended, self.live), rounds))
        self._state = loop.decode(self.method, self._context, state)

    def read(self) -> tuple[Outputs, Outputs]:
        """Read the rows that have ended, which are free from now on, and the others.

        Raises:
          FloatingPointError: logits that are not finite, or an own rule without distributions.
        """
        check_finite(self._state, self.spec.names, self.method.rule)
        outputs = read(self._state)
        ended: dict[int, tuple[int, int]] = {}
        going: dict[int, tuple[int, int]] = {}
        for row, request in enumerate(self.held):
            if request is not None:
                (ended if outputs.done[row] else going)[row] = request.label
        for row in ended:
            self.held[row] = None
        return outputs._replace(labels=ended), outputs._replace(labels=going)

    def past(self, count: int) -> Past:
        """Collect what the first `count` rows have learned, for the rows after them."""
        drafter = self.method.drafter and carry_over(self.method.drafter, self._state.drafter)
        return Past(self._state.policy, drafter, jnp.arange(self.size) < count)
