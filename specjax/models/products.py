"""Products of a few rows and a matrix, and sums of rows: the one place that chooses their form.

A float32 matrix is multiplied in float32. A bfloat16 matrix beside float32 rows, which a CPU has
(`layers.narrow_weights`), is multiplied as an accelerator does it: the factors are bfloat16 and the
sums float32. A sum's relative error is then that of rounding the rows, about 2⁻⁹ of their size.

On a CPU the order in which a row's numbers are added does not depend on the rows beside it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import devices


def product(rows: Array, matrix: Array, input_first: bool, dtype: Any = None) -> Array:
    """Multiply rows (M, in) by a matrix: (M, out).

    Args:
      matrix: (out, in), or (in, out) if `input_first`.
      dtype: the dtype of sums and result; None: that of the rows.
    """
    turned = matrix if input_first else matrix.T

    def widened(rows: Array, matrix: Array) -> Array:
        """Multiply in the rows' dtype."""
        return jnp.matmul(rows, matrix.astype(rows.dtype))

    def rounded(rows: Array, matrix: Array) -> Array:
        """Round the rows to the matrix's bfloat16; sums are float32.

        Without units for bfloat16 a CPU multiplies the same numbers in float32, which is faster.
        """
        narrow = rows.astype(matrix.dtype)
        if not devices.cpu_multiplies("bfloat16"):
            return widened(filled(narrow.astype(rows.dtype), 2), matrix)[: len(rows)]
        if not input_first:
            weight = matrix.T
            return in_tiles(narrow, lambda tile: kept(weight_first(tile, weight, rows.dtype)).T)
        padded = filled(narrow, devices.MIN_ROWS)
        return jnp.matmul(padded, matrix, preferred_element_type=rows.dtype)[: len(rows)]

    def plain(rows: Array, matrix: Array) -> Array:
        return jnp.matmul(rows, matrix, preferred_element_type=dtype)

    def paired(rows: Array, matrix: Array) -> Array:
        """Multiply two rows: XLA's CPU backend adds a single one's products in another order."""
        return plain(filled(rows, 2), matrix)[: len(rows)]

    if matrix.dtype == jnp.bfloat16 and rows.dtype == jnp.float32:
        return devices.by_platform(rows, turned, cpu=rounded, accelerator=widened)
    if len(rows) > 1:
        return plain(rows, turned)
    return devices.by_platform(rows, turned, cpu=paired, accelerator=plain)


TILE = 16
"""Rows of one product W xᵀ in bfloat16: with more of them XLA's CPU backend may add in another
order, and takes as long as for several products."""


def in_tiles(rows: Array, multiply: Callable[[Array], Array]) -> Array:
    """Apply `multiply`, (M, in) → (M, out), to at most `TILE` rows at a time."""
    count, width = rows.shape
    if count <= TILE:
        return multiply(rows)
    tiles = filled(rows, -(-count // TILE) * TILE).reshape(-1, TILE, width)
    return jax.lax.map(multiply, tiles).reshape(len(tiles) * TILE, -1)[:count]


def filled(rows: Array, count: int) -> Array:
    """Add rows of zeros up to `count`."""
    missing = max(0, count - len(rows))
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def weight_first(rows: Array, weight: Array, dtype: Any) -> Array:
    """Multiply a weight (out, in) by rows (M, in): (out, M), in `dtype`.

    XLA's CPU backend reads a large weight of bfloat16 or int8 at the speed of memory if it is the
    left factor, and two rows are multiplied: for a single one it widens the whole weight.
    """
    padded, axes = filled(rows, 2), (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(weight, padded, axes, preferred_element_type=dtype)[:, : len(rows)]


def kept(sums: Array) -> Array:
    """Return floats unchanged, such that XLA on a CPU keeps the form of the product they are of.

    Otherwise it rewrites the transpose of W xᵀ to x Wᵀ, and fuses the softmax of logits with the
    product of a head, which takes far longer with a large bfloat16 matrix and 40 rows or more.
    Rounding to the dtype's own precision changes nothing and ends both. An `optimization_barrier`
    is removed too early.
    """
    info = jnp.finfo(sums.dtype)
    return jax.lax.reduce_precision(sums, info.nexp, info.nmant)


@jax.custom_jvp
def row_sum(x: Array) -> Array:
    """Sum the last axis, which stays: (..., N) → (..., 1).

    On a CPU halves are added until one number is left, so a row's bits do not depend on the number
    of rows. XLA chooses the order of `jnp.sum` by all axes.
    """

    def by_halves(x: Array) -> Array:
        while (half := x.shape[-1] // 2) > 0:
            rest = x[..., 2 * half :]
            x = jnp.concatenate([x[..., :half] + x[..., half : 2 * half], rest], axis=-1)
        return x

    def at_once(x: Array) -> Array:
        return jnp.sum(x, axis=-1, keepdims=True)

    return devices.by_platform(x, cpu=by_halves, accelerator=at_once)


@row_sum.defjvp
def _row_sum_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """A sum is linear; its gradient needs no halves."""
    return row_sum(*primals), jnp.sum(tangents[0], axis=-1, keepdims=True)
