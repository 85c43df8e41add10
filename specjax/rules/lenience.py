"""The lenient rules of the paper's appendix A.5, which are not exact."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from specjax import sampling as smp
from specjax.pytrees import pytree, set_fields
from specjax.rules.base import at_position, ids, overlap, stop_where_not
from specjax.rules.token import Token
from specjax.support.ranges import number


@pytree
class Lenient(Token):
    """Lenience l of the paper's A.5: keep token x with probability min(1, p(x)/(l·q(x))).

    The paper leaves the residual open; here it stays norm(max(0, p − q)). So a drafted position
    gives x the probability

        min(q, p/l)(x) + (1 − Σ min(q, p/l)) · norm(max(0, p − q))(x)  ≤  p(x)/l

    and no longer p(x): decoding is faster, and its text drifts towards the draft's. l = 1 is
    `Token`. The token after a fully accepted draft still follows p. At temperature 0 see
    `LenientArgmax`.
    """

    lenience: Float[Array, ""]  # l in (0, 1]

    def __init__(self, lenience: float):
        """Make the rule for any temperature; a smaller l accepts more, and 1 is exact.

        Raises:
          ValueError: not 0 < lenience ≤ 1.
        """
        why = "1 is the exact rule, and towards 0 every token that the target can say is accepted"
        found = number("lenience", lenience, "(0, 1]", why)
        set_fields(self, lenience=jnp.float32(found))

    @property
    def exact(self) -> bool:  # type: ignore[override]  # a class variable in `Token`, here by l
        """Whether l = 1."""
        return bool(self.lenience == 1)

    def under(self, sampling):
        return LenientArgmax(self.lenience) if sampling.greedy else self

    def acceptance(self, target_logprobs, draft_logprobs):
        """The chance of acceptance, Σ min(p/l, q)."""
        return overlap(_over(target_logprobs, self.lenience), draft_logprobs)

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """The token rule's `stop` with ratios p/(l·q)."""
        over = _over(target_logprobs, self.lenience)
        return super().stop(over, draft_logprobs, drafts, draft_len)


@pytree
class LenientArgmax(Token):
    """Lenience at temperature 0: keep token x if p(x) ≥ l·max p, else replace it by the argmax.

    Here p is the target's softmax at temperature 1, because greedy standardization would make it
    one-hot. The paper prints p(x) ≤ l·max p, evidently for ≥. With l = 1 only the argmax is kept,
    the first of equals.
    """

    lenience: Float[Array, ""]  # l in (0, 1]

    @property
    def exact(self) -> bool:  # type: ignore[override]  # a class variable in `Token`, here by l
        """Whether l = 1."""
        return bool(self.lenience == 1)

    def target_distribution(self, logits, sampling):
        return smp.standardize(logits, smp.Sampling(1.0))

    def acceptance(self, target_logprobs, draft_logprobs):
        """The draft's mass on tokens that are kept: 0 or 1."""
        return jnp.sum(
            jnp.where(self._kept(target_logprobs), jnp.exp(draft_logprobs), 0.0), axis=-1
        )

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        """Stop at the first token that is not kept, with certainty."""
        return stop_where_not(self._kept(target_logprobs), drafts, draft_len, target_logprobs)

    def next_probs(self, target_logprobs, draft_logprobs, drafts, draft_len, accepted):
        """The argmax, with certainty."""
        target = at_position(target_logprobs, accepted)
        return (smp.argmax(target)[:, None] == ids(target)[None, :]).astype(target.dtype)

    def _kept(self, target_logprobs: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
        best = jnp.max(target_logprobs, axis=-1, keepdims=True)
        near = _over(target_logprobs, self.lenience) >= best
        index = jnp.broadcast_to(ids(target_logprobs), target_logprobs.shape)
        first = index == jnp.expand_dims(smp.argmax(target_logprobs), -1)
        return first | (near & (self.lenience < 1))


def _over(logprobs: Float[Array, "*batch V"], lenience: Float[Array, ""]):
    """The leniently scaled log-probabilities, log(p/l)."""
    return logprobs - jnp.log(lenience.astype(logprobs.dtype))
