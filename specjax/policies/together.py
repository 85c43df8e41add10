"""One length for all rows of a batch: a round lasts as long as its longest draft."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.goodput import Goodput, Tally, goodput
from specjax.policies.prices import Prices
from specjax.pytrees import pytree
from specjax.sampling import argmax


class Shared(NamedTuple):
    """What past rounds taught of each row, and how much of it is left."""

    tally: Tally
    left: Int[Array, " B"]  # tokens that it may still emit; 0: it has ended


@pytree
class Together(Goodput):
    """All rows draft the k in 0 … γ_max of largest Σ_r (1 + α_r + … + α_rᵏ) / price(k).

    The sum is over rows that are alive, and a row with n tokens left counts for n terms at most:
    as rows end, the length becomes that of the rest. The verify pass is as wide as the longest
    draft asks for, so a price may rise by steps.

    α_r is a row's own rate, drawn towards that of the other live rows, which is drawn towards the
    prior: a batch of n rows learns what a draft is worth n times as fast as one. A row alone drafts
    as `Goodput` does.

    Before the first round it is not known which rows are padding. All count then, and since all of
    them have the same α, the length is that of any one.
    """

    reads_batch = True

    def init(self, keys, gamma_max):
        return Shared(super().init(keys, gamma_max), jnp.full(keys.shape, gamma_max + 1, jnp.int32))

    def begin(self, state, gamma_max):
        price = self.prices.rounds(gamma_max)
        place = jnp.arange(gamma_max + 1, dtype=jnp.int32)[None, :]
        chance = self.alphas(state)[:, None] ** place.astype(jnp.float32)
        emitted = jnp.sum(jnp.where(place < state.left[:, None], chance, 0.0), axis=0)
        return state, argmax(jnp.cumsum(emitted) / price)

    def update(self, state, round_):
        return Shared(super().update(state.tally, round_), round_.left)

    def inherit(self, fresh, past, rows):
        return Shared(super().inherit(fresh.tally, past.tally, rows), fresh.left)

    def alphas(self, state: Shared) -> Float[Array, " B"]:
        """The estimate for each row."""
        live, own = state.left > 0, state.tally
        known = (jnp.where(live, x, 0.0) for x in own)
        others = self.alpha(Tally(*(jnp.sum(x) - x for x in known)))
        return (own.accepted + self.weight * others) / (own.tested + self.weight)


def together(
    prices: Prices, prior: float = 0.7, weight: float = 4.0, memory: float = 0.98
) -> Together:
    """Our own, for batches, with a table that was measured at their size.

    Args:
      prior: α before any evidence.
      weight: how many tested tokens the prior is worth to a batch, and the batch to each row.
      memory: of the evidence, how much a round leaves.
    """
    return Together(**vars(goodput(prices, prior, weight, memory)))
