"""One length for all rows of a batch: a round lasts as long as its longest draft."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri
from jaxtyping import Float, Int

from specjax.policies.costs import Costs
from specjax.policies.estimating import Estimating, Evidence, mixed
from specjax.policies.goodput import checked
from specjax.pytrees import pytree
from specjax.sampling import argmax
from specjax.support.ranges import number


class Shared(NamedTuple):
    """Evidence from past rounds of each row, and the tokens left."""

    evidence: Evidence
    left: Int[Array, " B"]  # tokens that the row may still emit; 0: it has ended


@pytree
class Together(Estimating):
    """Drafts in all rows the k of largest min_r (1 + α_r + … + α_rᵏ) / left_r / cost(k).

    A batch lasts as long as its slowest row, so only the row that will be done last counts: the one
    for which a round brings the least share of its remaining tokens. Gains of other rows are worth
    nothing, because no input takes their place. A row with n tokens left counts n terms at most.
    The verify pass is as wide as the longest draft, so a cost may rise by steps.

    α_r is a row's own rate. Its lasting part shrinks towards that of the other live rows, so a
    batch of n rows learns n times as fast as one. The uncertainty of a row counts as in the worst
    of n rows: α_r minus z_n standard deviations, z_n = Φ⁻¹((n − 3/8)/(n + 1/4)) (Blom), by the
    share of α(1 − α) that is between outputs.

    Before the first round it is not known which rows are padding. All count then; they have the
    same α, so the length is that of any one.
    """

    reads_batch = True

    def init(self, keys, gamma_max):
        return Shared(super().init(keys, gamma_max), jnp.full(keys.shape, gamma_max + 1, jnp.int32))

    def begin(self, state, live, gamma_max):
        alpha = self.slowest(state)
        optimistic = self.optimistic(state.evidence, alpha)
        length, tried = (argmax(self.rates(state, a, gamma_max)) for a in (alpha, optimistic))
        return state, jnp.where(length > 0, length, tried)

    def update(self, state, round_):
        return Shared(self.learned(state.evidence, self.held(state), round_), round_.left)

    def resume(self, fresh, past, rows):
        return Shared(super().resume(fresh.evidence, past.evidence, rows), fresh.left)

    def alpha(self, state: Shared) -> Float[Array, " B"]:  # type: ignore[override]
        """The estimated α of each row."""
        return mixed(state.evidence, self.held(state))

    def slowest(self, state: Shared) -> Float[Array, " B"]:
        """The α that each row would have if it were the worst of the active ones."""
        count = jnp.maximum(jnp.sum(state.left > 0, dtype=jnp.float32), 1)
        alpha = self.alpha(state)
        deviation = jnp.sqrt(alpha * (1 - alpha) / (self.evident(state.evidence) + 1))
        return jnp.maximum(alpha - ndtri((count - 0.375) / (count + 0.25)) * deviation, 0.0)

    def held(self, state: Shared) -> Float[Array, "B 3"]:
        """The three estimates of which α is a weighted mean."""
        first, known = self.first()
        live, own = state.left > 0, state.evidence.lasting
        accepted, tested = (jnp.where(live, x, 0.0) for x in own)
        others = jnp.sum(accepted) - accepted + known * first
        return self.estimates(state.evidence, others / (jnp.sum(tested) - tested + known), known)

    def rates(self, state: Shared, alpha: Float[Array, " B"], gamma_max: int) -> Float[Array, " K"]:
        """Share of the slowest row's remaining tokens per time, by 0 … γ_max drafted tokens."""
        place, left = jnp.arange(gamma_max + 1, dtype=jnp.int32)[None, :], state.left[:, None]
        chance = alpha[:, None] ** place.astype(jnp.float32)
        emitted = jnp.cumsum(jnp.where(place < left, chance, 0.0), axis=1)
        share = jnp.where(left > 0, emitted / jnp.maximum(left, 1).astype(emitted.dtype), jnp.inf)
        return jnp.min(share, axis=0) / self.costs.round_times(gamma_max)


def together(
    costs: Costs,
    prior: float = 0.7,
    weight: float = 8.0,
    memory: float = 0.9,
    lasting: float = 0.995,
    width: float = 0.4,
) -> Together:
    """Make our own policy for batches, with a table of costs measured at their size.

    Args:
      prior, weight, memory, lasting, width: see `lookahead`.
    """
    return Together(
        *checked(costs, prior, weight, memory),
        jnp.float32(number("lasting", lasting, "[0, 1]")),
        jnp.float32(number("width", width, "[0, ∞)")),
    )
