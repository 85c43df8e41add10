"""Finds the arrays of flax's msgpack files, and names them as torch's models do.

flax's own reader holds the file and a copy of its arrays at once. This one walks over the file once
to find each array, and reads the numbers from there. The format is msgpack's
(https://github.com/msgpack/msgpack/blob/master/spec.md). flax stores an array as an extension of
type 1, (shape, name of the dtype, bytes). One of more than a gigabyte is a map of several.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import IO, Any

import numpy as np

from specjax.checkpoints.tensors import (
    AGAIN,
    DTYPES,
    At,
    Tensor,
    Turned,
    contiguous,
    read_bytes,
    strided_pieces,
)

ARRAYS = (1, 3)  # flax's extension types: arrays and scalars of numpy
CHUNKED = "__msgpack_chunked_array__"
DEEPEST = 64  # maps within maps
LONGEST = 1 << 20  # bytes of a string
LONGEST_NAME = 1 << 10  # characters of a tensor's name, slashes included
MAX_RANK = 8  # of an array
# Values in a file; each costs at most 72 bytes (an empty map and its place in a list). An array of
# flax takes 7, one that T5X describes, with the state of its optimizer, about 100; the largest
# models of the families here have 1,200 arrays.
MAX_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True)
class FlaxTensor(Tensor):
    """An array in a msgpack file."""

    parts: tuple[tuple[int, int], ...]
    """The array's parts in order: (begin, size) in bytes of the file."""

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield a few rows at a time."""
        yield from strided_pieces(self.shape, contiguous(self.shape), self.dtype, self._read)

    def _read(self, begin: int, count: int) -> bytes:
        found = b""
        for start, size in self.parts:
            here = min(count, size - begin)
            if here > 0:
                found += read_bytes(self.file, start + begin, here)
                begin, count = 0, count - here
            else:
                begin -= size
        return found


def find(path: Path) -> dict[str, Tensor]:
    """Find all arrays of a file; the keys of its maps, joined by slashes, are their names.

    Raises:
      ValueError: it is cut short, damaged or not flax's, or holds anything but arrays.
    """
    tree: Mapping[str, Any] = read_tree(path)
    if set(tree) == {"params"} and isinstance(tree["params"], Mapping):
        tree = tree["params"]
    found: dict[str, Tensor] = {}
    for name, leaf in leaves(tree):
        if not isinstance(leaf, Tensor) or len(name) > LONGEST_NAME:
            kind = "has too long a name" if isinstance(leaf, Tensor) else "is no array"
            raise ValueError(f"{path}: its entry {name[:100]!r} {kind}. {AGAIN}")
        found[name] = leaf
    return found


def as_in_torch(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and transpose the arrays of Flax models as transformers' torch models have them.

    A `kernel` is a `weight` the other way round (GPT-2's too, whose Flax kernels are (out, in)).
    The `embedding` of an embedding and the `scale` of a norm are `weight`s.
    """
    named = {}
    for name, tensor in found.items():
        *place, last = name.split("/")
        if last == "kernel" and len(tensor.shape) == 2:
            tensor = Turned.of(tensor)
        last = "weight" if last in ("kernel", "embedding", "scale") else last
        named[".".join([*place, last])] = tensor
    return named


