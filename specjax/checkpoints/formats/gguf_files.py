"""Reads GGUF files, llama.cpp's format: metadata by name, and tensors, which are often quantised.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here,
so that no count in it takes more memory than the file; the package `gguf` decodes the numbers.
`gguf_models` turns names and metadata into those of Hugging Face.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from specjax.checkpoints import tensors
from specjax.checkpoints.tensors import AGAIN, DTYPES, POINTER, At, Tensor, Unread, read_bytes

SUFFIX = ".gguf"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
MAGIC, VERSIONS = b"GGUF", (2, 3)
OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # begin llama.cpp's formats before GGUF
CONVERT = "Convert the model with a current llama.cpp."
# What a file holds that is no model, by `general.type`; older files say it by the architecture.
OTHERS = {
    "mmproj": "a projector of images",
    "clip": "a projector of images",
    "imatrix": "a matrix for quantisation",
    "adapter": "an adapter (LoRA), which llama.cpp's llama-export-lora merges into its model",
    "controlvector": "a control vector",
}
BESIDE = ("mmproj", "clip", "imatrix")  # these leave a model's texts as they are
# The types of metadata by their numbers, two of which are no numbers themselves.
SCALARS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
STRING, ARRAY = 8, 9
MAX_VALUE = 1 << 26  # bytes of a string or of an array of numbers
MAX_AXES = 4
ALIGNMENT = 32  # of tensors, where `general.alignment` is absent
# Types whose numbers are stored one by one; all others are blocks.
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}


class GGUF(NamedTuple):
    """The header of a file, or of all shards."""

    file: Path
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class GGUFTensor(Tensor):
    """A tensor of a GGUF file. A quantised one is decoded to float32, some rows at a time."""

    begin: int
    """Offset in bytes from the beginning of the file."""
    kind: str
    """Name of the type of its numbers, as in `gguf.GGMLQuantizationType`."""
    head: int = 0
    """Rows of a head whose halves the file interleaves; 0: rows are in order."""
    added: float = 0.0
    """The number that the file adds to each; `pieces` subtracts it."""

    @property
    def width(self) -> int:
        """2 if quantised or half; else 0: llama.cpp keeps small tensors in float32 in any file."""
        return 2 if self.in_blocks or self.dtype.itemsize == 2 else 0

    @property
    def in_blocks(self) -> bool:
        """Whether the numbers are quantised; see `Tensor.in_blocks`."""
        return self.kind not in PLAIN

    @property
    def row_bytes(self) -> int:
        """Bytes of an index of the first axis of a matrix, or of a whole vector."""
        block, size = _block(self.kind)
        return math.prod(self.shape[1:] or self.shape) * size // block

    def pieces(self) -> Iterator[tuple[At, np.ndarray]]:
        """Yield some rows at a time, in whole heads; a vector comes whole."""
        rows = self.shape[0] if self.shape[1:] else 1
        unit = self.head if self.head and self.shape[1:] else 1
        numbers = math.prod(self.shape[1:] or self.shape)
        count = max(1, tensors.CHUNK // (numbers * self.dtype.itemsize * unit)) * unit
        whole = [slice(0, size) for size in self.shape[1:]]
        for begin in range(0, rows, count):
            end = min(begin + count, rows)
            data = read_bytes(
                self.file, self.begin + begin * self.row_bytes, (end - begin) * self.row_bytes
            )
            found = _decode(self.kind, data)
            if self.added:
                found = found - self.added
            if self.head:
                halves = (-1, self.head // 2, 2, *self.shape[1:])
                found = found.reshape(halves).swapaxes(1, 2)
            first = slice(begin, end) if self.shape[1:] else slice(0, self.shape[0])
            yield (first, *whole), found.reshape(-1, *self.shape[1:])

    def within(self, part: At) -> Iterator[tuple[At, np.ndarray]]:
        """Yield the numbers of a part. Of a matrix, rows of other heads are not read."""
        if not self.shape[1:]:
            yield from super().within(part)
            return
        unit, (rows, *others) = self.head or 1, part
        begin, end = rows.start // unit * unit, -(-rows.stop // unit) * unit
        some = dataclasses.replace(
            self,
            shape=(end - begin, *self.shape[1:]),
            begin=self.begin + begin * self.row_bytes,
        )
        moved = slice(rows.start - begin, rows.stop - begin)
        yield from Tensor.within(some, (moved, *others))


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name or, as in ollama's store, its content."""
    if not path.is_file() or path.suffix.lower() == SUFFIX:
        return path.is_file()
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC
    return False


