"""A log of every round: a policy around another one, which writes down what both were told.

It is part of the loop only where it is asked for (`generate(..., rounds=True)`), and changes no
token: whatever the inner policy is asked, it answers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.base import Policy
from specjax.pytrees import pytree


class Lines(NamedTuple):
    """R rounds of each row; those that have not come are 0."""

    allowed: Int[Array, "B R"]  # the longest draft that the policy allowed
    drafted: Int[Array, "B R"]
    accepted: Int[Array, "B R"]  # of those, the ones in the output
    emitted: Int[Array, "B R"]
    tested: Int[Array, "B R"]  # drafted tokens up to the first rejection, or to the output's end
    confidence: Float[Array, "B R G"]  # the belief in each drafted token, a log-probability
    entropy: Float[Array, "B R G"]  # of the belief that it was drawn from, in nats


class Log(NamedTuple):
    """The state of `Logged`."""

    inner: Any
    written: Int[Array, " B"]  # rounds so far
    allowed: Int[Array, " B"]  # in this round
    entropy: Float[Array, "B G"]  # in this round
    lines: Lines


@pytree
class Logged(Policy):
    """Decides as the inner policy does."""

    inner: Policy
    rounds: int = dataclasses.field(metadata={"static": True})  # R: a round emits one token or more

    @property
    def needs_shorter(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.inner.needs_shorter

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.inner.fixed

    @property
    def reads_batch(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.inner.reads_batch

    @property
    def carries(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.inner.carries

    def init(self, keys, gamma_max):
        count = jnp.zeros(keys.shape, jnp.int32)
        slots = jnp.zeros((*keys.shape, gamma_max), jnp.float32)
        numbers = jnp.zeros((*keys.shape, self.rounds), jnp.int32)
        each = jnp.zeros((*keys.shape, self.rounds, gamma_max), jnp.float32)
        lines = Lines(numbers, numbers, numbers, numbers, numbers, each, each)
        return Log(self.inner.init(keys, gamma_max), count, count, slots, lines)

    def inherit(self, fresh, past, rows):
        return fresh._replace(inner=self.inner.inherit(fresh.inner, past.inner, rows))

    def begin(self, state, gamma_max):
        inner, allowed = self.inner.begin(state.inner, gamma_max)
        each = jnp.broadcast_to(jnp.asarray(allowed, jnp.int32), state.written.shape)
        return state._replace(inner=inner, allowed=jnp.clip(each, 0, gamma_max)), allowed

    def keep_drafting(self, state, seen):
        put = jax.lax.dynamic_update_index_in_dim
        entropy = put(state.entropy, seen.entropy, seen.slot, 1)
        inner, more = self.inner.keep_drafting(state.inner, seen)
        return state._replace(inner=inner, entropy=entropy), more

    def go_on(self, state, drafting, confidence):
        inner, more = self.inner.go_on(state.inner, drafting, confidence)
        return state._replace(inner=inner), more

    def update(self, state, round_):
        rows = jnp.arange(len(state.written), dtype=jnp.int32)
        at = jnp.where(round_.active, state.written, self.rounds)  # past the end: dropped
        # An output that ends inside the draft tests nothing after its last token, as in `commit`.
        tested = jnp.sum(round_.tested, axis=1, dtype=jnp.int32)
        line = Lines(
            state.allowed,
            round_.drafted,
            round_.in_output,
            round_.emitted,
            tested,
            round_.confidence,
            state.entropy,
        )
        return Log(
            self.inner.update(state.inner, round_),
            state.written + round_.active.astype(jnp.int32),
            state.allowed,
            state.entropy,
            jax.tree.map(
                lambda old, new: old.at[rows, at].set(new, mode="drop"), state.lines, line
            ),
        )


def lines_of(written: Int[np.ndarray, " B"], lines: Lines, row: int) -> list[dict[str, Any]]:
    """The rounds of one row, for a table.

    Args:
      written, lines: of `Log` after the loop, on the host.

    Returns:
      For each round: round (from 0), allowed, drafted, accepted, emitted, tested, and for each
      drafted token confidence, a probability, and entropy, in nats. Position i of the draft, from
      0, was tested if i < tested, and accepted if i < accepted.
    """
    found = []
    for number in range(int(written[row])):
        line: Any = Lines(*(np.asarray(field)[row, number] for field in lines))
        there = slice(0, int(line.drafted))
        counts = {name: int(getattr(line, name)) for name in Lines._fields[:5]}
        found.append(
            {
                "round": number,
                **counts,
                "confidence": np.exp(line.confidence[there]).astype(float).round(6).tolist(),
                "entropy": line.entropy[there].astype(float).round(6).tolist(),
            }
        )
    return found
