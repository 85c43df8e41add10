"""Chances of acceptance, from the drafter's belief and past rounds of the row and its batch."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active

FIRST_SLOPE = 0.6
LIMIT = 4.0  # the largest log-odds of a belief: 1.8% and 98.2%
LEVEL_RATE = 0.5  # of learning, for the level and the slope
SLOPE_RATE = 0.02
SHARED = 0.1  # the share of its batch's mean that a row takes over in each round
MEMORY = 0.9  # the share of past rounds in the mean chance at each position


class Learned(NamedTuple):
    """Calibration from past rounds, and the row's draft in this round."""

    level: Float[Array, " B"]  # log-odds of acceptance at even belief
    slope: Float[Array, " B"]
    step: Float[Array, "B G"]  # mean chance of acceptance at each position, if reached
    odds: Float[Array, "B G"]  # of this round: log-odds of the largest belief
    each: Float[Array, "B G"]  # of this round: chance of acceptance, if reached
    reached: Float[Array, " B"]  # of this round: chance that all tokens so far are accepted


@pytree
class Calibrated(Policy):
    """The base of policies whose chances of slots follow the drafter's belief.

    If b is the largest probability in the drafter's belief, known before a token is drawn, the
    token is accepted with the log-odds

        level + slope · log(b/(1 − b))

    Both are learned from tested tokens by online logistic regression on Σ min(target, draft), for
    each row, and shrink towards the mean of the batch. The chance of a slot is the product along
    its row.
    """

    reads_batch = True

    prior: Float[Array, ""]  # the chance at each position before any round

    def init(self, keys, gamma_max):
        rows = keys.shape
        each = jnp.zeros((*rows, gamma_max), jnp.float32)
        ones = jnp.ones(rows, jnp.float32)
        return Learned(0 * ones, FIRST_SLOPE * ones, each + self.prior, each, each, ones)

    def begin(self, state, live, gamma_max):
        blank = jnp.zeros_like(state.odds)
        ones = jnp.ones_like(state.reached)
        return state._replace(odds=blank, each=blank, reached=ones), jnp.int32(gamma_max)

    def keep_drafting(self, state, seen):
        odds = log_odds(seen.top1)
        each = jax.nn.sigmoid(state.level + state.slope * odds)

        def put(old, new):
            return jax.lax.dynamic_update_index_in_dim(old, new, seen.slot, 1)

        found = state._replace(
            odds=put(state.odds, odds),
            each=put(state.each, jnp.where(seen.drafting, each, 0.0)),
            reached=state.reached * each,
        )
        return found, seen.drafting

    def chance(self, state, slot):
        return state.reached

    def update(self, state, round_):
        tested = round_.tested
        error = jnp.where(tested, round_.overlap.astype(jnp.float32) - state.each, 0.0)
        level = state.level + LEVEL_RATE * jnp.sum(error, axis=1)
        slope = state.slope + SLOPE_RATE * jnp.sum(error * state.odds, axis=1)
        known = state.each > 0  # of tokens that a row might draft, verified or not
        new = state._replace(
            level=jnp.clip(shared(level, round_.active), -2 * LIMIT, 2 * LIMIT),
            slope=jnp.clip(shared(slope, round_.active), 0.0, 2.0),
            step=jnp.where(known, MEMORY * state.step + (1 - MEMORY) * state.each, state.step),
        )
        return where_active(round_, new, state)


def shared(value: Float[Array, " B"], active: Array) -> Float[Array, " B"]:
    """Move each row's value towards the mean of active rows."""
    count = jnp.maximum(jnp.sum(active, dtype=value.dtype), 1)
    mean = jnp.sum(jnp.where(active, value, 0.0)) / count
    return value + SHARED * (mean - value)


def log_odds(prob: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Log-odds of a probability, clipped to ±`LIMIT`."""
    least = math.exp(-2 * LIMIT)
    odds = jnp.log(jnp.maximum(prob, least)) - jnp.log(jnp.maximum(1 - prob, least))
    return jnp.clip(odds, -LIMIT, LIMIT)
