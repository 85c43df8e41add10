"""Models that are one table of distributions, small enough to know every answer in advance.

A `Table` takes the place of a network: it has the `Model` protocol and runs through the same loops.
Its distributions are given, so α, the output's distribution and the speedup can be computed and
compared.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from specjax.pytrees import pytree
from specjax.types import Inputs


@pytree
class Table:
    """A model that looks up its next token's distribution: its only row, or the last token's."""

    table: Array  # (1, V) or (V, V) log-probabilities; row 0 for every token, or one for each

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    @property
    def order(self) -> int:
        """The number of past tokens that the distribution depends on, 0 or 1."""
        return int(self.table.shape[0] > 1)

    def start(self, inputs: Inputs, buffer_len: int):
        """Return an empty context and cache: there is nothing to encode or to keep."""
        return (), ()

    branches: ClassVar[bool] = True

    def __call__(self, tokens, start, context, cache):
        """Return rows of the table as "hidden" states (B, K, V), whatever the position."""
        return self.table[tokens if self.order else jnp.zeros_like(tokens)], cache

    def compact(self, cache, start, path):
        """Return the empty cache."""
        return cache

    def logits(self, hidden):
        return hidden


def fixed(probs: Float[ArrayLike, " V"]) -> Table:
    """Make a model of order 0: every token is drawn from the same distribution.

    Raises:
      ValueError: `probs` is not a distribution.
    """
    return Table(_logs(_distributions(probs, 1)[None]))


def by_last_token(probs: Float[ArrayLike, "V V"]) -> Table:
    """Make a model of order 1: after token i the next one is drawn from probs[i].

    Raises:
      ValueError: a row of `probs` is not a distribution, or there is not one for each token.
    """
    distributions = _distributions(probs, 2)
    if distributions.shape[0] != distributions.shape[1] or len(distributions) < 2:
        raise ValueError(
            f"probs has shape {distributions.shape}; it needs a distribution over all tokens "
            "for each token, (V, V) with V ≥ 2."
        )
    return Table(_logs(distributions))


def draft_of_alpha(
    target_probs: Float[ArrayLike, "*batch V"], alpha: Float[ArrayLike, "*batch"]
) -> np.ndarray:
    """Make drafts (…, V) whose overlap Σ min(target, draft) with each target is `alpha`.

    The draft is α · target + (1 − α) · junk. Junk is the last token, which the target never emits,
    so it is never accepted.

    Raises:
      ValueError: the target may emit the last token, or alpha lies outside [0, 1].
    """
    target = np.asarray(target_probs, np.float64)
    alpha = np.asarray(alpha, np.float64)
    if np.any(target[..., -1] > 0):
        raise ValueError(
            "The target must give its last token probability 0; append an entry of 0 to its "
            "distribution."
        )
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha={alpha} must lie in [0, 1]; it is a probability.")
    junk = np.zeros_like(target)
    junk[..., -1] = 1
    return alpha[..., None] * target + (1 - alpha[..., None]) * junk


def _distributions(probs: ArrayLike, rank: int) -> np.ndarray:
    distributions = np.asarray(probs, np.float64)
    if distributions.ndim != rank:
        raise ValueError(f"probs has shape {distributions.shape}; it must have {rank} axes.")
    if not np.all(distributions >= 0) or not np.allclose(distributions.sum(-1), 1, atol=1e-6):
        raise ValueError(
            "probs must be ≥ 0 and sum to 1 over the last axis; pass probabilities, not logits."
        )
    return distributions


def _logs(distributions: np.ndarray) -> Array:
    with np.errstate(divide="ignore"):  # −inf: a token of probability 0
        return jnp.asarray(np.log(distributions), jnp.float32)
