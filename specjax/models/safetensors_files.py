"""Reads and checks safetensors files, one tensor at a time, into memory that is already there.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length N of the header,
N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data. Tensors are read with plain
`readinto` and not through a memory map, whose touched pages count as a second copy of the model.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_AGAIN = "Copy or download it again."
CHUNK = 1 << 22  # bytes held while a tensor is converted or compared


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError that names the file if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). Copy or download it again."
        ) from None
    if type(value) is not dict:
        raise ValueError(f"{path} should hold a JSON object, not a {type(value).__name__}.")
    return value


def find_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory by name, from one file or from the shards of an index.

    Raises:
      FileNotFoundError: there is neither, or a shard is missing.
      ValueError: a file is cut short or damaged.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}.")
    shard_of = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{directory / INDEX} has no 'weight_map'. {_AGAIN}")
    headers = {}
    for shard in sorted(set(shard_of.values())):
        if not (directory / shard).is_file():
            raise FileNotFoundError(
                f"{directory / shard} is missing, but {INDEX} lists it. Copy or download it too."
            )
        headers[shard] = read_header(directory / shard)
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise ValueError(
                f"{directory / shard} has no tensor {name!r}, but {INDEX} puts it there. The files "
                "belong to different checkpoints: copy or download them again."
            )
    return {name: headers[shard][name] for name, shard in shard_of.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """Names and places of a file's tensors, checked against its length."""
    header, data_start = _header(path)
    size = path.stat().st_size
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: damaged header at {name!r}. {_AGAIN}") from None
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: {name!r} is stored as {dtype}; supported are {', '.join(DTYPES)}."
            )
        if data_start + end > size:
            raise ValueError(
                f"{path} is cut short: {size} bytes, but {name!r} ends at {data_start + end}. "
                f"{_AGAIN}"
            )
        if begin < 0 or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{path}: {name!r} has the wrong number of bytes. {_AGAIN}")
        tensors[name] = Tensor(path, DTYPES[dtype], shape, data_start + begin)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that were saved with the tensors."""
    return dict(_header(path)[0].get("__metadata__", {}))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset at which the data begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is cut short or no safetensors file ({size} bytes). {_AGAIN}")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} has a damaged header. {_AGAIN}") from None
    if type(header) is not dict:
        raise ValueError(f"{path} has a damaged header. {_AGAIN}")
    return header, 8 + length


def _chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor a few rows at a time, all in one buffer."""
    row = math.prod(tensor.shape[1:])
    count = max(1, CHUNK // (row * tensor.dtype.itemsize))
    buffer = np.empty((count, *tensor.shape[1:]), tensor.dtype)
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        for begin in range(0, tensor.shape[0], count):
            rows = buffer[: tensor.shape[0] - begin]
            _fill(file, rows)
            yield rows


def _fill(file: BinaryIO, array: np.ndarray) -> None:
    if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{file.name} ended while it was read. {_AGAIN}")


def read_into(tensor: Tensor, out: np.ndarray) -> None:
    """Fill `out`, of the tensor's shape, in its own dtype and strides."""
    if tensor.dtype == out.dtype and out.flags.c_contiguous:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            _fill(file, out)
        return
    at = 0
    for rows in _chunks(tensor):
        out[at : at + len(rows)] = rows.astype(out.dtype, copy=False)
        at += len(rows)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, without holding either in memory."""
    if a == b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(np.array_equal(x, y) for x, y in zip(_chunks(a), _chunks(b), strict=True))


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write one file that transformers reads too (`format: pt` says how names are meant)."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt", **metadata})
    path.chmod(0o666 & ~_umask())  # safetensors leaves it readable by its owner only


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
