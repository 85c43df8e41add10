"""Lookahead, our own policy: draft on while some longer draft is expected to be worth its time.

The chances of acceptance are learned from the row's own rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.calibrated import FIRST_SLOPE, log_odds
from specjax.policies.costs import Costs
from specjax.policies.estimating import Estimating, Evidence, mixed
from specjax.policies.goodput import checked, expected
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.sampling import argmax
from specjax.support.ranges import number

BELIEF_WEIGHT = 2.0  # weight of the prior mean belief, which fits α, in tested tokens


class Ahead(NamedTuple):
    """Evidence from past rounds, and the position in this round."""

    evidence: Evidence
    odds: Float[Array, " B"]  # a fading sum, as in `recent`: log-odds of beliefs in tested tokens
    slope: Float[Array, " B"]
    offset: Float[Array, " B"]  # log-odds of acceptance at even belief
    bars: Float[Array, "B K"]  # the bound that survival must exceed after 0, 1, … tokens
    drafted: Int[Array, " B"]  # tokens so far
    survival: Float[Array, " B"]  # P(all of them are accepted), estimated


@pytree
class Lookahead(Estimating):
    """Drafts while some longer draft, by one token or many, is expected to be worth its time.

    A token in which the drafter's belief is b is accepted with the log-odds

        log(α/(1 − α)) + slope · (log(b/(1 − b)) − its mean over tested tokens)

    So beliefs move the chance up and down from the α of recent rounds. The slope is learned by
    online logistic regression: it is 0 if beliefs are uninformative, and may exceed 1. It starts
    at .6, and the mean at α's own log-odds, which tested tokens soon outweigh.

    With n tokens drafted, all accepted with the chance S, k more are expected to bring
    S·(α + … + αᵏ) tokens and take cost(n + k) − cost(n). Time is valued at the rate of `goodput`,
    max (1 + α + … + αᵏ)/cost(k). If `goodput` would draft nothing, nothing is drafted.
    """

    learning_rate: Float[Array, ""]  # of the slope

    def init(self, keys, gamma_max):
        evidence = super().init(keys, gamma_max)
        zeros, ones = jnp.zeros(keys.shape, jnp.float32), jnp.ones(keys.shape, jnp.float32)
        bars = jnp.zeros((*keys.shape, gamma_max + 1), jnp.float32)
        none = jnp.zeros(keys.shape, jnp.int32)
        return Ahead(evidence, zeros, FIRST_SLOPE * ones, zeros, bars, none, ones)

    def begin(self, state, live, gamma_max):
        cost, alpha = self.costs.round_times(gamma_max), self.alpha(state)
        pays = argmax(self.rate(alpha, gamma_max)) > 0
        alpha = jnp.where(pays, alpha, self.optimistic(state.evidence, alpha))
        rate = self.rate(alpha, gamma_max)
        best = jnp.max(rate, axis=1)
        now = np.arange(len(cost))[:, None]
        more = now.T - now  # k, by n and n + k
        time = jnp.where(more > 0, cost[None, :] - cost[:, None], jnp.inf)
        brought = expected(alpha[:, None, None], np.maximum(more, 1)[None]) - 1
        bars = jnp.min(time[None] / brought, axis=2) * best[:, None]
        offset = log_odds(alpha) - state.slope * _mean_odds(state, alpha)
        none, certain = jnp.zeros_like(state.drafted), jnp.ones_like(alpha)
        state = state._replace(offset=offset, bars=bars, drafted=none, survival=certain)
        return state, jnp.where(best > rate[:, 0], len(cost) - 1, 0)

    def go_on(self, state, drafting, logprob):
        survival = state.survival * _chance(state, logprob[:, None])[:, 0]
        drafted = state.drafted + 1
        bar = jnp.take_along_axis(state.bars, drafted[:, None], axis=1)[:, 0]
        return state._replace(drafted=drafted, survival=survival), drafting & (survival > bar)

    def update(self, state, round_):
        odds = log_odds(jnp.exp(round_.belief_logprob))
        chance = _chance(state, round_.belief_logprob)
        mean = _mean_odds(state, self.alpha(state))
        apart = jnp.where(round_.tested, odds - mean[:, None], 0.0)
        slope = state.slope + self.learning_rate * jnp.sum((round_.ratio - chance) * apart, axis=1)
        memory, evidence = self.memory, state.evidence
        new = state._replace(
            odds=memory * state.odds + jnp.sum(jnp.where(round_.tested, odds, 0.0), axis=1),
            slope=jnp.clip(slope, 0.0, 2.0),
        )
        evidence = self.learned(evidence, self.estimates(evidence, *self.first()), round_)
        return where_active(round_, new, state)._replace(evidence=evidence)

    def alpha(self, state: Ahead) -> Float[Array, " B"]:  # type: ignore[override]
        """The estimated α of each row."""
        return mixed(state.evidence, self.estimates(state.evidence, *self.first()))


def _mean_odds(state: Ahead, alpha: Float[Array, " B"]) -> Float[Array, " B"]:
    """Mean log-odds of beliefs in recent tested tokens; at first that of α itself."""
    fitting = BELIEF_WEIGHT * log_odds(alpha)
    return (state.odds + fitting) / (state.evidence.recent.tested + BELIEF_WEIGHT)


def _chance(state: Ahead, logprob: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """The chance that tokens of these beliefs are accepted."""
    slope, offset = state.slope[:, None], state.offset[:, None]
    return jax.nn.sigmoid(offset + slope * log_odds(jnp.exp(logprob)))


def lookahead(
    costs: Costs,
    prior: float = 0.7,
    weight: float = 8.0,
    memory: float = 0.9,
    lasting: float = 0.995,
    learning_rate: float = 0.05,
    width: float = 0.4,
) -> Lookahead:
    """Make a lookahead policy, our own, with a table of costs.

    It is lossless: whether a token is drafted depends on tokens before it, which stay, and on past
    rounds.

    Args:
      prior: α without evidence, at which drafting should pay; unused if the table has an α.
      weight: weight of the lasting α in recent tests, in the second of three estimates.
      memory, lasting: the share of the recent and of the lasting evidence that a round keeps.
      learning_rate: step size of the slope.
      width: width of the interval for exploration; 0: a row never explores.
    """
    return Lookahead(
        *checked(costs, prior, weight, memory),
        jnp.float32(number("lasting", lasting, "[0, 1]")),
        jnp.float32(number("width", width, "[0, ∞)")),
        jnp.float32(number("learning_rate", learning_rate, "[0, ∞)")),
    )
