"""SVIP and AdaEDL: stop by the draft's entropy, which gives a lower bound on acceptance."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import number


@pytree
class Svip(Policy):
    """Stops after a token of √(scale·entropy) > threshold. The state is that root."""

    scale: Float[Array, ""]
    threshold: Float[Array, ""]

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.float32)

    def keep_drafting(self, state, seen):
        return jnp.sqrt(self.scale * seen.entropy), seen.drafting

    def go_on(self, state, drafting, logprob):
        return state, drafting & (state <= self.threshold)

    def update(self, state, round_):
        return jnp.zeros_like(state)


def svip(scale: float = 0.15, threshold: float = 0.3) -> Svip:
    """Make an SVIP policy (Zhang et al. 2024), by default with its authors' settings."""
    return Svip(
        jnp.float32(number("scale", scale, "(0, ∞)")),
        jnp.float32(number("threshold", threshold, "[0, ∞]")),
    )


class Bar(NamedTuple):
    """The bar for a distribution's estimated acceptance, and the rate that moves it."""

    bar: Float[Array, " B"]  # λ
    rate: Float[Array, " B"]  # accepted over verified, averaged


@pytree
class AdaEdl(Policy):
    """Drafts a token while 1 − √(scale·entropy) of its distribution is at least λ.

    λ follows the rate of acceptance: AR ← (AR + a/L)/2; λ rises by .01 where AR < goal. It falls
    by .01 where AR ≥ goal and fewer than γ_max tokens were accepted. Each change is averaged with
    nine parts of the old λ.
    """

    carries = True

    scale: Float[Array, ""]
    bar: Float[Array, ""]  # λ of the first round
    goal: Float[Array, ""]

    def init(self, keys, gamma_max):
        full = jnp.full(keys.shape, 1.0, jnp.float32)
        return Bar(self.bar * full, self.goal * full)

    def keep_drafting(self, state, seen):
        return state, seen.drafting & (1 - jnp.sqrt(self.scale * seen.entropy) >= state.bar)

    def update(self, state, round_):
        rate = (state.rate + round_.accepted / jnp.maximum(round_.verified, 1)) / 2
        fall = jnp.where(round_.accepted < round_.gamma_max, -0.01, 0.0)
        bar = state.bar + 0.1 * jnp.where(rate < self.goal, 0.01, fall)
        return where_active(round_.uncut, _if_drafted(round_, Bar(bar, rate), state), state)


def _if_drafted(round_, new: Bar, old: Bar) -> Bar:
    """Keep the rate of rounds without a draft, and lower λ, or it would block drafts for ever."""
    none = round_.verified == 0
    return Bar(jnp.where(none, old.bar - 0.001, new.bar), jnp.where(none, old.rate, new.rate))


def adaedl(scale: float = 0.2, bar: float = 0.4, goal: float = 0.9) -> AdaEdl:
    """Make an AdaEDL policy (Agrawal et al. 2024).

    The steps .01, averages .5 and .9 and the goal .9 are the authors'. The start at λ = `bar` and
    AR = `goal`, and the fall of λ in a round without a draft, are ours.
    """
    return AdaEdl(
        jnp.float32(number("scale", scale, "(0, ∞)")),
        jnp.float32(number("bar", bar, "[-∞, 1]")),
        jnp.float32(number("goal", goal, "[0, 1]")),
    )
