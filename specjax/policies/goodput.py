"""Goodput: the length of most expected tokens per time, by a table of costs.

If the best length were found after drafting, by this round's own tokens, it would depend on tokens
that it drops. So it judges longer drafts by past rounds alone: every token that was drawn is kept.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

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
