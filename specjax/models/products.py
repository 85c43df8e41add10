"""Products of a few rows and a matrix: the one place that chooses their form.

A float32 matrix is multiplied in float32. A bfloat16 matrix beside float32 rows, which a CPU has
(`layers.narrow_weights`), is multiplied as an accelerator does it: the factors are bfloat16 and the
sums float32. A sum's relative error is then that of rounding the rows, about 2⁻⁹ of their size.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax import devices


def product(rows: Array, matrix: Array, dtype: Any = None) -> Array:
    """Multiply rows (M, in) by a matrix (in, out): (M, out).

    Args:
      dtype: the dtype of sums and result; None: that of the rows.
    """
    if matrix.dtype == jnp.bfloat16 and rows.dtype == jnp.float32:
        return devices.by_platform(rows, matrix, cpu=_rounded, accelerator=_widened)
    return jnp.matmul(rows, matrix, preferred_element_type=dtype)


def _widened(rows: Array, matrix: Array) -> Array:
    """Multiply in the rows' dtype."""
    return jnp.matmul(rows, matrix.astype(rows.dtype))


def _rounded(rows: Array, matrix: Array) -> Array:
    """Round the rows to the matrix's bfloat16; sums are float32.

    Without units for bfloat16 a CPU multiplies the same numbers in float32, which is faster there.
    """
    narrow = rows.astype(matrix.dtype)
    if not devices.cpu_multiplies("bfloat16"):
        return _widened(narrow.astype(rows.dtype), matrix)
    missing = max(0, devices.MIN_ROWS - len(rows))
    padded = jnp.pad(narrow, ((0, missing), (0, 0))) if missing else narrow
    return jnp.matmul(padded, matrix, preferred_element_type=rows.dtype)[: len(rows)]
