"""Our own: a draft goes on while some longer one promises more than its time is worth, by chances
of acceptance that are learned from the row's own rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.costs import Costs
from specjax.policies.estimating import Estimating, Evidence, mixed
from specjax.policies.goodput import checked, expected
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.sampling import argmax
from specjax.support.ranges import number

BELIEF_WEIGHT = 2.0  # tested tokens that the mean belief is worth which fits α
FIRST_SLOPE = 0.6
LIMIT = 4.0  # of log-odds: beliefs of 1.8% and 98.2%


class Ahead(NamedTuple):
    """What past rounds taught, and where this round stands."""

    evidence: Evidence
    odds: Float[Array, " B"]  # a fading sum, as in `recent`: log-odds of beliefs in tested tokens
    slope: Float[Array, " B"]
    offset: Float[Array, " B"]  # log-odds of acceptance at even belief
    bars: Float[Array, "B K"]  # what survival must exceed behind 0, 1, … tokens
    drafted: Int[Array, " B"]  # tokens so far
    survival: Float[Array, " B"]  # P(all of them are accepted), estimated


@pytree
class Lookahead(Estimating):
    """Goes on while some longer draft, be it by one token or by many, promises more than its time
    is worth.

    A token that the drafter believes in with probability b is accepted with the log-odds

        log(α/(1 − α)) + slope · (log(b/(1 − b)) − its mean over tested tokens)

    so beliefs move a chance up and down from the α of recent rounds, and how far they do is learned
    by online logistic regression: from nothing, where they tell nothing, to more than the drafter
    says. It begins near a drafter whose beliefs are right: with a slope of .6, and a mean of α's
    own log-odds, which tested tokens soon outweigh.

    With n tokens drafted, all of which are accepted with the chance S, k more are expected to bring
    S·(α + … + αᵏ) tokens and take cost(n + k) − cost(n). Time is worth what `goodput` would make
    of it, max (1 + α + … + αᵏ)/cost(k). In a round where it would draft nothing nothing is
    drafted.
    """

    learning_rate: Float[Array, ""]  # of the slope

    def init(self, keys, gamma_max):
        evidence = super().init(keys, gamma_max)
        zeros, ones = jnp.zeros(keys.shape, jnp.float32), jnp.ones(keys.shape, jnp.float32)
        bars = jnp.zeros((*keys.shape, gamma_max + 1), jnp.float32)
        none = jnp.zeros(keys.shape, jnp.int32)
        return Ahead(evidence, zeros, FIRST_SLOPE * ones, zeros, bars, none, ones)

    def begin(self, state, gamma_max):
        cost, alpha = self.costs.round_times(gamma_max), self.alpha(state)
        pays = argmax(self.rate(alpha, gamma_max)) > 0
        alpha = jnp.where(pays, alpha, self.hoped(state.evidence, alpha))
        rate = self.rate(alpha, gamma_max)
        best = jnp.max(rate, axis=1)
        now = np.arange(len(cost))[:, None]
        more = now.T - now  # k, by n and n + k
        time = jnp.where(more > 0, cost[None, :] - cost[:, None], jnp.inf)
        brought = expected(alpha[:, None, None], np.maximum(more, 1)[None]) - 1
        bars = jnp.min(time[None] / brought, axis=2) * best[:, None]
        offset = _odds(alpha, 1 - alpha) - state.slope * _mean_odds(state, alpha)
        none, certain = jnp.zeros_like(state.drafted), jnp.ones_like(alpha)
        state = state._replace(offset=offset, bars=bars, drafted=none, survival=certain)
        return state, jnp.where(best > rate[:, 0], len(cost) - 1, 0)

    def go_on(self, state, drafting, confidence):
        survival = state.survival * _chance(state, confidence[:, None])[:, 0]
        drafted = state.drafted + 1
        bar = jnp.take_along_axis(state.bars, drafted[:, None], axis=1)[:, 0]
        return state._replace(drafted=drafted, survival=survival), drafting & (survival > bar)

    def update(self, state, round_):
        odds, chance = _belief_odds(round_.confidence), _chance(state, round_.confidence)
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
        """The estimate for each row."""
        return mixed(state.evidence, self.estimates(state.evidence, *self.first()))


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
    return (state.odds + fitting) / (state.evidence.recent.tested + BELIEF_WEIGHT)


def _chance(state: Ahead, confidence: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """That tokens of these beliefs are accepted."""
    slope, offset = state.slope[:, None], state.offset[:, None]
    return jax.nn.sigmoid(offset + slope * _belief_odds(confidence))


def lookahead(
    costs: Costs,
    prior: float = 0.7,
    weight: float = 8.0,
    memory: float = 0.9,
    lasting: float = 0.995,
    learning_rate: float = 0.05,
    width: float = 0.4,
) -> Lookahead:
    """Our own, with a table from `specjax.policies.costs`.

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
        *checked(costs, prior, weight, memory),
        jnp.float32(number("lasting", lasting, "[0, 1]")),
        jnp.float32(number("width", width, "[0, ∞)")),
        jnp.float32(number("learning_rate", learning_rate, "[0, ∞)")),
    )
