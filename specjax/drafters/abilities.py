"""Optional abilities of drafters. A class that has none of them drafts all the same.

An ability is a function or an attribute of the drafter's class; `Abilities` lists them. The loop
asks by the functions here, which have a default for drafters without it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.drafters.base import Drafter, proposal
from specjax.rounds import Round
from specjax.rules import AcceptanceRule
from specjax.sampling import Sampling
from specjax.types import Context, Model


class Abilities(Protocol):
    """All abilities; `sharing.shares` is one more."""

    free: bool
    """Whether a switch may call `begin` at any known token, in any order: it reads the source and
    the known tokens alone, at hardly any cost. Default: False."""
    branches: bool
    """Whether drafts can be trees; not if it proposes one token at most. Default: True."""
    guesses: bool
    """Whether a distribution depends on where the round began, not on the text alone: after drafted
    tokens EAGLE reads its own guesses, and Medusa looks further ahead. Replay then records a
    rollout from each position. Default: False."""
    carries: bool
    """Whether a batch may start from a part of the last state: `generate(carry_state=True)`."""

    def sees(self, target: Model) -> Model:
        """Wrap the target so that its hidden states hold those of more layers, as EAGLE-3 needs;
        distributions do not change."""
        ...

    def learn(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, " B"],
        round_: Round,
        judge: Callable[..., Float[Array, "B K"]],
        context: Context,
        state: Any,
    ) -> Any:
        """The state after a round; called after `observe`, in every round of a chain.

        Args:
          tokens: the known tokens, including those of the round.
          length: number of tokens that were known before the round.
          judge: maps logits of the tokens after 0 … γ_max drafted ones, (B, γ_max+1, V), to the
            chance that a token drawn from them is accepted, float32; 0 where they propose nothing.
            With `certain=True` the logits are one-hot log-probabilities.
        """
        ...

    def fork(self, state: Any) -> tuple[Any, Any]:
        """Split a state into a part that each branch of a tree copies, and a part that all share;
        `extend` neither reads nor changes the latter."""
        ...

    def join(self, own: Any, shared: Any) -> Any:
        """Join the two parts of a branch's state that `fork` has split."""
        ...

    def carry_over(self, state: Any) -> Any:
        """The part of the state at a batch's end that the next one begins with, without caches."""
        ...

    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
        """Put that part, of A rows, into a fresh state; `rows` marks those that were no padding."""
        ...


def is_free(drafter: Drafter) -> bool:
    """Whether a switch may call the drafter at any known token."""
    return getattr(drafter, "free", False)


def branches(drafter: Drafter) -> bool:
    """Whether drafts can be trees."""
    return getattr(drafter, "branches", True)


def guesses(drafter: Drafter) -> bool:
    """Whether a drafter's distribution depends on where the round began."""
    return getattr(drafter, "guesses", False)


def seen_by(drafter: Any, target: Model) -> Model:
    """The target whose hidden states `observe` gets."""
    return drafter.sees(target) if hasattr(drafter, "sees") else target


def fork(drafter: Any, state: Any) -> tuple[Any, Any]:
    """Split a drafter's state in two; by default the first part is all of it."""
    return drafter.fork(state) if hasattr(drafter, "fork") else (state, ())


def join(drafter: Any, own: Any, shared: Any) -> Any:
    """Join the two parts of a branch's state that `fork` has split."""
    return drafter.join(own, shared) if hasattr(drafter, "join") else own


def carries(drafter: Any) -> bool:
    """Whether the drafter may start a batch from its last state."""
    return hasattr(drafter, "carry_over") and getattr(drafter, "carries", False)


def carry_over(drafter: Any, state: Any) -> Any:
    """The part of a drafter's state that the next batch begins with; () by default."""
    return drafter.carry_over(state) if hasattr(drafter, "carry_over") else ()


def resume(drafter: Any, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
    """Put the part that `carry_over` took from the last batch, of A rows, into a fresh state."""
    return drafter.resume(fresh, past, rows) if hasattr(drafter, "carry_over") else fresh


def learns(drafter: Drafter) -> bool:
    """Whether past rounds change what the drafter drafts."""
    return hasattr(drafter, "learn")


def learn(drafter: Any, tokens, length, round_, judge, context: Context, state: Any) -> Any:
    """Update the drafter's state after a round; unchanged by default."""
    if not learns(drafter):
        return state
    return drafter.learn(tokens, length, round_, judge, context, state)


def learn_from(method: Any, tokens, length, round_: Round, context: Context, state: Any) -> Any:
    """Update the state of a method's drafter after a round, judged by the method's rule."""
    judge = partial(chances_of, method.rule, method.sampling, round_.target_logprobs)
    return learn(method.drafter, tokens, length, round_, judge, context, state)


def chances_of(
    rule: AcceptanceRule,
    sampling: Sampling,
    target_logprobs: Float[Array, "B K V"],
    logits: Float[Array, "B K V"],
    *,
    certain: bool = False,
) -> Float[Array, "B K"]:
    """The chance that a token drawn from these logits is accepted: `judge` of `learn`."""
    logits = logits.astype(target_logprobs.dtype)
    proposed = proposal(logits, sampling)
    chance = rule.acceptance(target_logprobs, logits if certain else proposed.logprobs)
    return jnp.where(proposed.proposes, chance, 0.0).astype(jnp.float32)
