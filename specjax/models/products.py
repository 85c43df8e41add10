"""Products of a few rows and a matrix: the one place that chooses their form.

A float32 matrix is multiplied in float32. A bfloat16 matrix beside float32 rows, which a CPU has
(`layers.narrow_weights`), is multiplied as an accelerator does it: the factors are bfloat16 and the
sums float32. A sum's relative error is then that of rounding the rows, about 2⁻⁹ of their size.
"""

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
            return widened(narrow.astype(rows.dtype), matrix)
        if not input_first:
            return kept(weight_first(narrow, matrix.T, rows.dtype)).T
        padded = filled(narrow, devices.MIN_ROWS)
        return jnp.matmul(padded, matrix, preferred_element_type=rows.dtype)[: len(rows)]

    if matrix.dtype == jnp.bfloat16 and rows.dtype == jnp.float32:
        return devices.by_platform(rows, turned, cpu=rounded, accelerator=widened)
    return jnp.matmul(rows, turned, preferred_element_type=dtype)


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
