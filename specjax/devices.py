"""Where arrays lie and programs run, and what follows from it. Nothing else asks for a platform.

`by_platform` is decided when a program is lowered, by the platform it is lowered for. So an export
for "cuda" from a CPU is right, and so is a model on the CPU of a machine that has a GPU. Dtype and
layout of the parameters are decided before: they follow the device that the parameters are put on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def by_platform(*operands: Any, cpu: Callable[..., T], accelerator: Callable[..., T]) -> T:
    """cpu(*operands) where the program runs on a CPU, accelerator(*operands) elsewhere.

    Both are traced, and one is compiled. What differs is loops. On a CPU a condition costs nothing,
    so a loop that ends early saves all that it leaves out. On an accelerator the host launches each
    turn. Unless XLA knows the number of turns, the host must first read the condition back from the
    device, and that takes longer than a few masked rows or slots do.
    """
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=accelerator)


def find(device: jax.Device | str | None = None) -> jax.Device:
    """A device, or the first of this process's that has the platform "cpu", "gpu" or "tpu".

    None: where jax puts new arrays, which `jax.default_device` sets.

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
    """Where the arrays of a pytree lie; if it holds only shapes, where jax would put them."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return min(leaf.devices(), key=lambda device: device.id)
    return find()


def is_accelerator(tree: Any) -> bool:
    """Whether the arrays of a pytree lie on a device that the host must wait for."""
    return device_of(tree).platform != "cpu"


def input_first(platform: str) -> bool:
    """Whether projections lie (in, out) there; see `layers.arrange`."""
    return platform == "cpu"


def has_half_precision(platform: str) -> bool:
    """Whether products of bfloat16 are faster there than those of float32."""
    return platform != "cpu"
