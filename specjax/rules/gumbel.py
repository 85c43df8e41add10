"""The Gumbel rule: both models draw with the same noise."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax import sampling as smp
from specjax.pytrees import pytree
from specjax.rules.base import ids
from specjax.rules.token import Token
from specjax.sampling import Purpose


@pytree
class Gumbel(Token):
    """Both models draw with plain decoding's noise at a position (Daliri, Musco and Suresh 2024):
    a drafted token is kept if it is the one that the target draws there.

    So the tokens are those of plain decoding with the same key, for every drafter and policy. Given
    the noise the target's distribution is one-hot, so the token rule accepts the drafted token
    exactly if it is the target's.
    """

    exact: ClassVar[bool] = True

    def under(self, sampling):
        """The token rule if greedy, without noise."""
        return Token() if sampling.greedy else self

    def given_noise(self, logprobs, keys, position):
        """A one-hot distribution at the token that plain decoding would draw."""
        drawn = smp.draw_by_gumbel(smp.fold(keys, position, Purpose.POSITION), logprobs)
        return jnp.where(drawn[:, None] == ids(logprobs)[None, :], 0.0, -jnp.inf)

    def acceptance(self, target_logprobs, draft_logprobs):
        """The mean over the noise, `coupled_overlap`, between (1−TV)/(1+TV) and 1−TV."""
        return coupled_overlap(target_logprobs, draft_logprobs)


def coupled_overlap(
    target_logprobs: Float[Array, "*batch V"], draft_logprobs: Float[Array, "*batch V"]
) -> Float[Array, "*batch"]:
    """The chance that one Gumbel noise draws the same token from target p and draft q,
    Σₓ 1/Σ_y max(p(y)/p(x), q(y)/q(x)); never too high, and at most 1/32 of it too low.

    With s = p(x)/(p(x) + q(x)) a term is p·q/(p + q) over G(s) = Σ_y max((1−s)·p(y), s·q(y)). G is
    convex, so its chords over 32 cells lie above it. A sort would be exact, but slow for a large V.
    """
    target, draft = jnp.exp(target_logprobs), jnp.exp(draft_logprobs)

    def larger(s):
        return jnp.sum(jnp.maximum((1 - s) * target, s * draft), axis=-1)

    cells = 32
    ends = jax.vmap(larger, out_axes=-1)(jnp.linspace(0, 1, cells + 1, dtype=target.dtype))
    both = target + draft
    share = target / jnp.where(both > 0, both, 1.0)
    cell = jnp.minimum((share * cells).astype(jnp.int32), cells - 1)
    low, high = (jnp.take_along_axis(ends, end, axis=-1) for end in (cell, cell + 1))
    chord = low + (high - low) * (share * cells - cell.astype(share.dtype))
    return jnp.sum(share * draft / chord, axis=-1)
