"""What a model needs of memory, from shapes alone, and what the device has.

Nothing is allocated here: `hub.outline` gives a checkpoint whose parameters are shapes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import devices
from specjax.types import Inputs, Model


class Need(NamedTuple):
    """Bytes. What the compiler takes for intermediate results comes on top."""

    params: int
    state: int  # context and cache of a batch: keys and values, masks, position biases
    laws: int  # of a round: float32 over the vocabulary at each position of the batch

    @property
    def total(self) -> int:
        return sum(self)


def memory_needed(
    model: Model, *, rows: int, source_len: int, buffer_len: int, gamma: int = 0
) -> Need:
    """Bytes for decoding with a model, loaded or an outline.

    Args:
      rows: B, decoded at once.
      source_len: S; 0 for a decoder-only model, whose prompts are part of the buffer.
      buffer_len: T, prompt + new tokens + gamma + 1; `decoding.needed` has the shapes of a run.
      gamma: laws of γ drafted tokens and of γ + 1 positions are held at once.
    """
    shapes = ((rows, source_len), (rows,), (rows, 1), (rows,))
    inputs = Inputs._make(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    state = jax.eval_shape(lambda model, inputs: model.start(inputs, buffer_len), model, inputs)
    laws = 4 * rows * (2 * gamma + 1) * model.vocab_size
    return Need(nbytes(model), nbytes(state), laws)


def nbytes(tree: Any) -> int:
    """Of all arrays, or shapes of arrays, in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_free(device: jax.Device | None = None) -> int | None:
    """Bytes that can still be allocated on a device; None where it does not say.

    On a CPU: what the system calls available, or what is left of the container's limit.

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


def check_fits(what: str, needed: int, way_out: str, device: jax.Device | None = None) -> None:
    """ValueError that names both numbers if the device certainly cannot hold `needed` bytes.

    Args:
      what: is to be held, for the message: the beginning of a sentence.
      device: default: where jax puts new arrays.
    """
    device = devices.find(device)
    free = memory_free(device)
    if free is not None and needed > free:
        place = "this machine" if device.platform == "cpu" else f"the device {device}"
        raise ValueError(
            f"{what} need {gigabytes(needed)}, and {gigabytes(free)} are free on {place}. {way_out}"
        )


def gigabytes(count: int) -> str:
    """In 10⁹ bytes, with three digits: 45.2 GB, 0.03 GB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e7 else f"{count / 1e6:.3g} MB"


def _host_free() -> int | None:
    """MemAvailable: free pages and those that the system gives up at once (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _container_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a control group (version 2) leaves; pages of files that nobody uses are given up."""
    try:
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stats = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - int(used) + int(stats.get("inactive_file", 0)))
