"""Replay of a whole batch along rollouts, by a table of times.

Rows are served as `generate` serves them: an input that waits takes the place of one that has
ended. Drafts and acceptance are those of `replay`; a round costs one pass over its verified
positions. So one recording answers for batches of any size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import loop
from specjax.policies import Costs, Policy
from specjax.pytrees import pytree
from specjax.replay.recorded import Recorded, RecordedDrafter, Recording, rows_of
from specjax.replay.rollouts import Rollouts
from specjax.state import until


class Served(NamedTuple):
    """Sums over all rounds of a batch."""

    time: Float[Array, ""]  # in the unit of the times
    tokens: Int[Array, ""]
    rounds: Int[Array, ""]
    positions: Int[Array, ""]  # of target calls, without those that fill a compiled size
    verified: Int[Array, ""]  # draft tokens
    accepted: Int[Array, ""]  # of these in the output
    calls: Int[Array, ""]  # of the drafter

    @property
    def rate(self) -> Float[Array, ""]:
        """Tokens per time."""
        return self.tokens.astype(jnp.float32) / self.time


@pytree
class Summing(RecordedDrafter):
    """Sums up the rounds of a batch; the sums go on when rows are admitted."""

    times: Costs

    def counts(self, rows):
        return Served(jnp.float32(0), *[jnp.int32(0)] * 6)

    def count(self, round_, state):
        def total(x):
            return jnp.sum(jnp.where(round_.active, x, 0), dtype=jnp.int32)

        positions = total(round_.verified + 1)
        time = self.times.exact(positions, state.calls)
        sums = total(round_.emitted), jnp.int32(1), positions, total(round_.verified)
        new = Served(time, *sums, total(round_.in_output), state.calls)
        return jax.tree.map(jnp.add, state.counts, new)


@pytree
class Oracle(Policy):
    """Knows which drafted tokens would be accepted, and verifies these alone.

    They are drafted as deep as this round's tokens per time are highest. Over a whole run that is
    no strict bound: at its end, rows may be worth more than tokens.

    The state is the number of tokens that each row would get accepted, which `Foreseeing` knows.
    """

    reads_batch = True

    times: Costs

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live: Bool[Array, " B"], gamma_max):
        """Draft as deep as tokens per time are highest."""
        depth = jnp.arange(gamma_max + 1, dtype=jnp.int32)
        kept = jnp.minimum(state[None, :], depth[:, None])
        count = jnp.sum(jnp.where(live[None, :], kept + 1, 0), axis=1, dtype=jnp.int32)
        rate = count.astype(jnp.float32) / self.times.exact(count, depth)
        return state, jnp.argmax(rate).astype(jnp.int32)

    def chance(self, state, slot):
        return (slot < state).astype(jnp.float32)

    def verifies(self, state, slot):
        return slot.chance > 0


@pytree
class Foreseeing(Recorded):
    """A recording whose policy is an `Oracle`."""

    def step(self, context, state, dice=None):
        recording, slots = self.recording, jnp.arange(self.gamma_max, dtype=jnp.int32)
        row = recording.row(context.target, state.length - 1)
        place = jax.tree.map(lambda x: x[:, None], row).place(slots[None, :])
        says = jnp.sum(jnp.cumprod(~recording.silent(place), axis=1), axis=1, dtype=jnp.int32)
        right = jnp.minimum(row.rejected - row.begin, says)
        right = jnp.clip(state.limit - state.length - 1, 0, right)
        return super().step(context, state.replace(policy=right), dice)


def serve(
    policy: Policy,
    rollouts: Rollouts,
    times: Costs,
    keys: Key[Array, " N"],
    *,
    rows: int,
) -> Served:
    """Decode all outputs in a batch of `rows` rows.

    Args:
      times: at this batch size, as `specjax.measure.batches.pass_times` measures them.
      keys: one for each output, which settle the chances of acceptance.
    """
    return _serve(policy, rollouts, times, keys, rows=rows, sizes=times.positions)


@partial(jax.jit, static_argnames=("rows", "sizes"))
def _serve(policy, rollouts, times, keys, *, rows, sizes) -> Served:
    recording, count = Recording.settled(rollouts, keys), len(keys)
    kind = Foreseeing if isinstance(policy, Oracle) else Recorded
    method: Any = kind.of(Summing(recording, times), policy, sizes)

    def started(first, number):
        output = first + jnp.arange(number, dtype=jnp.int32)
        inputs, room = rows_of(recording, output)
        return inputs, keys[inputs.source[:, 0]], room

    def more(carry):
        return ~jnp.all(carry[1].done)

    def until_one_ends(carry):
        contexts, state, waiting = carry
        end = until(1)._replace(done=jnp.where(waiting < count, 1, rows))
        state = loop.decode(method, contexts, state.replace(until=end))
        free = jnp.argmax(state.done).astype(jnp.int32)[None]
        return *loop.admit(method, contexts, state, free, *started(waiting, 1)), waiting + 1

    begun = loop.start(method, *started(0, rows), buffer_len=1)
    return jax.lax.while_loop(more, until_one_ends, (*begun, jnp.int32(rows)))[1].drafter.counts
