"""Replay of a whole batch along rollouts: verify budgets and policies, by a table of times.

Rows are served as `generate` serves them: an input that waits takes the place of one that has
ended. What a round drafts and accepts is that of `replay`; what it takes is the time of as many
positions as it verifies. So one recording answers for batches of any size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax.budgets import base as budgets
from specjax.policies import Costs, Policy
from specjax.policies.base import first_state
from specjax.pytrees import pytree
from specjax.replay.along import Along, first_rejections
from specjax.replay.rollouts import Rollouts


class Served(NamedTuple):
    """Sums over all rounds of a batch."""

    time: Float[Array, ""]  # in the unit of the times
    tokens: Int[Array, ""]
    rounds: Int[Array, ""]
    positions: Int[Array, ""]  # of target calls, without those that fill a compiled size
    drafted: Int[Array, ""]  # verified drafted tokens
    accepted: Int[Array, ""]  # of these in the output
    calls: Int[Array, ""]  # of the drafter

    @property
    def rate(self) -> Float[Array, ""]:
        """Tokens per time."""
        return self.tokens.astype(jnp.float32) / self.time


class Lanes(NamedTuple):
    """The B rows of a batch."""

    output: Int[Array, " B"]  # of the N outputs
    length: Int[Array, " B"]  # tokens of it so far
    policy: Any
    budget: Any


@pytree
class Oracle(budgets.Budget):
    """Knows which drafted tokens would be accepted, and verifies these alone.

    They are drafted as deep as this round's tokens per time are highest. Over a whole run that is
    no strict bound: at its end, rows may be worth more than tokens.
    """

    times: Costs

    def best(self, accepted: Int[Array, " B"], live: Bool[Array, " B"], gamma: int) -> Array:
        """The depth at which tokens per time are highest."""
        depth = jnp.arange(gamma + 1, dtype=jnp.int32)
        kept = jnp.minimum(accepted[None, :], depth[:, None])
        count = jnp.sum(jnp.where(live[None, :], kept + 1, 0), axis=1, dtype=jnp.int32)
        rate = count.astype(jnp.float32) / self.times.exact(count, depth)
        return jnp.argmax(rate).astype(jnp.int32)


@partial(jax.jit, static_argnames=("rows",))
def serve(
    policy: Policy,
    budget: budgets.Budget,
    rollouts: Rollouts,
    times: Costs,
    keys: Key[Array, " N"],
    *,
    rows: int,
) -> Served:
    """Decode all outputs in a batch of `rows` rows.

    Args:
      policy: how far rows draft; `policies.constant(γ)` where the budget alone decides.
      times: at this batch size, as `specjax.measure.batches.pass_times` measures them.
      keys: one for each output, which settle the chances of acceptance.
    """
    gamma, count = rollouts.gamma_max, len(rollouts.emitted)
    rejections = first_rejections(rollouts, keys)
    lane = jnp.arange(rows, dtype=jnp.int32)
    # The times may end before the batch.
    sizes = jnp.asarray([*times.positions, max(times.positions[-1], rows * (gamma + 1))], jnp.int32)

    def fresh(output):
        own = keys[jnp.minimum(output, count - 1)]
        return Lanes(
            output,
            jnp.zeros_like(output),
            first_state(policy, own, gamma),
            first_state(budget, own, gamma),
        )

    def more(carry):
        lanes, *_ = carry
        return jnp.any(lanes.output < count)

    def one_round(carry):
        lanes, waiting, sums = carry
        output = jnp.minimum(lanes.output, count - 1)
        live = lanes.output < count
        rejected = jnp.take_along_axis(rejections[output], lanes.length[:, None], axis=1)[:, 0]
        here = Along(jax.tree.map(lambda x: x[output], rollouts), lanes.length, rejected)
        state, allowed = policy.begin(lanes.policy, gamma)
        worth, chances = budgets.begin(budget, lanes.budget, live, gamma)
        cap = here.room(live, jnp.minimum(jnp.asarray(allowed, jnp.int32), worth))
        state, chances, drafted, (asked, _, _) = here.draft(policy, state, cap, budget, chances)
        if isinstance(budget, Oracle):
            right = jnp.minimum(drafted, rejected - lanes.length)
            calls = budget.best(right, live, gamma)
            verified = jnp.minimum(right, calls)
        else:
            calls = jnp.sum(jnp.any(asked, axis=1), dtype=jnp.int32)
            verified = budgets.hand_out(budget, chances, drafted, live, sizes)
        round_ = here.conclude(live, verified)
        positions = jnp.sum(jnp.where(live, verified + 1, 0), dtype=jnp.int32)
        sums = Served(
            sums.time + times.exact(positions, calls),
            sums.tokens + jnp.sum(round_.emitted, dtype=jnp.int32),
            sums.rounds + 1,
            sums.positions + positions,
            sums.drafted + jnp.sum(jnp.where(live, verified, 0), dtype=jnp.int32),
            sums.accepted + jnp.sum(round_.in_output, dtype=jnp.int32),
            sums.calls + calls,
        )
        kept = Lanes(
            lanes.output,
            lanes.length + round_.emitted,
            policy.update(state, round_),
            budget.update(chances.state, round_),
        )
        leaving = live & (kept.length >= here.recorded.emitted)
        place = waiting + jnp.cumsum(leaving, dtype=jnp.int32) - 1
        new = fresh(jnp.where(leaving, jnp.minimum(place, count), lanes.output))
        lanes = jax.tree.map(partial(_either, leaving), new, kept)
        return lanes, waiting + jnp.sum(leaving, dtype=jnp.int32), sums

    zero = jnp.int32(0)
    none = Served(jnp.float32(0), zero, zero, zero, zero, zero, zero)
    start = fresh(jnp.minimum(lane, count)), jnp.int32(min(rows, count)), none
    return jax.lax.while_loop(more, one_round, start)[2]


def _either(rows: Bool[Array, " B"], one: Array, other: Array) -> Array:
    return jnp.where(rows.reshape(-1, *(1,) * (one.ndim - 1)), one, other)
