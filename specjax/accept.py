"""Acceptance rules: how many drafted tokens are kept, and the law of the token that follows.

A rule is pure functions from log-probabilities to laws. It draws nothing: the loop does, so that
the law of a whole round can be enumerated. Both models' log-probabilities come from the same
`standardize`.

Shapes: `target_logprobs` (B, γ+1, V), entry i the target's law after i drafted tokens;
`draft_logprobs` (B, γ, V), entry i the law that drafted token i was drawn from; `drafts` (B, γ);
`draft_len` (B,) ≤ γ, how many were submitted. Entries at or beyond draft_len are arbitrary.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


class AcceptanceRule(Protocol):
    """What the loop needs of a rule; `TokenRule` is the paper's."""

    def survival(
        self,
        target_logprobs: Float[Array, "B K V"],
        draft_logprobs: Float[Array, "B G V"],
        drafts: Int[Array, "B G"],
        draft_len: Int[Array, " B"],
    ) -> Float[Array, "B G"]:
        """Entry i is P(more than i drafted tokens are accepted | drafts): non-increasing in i."""
        ...

    def next_probs(
        self,
        target_logprobs: Float[Array, "B K V"],
        draft_logprobs: Float[Array, "B G V"],
        drafts: Int[Array, "B G"],
        draft_len: Int[Array, " B"],
        accepted: Int[Array, " B"],
    ) -> Float[Array, "B V"]:
        """Law of the token after `accepted` drafted ones, given that the rest was rejected."""
        ...


def at_tokens(logprobs: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    """The log-probability of each token under the law at its position."""
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=2)[:, :, 0]


def at_position(logprobs: Float[Array, "B K V"], position: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The law at one position of each row."""
    return jnp.take_along_axis(logprobs, position[:, None, None], axis=1)[:, 0]


def overlap(
    target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    """β = Σₓ min(target, draft) = 1 − D_LK: the chance that a drafted token is accepted (Thm 3.5)."""
    return jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1)


def residual(
    target_probs: Float[Array, "B V"], draft_probs: Float[Array, "B V"]
) -> Float[Array, "B V"]:
    """norm(max(0, target − draft)); the target's own law where nothing is left of it.

    Nothing is left where both laws agree up to rounding; a rejection there has a probability of
    the order of rounding too.
    """
    left = jnp.maximum(target_probs - draft_probs, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    usable = mass > 0
    return jnp.where(usable, left / jnp.where(usable, mass, 1.0), target_probs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Algorithm 1 of Leviathan et al. 2023: keep token x with probability min(1, p(x)/q(x)),
    stop at the first that is not kept, and replace it by a draw from norm(max(0, p − q)).
    """

    def survival(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """Π min(1, p/q) over the tokens so far."""
        count = drafts.shape[1]
        target = at_tokens(target_logprobs[:, :count], drafts)
        draft = at_tokens(draft_logprobs, drafts)
        submitted = jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
        # A token was drawn, so its draft probability is positive; the target's may be 0.
        log_ratio = jnp.where(submitted, jnp.minimum(target - draft, 0.0), -jnp.inf)
        return jnp.exp(jnp.cumsum(log_ratio, axis=1))

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The residual at the rejected token; the target's law if all were accepted."""
        target = jnp.exp(at_position(target_logprobs, accepted))
        last = max(draft_logprobs.shape[1] - 1, 0)
        draft = jnp.exp(at_position(draft_logprobs, jnp.minimum(accepted, last)))
        rejected = (accepted < draft_len)[:, None]
        return jnp.where(rejected, residual(target, draft), target)
