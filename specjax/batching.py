"""From lists of ids to the padded arrays that the loops take, in few distinct shapes.

Shapes are compiled for, so they come in buckets: sizes of the form 2ᵏ and 3·2ᵏ. A row's tokens
depend neither on its bucket nor on its neighbours.
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


def pack(sources: Sequence[Sequence[int]], *, start_id: int, rows: int, width: int) -> Inputs:
    """Right-padded inputs of an encoder-decoder, each row's prompt being the start token.

    Args:
      sources: token ids of the live rows, at most `rows`, each of 1 … `width` ids.
      rows: B; missing rows are filled with one token, and should be given no budget.
    """
    source = np.zeros((rows, width), np.int32)
    source_len = np.ones((rows,), np.int32)
    for row, ids in enumerate(sources):
        source[row, : len(ids)] = ids
        source_len[row] = len(ids)
    return Inputs(
        source=jnp.asarray(source),
        source_len=jnp.asarray(source_len),
        prompt=jnp.full((rows, 1), start_id, jnp.int32),
        prompt_len=jnp.ones((rows,), jnp.int32),
    )
