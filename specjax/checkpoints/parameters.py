"""Fills a module's parameters from tensors of files, a piece at a time, and the reverse."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from specjax import devices
from specjax.checkpoints.families import Family
from specjax.checkpoints.formats.gguf_files import is_gguf, way_out
from specjax.checkpoints.tensors import (
    Tensor,
    Turned,
    Unread,
    read_int8,
    read_into,
    read_rounded,
    read_scales,
)
from specjax.models import int8, sharding
from specjax.models.layers import M, arrange, narrow_weights, quantise_weights
from specjax.models.memory import nbytes
from specjax.models.sharding import Placement, turned_paths

MAX_READERS = 8  # threads, each of which holds some megabytes of numbers that it decodes
SHOWN_AFTER = 1  # seconds; a small model needs no bar


def without_params(
    family: Family,
    config: Any,
    dtype: np.dtype,
    platform: str,
    weights: str | None = None,
    cache: str | None = None,
) -> Any:
    """Build a module with shapes for parameters; no weights are made.

    A CPU computes in float32, so bfloat16 is the dtype of matrices alone there.
    """

    mixed = platform == "cpu" and dtype == jnp.bfloat16

    def build() -> nnx.Module:
        module = family.build(config, rngs=nnx.Rngs(0), dtype=jnp.float32 if mixed else dtype)
        if weights:
            quantise_weights(module)
        elif mixed:
            narrow_weights(module, dtype)
        return arrange(module, platform)

    module: Any = nnx.eval_shape(build)
    if cache:
        module.int8_cache = True
    return module


def filled(
    module: M,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    *,
    device: jax.Device | None = None,
) -> M:
    """Fill a module of shapes (`nnx.eval_shape`) with the parameters in tensors.

    Args:
      names: for each parameter's path its tensors, stacked by rows, each with its share of them.
      device: holds the parameters; None: jax's own choice.

    Raises:
      ValueError: a tensor is missing, of another shape, or holds no floats.
    """
    tensors = needed(names, tensors)
    check_tensors(module, names, tensors, ())
    return read_params(module, names, tensors, (), device)


def unfilled(
    module: nnx.Module,
    names: Mapping[tuple, dict[str, int]],
    stored_turned: tuple[str, ...] = (),
    moved: Mapping[tuple, np.ndarray] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The inverse of `filled`: a module's parameters by the names of their tensors.

    Args:
      names: as in `filled`.
      stored_turned: suffixes of tensors that files store as (in, out).
      moved: rows of a module on a mesh; see `sharding.moved`.
    """
    turned, found = turned_paths(module), {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        array = np.asarray(variable[...])
        stacked = sharding.restored(array.T if path in turned else array, moved.get(path))
        shares = list(names[path].values())
        ends = np.cumsum(shares) * len(stacked) // sum(shares)
        for name, part in zip(names[path], np.split(stacked, ends[:-1]), strict=True):
            found[name] = part.T if name.endswith(stored_turned) else part
    return found


def read_params(
    module: M,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    stored_turned: tuple[str, ...],
    device: jax.Device | None = None,
    placement: Placement | None = None,
) -> M:
    """Read the files' parameters into a module, one in each thread: numpy releases Python's lock.

    Args:
      device: the parameters are committed to it; None: to none, so jax may move them.
      placement: on a mesh, each device gets its part, and nothing else is read.
    """
    graphdef, abstract = nnx.split(module)
    slots, turned, filled = dict(nnx.to_flat_state(abstract)), turned_paths(module), {}
    specs = {} if placement is None else sharding.specs(module, placement)
    order = {} if placement is None else sharding.order(module, placement)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # of this thread alone

    def placed(path: tuple, part: Callable[..., np.ndarray]) -> jax.Array:
        shape = slots[path].shape
        if placement is None:
            whole = part(*(slice(0, size) for size in shape))
            with jax.default_device(default):
                # Nothing else writes to it, so on a CPU the array may use its memory uncopied.
                return jax.device_put(whole, device, may_alias=True)

        @functools.cache  # a part that several devices hold is read once
        def read(*bounds):
            return part(*itertools.starmap(slice, bounds))

        def at(index):
            axes = zip(index, shape, strict=True)
            return read(*(axis.indices(size)[:2] for axis, size in axes))

        return jax.make_array_from_callback(shape, specs[path], at, dtype=slots[path].dtype)

    def read(path: tuple) -> None:
        parts = [
            Turned.of(tensors[name]) if name.endswith(stored_turned) else tensors[name]
            for name in names[path]
        ]
        rows = order.get(path, np.arange(sum(tensor.shape[0] for tensor in parts)))
        stacked = _Stacked(parts, rows, slots[path].dtype, path in turned)
        found: dict[tuple, Callable[..., np.ndarray]] = {path: stacked.part}
        if slots[path].dtype in int8.DTYPES:
            found[_scale_of(path)] = stacked.scales
        for one, part in found.items():
            filled[one] = slots[one].replace(jax.block_until_ready(placed(one, part)))

    paths = [path for path in slots if _weight_of(path, slots) is None]
    bar = tqdm(total=nbytes(slots), desc="weights", disable=None, unit="B", unit_scale=True,
               leave=False, delay=SHOWN_AFTER)  # fmt: skip
    with bar, _readers(None if placement is None else 1) as readers:
        for path, _ in zip(paths, readers.map(read, paths), strict=True):
            bar.update(nbytes(slots[path]))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@contextlib.contextmanager
def _readers(count: int | None) -> Iterator[concurrent.futures.Executor]:
    """Threads that read parameters. After an error, those that wait are not read."""
    pool = concurrent.futures.ThreadPoolExecutor(count or min(devices.cores(), MAX_READERS))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Stacked:
    """A parameter in files: rows of tensors, stacked. Devices hold all of it or parts."""

    tensors: list[Tensor]
    rows: np.ndarray  # of all tensors, in the mesh's order; −1: padding
    dtype: np.dtype
    turned: bool
    known: dict[tuple[int, int], np.ndarray] = dataclasses.field(default_factory=dict)  # scales

    def part(self, *at: slice) -> np.ndarray:
        """Read the numbers at a place of the parameter; rows of padding are zeros."""
        narrow = self.dtype in int8.DTYPES
        dtype = np.dtype(np.int8) if narrow else self.dtype
        out = _aligned(tuple(axis.stop - axis.start for axis in at), dtype)
        first, *others = at[::-1] if self.turned else at
        stacked = out.T if self.turned else out
        stacked[self.rows[first] < 0] = 0
        if narrow:
            self._round(stacked, first, others[0])
        else:
            for tensor, there, here in self._runs(first):
                read_into(tensor, stacked[here], (there, *others))
        if self.dtype == np.uint8:
            out = out.view(np.uint8)
            out ^= np.uint8(int8.SHIFT)
        return out

    def _round(self, out: np.ndarray, some: slice, columns: slice) -> None:
        """Fill `out` with int8, and with whole rows their scales in the same pass."""
        at, scale = (some.start, some.stop), self._ones(some)
        if at not in self.known and columns.stop - columns.start == self.tensors[0].shape[1]:
            for tensor, there, here in self._runs(some):
                read_int8(tensor, out[here], scale[here], there)
            self.known[at] = scale
            return
        scale = self.scales(some)
        for tensor, there, here in self._runs(some):
            read_rounded(tensor, out[here], scale[here], (there, columns))

    def scales(self, some: slice) -> np.ndarray:
        """Scales of some int8 rows, read once from whole rows: a device may hold a part of one."""
        at = some.start, some.stop
        if at not in self.known:
            out = self._ones(some)
            for tensor, there, here in self._runs(some):
                read_scales(tensor, out[here], there)
            self.known[at] = out
        return self.known[at]

    @staticmethod
    def _ones(some: slice) -> np.ndarray:
        out = _aligned((some.stop - some.start,), np.dtype(np.float32))
        out[...] = 1
        return out

    def _runs(self, some: slice) -> Iterator[tuple[Tensor, slice, slice]]:
        """Runs of rows that are adjacent in a tensor: the slice there, and the slice in `some`."""
        rows, begin = self.rows[some], 0
        for tensor in self.tensors:
            mine = np.flatnonzero((begin <= rows) & (rows < begin + tensor.shape[0]))
            for run in np.split(mine, np.flatnonzero(np.diff(rows[mine]) != 1) + 1):
                if len(run):
                    first = int(rows[run[0]]) - begin
                    yield tensor, slice(first, first + len(run)), slice(run[0], run[-1] + 1)
            begin += tensor.shape[0]


def needed(
    names: Mapping[tuple, dict[str, int]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that the parameters need; others are left out, with one warning.

    Raises:
      ValueError: one is missing.
    """
    wanted = dict.fromkeys(name for parts in names.values() for name in parts)
    files = [tensor.file for tensor in tensors.values()][:1]
    place = next((f if is_gguf(f) else f.parent for f in files), "the checkpoint")
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(
            f"{place}: {_some(missing)} missing from the weights, or the config is of another "
            f"model. {way_out(tensors)}"
        )
    if surplus := [name for name in tensors if name not in wanted]:
        warnings.warn(
            f"{place}: {_some(surplus)} in the weights belong to no layer that the config "
            "describes, and are left out. If the model needs them, the config is of another one.",
            stacklevel=4,
        )
    return {name: tensors[name] for name in wanted}


def check_tensors(
    module: nnx.Module,
    names: Mapping[tuple, dict[str, int]],
    tensors: Mapping[str, Tensor],
    stored_turned: tuple[str, ...],
) -> None:
    """Raise ValueError unless each tensor holds floats, in the shape that config.json asks for."""
    shapes: dict[str, tuple[int, ...]] = {}
    slots, turned = dict(nnx.to_flat_state(nnx.state(module))), turned_paths(module)
    for path, slot in slots.items():
        if _weight_of(path, slots) is not None:
            continue
        parts, shape = names[path], slot.shape[::-1] if path in turned else slot.shape
        for name, share in parts.items():
            part = (shape[0] * share // sum(parts.values()), *shape[1:])
            shapes[name] = part[::-1] if name.endswith(stored_turned) else part
    for name, shape in shapes.items():
        if isinstance(unread := tensors[name], Unread):
            raise ValueError(unread.reason)
        if tensors[name].dtype.kind in "biu":
            raise ValueError(
                f"{tensors[name].file}: {name!r} is stored as {tensors[name].dtype}; weights "
                "should be floats."
            )
        if tensors[name].shape != shape:
            raise ValueError(
                f"{tensors[name].file}: {name!r} has shape {tensors[name].shape}, but its config "
                f"asks for {shape}. {way_out({name: tensors[name]})}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _scale_of(path: tuple) -> tuple:
    """The path of the scales of a matrix in int8."""
    return *path[:-1], f"{path[-1]}_scale"


def _weight_of(path: tuple, slots: Mapping[tuple, Any]) -> tuple | None:
    """The path of the int8 matrix that has its scales at `path`; None: there are none."""
    *place, last = path
    weight = *place, str(last).removesuffix("_scale")
    return weight if weight != path and weight in slots else None


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array aligned to 64 bytes, which XLA on a CPU can use in place."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(dtype).reshape(shape)
