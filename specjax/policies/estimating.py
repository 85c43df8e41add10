"""Estimates of each row's α from its own rounds, and of the weight of recent rounds."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specjax.policies.goodput import Goodput, Tally, add
from specjax.pytrees import pytree
from specjax.rounds import where_active

PRIOR_WEIGHT = 6.0  # weight of the prior α, in tested tokens
MEASURED_WEIGHT = 40.0  # weight of a measured α, in tested tokens
PRIOR_SHARES = np.array([1 / 8, 1, 8], np.float32)  # shares of `weight`, by estimate
CREDIT_MEMORY = 0.99  # the share of an estimate's credit that a round keeps
MIN_CHANCE = 1e-3  # distance of estimates of α from 0 and 1, so that each can regain credit
MAX_EXPLORED_ALPHA = 0.98  # the largest α for exploration
OUTPUTS = 256  # equally likely outputs in a mean


class Evidence(NamedTuple):
    """Evidence from past rounds of each row."""

    recent: Tally
    lasting: Tally
    credit: Float[Array, "B 3"]  # log-likelihood of each estimate of α, fading


@pytree
class Estimating(Goodput):
    """A policy that estimates α from recent and past rounds, and explores where outputs differ.

    The estimate shrinks the α of recent rounds towards the row's lasting α. In three estimates the
    lasting α weighs `weight`/8, `weight` and 8 · `weight` recent tests. Each counts by the
    likelihood that it gave to past tokens (Bayes). So α follows outputs that change, and is steady
    for others. The lasting α starts at the one measured with the costs, or else at the prior, and
    fades towards it.

    If no draft pays at that α, drafts are chosen for α + width/√n, after n tested tokens. The n
    include the (1 − b)/b that the measured α weighs for a single output, where outputs differ by
    the share b of α(1 − α). So greedy outputs, some of which repeat themselves, are each explored.
    If outputs are alike, or b is not known, there is no exploration. A row that stopped
    drafting explores again as its evidence fades, more and more rarely.
    """

    lasting: Float[Array, ""]  # the share of the lasting evidence that a round keeps
    width: Float[Array, ""]  # of the interval that exploration adds to α

    def init(self, keys, gamma_max):
        none = super().init(keys, gamma_max)
        return Evidence(none, none, jnp.zeros((*keys.shape, len(PRIOR_SHARES)), jnp.float32))

    def prefers_plain(self, gamma_max, rounds, rows=1):
        """Whether plain decoding is preferred, as in `Goodput`. If no draft pays at the measured α,
        the outputs together must gain `margin` over plain decoding, since each pays to explore."""
        hopeless = dataclasses.replace(self, width=jnp.zeros_like(self.width))
        if not Goodput.prefers_plain(hopeless, gamma_max, rounds, rows):
            return False
        if self.promised_speedup(gamma_max, rows) < 1 + self.margin():
            return True
        return super().prefers_plain(gamma_max, rounds, rows)

    def promised_speedup(self, gamma_max: int, rows: int = 1) -> float:
        """Speedup over plain decoding if each output's α were known, and their mean were a standard
        error below the measured α.

        The α follow a Beta distribution of that mean and of `Costs.between`. Each output drafts its
        best length, or nothing for the cost of an idle round. A batch lasts as long as its worst
        output. So a token takes

            E_α [ min_k cost(k)/(1 + α + … + αᵏ) ]

        where α is the least of as many draws as there are rows.

        Args:
          rows: number of rows that wait for each other.
        """
        cost = np.asarray(self.costs.round_times(gamma_max), np.float64)
        lower = float(self.first()[0] - jnp.nan_to_num(self.costs.alpha_error))
        tokens = self.expected_tokens(lower, gamma_max, rows)
        plain = float(self.costs.outside(0.0).round_times(gamma_max)[0])
        return plain / float(np.mean(np.min(cost / tokens, axis=1)))

    def expected_tokens(self, mean: float, gamma_max: int, rows: int) -> Float[np.ndarray, "N K"]:
        """1 + α + … + αᵏ for 0 … γ_max drafted tokens, of N equally likely outputs; each is the
        worst of `rows` rows."""
        from scipy.special import betaincinv  # imports for .2 s, which few programs need

        alpha = np.clip(mean, MIN_CHANCE, 1 - MIN_CHANCE)
        total = float(self.concentration())
        shares = (np.arange(OUTPUTS) + 0.5) / OUTPUTS
        least = -np.expm1(np.log1p(-shares) / rows)  # quantiles of the least of so many uniforms
        alphas = betaincinv(alpha * total, (1 - alpha) * total, least)
        return np.cumsum(alphas[:, None] ** np.arange(gamma_max + 1), axis=1)

    def learned(self, state: Evidence, held: Float[Array, "B 3"], round_) -> Evidence:
        """Update the evidence after a round.

        Args:
          held: the estimates before the round.
        """
        held = jnp.clip(held, MIN_CHANCE, 1 - MIN_CHANCE)
        accepted = round_.in_output.astype(jnp.float32)[:, None]
        rejected = jnp.sum(round_.tested, axis=1).astype(jnp.float32)[:, None] - accepted
        credit = accepted * jnp.log(held) + rejected * jnp.log1p(-held)
        new = Evidence(
            add(state.recent, self.memory, round_),
            add(state.lasting, self.lasting, round_),
            CREDIT_MEMORY * state.credit + credit,
        )
        return where_active(round_, new, state)

    def first(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The α before any round, and its weight in tested tokens, which never fades."""
        measured = self.costs.alpha
        unknown = jnp.isnan(measured)
        known = jnp.where(unknown, PRIOR_WEIGHT, MEASURED_WEIGHT)
        return jnp.where(unknown, self.prior, measured), known

    def estimates(self, state: Evidence, first: Array, known: Array) -> Float[Array, "B 3"]:
        """The three estimates of which α is a weighted mean.

        Args:
          first: the prior of each row's lasting α, with the weight of `known` tested tokens.
        """
        recent, lasting = state.recent, state.lasting
        mean = (lasting.accepted + known * first) / (lasting.tested + known)
        weight = self.weight * PRIOR_SHARES[None, :]
        accepted = recent.accepted[:, None] + weight * mean[:, None]
        return accepted / (recent.tested[:, None] + weight)

    def optimistic(self, state: Evidence, alpha: Float[Array, " B"]) -> Float[Array, " B"]:
        """An upper bound of α for exploration; α itself if `Costs.between` is not known."""
        return jnp.minimum(alpha + self.width / jnp.sqrt(self.evident(state)), MAX_EXPLORED_ALPHA)

    def evident(self, state: Evidence) -> Float[Array, " B"]:
        """Tested tokens of each row, plus the weight of its first α."""
        return self.concentration() + state.lasting.tested

    def concentration(self) -> Float[Array, ""]:
        """Concentration (1 − b)/b of the Beta distribution of the outputs' α: the weight of the
        first α for an output, in tested tokens. A million if b is not known; a thousandth at least,
        because at 0 there is no distribution."""
        between = jnp.clip(jnp.nan_to_num(self.costs.between), 1e-6, 1 - MIN_CHANCE)
        return (1 - between) / between


def mixed(state: Evidence, estimates: Float[Array, "B 3"]) -> Float[Array, " B"]:
    """Mean of the estimates, weighted by their credit."""
    return jnp.sum(jax.nn.softmax(state.credit, axis=1) * estimates, axis=1)
