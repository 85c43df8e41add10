"""Chooses how parameters are held where the user does not say."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import devices
from specjax.checkpoints.tensors import Tensor


class Precision(NamedTuple):
    """How parameters are held."""

    dtype: np.dtype
    weights: str | None = None  # "int8", as for `load`
    why: str = ""


def fastest(
    tensors: Mapping[str, Tensor],
    platform: str,
    stored_turned: tuple[str, ...] = (),
    *,
    may_round: bool = True,
) -> Precision:
    """Choose what a platform multiplies fastest, among what suits the stored numbers.

    A CPU with units for it takes int8 if most numbers are quantised already, and bfloat16 if all
    matrices are stored in it; but only if most numbers lie in matrices that are large enough to
    gain (`devices.input_first`). Else it takes float32. An accelerator takes the files' dtype, or
    bfloat16 for fewer bits.

    Args:
      stored_turned: suffixes of tensors that files store as (in, out).
      may_round: False: a CPU takes float32.
    """
    if platform != "cpu":
        widest = max(tensor.width for tensor in tensors.values())
        return Precision(np.dtype(jnp.bfloat16 if widest == 2 else jnp.float32))
    matrices = [
        (tensor, tensor.shape[::-1] if name.endswith(stored_turned) else tensor.shape)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2
    ]

    def most(suits: Callable[[Tensor, Any], bool]) -> bool:
        """Whether more than half of the numbers lie in such matrices."""
        return sum(math.prod(shape) * (1 if suits(t, shape) else -1) for t, shape in matrices) > 0

    def gains(dtype: Any) -> bool:
        return may_round and most(lambda _, shape: not devices.input_first(platform, dtype, shape))

    if most(lambda tensor, _: tensor.in_blocks) and gains(np.int8):
        why = "as its file has at most 8 bits a number and this CPU multiplies int8 fastest"
        return Precision(np.dtype(np.float32), "int8", f"int8, {why}; dtype=float32 rounds none")
    if {tensor.dtype for tensor, _ in matrices} == {np.dtype(jnp.bfloat16)} and gains(jnp.bfloat16):
        why = "as its file has it and this CPU multiplies it fastest"
        return Precision(np.dtype(jnp.bfloat16), None, f"bfloat16, {why}")
    why = "float32, as nothing that suits its file is faster on this CPU" if may_round else ""
    return Precision(np.dtype(np.float32), None, why)
