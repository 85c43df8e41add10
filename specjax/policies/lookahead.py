"""Our own: a draft goes on while some longer one promises more than its time is worth, by chances
of acceptance that are learned from the row's own rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specjax.policies.goodput import Goodput, Tally, add, checked, expected
from specjax.policies.prices import MEASURED_WEIGHT, Prices
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import number

PRIOR_WEIGHT = 6.0  # tested tokens that the prior is worth
BELIEF_WEIGHT = 2.0  # and that the mean belief is worth which fits α
TRUST = np.array([1 / 8, 1, 8], np.float32)  # shares of `weight`, by estimate
CREDIT_MEMORY = 0.99  # of an estimate's credit, how much a round leaves
MOST_HOPED = 0.98
HOPED_GAIN = 0.25  # that a hope must promise over a round without a draft
LEAST_CHANCE = 1e-3  # that an estimate is held to, so that no credit is lost for ever
FIRST_SLOPE = 0.6
LIMIT = 4.0  # of log-odds: beliefs of 1.8% and 98.2%


class Ahead(NamedTuple):
    """What past rounds taught, and where this round stands."""

    recent: Tally
    lasting: Tally
    credit: Float[Array, "B 3"]  # how well each estimate of α foretold: log-likelihood, fading
    odds: Float[Array, " B"]  # a fading sum, as in `recent`: log-odds of beliefs in tested tokens
    slope: Float[Array, " B"]
    offset: Float[Array, " B"]  # log-odds of acceptance at even belief
    bars: Float[Array, "B K"]  # what survival must exceed behind the tokens so far, and 1, … more
    survival: Float[Array, " B"]  # P(all drafted tokens so far are accepted), estimated


@pytree
class Lookahead(Goodput):
    """Goes on while some longer draft, be it by one token or by many, promises more than its time
    is worth.

    A token that the drafter believes in with probability b is accepted with the log-odds

        log(α/(1 − α)) + slope · (log(b/(1 − b)) − its mean over tested tokens)

    so beliefs move a chance up and down from the α of recent rounds, and how far they do is learned
    by online logistic regression: from nothing, where they tell nothing, to more than the drafter
    says. It begins near a drafter whose beliefs are right: with a slope of .6, and a mean of α's
    own log-odds, which tested tokens soon outweigh.

    α is drawn from that of recent rounds towards the row's lasting one. How far is learned too:
    there are three estimates, in which the lasting α is worth `weight`/8, `weight` and 8 · `weight`
    recent tests, and each counts by how likely it held what came (Bayes). So where outputs change,
    α follows; where all tokens are alike it stays. The lasting α begins at the one that was
    measured with the prices, or else at the prior, and fades towards it.

    Where no draft pays at that α, the row drafts as if it were α + width/√n, as long as some draft
    would then bring a quarter more than none: what is given up is given up on evidence, after n
    tested tokens, and little is not hoped for, since trying has its price. The n include the
    (1 − b)/b which the measured α is worth to a single output, where outputs differ by the share b
    of α(1 − α). So greedy outputs, of which some repeat themselves, are tried one by one. Where
    outputs are alike, or b is not known, an α that does not pay is believed. A row that has stopped
    drafting tries again as its evidence fades, ever more seldom.

    With n tokens drafted, all of which are accepted with the chance S, k more are expected to bring
    S·(α + … + αᵏ) tokens and take price(n + k) − price(n). Time is worth what `goodput` would make
    of it, max (1 + α + … + αᵏ)/price(k). In a round where it would draft nothing nothing is
    drafted.
    """

    lasting: Float[Array, ""]  # of the lasting evidence, how much a round leaves
    learning_rate: Float[Array, ""]  # of the slope
    width: Float[Array, ""]  # of hope

    def init(self, keys, gamma_max):
        none = super().init(keys, gamma_max)
        zeros, ones = jnp.zeros(keys.shape, jnp.float32), jnp.ones(keys.shape, jnp.float32)
        bars = jnp.zeros((*keys.shape, gamma_max + 1), jnp.float32)
        credit = jnp.zeros((*keys.shape, len(TRUST)), jnp.float32)
        return Ahead(none, none, credit, zeros, FIRST_SLOPE * ones, zeros, bars, ones)

    def begin(self, state, gamma_max):
        price, alpha = self.prices.rounds(gamma_max), self.alpha(state)
        hoped = self.hoped(state)
        tries = self._gain(hoped, gamma_max) > HOPED_GAIN
        alpha = jnp.where((self._gain(alpha, gamma_max) <= 0) & tries, hoped, alpha)
        rate = self.rate(alpha, gamma_max)
        best = jnp.max(rate, axis=1)
        now = np.arange(len(price))[:, None]
        more = now.T - now  # k, by n and n + k
        time = jnp.where(more > 0, price[None, :] - price[:, None], jnp.inf)
        brought = expected(alpha[:, None, None], np.maximum(more, 1)[None]) - 1
        bars = jnp.min(time[None] / brought, axis=2) * best[:, None]
        offset = _odds(alpha, 1 - alpha) - state.slope * _mean_odds(state, alpha)
        state = state._replace(offset=offset, bars=bars, survival=jnp.ones_like(alpha))
        return state, jnp.where(best > rate[:, 0], len(price) - 1, 0)

    def go_on(self, state, drafting, confidence):
        survival = state.survival * _chance(state, confidence[:, None])[:, 0]
        bars = jnp.pad(state.bars[:, 1:], ((0, 0), (0, 1)), constant_values=jnp.inf)
        return state._replace(bars=bars, survival=survival), drafting & (survival > bars[:, 0])

    def update(self, state, round_):
        odds, chance = _belief_odds(round_.confidence), _chance(state, round_.confidence)
        mean = _mean_odds(state, self.alpha(state))
        apart = jnp.where(round_.tested, odds - mean[:, None], 0.0)
        slope = state.slope + self.learning_rate * jnp.sum((round_.ratio - chance) * apart, axis=1)
        held = jnp.clip(self.estimates(state), LEAST_CHANCE, 1 - LEAST_CHANCE)
        accepted = round_.accepted.astype(jnp.float32)[:, None]
        rejected = jnp.sum(round_.tested, axis=1).astype(jnp.float32)[:, None] - accepted
        new = state._replace(
            recent=add(state.recent, self.memory, round_),
            lasting=add(state.lasting, self.lasting, round_),
            credit=CREDIT_MEMORY * state.credit
            + accepted * jnp.log(held)
            + rejected * jnp.log1p(-held),
            odds=self.memory * state.odds + jnp.sum(jnp.where(round_.tested, odds, 0.0), axis=1),
            slope=jnp.clip(slope, 0.0, 2.0),
        )
        return where_active(round_, new, state)

    def _gain(self, alpha: Float[Array, " B"], gamma_max: int) -> Float[Array, " B"]:
        """Of the best draft over none, as a share of tokens per time."""
        rate = self.rate(alpha, gamma_max)
        return jnp.max(rate, axis=1) / rate[:, 0] - 1

    def hoped(self, state: Ahead) -> Float[Array, " B"]:
        """What α may be yet, by how far outputs differ and what the row has shown; α itself where
        it is not known how far they do."""
        between = jnp.maximum(jnp.nan_to_num(self.prices.between), 1e-6)
        hope = self.width / jnp.sqrt((1 - between) / between + state.lasting.tested)
        return jnp.minimum(self.alpha(state) + hope, MOST_HOPED)

    def alpha(self, state: Ahead) -> Float[Array, " B"]:  # type: ignore[override]
        """The estimate for each row."""
        return jnp.sum(jax.nn.softmax(state.credit, axis=1) * self.estimates(state), axis=1)

    def estimates(self, state: Ahead) -> Float[Array, "B 3"]:
        """The three of which it is a mean."""
        recent, lasting, measured = state.recent, state.lasting, self.prices.alpha
        unknown = jnp.isnan(measured)
        known = jnp.where(unknown, PRIOR_WEIGHT, MEASURED_WEIGHT)  # and never fades
        first = jnp.where(unknown, self.prior, measured)
        mean = (lasting.accepted + known * first) / (lasting.tested + known)
        weight = self.weight * TRUST[None, :]
        accepted = recent.accepted[:, None] + weight * mean[:, None]
        return accepted / (recent.tested[:, None] + weight)


def _odds(some: Array, rest: Array) -> Array:
    """log(some/rest), within `LIMIT`."""
    return jnp.clip(jnp.log(jnp.maximum(some, 1e-6) / jnp.maximum(rest, 1e-6)), -LIMIT, LIMIT)


def _belief_odds(confidence: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    belief = jnp.exp(confidence)
    return _odds(belief, 1 - belief)


def _mean_odds(state: Ahead, alpha: Float[Array, " B"]) -> Float[Array, " B"]:
    """Of beliefs in recent tested tokens; before there are any, of a drafter that is right about
    its α."""
    fitting = BELIEF_WEIGHT * _odds(alpha, 1 - alpha)
    return (state.odds + fitting) / (state.recent.tested + BELIEF_WEIGHT)


def _chance(state: Ahead, confidence: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """That tokens of these beliefs are accepted."""
    slope, offset = state.slope[:, None], state.offset[:, None]
    return jax.nn.sigmoid(offset + slope * _belief_odds(confidence))


def lookahead(
    prices: Prices,
    prior: float = 0.7,
    weight: float = 8.0,
    memory: float = 0.9,
    lasting: float = 0.995,
    learning_rate: float = 0.05,
    width: float = 0.4,
) -> Lookahead:
    """Our own, with a table from `specjax.policies.prices`.

    It is lossless: whether a token is drafted depends on tokens before it, which stay, and on past
    rounds.

    Args:
      prior: α without evidence, one at which drafting pays; of no account where the table has one.
      weight: how many recent tests the lasting α is worth, in the second of three estimates.
      memory, lasting: of the evidence, how much a round leaves: of what α follows, and of what it
        falls back to.
      learning_rate: of what beliefs tell.
      width: how much is hoped for; with 0 a row gives up on the α of other outputs.
    """
    return Lookahead(
        *checked(prices, prior, weight, memory),
        jnp.float32(number("lasting", lasting, "[0, 1]")),
        jnp.float32(number("learning_rate", learning_rate, "[0, ∞)")),
        jnp.float32(number("width", width, "[0, ∞)")),
    )
