"""The random draws of a round: the only place where the loop draws.

Enumeration (`specjax.testing`) replaces a `Dice` by one that takes every possible
outcome.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax import sampling as smp
from specjax.rules import surviving
from specjax.sampling import Purpose
from specjax.state import State


class Dice:
    """Draws by keys that depend on the row, its own round, the purpose and the slot."""

    def draft(
        self,
        state: State,
        slot: Int[Array, ""],
        logprobs: Float[Array, "B V"],
        best: Int[Array, " B"],
    ):
        """Draw a drafted token for each row, (B,) int32; `best` is the likeliest one."""
        keys = smp.fold(state.keys, state.rounds, Purpose.DRAFT, slot)
        return smp.draw(keys, jnp.exp(logprobs))

    def accepted(self, state: State, stop: Float[Array, "B K"]):
        """Draw the count of accepted tokens, (B,) int32, by one uniform number."""
        point = smp.uniform(smp.fold(state.keys, state.rounds, Purpose.ACCEPT), stop.dtype)
        return jnp.sum(point[:, None] < surviving(stop), axis=1, dtype=jnp.int32)

    def next(self, state: State, probs: Float[Array, "B V"]):
        """Draw the token after the accepted ones, (B,) int32."""
        return smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), probs)


class GreedyDice(Dice):
    """Dice of the likeliest outcome: at temperature 0 every distribution is one-hot."""

    def draft(self, state, slot, logprobs, best):
        return best

    def accepted(self, state, stop):
        return smp.argmax(stop)

    def next(self, state, probs):
        return smp.argmax(probs)


def dice_for(method: Any) -> Dice:
    """The dice that the jitted loop uses for a method."""
    return GreedyDice() if method.sampling.greedy else Dice()
