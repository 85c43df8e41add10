"""Finds, reads and writes the tensors of safetensors files, a piece at a time."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # teaches numpy, and with it safetensors, the name "bfloat16" too
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
DTYPES = {**FLOATS, "BOOL": np.bool_, "U8": np.uint8}  # some files hold masks, which are not read
CHUNK = 1 << 22  # bytes read at once
_AGAIN = "Copy or download it again."


class Tensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError that names the file if it is not one."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). {_AGAIN}") from None
    if type(value) is not dict:
        raise ValueError(f"{path} should hold a JSON object, not a {type(value).__name__}.")
    return value


def find_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory by name, from one file or from the shards of an index.

    Raises:
      FileNotFoundError: there is neither, or a shard is missing.
      ValueError: a file is cut short or damaged, or holds other tensors than the index says.
    """
    if (directory / SINGLE).is_file():
        return _tensors(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}.")
    shard_of = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{directory / INDEX} has no 'weight_map'. {_AGAIN}")
    for name, shard in shard_of.items():
        if not isinstance(shard, str):
            raise ValueError(
                f"{directory / INDEX}: 'weight_map' puts {name!r} into {shard!r}, which should be "
                f"the name of a file. {_AGAIN}"
            )
    shards = {}
    for shard in sorted(set(shard_of.values())):
        if not (directory / shard).is_file():
            raise FileNotFoundError(
                f"{directory / shard} is missing, but {INDEX} lists it. Copy or download it too."
            )
        shards[shard] = _tensors(directory / shard)
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise ValueError(
                f"{directory / shard} has no tensor {name!r}, but {INDEX} puts it there. The files "
                "belong to different checkpoints: copy or download them again."
            )
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that were saved with the tensors."""
    with _open(path) as file:
        return file.metadata() or {}


def read_into(tensor: Tensor, out: np.ndarray) -> None:
    """Fill `out`, of the tensor's shape, in its own dtype and strides."""
    at = 0
    for rows in _chunks(tensor):
        out[at : at + len(rows)] = rows
        at += len(rows)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, without holding either in memory."""
    if a == b:
        return True
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(
        np.array_equal(x, y) for x, y in zip(_chunks(a), _chunks(b), strict=True)
    )


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write one file that transformers reads too (`format: pt` says how names are meant)."""
    path.touch()
    mode = path.stat().st_mode
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt", **metadata})
    path.chmod(mode)  # safetensors 0.8 makes a file that only its owner may read


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """safetensors' view of a file, whose errors do not say which file they are about."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}). {_AGAIN}") from None


def _tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file by name."""
    found = {}
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            entry = file.get_slice(name)
            if (stored := entry.get_dtype()) not in DTYPES:
                raise ValueError(
                    f"{path}: {name!r} is stored as {stored}; supported are {', '.join(FLOATS)}."
                )
            found[name] = Tensor(path, name, np.dtype(DTYPES[stored]), tuple(entry.get_shape()))
    return found


def _chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor a few rows at a time.

    The file is opened anew for each: safetensors maps it into memory, where the pages that were
    read count as a second copy until it is closed. It costs less than 0.5 ms with 500 tensors.
    """
    length, *rest = tensor.shape
    count = max(1, CHUNK // max(1, math.prod(rest) * tensor.dtype.itemsize))
    for begin in range(0, length, count):
        with _open(tensor.file) as file:
            rows = file.get_slice(tensor.name)[begin : min(begin + count, length)]
        yield rows
