"""The policy of the paper, always the same length, and one without decisions."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.support.ranges import whole


@pytree
class Constant(Policy):
    """Drafts γ tokens in every round."""

    fixed = True

    gamma: Int[Array, ""]

    def begin(self, state, live, gamma_max):
        return state, self.gamma


@pytree
class Undecided(Policy):
    """Drafts γ_max tokens, unknown to the loop in advance: a policy without decisions."""


def constant(gamma: int) -> Constant:
    """A policy that always drafts `gamma` ≥ 1 tokens."""
    why = "without a draft model, decoding is autoregressive"
    return Constant(jnp.int32(whole("gamma", gamma, "[1, ∞)", why)))
