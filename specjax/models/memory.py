"""Memory that decoding needs, and memory that a device has.

Nothing is allocated here. `decoding.programs.needed` gives the `Need` of a run, of loaded models or
of outlines (`checkpoints.outline`), whose parameters are shapes.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import devices


class Need(NamedTuple):
    """Bytes that a run needs."""

    params: int  # of all models
    state: int  # of a batch: caches, contexts and all else that rounds carry
    temporary: int  # intermediate results of a compiled program: distributions and activations

    @property
    def total(self) -> int:
        """The sum: all of it is held at once."""
        return sum(self)


def temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program holds beside its arguments while it runs.

    They are intermediate results, as the compiler has placed them, and results that are not written
    over a donated argument. The compiler decides how many distributions over the vocabulary are
    held at once, so no formula bounds it. 0 on a backend that does not report it.

    XLA does not count what a library's kernels hold on a CPU (YNNPACK, in a softmax):
    up to two more arrays of the size of a round's distributions.
    """
    sizes = compiled.memory_analysis()
    if sizes is None:
        return 0
    return sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a pytree; a shared array counts once.

    On a mesh: the bytes on one of its devices.
    """
    leaves = {id(leaf): leaf for leaf in _arrays(tree)}
    return sum(math.prod(_held(leaf)) * leaf.dtype.itemsize for leaf in leaves.values())


def _arrays(tree: Any) -> list[Any]:
    """The arrays and shapes of arrays in a pytree, without plain numbers."""
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def _held(leaf: Any) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def dtype_of(tree: Any) -> np.dtype:
    """A model's narrowest floats: the dtype of its matrices, unless they are int8.

    float32 where it has none, as a model of your own may.
    """
    dtypes = {leaf.dtype for leaf in _arrays(tree)}
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return np.dtype(min(floats, key=lambda dtype: dtype.itemsize, default=jnp.float32))


def memory_free(device: jax.Device | None = None) -> int | None:
    """Bytes that can still be allocated on a device; None if it does not report them.

    On a CPU: the system's available memory, or the rest of the container's limit.

    Args:
      device: default: where jax puts new arrays.
    """
    device = devices.find(device)
    if device.platform == "cpu":
        known = [free for free in (_host_free(), _container_free()) if free is not None]
        return min(known, default=None)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_fits(
    what: str,
    needed: int,
    way_out: str | Callable[[int], str],
    device: jax.Device | None = None,
    times: int = 1,
) -> None:
    """Raise ValueError, with both numbers, if the device certainly cannot hold `needed` bytes.

    Args:
      what: beginning of the message: the thing to hold.
      way_out: end of the message, or a function that makes it from the bytes that are free.
      device: default: where jax puts new arrays.
      times: devices of one machine that each need as much: those of a CPU share its memory.
    """
    device = devices.find(device)
    needed *= times if device.platform == "cpu" else 1
    free = memory_free(device)
    if free is not None and needed > free:
        end = way_out if isinstance(way_out, str) else way_out(free)
        place = "this machine" if device.platform == "cpu" else f"the device {device}"
        raise ValueError(
            f"{what} need {gigabytes(needed)}, and {gigabytes(free)} are free on {place}. {end}"
        )


def gigabytes(count: int) -> str:
    """Format bytes with three digits: 45.2 GB, or 3.25 MB below 0.01 GB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e7 else f"{count / 1e6:.3g} MB"


def _host_free() -> int | None:
    """MemAvailable of Linux: free pages, and those that the system gives up at once."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _container_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left in a control group (version 2); its unused pages of files count as free."""
    try:
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stats = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - int(used) + int(stats.get("inactive_file", 0)))
