"""Devices of arrays and programs, and what depends on them. No other module asks for a platform.

`by_platform` chooses when a program is lowered, by the platform it is lowered for. So an export
for "cuda" from a CPU is right, and so is a model on the CPU of a machine that has a GPU. Dtype and
layout of the parameters are chosen before that, by the device that the parameters are put on.
"""

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def by_platform(*operands: Any, cpu: Callable[..., T], accelerator: Callable[..., T]) -> T:
    """Return cpu(*operands) where the program runs on a CPU, accelerator(*operands) elsewhere.

    Both are traced, and one is compiled. The two differ in loops. On a CPU a condition is free, so
    a loop that ends early saves the turns that it skips. On an accelerator the host launches each
    turn. Unless XLA knows the number of turns, the host first reads the condition back from the
    device, and that takes longer than a few masked rows or slots do.
    """
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def find(device: jax.Device | str | None = None) -> jax.Device:
    """Find a device: the given one, or this process's first on platform "cpu", "gpu" or "tpu".

    None: the device of new arrays, which `jax.default_device` sets.

    Raises:
      ValueError: this machine has no such platform.
    """
    if device is None:
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if hasattr(device, "platform"):
        return device
    if not isinstance(device, str | None):
        raise ValueError(f"device={device!r} must be a jax.Device, or 'cpu', 'gpu' or 'tpu'.")
    try:
        return jax.local_devices(backend=device)[0]
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is no platform that jax finds on this machine; leave it out to use "
            f"{jax.default_backend()!r}."
        ) from error


def device_of(tree: Any) -> jax.Device:
    """The device of a pytree's arrays; of mere shapes, the one where jax would put them."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return min(leaf.devices(), key=lambda device: device.id)
    return find()


def is_accelerator(tree: Any) -> bool:
    """Whether the arrays of a pytree lie on a device that the host must wait for."""
    return device_of(tree).platform != "cpu"


def input_first(platform: str, dtype: Any, shape: tuple[int, int]) -> bool:
    """Whether a projection is stored (in, out) on this platform; see `layers.arrange`.

    A CPU with units for its dtype reads a large weight of bfloat16 or int8 at the speed of memory
    as the left factor of a product (`products.weight_first`), and so it stays (out, in). The limits
    are where that is faster for 1 to 4 rows (`experiments/benchmark/products.md`).

    Args:
      shape: (out, in).
    """
    name, inputs = np.dtype(dtype).name, shape[1]
    units = name in UNITS and cpu_multiplies(name)
    left = units and inputs * shape[0] >= LARGE[name] and (name == "int8" or inputs >= DEEP)
    return platform == "cpu" and not left


UNITS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"},
    "uint8": {"avx512_vnni"},
}
"""Flags of /proc/cpuinfo, on x86 and ARM, of a processor with units for products of a dtype.
"uint8": for uint8 by int8, which XLA multiplies faster than int8 by int8."""
MIN_ROWS = 4
"""Rows from which XLA's CPU backend uses them for an (in, out) matrix. For fewer rows it converts
every number of the matrix, and takes up to three times as long."""
LARGE, DEEP = {"int8": 1 << 19, "bfloat16": 1 << 20}, 1024
"""Numbers of a weight, and inputs of one of bfloat16, from which it is a left factor."""


@functools.cache
def cpu_multiplies(dtype: str) -> bool:
    """Whether this machine's processor has units for products of "bfloat16", "int8" or "uint8".

    Linux lists them. Elsewhere the answer is False.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return not UNITS[dtype].isdisjoint(text.split())


def cores() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
