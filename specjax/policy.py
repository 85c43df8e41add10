"""Draft-length policies: how long the next draft may be.

A policy is a value with pure functions; its state is a pytree in the loop's carry. Lengths are
data: γ_max is static, and nothing recompiles. What a policy may see decides whether the output's
law stays the target's: `keep_drafting` is asked before the token exists and is told nothing of it,
so a policy cannot peek at a token and drop it.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key


class Observation(NamedTuple):
    """What is known before drafted token i exists."""

    slot: Int[Array, ""]  # i, from 0
    drafting: Bool[Array, " B"]  # rows that drafted every token so far
    draft_logprobs: Float[Array, "B V"]  # the law that token i would be drawn from
    previous_logprob: Float[Array, " B"]  # of token i − 1 under its own law; 0 at i = 0


class RoundStats(NamedTuple):
    """What one round taught, for each row."""

    active: Bool[Array, " B"]  # False: the row had finished, learn nothing from it
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]  # before a cut at EOS
    emitted: Int[Array, " B"]
    overlap: Float[Array, "B G"]  # P(a token there is accepted): Σ min(target, draft)
    submitted: Bool[Array, "B G"]  # positions that count


class Policy(Protocol):
    """What the loop needs of a policy; `Constant` is the paper's."""

    def init(self, keys: Key[Array, " B"], gamma_max: int) -> Any:
        """The state before the first round."""
        ...

    def begin(self, state: Any) -> tuple[Any, Int[Array, " B"]]:
        """Before a round: the state, and the longest draft allowed for each row."""
        ...

    def keep_drafting(self, state: Any, seen: Observation) -> tuple[Any, Bool[Array, " B"]]:
        """Whether each row drafts token i, decided before it is drawn."""
        ...

    def update(self, state: Any, stats: RoundStats) -> Any:
        """After a round: what was learned."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constant:
    """Always γ tokens, as in the paper."""

    gamma: Array  # () int32

    def init(self, keys, gamma_max):
        return ()

    def begin(self, state):
        return state, self.gamma

    def keep_drafting(self, state, seen):
        return state, seen.drafting

    def update(self, state, stats):
        return state


def constant(gamma: int) -> Constant:
    """A policy that always drafts `gamma` ≥ 1 tokens."""
    if gamma < 1 or gamma != int(gamma):
        raise ValueError(
            f"gamma={gamma} must be a whole number ≥ 1; without a draft model, "
            "decoding is autoregressive."
        )
    return Constant(jnp.int32(gamma))
