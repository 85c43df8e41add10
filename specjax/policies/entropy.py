"""Stop by the entropy of the draft's distribution, a lower bound on acceptance: SVIP and AdaEDL."""

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
    """Stops after a token whose distribution had √(scale·entropy) > threshold. The state is that
    root."""

    scale: Float[Array, ""]
    threshold: Float[Array, ""]

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.float32)

    def keep_drafting(self, state, seen):
        return jnp.sqrt(self.scale * seen.entropy), seen.drafting

    def go_on(self, state, drafting, confidence):
        return state, drafting & (state <= self.threshold)

    def update(self, state, round_):
        return jnp.zeros_like(state)


def svip(scale: float = 0.15, threshold: float = 0.3) -> Svip:
    """SVIP (Zhang et al. 2024) with its authors' settings."""
    return Svip(
        jnp.float32(number("scale", scale, "(0, ∞)")),
        jnp.float32(number("threshold", threshold, "[0, ∞]")),
    )


class Bar(NamedTuple):
    """What a distribution's estimated acceptance must reach, and the rate that moves it."""

    bar: Float[Array, " B"]  # λ
    rate: Float[Array, " B"]  # accepted over drafted, averaged


@pytree
class AdaEdl(Policy):
    """Drafts a token while 1 − √(scale·entropy) of its distribution is at least λ.

    λ follows the rate of acceptance: AR ← (AR + a/L)/2; λ rises by .01 where AR < goal, falls by
    .01 where AR ≥ goal and fewer than γ_max tokens were accepted, each change averaged with nine
    parts of the old λ.
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
        rate = (state.rate + round_.accepted / jnp.maximum(round_.drafted, 1)) / 2
        fall = jnp.where(round_.accepted < round_.gamma_max, -0.01, 0.0)
        bar = state.bar + 0.1 * jnp.where(rate < self.goal, 0.01, fall)
        return where_active(round_.uncut, _if_drafted(round_, Bar(bar, rate), state), state)


def _if_drafted(round_, new: Bar, old: Bar) -> Bar:
    """Without a draft there is no rate; but a λ that lets nothing through must come down."""
    none = round_.drafted == 0
    return Bar(jnp.where(none, old.bar - 0.001, new.bar), jnp.where(none, old.rate, new.rate))


def adaedl(scale: float = 0.2, bar: float = 0.4, goal: float = 0.9) -> AdaEdl:
    """AdaEDL (Agrawal et al. 2024).

    Its steps .01, averages .5 and .9 and its goal .9 are the authors'. Ours are λ = `bar` and
    AR = `goal` at the start, and that λ falls in a round without a draft.
    """
    return AdaEdl(
        jnp.float32(number("scale", scale, "(0, ∞)")),
        jnp.float32(number("bar", bar, "[-∞, 1]")),
        jnp.float32(number("goal", goal, "[0, 1]")),
    )
