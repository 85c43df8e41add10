"""Numbers in 8 bits: x ≈ int8 · scale, symmetric around 0, with one scale for each of many vectors.

Weights have a scale for each output channel, caches one for each position and head. Only what is
stored is narrow: products are taken in the dtype of the other factor, and scaled afterwards. On a
CPU the weights are widened a block at a time, so a product reads a quarter of the bytes and holds
little beside them.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import devices

LARGEST = 127
BLOCK = 1 << 20  # weights that a CPU widens at once
A = TypeVar("A", Array, np.ndarray)


def quantise(x: A, axis: int) -> tuple[A, A]:
    """Rounded to int8, so that |x − int8 · scale| ≤ scale / 2; scale = max |x| / 127 along `axis`.

    Args:
      x: floats, of numpy or jax.
      axis: of the vectors that share a scale.

    Returns:
      int8, in the shape of x, and the scales in float32, without that axis.
    """
    xp = x.__array_namespace__()
    wide = x.astype(np.float32)
    scale = scale_of(xp.max(xp.abs(wide), axis=axis))
    return round_to(wide, xp.expand_dims(scale, axis)), scale


def scale_of(largest: A) -> A:
    """From the largest absolute values, ≥ 0, float32. A vector of zeros has the scale 1."""
    xp = largest.__array_namespace__()
    return xp.where(largest == 0, np.float32(1), largest * np.float32(1 / LARGEST))


def round_to(wide: A, scale: A) -> A:
    """In int8, by scales that the numbers can be divided by. What is not finite has a scale that is
    not, which makes the product so too.
    """
    xp = wide.__array_namespace__()
    return xp.rint(wide / scale).astype(np.int8)


def product(
    rows: Array, weight: Array, scale: Array, input_first: bool, split: bool = False
) -> Array:
    """rows (M, in) times a weight in int8 → (M, out), in at least float32.

    Args:
      weight: (out, in), or (in, out) if `input_first`.
      scale: (out,).
      split: whether the weight lies on several devices. A block of its channels would lie on one
        of them, so each widens all of its part at once.
    """
    wide = np.promote_types(rows.dtype, jnp.float32)
    channels, outputs = int(input_first), len(scale)

    def times(rows, weight):
        widened = weight.astype(rows.dtype)
        turned = widened if input_first else widened.T
        return jnp.matmul(rows, turned, preferred_element_type=wide)

    def first_row(rows):
        """Of each input, for the device that has it."""
        return rows[0][:, None] if input_first else rows[0][None, :]

    def by_blocks(rows, weight):
        """Some output channels at a time, which stay in the processor's own memory."""
        blocks = -(-weight.size // BLOCK)
        if split or blocks == 1:
            return times(rows, late(weight, rows, first_row if split else first))
        size = -(-outputs // blocks)

        def block(i, out):
            at = jnp.minimum(i * size, outputs - size)  # the last may overlap the one before
            part = jax.lax.dynamic_slice_in_dim(weight, at, size, channels)
            return jax.lax.dynamic_update_slice_in_dim(out, times(rows, part), at, 1)

        return jax.lax.fori_loop(0, blocks, block, jnp.zeros((len(rows), outputs), wide))

    def at_once(rows, weight):
        return times(rows, late(weight, rows))

    sums = devices.by_platform(rows, weight, cpu=by_blocks, accelerator=at_once)
    return sums * scale[None, :].astype(wide)


def first(x: Array) -> Array:
    """The first number."""
    return x[(0,) * x.ndim]


def late(narrow: Array, x: Array, few: Callable[[Array], Array] = first) -> Array:
    """The same array in int8, which XLA cannot widen before x is known.

    What does not change in a loop is moved out of it: all weights would be widened once, and kept
    as floats. On a CPU a barrier is gone before that happens; there, what is added is always 0.

    Args:
      few: of x, what a CPU looks at; it broadcasts to the array. Of what is split over devices,
        numbers that lie where its parts lie, or devices would have to ask one another.
    """

    def cpu(narrow, x):
        seen = few(x)
        return narrow + ((seen > 0) & (seen < 0)).astype(narrow.dtype)

    def accelerator(narrow, x):
        return jax.lax.optimization_barrier((narrow, x))[0]

    return devices.by_platform(narrow, x, cpu=cpu, accelerator=accelerator)