def leaves(
    tree: Mapping[str, Any], prefix: str = "", *, described: Set[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested maps with their paths; maps with the keys `described` are some."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and not (described and described <= set(value)):
            yield from leaves(value, f"{prefix}{key}/", described=described)
        else:
            yield f"{prefix}{key}", value


def read_tree(path: Path) -> dict[str, Any]:
    """Read the map in a file, with `FlaxTensor`s for its arrays; ValueError if it has none."""
    with path.open("rb") as stream:
        try:
            walker = _Walker(path, stream)
            tree = walker.value(0)
            if type(tree) is not dict or stream.tell() != walker.size:
                raise _Damaged("it is no map")
            return tree
        except (_Damaged, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is cut short, damaged or not written by flax ({error}). {AGAIN}"
            ) from None


class _Damaged(Exception):
    """The error of a file that is not what it should be."""


class _Walker:
    """Walks over a file from its beginning, and skips the numbers of its arrays."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.stream = path, stream
        self.size = os.fstat(stream.fileno()).st_size
        self.values = 0

    def value(self, depth: int) -> Any:
        """Read the value that begins here; numpy's arrays and scalars become `FlaxTensor`s."""
        if depth > DEEPEST:
            raise _Damaged("maps in maps without end")
        self.values += 1
        if self.values > MAX_VALUES:
            raise _Damaged(f"more than {MAX_VALUES:,} values, which no model has")
        kind = self.integer(1)
        if kind < 0x80:
            return kind
        if kind >= 0xE0:
            return kind - 0x100
        if kind < 0x90:
            return self.map(kind & 0x0F, depth)
        if kind < 0xA0:
            return [self.value(depth + 1) for _ in range(kind & 0x0F)]
        if kind < 0xC0:
            return self.text(kind & 0x1F)
        if (read := _KINDS.get(kind)) is None:
            raise _Damaged(f"byte {kind:#x} begins nothing")
        return read(self, depth)

    def take(self, count: int) -> bytes:
        if count > LONGEST:
            raise _Damaged(f"a string of {count} bytes")
        data = self.stream.read(count)
        if len(data) < count:
            raise _Damaged("it ends too early")
        return data

    def skip(self, count: int) -> tuple[int, int]:
        """Skip `count` bytes; return their begin and their number."""
        begin = self.stream.tell()
        if begin + count > self.size:
            raise _Damaged("it ends too early")
        self.stream.seek(count, os.SEEK_CUR)
        return begin, count

    def integer(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "big", signed=signed)

    def text(self, count: int) -> str:
        return self.take(count).decode()

    def number(self, dtype: str) -> float:
        return float(np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0])

    def list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> Any:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if type(key) is not str or key in found:
                raise _Damaged("a key is no string or comes twice")
            found[key] = self.value(depth + 1)
        return self.joined(found) if found.get(CHUNKED) is True else found

    def joined(self, found: Mapping[str, Any]) -> FlaxTensor:
        """Join an array of several parts: maps from "0", "1", ... to its lengths and parts."""
        shape, chunks = found.get("shape"), found.get("chunks")
        if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
            raise _Damaged("an array lacks its shape or its parts")
        lengths = [shape.get(str(axis)) for axis in range(len(shape))]
        parts: list[Any] = [chunks.get(str(part)) for part in range(len(chunks))]
        if not all(isinstance(part, FlaxTensor) and part.dtype == parts[0].dtype for part in parts):
            raise _Damaged("a part of an array is none")
        ranges = tuple(place for part in parts for place in part.parts)
        return self.array(lengths, parts[0].dtype.name, ranges)

    def extension(self, count: int, depth: int) -> FlaxTensor:
        kind, end = self.integer(1), self.stream.tell() + count
        if kind not in ARRAYS:
            raise _Damaged(f"an extension of type {kind}")
        if self.integer(1) != 0x93:
            raise _Damaged("an array is not three things")
        shape, dtype = self.value(depth + 1), self.value(depth + 1)
        place = self.value(depth + 1)
        if self.stream.tell() != end or type(place) is not tuple:
            raise _Damaged("an array has another size than it says")
        return self.array(shape, dtype, (place,))

    def array(self, shape: Any, dtype: Any, parts: tuple[tuple[int, int], ...]) -> FlaxTensor:
        sizes = type(shape) is list and all(type(n) is int and n >= 0 for n in shape)
        if not sizes or len(shape) > MAX_RANK:
            raise _Damaged("an array has an impossible shape")
        if type(dtype) is not str or dtype not in DTYPES:
            raise _Damaged(f"an array of {str(dtype)[:100]!r}")
        if sum(size for _, size in parts) != math.prod(shape) * DTYPES[dtype].itemsize:
            raise _Damaged(f"an array of shape {tuple(shape)} has another number of bytes")
        return FlaxTensor(self.path, DTYPES[dtype], tuple(shape), parts)


def _sized(width: int, read: Callable[[_Walker, int, int], Any]) -> Callable[[_Walker, int], Any]:
    """A reader of values that begin with their length."""
    return lambda walker, depth: read(walker, walker.integer(width), depth)


def _integer(width: int, signed: bool) -> Callable[[_Walker, int], Any]:
    return lambda walker, depth: walker.integer(width, signed)


def _fixed_extension(count: int) -> Callable[[_Walker, int], Any]:
    return lambda walker, depth: walker.extension(count, depth)


_KINDS: dict[int, Callable[[_Walker, int], Any]] = {
    0xC0: lambda walker, depth: None,
    0xC2: lambda walker, depth: False,
    0xC3: lambda walker, depth: True,
    **{0xC4 + i: _sized(1 << i, lambda walker, n, _: walker.skip(n)) for i in range(3)},
    **{0xC7 + i: _sized(1 << i, _Walker.extension) for i in range(3)},
    0xCA: lambda walker, depth: walker.number(">f4"),
    0xCB: lambda walker, depth: walker.number(">f8"),
    **{0xCC + i: _integer(1 << i, False) for i in range(4)},
    **{0xD0 + i: _integer(1 << i, True) for i in range(4)},
    **{0xD4 + i: _fixed_extension(1 << i) for i in range(5)},
    **{0xD9 + i: _sized(1 << i, lambda walker, n, _: walker.text(n)) for i in range(3)},
    **{0xDC + i: _sized(2 << i, _Walker.list) for i in range(2)},
    **{0xDE + i: _sized(2 << i, _Walker.map) for i in range(2)},
}
