"""Numbers in 8 bits: x ≈ int8 · scale, symmetric around 0, with one scale per vector.

Weights have a scale for each output channel, caches one for each position and head. Only storage is
narrow: products are as exact as with the widened numbers, and are scaled afterwards. A CPU with
units for int8 takes rows as sums of two int8 parts. Other CPUs widen the weights a block at a time:
a product reads a quarter of the bytes, and holds little beside.

Where a CPU has AVX-512's VNNI, a weight that is a left factor is stored as uint8, shifted by 128:
the instruction multiplies uint8 by int8. `layers.arrange` decides, and `signed` undoes it.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import devices
from specjax.models import products

LARGEST = 127
BLOCK = 1 << 20  # weights that a CPU widens at once
SHIFT, TILE = 128, 4
"""What uint8 adds to a number in int8; rows of int8 that VNNI's kernels take at once."""
DTYPES = (np.dtype(np.int8), np.dtype(np.uint8))
"""The dtypes of a stored weight in 8 bits."""
A = TypeVar("A", Array, np.ndarray)


def quantise(x: A, axis: int) -> tuple[A, A]:
    """Round to int8, so that |x − int8 · scale| ≤ scale / 2; scale = max |x| / 127 along `axis`.

    Args:
      x: floats, of numpy or jax.
      axis: the axis along which numbers share a scale.

    Returns:
      int8, in the shape of x, and the scales in float32, without that axis.
    """
    xp = x.__array_namespace__()
    wide = x.astype(np.float32)
    scale = scale_of(xp.max(xp.abs(wide), axis=axis))
    return round_to(wide, xp.expand_dims(scale, axis)), scale


def scale_of(largest: A) -> A:
    """The scale of the largest absolute values, ≥ 0, float32; 1 for a vector of zeros."""
    xp = largest.__array_namespace__()
    return xp.where(largest == 0, np.float32(1), largest * np.float32(1 / LARGEST))


def round_to(wide: A, scale: A) -> A:
    """Round to int8 by given scales, which the numbers can be divided by.

    A number that is not finite has a scale that is not finite, and so has the product.
    """
    xp = wide.__array_namespace__()
    return xp.rint(wide / scale).astype(np.int8)


def signed(x: A) -> A:
    """Return a weight that is stored as uint8 in int8, and any other array unchanged."""
    return (x ^ np.uint8(SHIFT)).view(np.int8) if x.dtype == np.uint8 else x


def unsigned(x: A) -> A:
    """Return a weight in int8 as uint8, shifted by 128, and one in uint8 unchanged."""
    return x.view(np.uint8) ^ np.uint8(SHIFT) if x.dtype == np.int8 else x


