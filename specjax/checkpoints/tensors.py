"""Tensors of files by name: the one interface to weights.

A source of weights is a dict from names to `Tensor`s. Shape and dtype come from headers; numbers
are read on demand, a piece at a time, to where they belong. A module each for safetensors, pickles,
msgpack, zarr and GGUF fills such a dict; all other code is independent of the format.
"""

import abc
import dataclasses
import math
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # registers the name "bfloat16" with numpy too
import numpy as np

from specjax.models import int8

FLOATS = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Some files hold masks or counters beside the weights; they are found, and never read.
DTYPES = FLOATS | {
    name: np.dtype(name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")
}
HELD = ("float32", "bfloat16", "float16")  # dtypes in which parameters may be held or written
CHUNK = 1 << 20
"""Bytes read at once. They and what is computed of them stay in a processor's cache, and in memory
that Python keeps; larger arrays are new memory for each piece, which Linux has to clear."""
AGAIN = "Copy or download it again."
POINTER = b"version https://git-lfs"  # begins what git-lfs leaves in the place of a file
At = tuple[slice, ...]  # where a piece lies in its tensor


@dataclasses.dataclass(frozen=True)
class Tensor(abc.ABC):
    """A tensor in a file. Equal ones lie in the same place."""

    file: Path
    """The file that holds the tensor, for messages."""
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes of a number that keep its precision in memory; 0: other tensors decide."""
        return self.dtype.itemsize

    @property
    def in_blocks(self) -> bool:
        """Whether the numbers are quantised: 8 bits or fewer each, with a scale for a block."""
        return False

    @abc.abstractmethod
    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield all numbers once, a few megabytes at a time, each piece with its place."""

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the numbers of a part, each piece with its place in that part.

        By default the whole tensor is read, and numbers outside the part are dropped at once.

        Args:
          part: slices with a begin and an end ≥ 0, one for each axis.
        """
        for at, piece in self.pieces():
            lengths = zip(at, part, self.shape, strict=True)
            shared, place = [], []
            for here, wanted, size in lengths:
                first, end, _ = here.indices(size)
                begin, stop = max(first, wanted.start), min(end, wanted.stop)
                shared.append(slice(begin - first, stop - first))
                place.append(slice(begin - wanted.start, stop - wanted.start))
            if all(axis.start < axis.stop for axis in shared):
                yield tuple(place), piece[tuple(shared)]
            del piece


@dataclasses.dataclass(frozen=True)
class Stored(Tensor):
    """A tensor whose numbers lie in its file one by one."""

    begin: int
    """Offset in bytes from the beginning of the file."""
    strides: tuple[int, ...]
    """Elements from one index to the next, one for each axis."""
    checksum: int = 0
    """CRC-32 of its bytes, if they are a whole storage in order; 0: unknown."""

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield pieces in the file's order; ValueError at the end if the checksum differs."""
        found = 0

        def read(begin: int, count: int) -> bytes:
            nonlocal found
            data = read_bytes(self.file, self.begin + begin, count)
            if self.checksum:
                found = zlib.crc32(data, found)
            return data

        yield from strided_pieces(self.shape, self.strides, self.dtype, read)
        if self.checksum and found != self.checksum:
            raise ValueError(f"{self.file} is damaged (wrong checksum of a tensor). {AGAIN}")

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the numbers of a part; without a checksum, other rows are not read."""
        if self.checksum:
            yield from super().within(part)
            return
        moved = sum(axis.start * step for axis, step in zip(part, self.strides, strict=True))
        some = dataclasses.replace(
            self,
            shape=tuple(axis.stop - axis.start for axis in part),
            begin=self.begin + moved * self.dtype.itemsize,
        )
        yield from some.pieces()


@dataclasses.dataclass(frozen=True)
class Turned(Tensor):
    """A matrix that the file holds transposed."""

    stored: Tensor

    @classmethod
    def of(cls, stored: Tensor) -> "Turned":
        """The transpose of a tensor."""
        return cls(stored.file, stored.dtype, stored.shape[::-1], stored)

    @property
    def width(self) -> int:
        """The width of the stored tensor."""
        return self.stored.width

    @property
    def in_blocks(self) -> bool:
        """Whether the stored tensor is quantised."""
        return self.stored.in_blocks

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the pieces of the stored tensor, transposed."""
        for at, piece in self.stored.pieces():
            yield at[::-1], piece.T
            del piece

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield a part of the stored tensor, transposed."""
        for at, piece in self.stored.within(part[::-1]):
            yield at[::-1], piece.T
            del piece


@dataclasses.dataclass(frozen=True)
class Unread(Tensor):
    """A tensor of a type that cannot be read. A model that does not need it still loads."""

    reason: str  # the error of reading it

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Raise ValueError."""
        raise ValueError(self.reason)


@dataclasses.dataclass(frozen=True, eq=False)
class Held(Tensor):
    """A tensor in memory, to be written."""

    array: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> "Held":
        """Wrap an array as a tensor."""
        return cls(Path("memory"), array.dtype, array.shape, array)

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the whole array as one piece."""
        yield tuple(slice(None) for _ in self.shape), self.array


def float_dtype(value: Any) -> np.dtype:
    """Read the argument `dtype`; ValueError unless it is one of `HELD`."""
    try:
        found = np.dtype(value)
    except TypeError:
        found = None
    if value is None or found is None or found.name not in HELD:
        raise ValueError(f"dtype={value!r} must be one of {', '.join(HELD)}.")
    return found


def read_into(tensor: Tensor, out: np.ndarray, part: At | None = None) -> None:
    """Fill `out`, of the shape of the tensor or of the part, in its own dtype and strides."""
    for at, piece in tensor.pieces() if part is None else tensor.within(part):
        # numpy rounds numbers that are adjacent much faster than it transposes rounded ones.
        out[at] = piece.astype(out.dtype, copy=False)
        del piece  # otherwise it stays in memory beside the next


def read_int8(
    tensor: Tensor, out: np.ndarray, scale: np.ndarray, rows: slice = slice(None)
) -> None:
    """Fill `out`, in int8, and the scale of each row with a matrix or some rows of it.

    The numbers are those of `int8.quantise`. The file is read once, or twice if its pieces hold
    parts of rows.
    """
    part = (slice(*rows.indices(tensor.shape[0])[:2]), slice(0, tensor.shape[1]))
    for at, piece in tensor.within(part):
        if piece.shape[1] < tensor.shape[1]:  # scales are those of whole rows
            read_scales(tensor, scale, rows)
            read_rounded(tensor, out, scale, part)
            return
        with np.errstate(invalid="ignore"):  # where a number is not finite, neither is its scale
            out[at], scale[at[0]] = int8.quantise(piece, axis=1)
        del piece


def read_scales(tensor: Tensor, out: np.ndarray, rows: slice = slice(None)) -> None:
    """Fill `out` with the scale of each row of a matrix, or of some rows, as `int8.quantise` does.

    This is a separate pass before `read_rounded`, for pieces that hold parts of rows.

    Args:
      out: float32.
    """
    out[...] = 0
    for at, piece in tensor.within(
        (slice(*rows.indices(tensor.shape[0])[:2]), slice(0, tensor.shape[1]))
    ):
        found = np.abs(piece).max(axis=1).astype(np.float32)
        out[at[0]] = np.maximum(out[at[0]], found)
        del piece
    out[...] = int8.scale_of(out)


def read_rounded(tensor: Tensor, out: np.ndarray, scale: np.ndarray, part: At) -> None:
    """Fill `out`, in int8, with a part of a matrix, rounded by the scales of its rows."""
    with np.errstate(invalid="ignore"):  # where a number is not finite, neither is its scale
        for at, piece in tensor.within(part):
            out[at] = int8.round_to(piece.astype(np.float32), scale[at[0], None])
            del piece


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, without holding either in memory."""
    if a == b:
        return True
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    for (at, x), (there, y) in zip(a.pieces(), b.pieces(), strict=False):
        if at != there:  # different layouts: one tensor is read as a whole
            whole = np.empty(b.shape, b.dtype)
            read_into(b, whole)
            return all(np.array_equal(x, whole[at]) for at, x in a.pieces())
        if not np.array_equal(x, y):
            return False
    return True


def strided_pieces(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype,
    read: Callable[[int, int], bytes],
) -> Iterator[tuple[At, np.ndarray]]:
    """Yield pieces of a tensor in the order of its numbers in the file.

    Args:
      shape: any; nothing is read of an empty tensor.
      strides: elements from one index to the next, ≥ 0, one for each axis.
      dtype: of the numbers, as they are stored.
      read: gives `count` bytes from byte `begin` of the tensor on.
    """
    if 0 in shape:
        return
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    # How far the last element of an index along the outermost axis is from the first.
    outer = max(range(len(shape)), key=lambda axis: strides[axis], default=None)
    inner = 1 + sum(
        (size - 1) * stride
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if axis != outer
    )
    size, stride = (1, 0) if outer is None else (shape[outer], strides[outer])
    count = max(1, (CHUNK // dtype.itemsize - inner) // max(1, stride) + 1)
    for begin in range(0, size, count):
        some = min(count, size - begin)
        span = (some - 1) * stride + inner
        data = np.frombuffer(read(begin * stride * dtype.itemsize, span * dtype.itemsize), dtype)
        whole = [slice(0, length) for length in shape]
        if outer is not None:
            whole[outer] = slice(begin, begin + some)
        lengths = [place.stop - place.start for place in whole]
        steps = [stride * dtype.itemsize for stride in strides]
        yield tuple(whole), np.lib.stride_tricks.as_strided(data, lengths, steps, writeable=False)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose last index moves fastest."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def read_bytes(file: Path, begin: int, count: int) -> bytes:
    """Read a part of a file; ValueError if the file ends earlier."""
    with file.open("rb") as stream:
        if not 0 <= begin <= begin + count <= os.fstat(stream.fileno()).st_size:
            raise ValueError(f"{file} is cut short. {AGAIN}")
        stream.seek(begin)
        return stream.read(count)
