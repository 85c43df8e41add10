"""Our own policy of batches: positions as long as one more raises the batch's tokens per time."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.calibrated import Calibrated, Learned
from specjax.policies.costs import Costs
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import number

PAUSE = 16  # rounds without a draft before one token is drafted again


class Stopping(NamedTuple):
    """The calibration, and this round's drafting."""

    learned: Learned
    depth: Int[Array, " B"]  # calls of the drafter in this round
    idle: Int[Array, " B"]  # rounds without a draft, up to this one


@pytree
class EarlyStop(Calibrated):
    """Takes slots while one more raises tokens per time.

    With n slots taken in falling order of chance, a round brings R + S₁ + … + Sₙ tokens of R rows
    and takes d·c + v(R + n) + rest. Slot n + 1 is taken if that raises the quotient. The rule looks
    at the slots taken and the next one, so it is exact; a maximum over all n would read tokens of
    later slots. v is the largest convex function below the times of `Costs`, for which both agree:
    a size that is hardly used for one token more is worth it for many, so its steps would stop too
    early. Positions up to the compiled size are then filled, since they cost nothing.

    How deep to draft is decided before the round, from the mean chances at each position in past
    rounds: the d for which the best n promises most. If that is 0, one token is drafted every
    `PAUSE` rounds.
    """

    times: Costs
    smooth: Float[Array, " M"]  # v at the positions of `times`
    fills = True

    def init(self, keys, gamma_max):
        zeros = jnp.zeros(keys.shape, jnp.int32)
        return Stopping(super().init(keys, gamma_max), zeros, zeros)

    def begin(self, state, live, gamma_max):
        learned, _ = super().begin(state.learned, live, gamma_max)
        best = self.best_depth(learned, live, gamma_max)
        paused = jnp.max(jnp.where(live, state.idle, 0)) >= PAUSE
        depth = jnp.where((best == 0) & paused, 1, best)
        idle = jnp.where(depth > 0, 0, state.idle + 1)
        return Stopping(learned, jnp.full_like(state.depth, depth), idle), depth

    def best_depth(self, learned: Learned, live: Array, gamma_max: int) -> Int[Array, ""]:
        """The number of drafted tokens for which the best number of slots promises most."""
        mean = jnp.where(live[:, None], jnp.cumprod(learned.step, axis=1), 0.0).ravel()
        index = jnp.broadcast_to(jnp.arange(gamma_max, dtype=jnp.int32), learned.step.shape).ravel()
        order = jnp.argsort(-mean)
        depth = jnp.arange(gamma_max + 1, dtype=jnp.int32)[:, None]
        within = index[order][None, :] < depth
        rows = jnp.sum(live, dtype=jnp.int32)
        worth = jnp.where(within, mean[order][None, :], 0.0)
        tokens = rows.astype(jnp.float32) + jnp.cumsum(worth, axis=1)
        count = rows + jnp.cumsum(within, axis=1, dtype=jnp.int32)
        rate = tokens / self.smoothed(count, depth)
        plain = (rows.astype(jnp.float32) / self.smoothed(rows, 0))[None]
        return jnp.argmax(jnp.concatenate([plain, jnp.max(rate[1:], axis=1)])).astype(jnp.int32)

    def smoothed(self, positions: Int[Array, "..."], depth: int | Array) -> Float[Array, "..."]:
        """Time of a round without the steps between sizes. Arguments: as in `Costs.exact`."""
        at = jnp.asarray(self.times.positions, jnp.float32)
        calls = jnp.interp(positions.astype(jnp.float32), at, self.smooth)
        calls = calls + self.times.beyond(positions)
        return self.times.of_calls(calls, depth, self.times.rest[-1])

    def keep_drafting(self, state, seen):
        learned, drafting = super().keep_drafting(state.learned, seen)
        return state._replace(learned=learned), drafting

    def chance(self, state, slot):
        return super().chance(state.learned, slot)

    def verifies(self, state, slot):
        depth, count = state.depth[0], slot.rows + slot.taken
        now, more = (self.smoothed(count + i, depth) for i in (0, 1))
        return (slot.gained + slot.chance) * now > slot.gained * more

    def update(self, state, round_):
        learned = super().update(state.learned, round_)
        return where_active(round_, state._replace(learned=learned), state)


def early_stop(times: Costs, prior: float = 0.7) -> EarlyStop:
    """Make our own policy of batches, with times measured at its batch size.

    Args:
      prior: chance of acceptance at each position before any round.
    """
    if not isinstance(times, Costs):
        raise ValueError(
            f"times={times!r} must be a specjax.policies.Costs: "
            "`specjax.measure.batches.pass_times` measures one."
        )
    smooth = jnp.asarray(convex(times.positions, times.verify.tolist()), jnp.float32)
    return EarlyStop(jnp.float32(number("prior", prior, "(0, 1)")), times, smooth)


def convex(sizes: Sequence[int], times: Sequence[float]) -> np.ndarray:
    """The largest convex function that is nowhere above the times, at the same sizes."""
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1 and _slope(sizes, times, hull[-2], hull[-1]) >= _slope(
            sizes, times, hull[-2], i
        ):
            hull.pop()
        hull.append(i)
    return np.interp(sizes, [sizes[i] for i in hull], [times[i] for i in hull])


def _slope(sizes: Sequence[int], times: Sequence[float], i: int, j: int) -> float:
    return (times[j] - times[i]) / (sizes[j] - sizes[i])
