"""The default schedule of transformers: two more after full acceptance, else one less."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import whole


@pytree
class Heuristic(Policy):
    """Drafts γ tokens: γ ← γ + 2 after full acceptance, else max(1, γ − 1). The state is γ."""

    carries = True

    gamma: Int[Array, ""]  # of the first round

    def init(self, keys, gamma_max):
        return jnp.full(keys.shape, jnp.minimum(self.gamma, gamma_max), jnp.int32)

    def begin(self, state, live, gamma_max):
        return state, state

    def update(self, state, round_):
        all_accepted = round_.accepted == round_.verified
        new = jnp.where(all_accepted, state + 2, jnp.maximum(state - 1, 1))
        # A round without a draft (at a row's end, or without a proposal) shows nothing, and neither
        # does one that an EOS cut short.
        new = jnp.where(round_.verified > 0, jnp.minimum(new, round_.gamma_max), state)
        return where_active(round_.uncut, new, state)


def heuristic(gamma: int = 5) -> Heuristic:
    """Make a policy of transformers' schedule, which starts from γ ≥ 1."""
    return Heuristic(jnp.int32(whole("gamma", gamma, "[1, ∞)")))
