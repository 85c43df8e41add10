"""transformers' dynamic length: draft while the drafter is confident, and retune the threshold."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import number

BINS = 20


class Seen(NamedTuple):
    """The threshold, and the counts by which it is retuned."""

    threshold: Float[Array, " B"]
    matches: Float[Array, "B N"]  # accepted tokens by the belief in them, in N equal bins
    misses: Float[Array, "B N"]  # rejected ones


@pytree
class Confidence(Policy):
    """Stops after a token whose own probability is below τ.

    τ is retuned after each round: it is the bin edge of smallest FPR + 3·FNR, where a positive is a
    token that passes τ, and a true one was accepted. transformers keeps every token and its
    probability; here they are counted in 20 bins.
    """

    carries = True

    threshold: Float[Array, ""]  # of the first rounds

    def init(self, keys, gamma_max):
        none = jnp.zeros((*keys.shape, BINS), jnp.float32)
        return Seen(jnp.full(keys.shape, self.threshold, jnp.float32), none, none)

    def go_on(self, state, drafting, logprob):
        return state, drafting & (jnp.exp(logprob) >= state.threshold)

    def update(self, state, round_):
        edges = jnp.arange(BINS, dtype=jnp.float32) / BINS
        which = jnp.floor(jnp.exp(round_.belief_logprob) * BINS).astype(jnp.int32)
        hit = (
            jnp.minimum(which, BINS - 1)[:, :, None]
            == jnp.arange(BINS, dtype=jnp.int32)[None, None, :]
        )

        def counted(where):
            return jnp.sum(hit & where[:, :, None], axis=1).astype(jnp.float32)

        matches = state.matches + counted(round_.kept)
        misses = state.misses + counted(round_.tested & ~round_.kept)
        good, bad = jnp.sum(matches, axis=1), jnp.sum(misses, axis=1)
        below = jnp.cumsum(matches, axis=1) - matches  # accepted tokens that an edge would stop at
        above = bad[:, None] - (jnp.cumsum(misses, axis=1) - misses)
        cost = above / jnp.maximum(bad, 1)[:, None] + 3 * below / jnp.maximum(good, 1)[:, None]
        best = edges[BINS - 1 - jnp.argmin(cost[:, ::-1], axis=1)]  # the highest of equals
        known = (good > 0) & (bad > 0) & (good + bad > 5)
        new = Seen(jnp.where(known, best, state.threshold), matches, misses)
        return where_active(round_, new, state)


def confidence(threshold: float = 0.4) -> Confidence:
    """Make a policy of transformers' dynamic length, from a threshold in [0, 1]."""
    return Confidence(jnp.float32(number("threshold", threshold, "[0, 1]", "it is a probability")))
