"""Finds, reads and writes the tensors of safetensors files, a piece at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints import tensors
from specjax.checkpoints.tensors import AGAIN, DTYPES, At, Tensor, Unread, read_into

# Names of dtypes in a header, and numpy's.
NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "U8": "uint8",
    "I64": "int64",
}
FLOATS = [stored for stored, name in NAMES.items() if name in tensors.FLOATS]


@dataclass(frozen=True)
class SafeTensor(Tensor):
    """A tensor of a safetensors file."""

    name: str

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield a few rows at a time.

        The file is opened anew for each piece: safetensors maps it into memory, where pages that
        were read count as a second copy until it is closed.
        """
        if not self.shape:
            with _open(self.file) as file:
                yield (), file.get_tensor(self.name)
            return
        yield from self.within(tuple(slice(0, size) for size in self.shape))

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield a few rows at a time; nothing else of the file is read."""
        rows, *others = part
        lengths = [axis.stop - axis.start for axis in others]
        count = max(1, tensors.CHUNK // max(1, math.prod(lengths) * self.dtype.itemsize))
        whole = [slice(0, length) for length in lengths]
        for begin in range(rows.start, rows.stop, count):
            end = min(begin + count, rows.stop)
            with _open(self.file) as file:
                piece = file.get_slice(self.name)[(slice(begin, end), *others)]
            yield (slice(begin - rows.start, end - rows.start), *whole), piece
            del piece


def find(path: Path) -> dict[str, Tensor]:
    """Find all tensors of one file by name; ValueError if it is cut short or damaged."""
    found: dict[str, Tensor] = {}
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            entry = file.get_slice(name)
            stored, shape = entry.get_dtype(), tuple(entry.get_shape())
            if stored in NAMES:
                found[name] = SafeTensor(path, DTYPES[NAMES[stored]], shape, name)
            else:
                reason = f"is stored as {stored}; supported are {', '.join(FLOATS)}."
                found[name] = Unread(path, np.dtype(np.void), shape, f"{path}: {name!r} {reason}")
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that were saved with the tensors."""
    with _open(path) as file:
        return file.metadata() or {}


def write_file(
    path: Path,
    source: Mapping[str, Tensor],
    dtype: np.dtype,
    metadata: Mapping[str, str],
    progress: Callable[[int], Any] = lambda count: None,
) -> None:
    """Write one file that transformers reads too (`format: pt`: names are torch's).

    Tensors are read one after the other, and only one is held in memory.

    Args:
      path: the file; an existing one is replaced.
      source: the tensors, by the names that they get.
      dtype: of the stored tensors: float32, bfloat16 or float16.
      metadata: strings for the header.
      progress: called after each tensor with its bytes.
    """
    stored = next(key for key, name in NAMES.items() if name == dtype.name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in sorted(source):
        begin, end = end, end + math.prod(source[name].shape) * dtype.itemsize
        shape = list(source[name].shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(source):
            array = np.empty(source[name].shape, dtype)
            read_into(source[name], array)
            array.tofile(file)
            progress(array.nbytes)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file with safetensors, whose errors do not name the file."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}). {AGAIN}") from None
