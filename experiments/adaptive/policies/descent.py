"""First descent: draft while one token more is expected to raise tokens per time.

The search stops at the first length after which they would fall, so that no token is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies import Costs
from specjax.policies.goodput import Goodput, Tally, checked
from specjax.pytrees import pytree
from specjax.rounds import where_active

BINS = 8


class Descent(NamedTuple):
    """Counts by the belief in a token, and the position in this round."""

    tally: Tally  # (B, BINS)
    drafted: Int[Array, " B"]
    survival: Float[Array, " B"]  # P(all drafted tokens so far are accepted), estimated
    expected: Float[Array, " B"]  # tokens that the round would give if it stopped here


@pytree
class FirstDescent(Goodput):
    """Drafts while one more token is expected to raise tokens per time, decided token by token.

    A token's chance of acceptance is estimated from past tokens of similar belief; before the
    token is drawn, from all past tokens. Drafting stops at the first length, 0 included, after
    which expected tokens per time would fall; longer drafts are not considered.
    """

    def outside(self):
        """The policy itself: it never considers longer drafts if one token does not pay."""
        return self

    def init(self, keys, gamma_max):
        self.costs.round_times(gamma_max)
        none = jnp.zeros((*keys.shape, BINS), jnp.float32)
        return self._fresh(Tally(none, none))

    def begin(self, state, live, gamma_max):
        cost = self.costs.round_times(gamma_max)
        return state, jnp.where(self._pays(state, cost), len(cost) - 1, 0)

    def go_on(self, state, drafting, logprob):
        cost = self.costs.round_times(self.costs.gamma_max)
        at = _bin(logprob)[:, None]
        tally = jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1)[:, 0], state.tally)
        survival = jnp.where(drafting, state.survival * self.alpha(tally), state.survival)
        state = Descent(
            state.tally,
            state.drafted + drafting.astype(jnp.int32),
            survival,
            state.expected + jnp.where(drafting, survival, 0.0),
        )
        return state, drafting & self._pays(state, cost)

    def update(self, state, round_):
        bins = jnp.arange(BINS, dtype=jnp.int32)[None, None, :]
        hit = _bin(round_.belief_logprob)[:, :, None] == bins
        hit = (hit & round_.tested[:, :, None]).astype(jnp.float32)
        tally = Tally(
            self.memory * state.tally.accepted + jnp.sum(hit * round_.ratio[:, :, None], axis=1),
            self.memory * state.tally.tested + jnp.sum(hit, axis=1),
        )
        return self._fresh(where_active(round_, tally, state.tally))

    def _pays(self, state, cost):
        """Whether one token more is expected to raise tokens per time."""
        overall = jax.tree.map(lambda x: jnp.sum(x, axis=1), state.tally)
        now = jnp.minimum(state.drafted, len(cost) - 1)
        then = jnp.minimum(now + 1, len(cost) - 1)
        expected = state.expected + state.survival * self.alpha(overall)
        return expected * cost[now] > state.expected * cost[then]

    def _fresh(self, tally):
        ones = jnp.ones(tally.tested.shape[:1], jnp.float32)
        return Descent(tally, jnp.zeros(ones.shape, jnp.int32), ones, ones)


def _bin(logprob: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """The index of a probability's bin, of BINS equal ones."""
    which = jnp.floor(jnp.exp(logprob) * BINS).astype(jnp.int32)
    return jnp.clip(which, 0, BINS - 1)


def first_descent(
    costs: Costs, prior: float = 0.7, weight: float = 4.0, memory: float = 0.9
) -> FirstDescent:
    """Make a goodput policy by this round's beliefs, with a table of costs."""
    return FirstDescent(*checked(costs, prior, weight, memory))
