"""Packed positions of a batch: a call computes N of its B·K positions.

Projections, feed-forward layers and the head work on (N, E). Attention sees (B, K): what it reads
is unpacked before it, and packed again after it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped


class Packing(NamedTuple):
    """The positions of a call that are computed: the first few of each row, one row after another.

    Unpacked entries beyond a row's count hold the values of other positions. Their keys and values
    go to slots that are stale, and nothing else may be read of them.
    """

    at: Int[Array, " N"]  # row · K + slot of each packed position
    of: Int[Array, "B K"]  # the packed position of each slot

    @classmethod
    def first(cls, count: Int[Array, " B"], width: int, size: int) -> "Packing":
        """Pack the first `count` positions of each row.

        Args:
          count: 1 … width for each row.
          width: K.
          size: N ≥ the sum of the counts. Positions beyond the sum repeat the last one.
        """
        ends = jnp.cumsum(count, dtype=jnp.int32)
        place = jnp.minimum(jnp.arange(size, dtype=jnp.int32), ends[-1] - 1)
        row = jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        begin = ends - count
        slot = jnp.arange(width, dtype=jnp.int32)[None, :]
        return cls(row * width + place - begin[row], jnp.minimum(begin[:, None] + slot, size - 1))


def pack(x: Shaped[Array, "B K ..."], packing: Packing | None) -> Array:
    """Take the packed positions, (N, …); without a packing x as it is."""
    return x if packing is None else x.reshape(-1, *x.shape[2:])[packing.at]


def unpack(x: Shaped[Array, "N ..."], packing: Packing | None) -> Array:
    """Put packed positions back into (B, K, …); without a packing x as it is."""
    return x if packing is None else x[packing.of]
