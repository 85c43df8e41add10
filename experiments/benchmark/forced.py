"""Acceptance as an input: each drafted token is accepted with a given chance, at the full cost.

Random weights accept next to nothing, and their α cannot be set. Times depend on how many tokens
are accepted and not on which, so this rule takes α as a number and still does all the work: both
laws are standardised, ratios and residuals computed. Its outputs follow no model's law: for
timing only, and not among the library's rules.
"""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.accept import TokenRule
from specjax.pytrees import pytree
from specjax.speculative import Contexts, Dice, GreedyDice, Speculative, step
from specjax.state import State, unfinished


@pytree
class ForcedRule(TokenRule):
    """`TokenRule`, but for how many tokens survive: more than i with probability α^(i+1)."""

    exact: ClassVar[bool] = False
    alpha: Float[Array, ""]

    def survival(self, target_logprobs, draft_logprobs, drafts, draft_len):
        computed = super().survival(target_logprobs, draft_logprobs, drafts, draft_len)
        count = drafts.shape[1]
        submitted = jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
        alpha = self.alpha.astype(computed.dtype)
        forced = jnp.cumprod(jnp.where(submitted, alpha, 0.0), axis=1)
        # Never NaN while laws are finite, which no compiler knows: so `computed` has to be.
        return jnp.where(jnp.isnan(computed), computed, forced)


class ForcedDice(GreedyDice):
    """At temperature 0 the laws are one-hot, but how many tokens survive is random."""

    accepted = Dice.accepted


@partial(jax.jit, donate_argnames="state")
def decode(method: Speculative, contexts: Contexts, state: State) -> State:
    """`speculative.decode` for a method with the forced rule. Donates `state`."""
    dice = ForcedDice() if method.sampling.kind == "greedy" else Dice()

    def body(state):
        return step(method, contexts, state, dice)[0]

    return jax.lax.while_loop(unfinished, body, state)
