"""Acceptance as an input: each drafted token is accepted with a given chance, at the full cost.
Beside it what that chance gives on average, and a policy that drafts nothing.

Random weights accept next to nothing, and their α cannot be set. Times depend on how many tokens
are accepted and not on which, so this rule takes α as a number and still does all the work: both
distributions are standardised, ratios and residuals computed. Its outputs follow no model's
distribution: for timing only, and not among the library's rules.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specjax import formulas
from specjax.dice import Dice, GreedyDice
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rules import Token, ends
from specjax.speculative import Contexts, Speculative, step
from specjax.state import State, unfinished


@pytree
class ForcedRule(Token):
    """`rules.Token`, but for how many tokens survive: more than i with probability α^(i+1)."""

    exact: ClassVar[bool] = False
    alpha: Float[Array, ""]

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        computed = super().stop(target_logprobs, draft_logprobs, drafts, draft_len)
        length = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
        survival = self.alpha.astype(computed.dtype) ** length.astype(computed.dtype)
        forced = ends(jnp.where(length <= draft_len[:, None], survival, 0.0))
        # Never NaN while distributions are finite, which no compiler knows: so `computed` has to
        # be.
        return jnp.where(jnp.isnan(computed), computed, forced)


class ForcedDice(GreedyDice):
    """At temperature 0 the distributions are one-hot, but how many tokens survive is random."""

    accepted = Dice.accepted


@partial(jax.jit, donate_argnames="state")
def decode(method: Speculative, contexts: Contexts, state: State) -> State:
    """`loop.decode` for a method with the forced rule. Donates `state`."""
    dice = ForcedDice() if method.sampling.greedy else Dice()

    def body(state):
        return step(method, contexts, state, dice)[0]

    return jax.lax.while_loop(unfinished, body, state)


@pytree
class Silent(Policy):
    """Never drafts."""

    def begin(self, state, live, gamma_max):
        return state, jnp.int32(0)


@cache
def rounds(alpha: float, gamma: int, tokens: int, batch: int) -> tuple[float, float]:
    """Mean and standard deviation of the rounds that a batch takes, over keys."""
    chances = formulas.rounds_distribution(alpha, gamma, tokens, batch)
    counts = np.arange(len(chances))
    mean = float(chances @ counts)
    return mean, float(np.sqrt(chances @ (counts - mean) ** 2))


def expected(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the row's α gives outputs of its length on average, beside what came out of its keys.

    Args:
      row: fields of the case, and what was measured: `speedups` by repeat and `rounds_by_key` of
        each repeat, or one `speedup` and one number of `rounds`, of one key.

    Returns:
      keys; tau_expected and tau_error, the standard error of a mean over so many keys; tau_off, how
      many standard errors of its mean the rounds lie off, > 0 for more tokens; speedup_at_alpha,
      the speedup had every repeat taken the mean number of rounds (None where α is not forced).
    """
    agrees = row["weights"] == "agreeing"
    alpha = 1.0 if agrees else row["alpha"]
    mean, deviation = rounds(alpha, row["gamma"], row["tokens"], row["batch"])
    seen = np.array(row.get("rounds_by_key", [[row["rounds"]]]), float)
    error = deviation / np.sqrt(seen.size)
    tau = row["tokens"] / mean
    speedups = np.array(row.get("speedups", [row["speedup"]]))
    return {
        "keys": seen.size,
        "tau_expected": tau,
        "tau_error": tau * error / mean,
        "tau_off": float((mean - seen.mean()) / max(error, 1e-9)),
        "speedup_at_alpha": None if agrees else float(np.median(speedups * seen.mean(1) / mean)),
    }
