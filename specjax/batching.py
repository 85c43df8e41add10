"""Padded arrays for the loops, made from lists of ids, in few distinct shapes.

Every shape is compiled, so sizes come in buckets of the form 2ᵏ and 3·2ᵏ. A row's tokens depend
neither on its bucket nor on its neighbours.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.types import Inputs


def bucket(size: int, smallest: int = 1) -> int:
    """The smallest 2ᵏ or 3·2ᵏ that is ≥ size and ≥ smallest.

    >>> [bucket(n) for n in (1, 5, 6, 7, 100, 130)]
    [1, 6, 6, 8, 128, 192]
    """
    size = max(size, smallest, 1)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= size else power


def pack(texts: Sequence[Sequence[int]], *, start_id: int | None, rows: int, width: int) -> Inputs:
    """Pad texts on the right: sources of an encoder-decoder, or prompts of a decoder-only model.

    Args:
      texts: token ids of the live rows, at most `rows`, each of 1 … `width` ids.
      start_id: the prompt of every row of an encoder-decoder. None: the texts are the prompts.
      rows: B; missing rows are filled with one token, and should have no budget.
    """
    ids = np.zeros((rows, width), np.int32)
    lengths = np.ones((rows,), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        lengths[row] = len(text)
    packed, packed_len = jnp.asarray(ids), jnp.asarray(lengths)
    if start_id is None:
        nothing = jnp.zeros((rows, 0), jnp.int32)
        return Inputs(nothing, jnp.zeros((rows,), jnp.int32), packed, packed_len)
    start = jnp.full((rows, 1), start_id, jnp.int32)
    return Inputs(packed, packed_len, start, jnp.ones((rows,), jnp.int32))