def way_out(tensors: Mapping[str, Tensor]) -> str:
    """What to do where tensors do not fit the config, which is config.json or in their file."""
    files = [tensor.file for tensor in tensors.values()][:1]
    stored = any(map(is_gguf, files))
    return CONVERT if stored else "Copy or download config.json and weights again."


def only(directory: Path) -> Path | None:
    """Find the GGUF file of a model in a directory; None if it has none.

    Raises:
      ValueError: there are several, and not as shards of one.
    """
    paths = (path for path in directory.iterdir() if path.suffix.lower() == SUFFIX)
    found = list(dict.fromkeys(shards(path)[0] for path in sorted(paths) if path.is_file()))
    if len(found) > 1:
        found = [path for path in found if _kind(path) not in BESIDE] or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{directory} holds several models: give one of the files {names}.")
    return found[0] if found else None


def _kind(path: Path) -> str:
    """What a file says that it holds, of `OTHERS`; "" for a model or a file that is not read."""
    with contextlib.suppress(OSError, ValueError):
        return _other(_read(path)[0])
    return ""


def _other(fields: Mapping[str, Any]) -> str:
    stated = (fields.get(f"general.{key}") for key in ("type", "architecture"))
    return next((value for value in stated if isinstance(value, str) and value in OTHERS), "")


def shards(path: Path) -> list[Path]:
    """List the files of a model by their names, given one of them."""
    match = SHARD.fullmatch(path.name)
    if match is None or not int(match[3]):
        return [path]
    count = int(match[3])
    return [
        path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}{path.suffix}") for i in range(count)
    ]


def read(path: Path) -> GGUF:
    """Read the header of a file, or of all shards, whose metadata is that of the first.

    Raises:
      FileNotFoundError: a shard is missing.
      ValueError: a file is cut short or damaged or holds no model, or the package `gguf` is
        missing.
    """
    files = shards(path)
    fields: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    for i, file in enumerate(files):
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing, a part of the model in {path}. Copy or download it too."
            )
        read_fields, inner = _read(file)
        fields = fields or read_fields
        parts = str(read_fields.get("split.count", len(files)))
        if parts != str(len(files)) or str(read_fields.get("split.no", i)) != str(i):
            raise ValueError(
                f"{file} is a part of a model in {parts[:9]} files. Give them the names that "
                "llama.cpp's gguf-split gives, such as model-00001-of-00003.gguf."
            )
        for name, tensor in inner.items():
            if name in found:
                raise ValueError(f"{file} is damaged ({name[:100]!r} is there twice). {AGAIN}")
            found[name] = tensor
    if kind := _other(fields):
        raise ValueError(f"{path} holds {OTHERS[kind]}. Give the file of a whole model.")
    if not found and any(key.startswith("tokenizer.") for key in fields):
        raise ValueError(f"{path} holds a vocabulary alone. Give the file of a whole model.")
    if not found:
        raise ValueError(f"{path} holds no tensors. {AGAIN}")
    return GGUF(files[0], fields, found)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _package()
    with path.open("rb") as stream:
        header = _Header(stream)
        try:
            magic, version = header.take(4), header.whole(4)
            if magic not in (MAGIC, *OLDER, POINTER[:4]) or not version:
                raise ValueError("it does not begin with GGUF and a version")
            if magic == MAGIC and version in VERSIONS:
                return header.contents(path)
        except (EOFError, ValueError) as error:  # a name may not be UTF-8
            raise ValueError(f"{path} is cut short or damaged ({error}). {AGAIN}") from None
    raise ValueError(f"{path} {_not_read(magic, version)}")


def _not_read(magic: bytes, version: int) -> str:
    """Say what a whole file is that is not read, and the way out."""
    if magic == POINTER[:4]:
        return "is no file of weights but git-lfs's pointer to one: run `git lfs pull`."
    if magic != MAGIC or version < min(VERSIONS):
        return f"has a format that is older than GGUF 2. {CONVERT}"
    if not version % (1 << 16):
        return (
            "has the byte order of big-endian machines, which is not read. Turn it with "
            "`gguf-convert-endian FILE little`, of the package gguf."
        )
    return (
        f"is of version {version} of GGUF, which is newer than those that are read (2 and 3). "
        "Update specjax, or look for an older file of the model."
    )


