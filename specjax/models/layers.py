"""Projections and norms, shared by the model families: parameters in NNX modules.

Weights are (out, in), as in Hugging Face checkpoints, unless `arrange` has turned them.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax import devices
from specjax.models import int8, products

M = TypeVar("M", bound=nnx.Module)


class Linear(nnx.Module):
    """A layer y = x Wᵀ (+ b); W is (out, in), or its transpose once `arrange` has turned it."""

    weight_scale: nnx.Param | None = None  # (out,) float32, of a weight in int8
    split: bool = False  # over the devices of a mesh; see `sharding.split`

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
    ):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None
        self.input_first = False

    def __call__(self, x: Array) -> Array:
        """Map (..., in) to (..., out)."""
        options: dict[str, Any] = {"scale": self.weight_scale, "split": self.split}
        y = project(x, self.weight[...], self.input_first, **options)
        return y if self.bias is None else y + _as_last_axis(self.bias, y)

    def turned_weight(self) -> nnx.Param:
        """The weight that `arrange` transposes."""
        return self.weight

    def matrices(self) -> dict[str, bool]:
        """The matrices that `quantise_weights` rounds; True: it is (in, out)."""
        return {"weight": self.input_first}


class Fused(Linear):
    """Several projections of one input in one product; their rows are stacked.

    On a mesh the rows of one device lie together: `shards` blocks, each with an equal share of
    every part, so that no part crosses a block's border. `sharding.order` gives the order.
    """

    def __init__(self, inputs: int, parts: Sequence[int], std: float, **options):
        """Build the layer; `parts`: the number of outputs of each projection."""
        super().__init__(inputs, sum(parts), std, **options)
        self.parts = tuple(parts)
        self.shards = 1

    def __call__(self, x: Array) -> list[Array]:  # type: ignore[override]
        """Map (..., in) to (..., out) of each part."""
        y = super().__call__(x)
        ends = np.cumsum(self.parts)[:-1] // self.shards
        if self.shards == 1:
            return jnp.split(y, ends, axis=-1)
        blocks = jnp.split(y.reshape(*y.shape[:-1], self.shards, -1), ends, axis=-1)
        return [block.reshape(*y.shape[:-1], -1) for block in blocks]


def project(
    x: Array,
    weight: Array,
    input_first: bool,
    dtype: Any = None,
    scale: nnx.Param | None = None,
    split: bool = False,
) -> Array:
    """Multiply x by a weight that is (out, in), or (in, out) if `input_first`.

    It is a product of two matrices: with separate axes for rows and positions, XLA's CPU backend
    takes several times as long for the weight's gradient.

    Args:
      dtype: of sums and result. None: that of the factors.
      scale: (out,), of a weight in int8. Then the sums are in at least float32.
      split: see `int8.product`.
    """
    rows = x.reshape(-1, x.shape[-1])
    if scale is not None:
        out = int8.product(rows, weight, scale[...], input_first, split)
        out = out.astype(dtype or x.dtype)
    else:
        out = products.product(rows, weight, input_first, dtype)
    return out.reshape(*x.shape[:-1], -1)


def arrange(module: M, platform: str | None) -> M:
    """Turn projections of a module in place, one at a time, and return it.

    XLA's CPU backend multiplies up to five rows by an (in, out) matrix in the time of one row. It
    takes longer if the matrix is (out, in) and the second factor. The layout so makes verifying γ+1
    tokens as cheap as decoding one (docs/performance.md).

    Args:
      platform: "cpu", "gpu" or "tpu", for which `devices.input_first` chooses the layout of each
        weight; None: all get that of a checkpoint, (out, in).
    """
    # Rows are as wide as norms, biases and scales; in bfloat16 they are multiplied as x W.
    wide = any(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(module)))
    for _, layer in nnx.iter_graph(module):
        if hasattr(layer, "input_first"):
            turned = layer.turned_weight()
            narrow = turned.dtype in int8.DTYPES
            shape = turned.shape[::-1] if layer.input_first else turned.shape
            dtype = (jnp.int8 if narrow else turned.dtype) if wide else jnp.float32
            first = platform is not None and devices.input_first(platform, dtype, shape)
            if layer.input_first != first:
                turned.set_value(turned[...].T)
                layer.input_first = first
            shift = platform == "cpu" and not first and devices.cpu_multiplies("uint8")
            if narrow and shift != (turned.dtype == np.uint8):
                turned.set_value((int8.unsigned if shift else int8.signed)(turned[...]))
    return module


def quantise_weights(module: M) -> M:
    """Round all projections, embeddings and heads of a module to int8 in place, and return it.

    Each output channel has a scale, in a parameter beside the matrix, such as `weight_scale` for
    `weight`. A row of an embedding is a channel, as it is of a head, so tied ones share the scales
    too. Norms, biases and tables of positions are small, and stay as they are.
    """
    for _, layer in list(nnx.iter_graph(module)):
        for name, turned in layer.matrices().items() if hasattr(layer, "matrices") else ():
            matrix = getattr(layer, name)
            rounded, scale = int8.quantise(matrix[...], axis=0 if turned else 1)
            matrix.set_value(rounded)
            setattr(layer, f"{name}_scale", nnx.Param(scale))
    return module


def widen_weights(module: M, dtype: Any) -> M:
    """Undo `quantise_weights` in place, up to rounding, and return the module."""
    for _, layer in list(nnx.iter_graph(module)):
        for name, turned in layer.matrices().items() if hasattr(layer, "matrices") else ():
            matrix, scale = (getattr(layer, part) for part in (name, f"{name}_scale"))
            if scale is not None:
                by_row = jnp.expand_dims(scale[...], 0 if turned else 1)
                wide = int8.signed(matrix[...]).astype(by_row.dtype)
                matrix.set_value((wide * by_row).astype(dtype))
                delattr(layer, f"{name}_scale")
    return module


def narrow_weights(module: M, dtype: Any) -> M:
    """Cast all projections, embeddings and heads of a module to `dtype` in place, and return it.

    Norms, biases and tables of positions keep theirs, and so do hidden states and caches.
    """
    for _, layer in list(nnx.iter_graph(module)):
        for name in layer.matrices() if hasattr(layer, "matrices") else ():
            matrix = getattr(layer, name)
            matrix.set_value(matrix[...].astype(dtype))
    return module


class RMSNorm(nnx.Module):
    """RMSNorm: x / rms(x) · (offset + scale) over the last axis, computed in float32; no bias."""

    def __init__(self, width: int, epsilon: float, *, offset: float = 0.0, dtype=jnp.float32):
        """Build the layer; `offset`: 1 in a Gemma, which stores scales as differences from 1."""
        self.scale = nnx.Param(jnp.full((width,), 1.0 - offset, dtype))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: Array) -> Array:
        """Map (..., E) to (..., E), in the dtype of x."""
        wide = x.astype(np.promote_types(x.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(_row_mean(wide * wide) + self.epsilon)
        scale = _as_last_axis(self.scale, x)
        if self.offset:  # Gemma rounds after this product, and other families before it
            return (wide * inverse * (self.offset + scale.astype(wide.dtype))).astype(x.dtype)
        return (wide * inverse).astype(x.dtype) * scale


class LayerNorm(nnx.Module):
    """LayerNorm: (x − mean) / deviation · scale + bias over the last axis, in float32."""

    def __init__(self, width: int, epsilon: float, *, dtype=jnp.float32):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Map (..., E) to (..., E), in the dtype of x."""
        wide = x.astype(np.promote_types(x.dtype, jnp.float32))
        centred = wide - _row_mean(wide)
        unit = centred * jax.lax.rsqrt(_row_mean(centred * centred) + self.epsilon)
        scale, bias = (_as_last_axis(p, x).astype(wide.dtype) for p in (self.scale, self.bias))
        return (unit * scale + bias).astype(x.dtype)


def _row_mean(x: Array) -> Array:
    """The mean of the last axis, which stays; see `products.row_sum`."""
    return products.row_sum(x) / x.shape[-1]


def _as_last_axis(vector: nnx.Param, like: Array) -> Array:
    """Reshape (N,) to (1, …, 1, N), with as many axes as `like`."""
    return jnp.expand_dims(vector[...], tuple(range(like.ndim - 1)))