def product(
    rows: Array, weight: Array, scale: Array, input_first: bool, split: bool = False
) -> Array:
    """Multiply rows (M, in) by a weight in int8: (M, out), in at least float32.

    Args:
      weight: (out, in), also as uint8 (`unsigned`), or (in, out) if `input_first`.
      scale: (out,).
      split: whether the weight lies on several devices. A block of its channels would lie on one
        of them, so each device widens all of its part at once.
    """
    wide = np.promote_types(rows.dtype, jnp.float32)
    channels, outputs = int(input_first), len(scale)

    def times(rows, weight):
        widened = signed(weight).astype(rows.dtype)
        turned = widened if input_first else widened.T
        return jnp.matmul(rows, turned, preferred_element_type=wide)

    def first_row(rows):
        """One number of each input, for the device that has it."""
        return rows[0][:, None] if input_first else rows[0][None, :]

    def by_blocks(rows, weight):
        """Multiply some output channels at a time, which stay in the processor's cache."""
        if devices.cpu_multiplies("int8") and not split:  # a scale would be a collective
            return in_parts(rows, weight, input_first).astype(wide)
        blocks, count = -(-weight.size // BLOCK), len(rows)
        rows = products.filled(rows, 2)
        if split or blocks == 1:
            return times(rows, late(weight, rows, first_row if split else first))[:count]
        size = -(-outputs // blocks)

        def block(i, out):
            at = jnp.minimum(i * size, outputs - size)  # the last may overlap the one before
            part = jax.lax.dynamic_slice_in_dim(weight, at, size, channels)
            return jax.lax.dynamic_update_slice_in_dim(out, times(rows, part), at, 1)

        empty = jnp.zeros((len(rows), outputs), wide)
        return jax.lax.fori_loop(0, blocks, block, empty)[:count]

    def at_once(rows, weight):
        return times(rows, late(weight, rows))

    sums = devices.by_platform(rows, weight, cpu=by_blocks, accelerator=at_once)
    return sums * scale[None, :].astype(wide)


def in_parts(rows: Array, weight: Array, input_first: bool) -> Array:
    """Multiply rows (M, in) by an int8 weight in integers: (M, out) float32.

    A row is two int8 parts, x = coarse · s + fine · s/254 with s = max |x| / 127, up to
    max |x| / 64,516. Both parts are rows of one product, whose int32 sums are exact; so a row's
    result does not depend on the rows beside it.
    """
    wide = rows.astype(jnp.float32)
    scale = scale_of(jnp.abs(wide).max(axis=1, keepdims=True))
    coarse = jnp.rint(wide / scale)
    fine = jnp.rint((wide - coarse * scale) / (scale / (2 * LARGEST)))
    # Both parts of a row lie side by side, so that rows of several devices stay where they are.
    count, width = rows.shape
    parts = jnp.stack([coarse, fine], axis=1).astype(jnp.int8).reshape(2 * count, width)
    if not input_first:
        sums = left_sums(parts, weight)
        pairs = sums.astype(jnp.float32).reshape(-1, count, 2)
        return (pairs[..., 0] + pairs[..., 1] / (2 * LARGEST)).T * scale
    padded = products.filled(parts, devices.MIN_ROWS)
    sums = jnp.matmul(padded, weight, preferred_element_type=jnp.int32)[: 2 * count]
    apart = sums.astype(jnp.float32).reshape(count, 2, -1)
    return (apart[:, 0] + apart[:, 1] / (2 * LARGEST)) * scale


def left_sums(parts: Array, weight: Array) -> Array:
    """Sums of an (out, in) weight, in int8 or uint8, and rows (M, in) in int8: (out, M) int32."""
    if weight.dtype == jnp.int8:
        return products.weight_first(parts, weight, jnp.int32)
    count, axes = len(parts), (((1,), (1,)), ((), ()))
    padded = products.filled(parts, -(-count // TILE) * TILE if count > 2 else 2)
    # With a preset jax hands over the two dtypes as they are; it would widen the whole weight.
    preset = jax.lax.DotAlgorithmPreset.DEFAULT
    sums = jax.lax.dot_general(
        weight, padded, axes, precision=preset, preferred_element_type=jnp.int32
    )
    return sums[:, :count] - SHIFT * parts.astype(jnp.int32).sum(axis=1)[None, :]


def first(x: Array) -> Array:
    """The first number of an array."""
    return x[(0,) * x.ndim]


def late(narrow: Array, x: Array, few: Callable[[Array], Array] = first) -> Array:
    """Return the int8 array unchanged, such that XLA cannot widen it before x is known.

    XLA hoists loop invariants: it would widen all weights once, and keep them as floats. On a CPU
    `optimization_barrier` is removed too early, so 0 is added, which XLA cannot prove to be 0.

    Args:
      few: selects the numbers of x that a CPU looks at; they broadcast to the array. If the array
        is split over devices, they must lie where its parts lie, or a collective is needed.
    """

    def cpu(narrow, x):
        seen = few(x)
        return narrow + ((seen > 0) & (seen < 0)).astype(narrow.dtype)

    def accelerator(narrow, x):
        return jax.lax.optimization_barrier((narrow, x))[0]

    return devices.by_platform(narrow, x, cpu=cpu, accelerator=accelerator)
