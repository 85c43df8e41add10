"""Models for tests that write the expected tokens down; `specjax.testing.tables` has the others."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.pytrees import pytree
from specjax.testing.tables import (
    TableModel,
    hopeless,
    inputs_of,
    logits_after,
    one_hot,
    random_table,
    repeat,
)
from specjax.types import Inputs

__all__ = [
    "MarkovModel",
    "TableModel",
    "chain",
    "hopeless",
    "inputs_of",
    "logits_after",
    "one_hot",
    "random_table",
    "repeat",
]


@pytree
class MarkovModel:
    """The next token's distribution depends on the last token alone; the cache holds nothing."""

    table: Array  # (V, V) logits by last token

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def start(self, inputs: Inputs, buffer_len: int):
        return (), ()

    def __call__(self, tokens, start, context, cache):
        return self.table[tokens], cache

    def logits(self, hidden):
        return hidden


def chain(successor: list[int], dtype=jnp.float32) -> MarkovModel:
    """A deterministic model: token i is followed by successor[i]."""
    hit = np.eye(len(successor))[successor] > 0
    return MarkovModel(jnp.asarray(np.where(hit, 0.0, -np.inf), dtype))
