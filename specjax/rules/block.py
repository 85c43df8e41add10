"""The block rule: block verification of a whole draft."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.pytrees import pytree
from specjax.rules.base import (
    along,
    at_position,
    at_tokens,
    overlap,
    residual,
)
from specjax.rules.token import Token


@pytree
class Block(Token):
    """Block verification (Sun et al. 2024): a draft is judged as a whole, and more of it is kept.

    With P₀ = 1 and Pᵢ = min(1, Pᵢ₋₁·p(xᵢ)/q(xᵢ)), the residual after i tokens is [Pᵢ·p − q]₊, with
    q = 0 once the draft has ended; its mass is Zᵢ. The longest i with
    uᵢ ≤ hᵢ = Zᵢ/(Zᵢ + 1 − Pᵢ) is accepted, and the next token is drawn from the residual there. An
    unlikely token may thus be kept because of later likely ones.
    """

    exact: ClassVar[bool] = True
    reveals_shorter: ClassVar[bool] = False  # what is kept depends on where the draft ended

    def under(self, sampling):
        """The token rule if greedy: it keeps as much of one-hot distributions."""
        return Token() if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """The token rule's Σ min(p, q): no single chance exists here. At least as many tokens are
        accepted."""
        return overlap(target_logprobs, draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """P(stop at i) = hᵢ·Π (1 − hⱼ) over j > i, for independent uniforms uⱼ; h₀ = 1."""
        log_kept = self._log_kept(target_logprobs, draft_logprobs, drafts, draft_len)
        target = jnp.exp(log_kept[:, :, None] + target_logprobs)
        draft = _submitted_probs(draft_logprobs, draft_len)
        left = jnp.sum(jnp.maximum(target - draft, 0.0), axis=-1)
        lost = -jnp.expm1(log_kept)  # 1 − P
        # 1 − h is 0 where P = 1, even if Z = 0. On a GPU the quotient of equals may be above 1.
        missed = jnp.where(lost > 0, lost / jnp.where(lost > 0, left + lost, 1.0), 0.0)
        missed = jnp.minimum(missed, 1.0)
        return (1.0 - missed) * along(jnp.multiply, missed[:, :0:-1], 1.0)[:, ::-1]

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The residual norm([P·p − q]₊); the target's distribution if all were accepted."""
        log_kept = self._log_kept(target_logprobs, draft_logprobs, drafts, draft_len)
        log_kept = jnp.take_along_axis(log_kept, accepted[:, None], axis=1)
        target = jnp.exp(log_kept + at_position(target_logprobs, accepted))
        return residual(target, at_position(_submitted_probs(draft_logprobs, draft_len), accepted))

    def _log_kept(self, target_logprobs, draft_logprobs, drafts, draft_len) -> Float[Array, "B K"]:
        """The logs of Pᵢ for i = 0 … γ; −inf past the draft's end."""
        count = drafts.shape[1]
        ratio = at_tokens(target_logprobs[:, :count], drafts) - at_tokens(draft_logprobs, drafts)
        slots = jnp.arange(count, dtype=jnp.int32)[None, :]
        ratio = jnp.where(slots < draft_len[:, None], ratio, -jnp.inf)
        return along(lambda kept, ratio: jnp.minimum(kept + ratio, 0.0), ratio, 0.0)


def _submitted_probs(
    draft_logprobs: Float[Array, "B G V"], draft_len: Int[Array, " B"]
) -> Float[Array, "B K V"]:
    """The draft's distributions, γ+1 entries; 0 throughout where no token was submitted."""
    slots = jnp.arange(draft_logprobs.shape[1], dtype=jnp.int32)[None, :]
    submitted = slots < draft_len[:, None]
    probs = jnp.where(submitted[:, :, None], jnp.exp(draft_logprobs), 0.0)
    return jnp.pad(probs, ((0, 0), (0, 1), (0, 0)))
