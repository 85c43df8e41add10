"""The token rule of the paper, and the base of the others."""

from typing import ClassVar

import jax.numpy as jnp

from specjax.pytrees import pytree
from specjax.rules.base import (
    AcceptanceRule,
    along,
    at_position,
    at_tokens,
    ends,
    overlap,
    residual,
)


@pytree
class Token(AcceptanceRule):
    """Algorithm 1 of Leviathan et al. 2023: keep token x with probability min(1, p(x)/q(x)),
    stop at the first that is not kept, and replace it by a draw from norm(max(0, p − q)).
    """

    exact: ClassVar[bool] = True
    reveals_shorter: ClassVar[bool] = True

    def acceptance(self, target_logprobs, draft_logprobs):
        """The chance of acceptance, Σ min(p, q)."""
        return overlap(target_logprobs, draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """More than i tokens are accepted with probability Π min(1, p/q) over the first i + 1."""
        count = drafts.shape[1]
        target = at_tokens(target_logprobs[:, :count], drafts)
        draft = at_tokens(draft_logprobs, drafts)
        submitted = jnp.arange(count, dtype=jnp.int32)[None, :] < draft_len[:, None]
        # A token was drawn, so its draft probability is positive; the target's may be 0.
        log_ratio = jnp.where(submitted, jnp.minimum(target - draft, 0.0), -jnp.inf)
        return ends(jnp.exp(along(jnp.add, log_ratio, 0.0)[:, 1:]))

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The residual at the rejected token; the target's distribution if all were accepted."""
        target = jnp.exp(at_position(target_logprobs, accepted))
        if not draft_logprobs.shape[1]:
            return target
        last = draft_logprobs.shape[1] - 1
        draft = jnp.exp(at_position(draft_logprobs, jnp.minimum(accepted, last)))
        rejected = (accepted < draft_len)[:, None]
        return jnp.where(rejected, residual(target, draft), target)