class _Header:
    """Reads the header from the beginning; EOFError where the file ends earlier."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.at = stream, 0
        self.size = os.fstat(stream.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise EOFError("it ends too early")
        if count > MAX_VALUE:
            raise ValueError(f"a value of {count:,} bytes in its header")
        self.at += count
        return self.stream.read(count)

    def whole(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def text(self) -> str:
        return self.take(self.whole(8)).decode()

    def value(self) -> Any:
        kind = self.whole(4)
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            found = self.scalars(kind, 1)[0]
            # The shortest decimal: 1e-05 for the float32 that is next to it.
            return float(str(found)) if found.dtype == np.float32 else found.item()
        kind, count = self.whole(4), self.whole(8)
        if kind == STRING:
            return [self.text() for _ in range(count)]
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> np.ndarray:
        if kind >= len(SCALARS) or not SCALARS[kind]:
            raise ValueError(f"a value of the unknown type {kind} in its header")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def contents(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The rest of the header: metadata, and tensors whose numbers are all in the file."""
        count, fields_count = self.whole(8), self.whole(8)
        fields: dict[str, Any] = {}
        for _ in range(fields_count):
            key = self.text()
            if key in fields:
                raise ValueError(f"{key[:100]!r} is there twice")
            fields[key] = self.value()
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, axes = self.text(), self.whole(4)
            if name in described:
                raise ValueError(f"{name[:100]!r} is there twice")
            if not 1 <= axes <= MAX_AXES:
                raise ValueError(f"{name[:100]!r} has {axes} axes")
            shape = tuple(self.whole(8) for _ in range(axes))[::-1]  # the fastest comes first
            described[name] = shape, self.whole(4), self.whole(8)
        unit = fields.get("general.alignment", ALIGNMENT)
        if type(unit) is not int or unit < 1 or unit & (unit - 1):
            raise ValueError(f"general.alignment={unit!r} is no power of two")
        start = -(-self.at // unit) * unit
        found = {
            name: self.tensor(path, name, shape, number, start + offset)
            for name, (shape, number, offset) in described.items()
        }
        places = sorted(_place(t) for t in found.values() if isinstance(t, GGUFTensor))
        known = len(places) == len(found)  # else the others have a type whose size is unknown
        end = max(start, self.size)
        for one, other in itertools.pairwise([(start, start), *places, (end, end)]):
            if one[1] > other[0]:
                raise ValueError("the numbers of two tensors overlap")
            if known and other[0] - one[1] >= unit:
                raise ValueError(f"{other[0] - one[1]:,} bytes belong to no tensor")
        return fields, found

    def tensor(
        self, path: Path, name: str, shape: tuple[int, ...], number: int, begin: int
    ) -> Tensor:
        try:
            kind = _package().GGMLQuantizationType(number).name
        except ValueError:
            kind = str(number)
        if kind not in PLAIN and not _is_decoded(kind):
            reason = f"{path}: {name[:100]!r} is stored as {kind}, which is not read."
            return Unread(path, np.dtype(np.void), shape, reason)
        block, _ = _block(kind)
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"{name[:100]!r} of type {kind} has the impossible shape {shape}")
        found = GGUFTensor(path, DTYPES[PLAIN.get(kind, "float32")], shape, begin, kind)
        if _place(found)[1] > self.size:
            raise EOFError(f"the numbers of {name[:100]!r} are missing or cut short")
        return found


def _place(tensor: GGUFTensor) -> tuple[int, int]:
    rows = tensor.shape[0] if tensor.shape[1:] else 1
    return tensor.begin, tensor.begin + rows * tensor.row_bytes


def _package() -> Any:
    """The package that decodes quantised numbers, which only GGUF files need."""
    try:
        import gguf
    except ImportError:
        raise ValueError("Files of GGUF need a package: pip install 'specjax[gguf]'.") from None
    return gguf


@functools.cache
def _block(kind: str) -> tuple[int, int]:
    """How many numbers a block of a type has, and how many bytes."""
    gguf = _package()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@functools.cache
def _is_decoded(kind: str) -> bool:
    """Whether the package decodes a type."""
    try:
        _decode(kind, bytes(_block(kind)[1]))
    except (KeyError, NotImplementedError):
        return False
    return True


def _decode(kind: str, data: bytes) -> np.ndarray:
    """Decode numbers, whose shape is left to the caller."""
    if kind in PLAIN:
        return np.frombuffer(data, DTYPES[PLAIN[kind]])
    gguf = _package()
    blocks = np.frombuffer(data, np.uint8)[None]  # one row: the package would decode 16 at a time
    with np.errstate(all="ignore"):  # a scale may be no number
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
