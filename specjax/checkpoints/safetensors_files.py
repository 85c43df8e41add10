"""Finds and writes the tensors of safetensors files, a piece at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.checkpoints import tensors
from specjax.checkpoints.tensors import (
    AGAIN,
    DTYPES,
    Stored,
    Tensor,
    Unread,
    contiguous,
    read_into,
)

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


def find(path: Path) -> dict[str, Tensor]:
    """Find all tensors of one file by name; ValueError if it is cut short or damaged."""
    found: dict[str, Tensor] = {}
    with _open(path) as file, path.open("rb") as stream:  # the library has checked the header
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        for name in file.keys():  # noqa: SIM118
            stored, shape = header[name]["dtype"], tuple(header[name]["shape"])
            if stored in NAMES:
                begin = 8 + size + header[name]["data_offsets"][0]
                dtype = DTYPES[NAMES[stored]]
                found[name] = Stored(path, dtype, shape, begin, contiguous(shape))
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
