"""One length for all rows of a batch: a round lasts as long as its longest draft."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.goodput import Goodput, Tally, goodput
from specjax.policies.prices import MEASURED_WEIGHT, Prices
from specjax.pytrees import pytree
from specjax.sampling import argmax
from specjax.support.ranges import number

DEFAULT_PRIOR = 0.7


class Shared(NamedTuple):
    """What past rounds taught of each row, and how much of it is left."""

    tally: Tally
    left: Int[Array, " B"]  # tokens that it may still emit; 0: it has ended


@pytree
class Together(Goodput):
    """All rows draft the k of largest min_r (1 + α_r + … + α_rᵏ) / left_r / price(k).

    A batch lasts as long as its slowest row, so the row counts that will be done last: the least
    over rows that are alive of the share of what is left that a round brings. What others would
    gain is worth nothing, for nobody takes their place. A row with n tokens left counts for n terms
    at most. The verify pass is as wide as the longest draft asks for, so a price may rise by steps.

    α_r is a row's own rate, drawn towards that of the other live rows, which is drawn towards the
    prior: a batch of n rows learns what a draft is worth n times as fast as one. The prior is worth
    `known` tested tokens to a batch, and the batch `weight` to each row.

    Where that k is 0, one token is drafted all the same as long as some length would pay at
    α_r + width/√n, with n tested tokens in the batch: what is given up is given up on evidence, and
    the evidence is cheap. Evidence fades as new comes, and so not while nothing is drafted: a
    drafter that was idle has all that it missed to read before it can be tried again.

    Before the first round it is not known which rows are padding. All count then, and since all of
    them have the same α, the length is that of any one.
    """

    reads_batch = True

    known: Float[Array, ""]
    width: Float[Array, ""]

    def init(self, keys, gamma_max):
        return Shared(super().init(keys, gamma_max), jnp.full(keys.shape, gamma_max + 1, jnp.int32))

    def begin(self, state, gamma_max):
        alpha, tested = self.alphas(state)
        expected, hoped = (
            self.rates(state, chance, gamma_max)
            for chance in (alpha, jnp.minimum(alpha + self.width / jnp.sqrt(tested), 1.0))
        )
        least = jnp.any(hoped > hoped[0]).astype(jnp.int32)
        return state, jnp.maximum(argmax(expected), least)

    def update(self, state, round_):
        drafted = jnp.any(round_.drafted > 0)
        new = super().update(state.tally, round_)
        return Shared(jax.tree.map(partial(jnp.where, drafted), new, state.tally), round_.left)

    def inherit(self, fresh, past, rows):
        """Half of the evidence: a draft that was given up on earlier inputs is tried again."""
        tally = super().inherit(fresh.tally, past.tally, rows)
        return Shared(jax.tree.map(lambda x: x / 2, tally), fresh.left)

    def prefers_plain(self, gamma_max, rounds):
        """Before the first round an α that was measured, and does not pay, is believed."""
        measured = self.known >= MEASURED_WEIGHT
        first = dataclasses.replace(self, width=jnp.where(measured, 0.0, self.width))
        return Goodput.prefers_plain(first, gamma_max, rounds)

    def alphas(self, state: Shared) -> tuple[Float[Array, " B"], Float[Array, ""]]:
        """The estimate for each row, and the evidence in the batch, that of the prior included."""
        live, own = state.left > 0, state.tally
        seen = Tally(*(jnp.where(live, x, 0.0) for x in own))
        passed, tested = (jnp.sum(x) for x in seen)
        others = passed - seen.accepted + self.known * self.prior
        others = others / (tested - seen.tested + self.known)
        alpha = (own.accepted + self.weight * others) / (own.tested + self.weight)
        return alpha, tested + self.known

    def rates(self, state: Shared, alpha: Float[Array, " B"], gamma_max: int) -> Float[Array, " K"]:
        """Of what the slowest row has left, the share in a unit of time where all draft 0 … γ_max
        tokens."""
        place, left = jnp.arange(gamma_max + 1, dtype=jnp.int32)[None, :], state.left[:, None]
        chance = alpha[:, None] ** place.astype(jnp.float32)
        emitted = jnp.cumsum(jnp.where(place < left, chance, 0.0), axis=1)
        share = jnp.where(left > 0, emitted / jnp.maximum(left, 1).astype(emitted.dtype), jnp.inf)
        return jnp.min(share, axis=0) / self.prices.rounds(gamma_max)


def together(
    prices: Prices,
    prior: float | None = None,
    weight: float = 2.0,
    memory: float = 0.98,
    width: float = 0.3,
) -> Together:
    """Our own, for batches, with a table that was measured at their size.

    Args:
      prior: α before any evidence. None: what was measured with the prices, which is worth 40
        tested tokens to a batch; .7 if nothing was.
      weight: how many tested tokens any other prior is worth, and the batch to each row.
      memory: of the evidence, how much a round with a draft leaves.
      width: how much is hoped for; with 0 a batch may stop drafting by bad luck.
    """
    made = goodput(prices, DEFAULT_PRIOR if prior is None else prior, weight, memory)
    known = made.weight
    if prior is None and not jnp.isnan(prices.alpha):
        made = dataclasses.replace(made, prior=prices.alpha)
        known = jnp.float32(MEASURED_WEIGHT)
    hoped = jnp.float32(number("width", width, "[0, ∞)"))
    return Together(**vars(made), known=known, width=hoped)
