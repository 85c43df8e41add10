"""Goodput: the length of most expected tokens per time, by a table of costs.

If the best length were found after drafting, by this round's own tokens, it would depend on tokens
that it drops. So the search stops at the first descent, or judges longer drafts by past rounds
alone: every token that was drawn is kept.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.base import Policy
from specjax.policies.costs import Costs, required
from specjax.pytrees import pytree
from specjax.rounds import Round, idle, where_active
from specjax.sampling import argmax
from specjax.support.ranges import number


class Tally(NamedTuple):
    """Fading counts, from which a chance of acceptance is estimated."""

    accepted: Float[Array, "B ..."]
    tested: Float[Array, "B ..."]


MIN_MARGIN = 0.02  # the least expected gain over plain decoding for which to draft


@pytree
class Goodput(Policy):
    """Drafts the k in 0 … γ_max of largest (1 + α + … + αᵏ)/cost(k), as SmartSpec does.

    α is estimated from past rounds. Evidence fades round by round towards a prior, so a row that
    stopped drafting starts again.
    """

    carries = True

    costs: Costs
    prior: Float[Array, ""]  # α before any evidence
    weight: Float[Array, ""]  # the prior's weight, in tested tokens
    memory: Float[Array, ""]  # the share of the evidence that a round keeps

    def init(self, keys, gamma_max):
        self.costs.round_times(gamma_max)  # checks that the table fits
        none = jnp.zeros(keys.shape, jnp.float32)
        return Tally(none, none)

    def begin(self, state, live, gamma_max):
        return state, argmax(self.rate(self.alpha(state), gamma_max))

    def update(self, state, round_):
        return where_active(round_, add(state, self.memory, round_), state)

    def prefers_plain(self, gamma_max, rounds, rows=1):
        """Whether no draft is expected to gain `margin` over plain decoding, by the time of a token
        outside of the loop, if known. Without drafts nothing is learned."""
        outside = self.outside()

        def next_round(state, _):
            state, allowed = outside.begin(state, jnp.ones(rows, bool), gamma_max)
            return outside.update(state, idle(gamma_max, rows)), jnp.any(allowed > 0)

        first = outside.init(jax.random.split(jax.random.key(0), rows), gamma_max)
        drafts = jax.lax.scan(next_round, first, length=rounds)[1]
        return not bool(jnp.any(drafts))

    def outside(self) -> "Goodput":
        """The policy with costs of plain decoding outside of the loop, which drafts must beat."""
        return dataclasses.replace(self, costs=self.costs.outside(self.margin()))

    def margin(self) -> Float[Array, ""]:
        """The gain over plain decoding that drafts must promise: the error of the costs, if known,
        and at least `MIN_MARGIN`."""
        return jnp.fmax(self.costs.error, MIN_MARGIN)

    def alpha(self, state: Tally) -> Float[Array, " B"]:
        """The estimated α of each row."""
        return (state.accepted + self.weight * self.prior) / (state.tested + self.weight)

    def rate(self, alpha: Float[Array, " B"], gamma_max: int) -> Float[Array, "B K"]:
        """Expected tokens per time of 0 … γ_max drafted tokens."""
        cost = self.costs.round_times(gamma_max)
        return expected(alpha[:, None], np.arange(len(cost))[None]) / cost[None]


def add(tally: Tally, memory: Float[Array, ""], round_: Round) -> Tally:
    """Add a round to fading counts."""
    tested = jnp.sum(round_.tested, axis=1)  # the first rejected one included
    return Tally(
        memory * tally.accepted + round_.in_output.astype(jnp.float32),
        memory * tally.tested + tested.astype(jnp.float32),
    )


def expected(alpha: Float[Array, "..."], drafted: np.ndarray) -> Float[Array, "..."]:
    """1 + α + … + αᵏ in closed form: elementwise, so XLA fuses it with its surroundings."""
    count, short = (drafted + 1).astype(np.float32), 1 - alpha
    ratio = -jnp.expm1(count * jnp.log1p(-short)) / jnp.where(short > 0, short, 1.0)
    return jnp.where(short > 0, ratio, count)


def goodput(costs: Costs, prior: float = 0.7, weight: float = 4.0, memory: float = 0.9) -> Goodput:
    """Make a goodput policy, SmartSpec's rule for each row, with a table of costs."""
    return Goodput(*checked(costs, prior, weight, memory))


def checked(
    costs: Costs | None, prior: float, weight: float, memory: float
) -> tuple[Costs, Array, Array, Array]:
    """The fields of `Goodput`; ValueError for a number out of range."""
    return (
        required(costs),
        jnp.float32(number("prior", prior, "[0, 1]")),
        jnp.float32(number("weight", weight, "(0, ∞)")),
        jnp.float32(number("memory", memory, "[0, 1]")),
    )


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
