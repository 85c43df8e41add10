"""The typical acceptance rule of Medusa, which is not exact."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from specjax.pytrees import pytree, set_fields
from specjax.rules.base import at_position, stop_where_not
from specjax.rules.token import Token
from specjax.sampling import entropy
from specjax.support.ranges import number


@pytree
class Typical(Token):
    """Typical acceptance (Medusa, Cai et al. 2024): keep token x if p(x) > min(ε, δ·exp(−H(p))),
    whatever q(x).

    H is the entropy of p in nats. A, the tokens that pass, always holds the likeliest: max p is at
    least exp(−H). A token that is not kept is replaced by a draw from p within A, which the token
    after a fully accepted draft follows too. So a drafted position gives x the probability

        q(x) + (1 − q(A)) · p(x)/p(A)  for x in A, and 0 for others

    and no longer p(x): within A the draft's distribution is used unchanged. At temperature 0 only
    the argmax passes, and the rule is `Token`.
    """

    exact: ClassVar[bool] = False

    epsilon: Float[Array, ""]  # ε in (0, 1], a probability that is always accepted
    delta: Float[Array, ""]  # δ in (0, 1], a threshold relative to exp(−H)

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        """Make the rule; smaller numbers accept more. The defaults are Medusa's, where δ = √ε.

        Raises:
          ValueError: ε or δ outside (0, 1].
        """
        why = "the smaller it is, the more tokens are accepted"
        for name, given in (("epsilon", epsilon), ("delta", delta)):
            set_fields(self, **{name: jnp.float32(number(name, given, "(0, 1]", why))})

    def under(self, sampling):
        return Token() if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """The chance of acceptance, q(A)."""
        kept = self._kept(target_logprobs)
        return jnp.sum(jnp.where(kept, jnp.exp(draft_logprobs), 0.0), axis=-1)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """Stop at the first token that is not kept, with certainty."""
        return stop_where_not(self._kept(target_logprobs), drafts, draft_len, target_logprobs)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The target's distribution within A."""
        target = at_position(target_logprobs, accepted)
        left = jnp.where(self._kept(target), jnp.exp(target), 0.0)
        return left / jnp.sum(left, axis=-1, keepdims=True)

    def _kept(self, target_logprobs: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
        probs = jnp.exp(target_logprobs)
        peak = jnp.exp(-entropy(target_logprobs))[..., None]
        epsilon, delta, peak = (x.astype(probs.dtype) for x in (self.epsilon, self.delta, peak))
        best = jnp.max(probs, axis=-1, keepdims=True)  # passes; where δ = 1, up to rounding
        return (probs > jnp.minimum(epsilon, delta * peak)) | (probs == best)
