"""An acceptance rule of your own, and its check.

    python examples/own_rule.py

`Cautious` keeps a drafted token less often than the paper's rule does, and stays exact: what it
does not keep comes back from the residual p − c·min(p, q), normalized.
"""

import jax.numpy as jnp
from jax import Array

from specjax.pytrees import pytree
from specjax.rules import Token, at_position, at_tokens
from specjax.rules.base import along, ends, overlap
from specjax.testing import check_rule


@pytree
class Cautious(Token):
    """Keeps token x with probability c·min(1, p(x)/q(x))."""

    share: Array  # c, () float32 in [0, 1]

    exact = True  # `check_rule` holds it to this

    def acceptance(self, target_logprobs, draft_logprobs):
        return self.share * overlap(target_logprobs, draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """Entry i is P(exactly i drafted tokens are accepted)."""
        count = drafts.shape[1]
        ratio = at_tokens(target_logprobs[:, :count], drafts) - at_tokens(draft_logprobs, drafts)
        keeps = self.share * jnp.exp(jnp.minimum(ratio, 0.0))
        submitted = jnp.arange(count)[None, :] < draft_len[:, None]
        return ends(along(jnp.multiply, jnp.where(submitted, keeps, 0.0), 1.0)[:, 1:])

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The distribution of the token after `accepted` drafted ones."""
        target = jnp.exp(at_position(target_logprobs, accepted))
        if not draft_logprobs.shape[1]:  # a pass of one position judges no draft
            return target
        slot = jnp.minimum(accepted, draft_logprobs.shape[1] - 1)
        draft = jnp.exp(at_position(draft_logprobs, slot))
        rest = target - self.share * jnp.minimum(target, draft)
        mass = jnp.sum(rest, axis=-1, keepdims=True)
        rejected = (accepted < draft_len)[:, None] & (mass > 0)
        return jnp.where(rejected, rest / jnp.where(mass > 0, mass, 1.0), target)


def main():
    check_rule(Cautious(jnp.float32(0.7)))
    print("Cautious keeps the target's distribution.")


if __name__ == "__main__":
    main()
