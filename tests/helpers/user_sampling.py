"""A way of sampling in a user's own file, as docs/own.md has it: min-p."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.pytrees import pytree
from specjax.sampling import Filter


@pytree
class MinP(Filter):
    """Keeps the tokens that are at least `share` times as likely as the likeliest."""

    share: Array  # () float32, in (0, 1]

    def __call__(self, logits):
        floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.share).astype(logits.dtype)
        return jnp.where(logits < floor, -jnp.inf, logits)

    def in_numpy(self, logits):
        """The same by its definition, for `reference.distribution`."""
        probs = np.exp(logits - logits.max())
        return np.where(probs < float(self.share), -np.inf, logits)


def min_p(share: float) -> MinP:
    return MinP(jnp.float32(share))
