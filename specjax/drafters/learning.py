"""Drafters that learn from rounds, as a `switch` does, and drafters that are free to query."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.drafters.base import Drafter, proposal
from specjax.rounds import Round
from specjax.rules import AcceptanceRule
from specjax.sampling import Sampling
from specjax.types import Context


@runtime_checkable
class Learns(Protocol):
    """A drafter whose past rounds change what it drafts.

    `learn` returns the state after a round. It is called after `observe`, in every round of a
    chain. Values that it does not read are not computed.

    Args of `learn`:
      tokens: the known tokens, including those of the round.
      length: number of tokens that were known before the round.
      judge: maps logits of the tokens after 0 … γ_max drafted ones, (B, γ_max+1, V), to the chance
        that a token drawn from them is accepted, float32; 0 where they propose nothing. With
        `certain=True` the logits are one-hot log-probabilities.
    """

    @abstractmethod
    def learn(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, " B"],
        round_: Round,
        judge: Callable[..., Float[Array, "B K"]],
        context: Context,
        state: Any,
    ) -> Any: ...


def learn(
    drafter: Drafter,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    round_: Round,
    judge: Callable[..., Float[Array, "B K"]],
    context: Context,
    state: Any,
) -> Any:
    """Update the drafter's state after a round; unchanged unless it `Learns`."""
    if isinstance(drafter, Learns):
        return drafter.learn(tokens, length, round_, judge, context, state)
    return state


def learn_from(
    method: Any,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    round_: Round,
    context: Context,
    state: Any,
) -> Any:
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
    """The chance that a token drawn from these logits is accepted: `judge` of `Learns`."""
    logits = logits.astype(target_logprobs.dtype)
    proposed = proposal(logits, sampling)
    chance = rule.acceptance(target_logprobs, logits if certain else proposed.logprobs)
    return jnp.where(proposed.proposes, chance, 0.0).astype(jnp.float32)


def is_free(drafter: Drafter) -> bool:
    """Whether a switch may call the drafter at any known token, in any order.

    A class declares `free = True` if `begin` reads the source and the known tokens alone, at hardly
    any cost.
    """
    return getattr(drafter, "free", False)
