"""α of each row, from its own rounds; and how far recent rounds are to be trusted, from these."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from scipy.special import betaincinv

from specjax.policies.goodput import Goodput, Tally, add
from specjax.pytrees import pytree
from specjax.rounds import where_active

PRIOR_WEIGHT = 6.0  # tested tokens that the prior is worth
MEASURED_WEIGHT = 40.0  # and an α that was measured
PRIOR_SHARES = np.array([1 / 8, 1, 8], np.float32)  # shares of `weight`, by estimate
CREDIT_MEMORY = 0.99  # of an estimate's credit, how much a round leaves
MIN_CHANCE = 1e-3  # that an estimate is held to, so that no credit is lost for ever
MOST_HOPED = 0.98
OUTPUTS = 256  # equally likely, of which a mean is taken


class Evidence(NamedTuple):
    """What past rounds of each row taught."""

    recent: Tally
    lasting: Tally
    credit: Float[Array, "B 3"]  # log-likelihood of each estimate of α, fading


@pytree
class Estimating(Goodput):
    """A policy that estimates α from recent and past rounds, and explores where outputs differ.

    α is drawn from that of recent rounds towards the row's lasting one. How far is learned too:
    there are three estimates, in which the lasting α is worth `weight`/8, `weight` and 8 · `weight`
    recent tests, and each counts by how likely it held what came (Bayes). So where outputs change,
    α follows; where all tokens are alike it stays. The lasting α begins at the one that was
    measured with the costs, or else at the prior, and fades towards it.

    Where no draft pays at that α, drafts are as if it were α + width/√n: what is given up is given
    up on evidence, after n tested tokens. The n include the (1 − b)/b which the measured α is worth
    to a single output, where outputs differ by the share b of α(1 − α). So greedy outputs, of which
    some repeat themselves, are tried one by one. Where outputs are alike, or b is not known, an α
    that does not pay is believed. What has been given up is tried again as its evidence fades, ever
    more seldom.
    """

    lasting: Float[Array, ""]  # of the lasting evidence, how much a round leaves
    width: Float[Array, ""]  # of the interval that exploration adds to α

    def init(self, keys, gamma_max):
        none = super().init(keys, gamma_max)
        return Evidence(none, none, jnp.zeros((*keys.shape, len(PRIOR_SHARES)), jnp.float32))

    def prefers_plain(self, gamma_max, rounds, rows=1):
        """As `Goodput`. Where no draft pays at the measured α, every output pays for the try of the
        best: all of them together must promise `margin` more than plain decoding."""
        hopeless = dataclasses.replace(self, width=jnp.zeros_like(self.width))
        if not Goodput.prefers_plain(hopeless, gamma_max, rounds, rows):
            return False
        if self.promised_speedup(gamma_max, rows) < 1 + self.margin():
            return True
        return super().prefers_plain(gamma_max, rounds, rows)

    def promised_speedup(self, gamma_max: int, rows: int = 1) -> float:
        """Over plain decoding, if the α of each output were known, and their mean were a standard
        error below the measured α.

        Their α are of the Beta distribution of that mean and of `Costs.between`. Each output
        drafts the length that is best for it, or nothing for the cost of an idle round. Where a
        batch waits for its last row, it lasts as long as its worst output. So a token takes

            E_α [ min_k cost(k)/(1 + α + … + αᵏ) ]

        where α is the least of as many draws as there are rows.

        Args:
          rows: that wait for each other.
        """
        cost = np.asarray(self.costs.round_times(gamma_max), np.float64)
        tokens = self.expected_tokens(self.lower_alpha(), gamma_max, rows)
        return self.plain_token() / float(np.mean(np.min(cost / tokens, axis=1)))

    def promised_alone(self, cost: Mapping[int, float], rows: int = 1) -> dict[int, float]:
        """The `promised_speedup` of each draft length if all rounds have it, the best first.

        A token takes

            cost(k) · E_α [ 1/(1 + α + … + αᵏ) ]

        Their order is by the measured α; what each promises is of the lower one.

        Args:
          cost: of a round, by the lengths to choose from.
        """

        def takes(length: int, alpha: float) -> float:
            tokens = self.expected_tokens(alpha, length, rows)[:, length]
            return float(cost[length] * np.mean(1 / tokens))

        ordered = sorted(cost, key=lambda length: takes(length, float(self.first()[0])))
        token, lower = self.plain_token(), self.lower_alpha()
        return {length: token / takes(length, lower) for length in ordered}

    def plain_token(self) -> float:
        """What a token of plain decoding takes, or a round without a draft if that is less."""
        return float(self.costs.outside(0.0).round_times(self.costs.gamma_max)[0])

    def lower_alpha(self) -> float:
        """The first α less a standard error of it."""
        return float(self.first()[0] - jnp.nan_to_num(self.costs.alpha_error))

    def expected_tokens(self, mean: float, gamma_max: int, rows: int) -> Float[np.ndarray, "N K"]:
        """1 + α + … + αᵏ for 0 … γ_max drafted tokens, of N equally likely outputs, or of the worst
        of so many rows."""
        alpha = np.clip(mean, MIN_CHANCE, 1 - MIN_CHANCE)
        total = float(self.concentration())
        shares = (np.arange(OUTPUTS) + 0.5) / OUTPUTS
        least = -np.expm1(np.log1p(-shares) / rows)  # quantiles of the least of so many uniforms
        alphas = betaincinv(alpha * total, (1 - alpha) * total, least)
        return np.cumsum(alphas[:, None] ** np.arange(gamma_max + 1), axis=1)

    def learned(self, state: Evidence, held: Float[Array, "B 3"], round_) -> Evidence:
        """After a round.

        Args:
          held: the estimates before it.
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
        """α before any round, and the tested tokens that it is worth; these never fade."""
        measured = self.costs.alpha
        unknown = jnp.isnan(measured)
        known = jnp.where(unknown, PRIOR_WEIGHT, MEASURED_WEIGHT)
        return jnp.where(unknown, self.prior, measured), known

    def estimates(self, state: Evidence, first: Array, known: Array) -> Float[Array, "B 3"]:
        """The three of which α is a mean.

        Args:
          first: what the lasting α of each row is drawn to, by as much as `known` tested tokens.
        """
        recent, lasting = state.recent, state.lasting
        mean = (lasting.accepted + known * first) / (lasting.tested + known)
        weight = self.weight * PRIOR_SHARES[None, :]
        accepted = recent.accepted[:, None] + weight * mean[:, None]
        return accepted / (recent.tested[:, None] + weight)

    def hoped(self, state: Evidence, alpha: Float[Array, " B"]) -> Float[Array, " B"]:
        """What α may be yet; α itself where it is not known how far outputs differ."""
        return jnp.minimum(alpha + self.width / jnp.sqrt(self.evident(state)), MOST_HOPED)

    def evident(self, state: Evidence) -> Float[Array, " B"]:
        """Tested tokens of each row, and as many as its first α is worth to it."""
        return self.concentration() + state.lasting.tested

    def concentration(self) -> Float[Array, ""]:
        """Of the Beta distribution of the outputs' α, (1 − b)/b: as many tested tokens the first α
        is worth to an output. A million where it is not known how far outputs differ; and a
        thousandth at least, for at 0 there is no distribution."""
        between = jnp.clip(jnp.nan_to_num(self.costs.between), 1e-6, 1 - MIN_CHANCE)
        return (1 - between) / between


def mixed(state: Evidence, estimates: Float[Array, "B 3"]) -> Float[Array, " B"]:
    """By the credit of each."""
    return jnp.sum(jax.nn.softmax(state.credit, axis=1) * estimates, axis=1)
