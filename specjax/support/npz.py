"""Archives of arrays: npz files, whose names, types and sizes are checked before they are read."""

import math
import os
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

MAX_LIST = 1 << 22  # bytes of an archive's list of files; torch writes some 100 per tensor
# Bytes that the arrays of an npz file may take: the first number, and the second for each byte of
# the file. Tables of a vocabulary may be nearly all zeros; other numbers are packed to a third.
SMALL_NPZ, NPZ_RATIO = 1 << 25, 16


def read_npz(
    path: str | os.PathLike, ranks: Mapping[str, int], what: str, way_out: str
) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file.

    Names, types and sizes are checked before any array is read. The arrays may take `SMALL_NPZ`
    bytes, and `NPZ_RATIO` more for each byte of the file.

    Args:
      ranks: names of all its arrays, each of numbers, and how many axes they have.
      what: the expected contents, for errors.
      way_out: the remedy, for errors.

    Raises:
      OSError: there is no such file, or it cannot be opened.
      ValueError: it is empty, cut short or damaged, or holds anything else.
    """
    with open(path, "rb") as stream:
        try:
            with open_zip(stream) as archive:
                most = SMALL_NPZ + NPZ_RATIO * os.fstat(stream.fileno()).st_size
                _check_npz(archive, ranks, what, most)
                return {name: _member(archive, name, npy.read_array) for name in ranks}
        except _Unlike as error:
            raise ValueError(f"{path}{error}. {way_out}") from None
        except Exception as error:  # many classes: zip, compression, an array's header, …
            raise ValueError(
                f"{path} is not a file of {what}, or it is damaged ({error}). {way_out}"
            ) from error


class _Unlike(ValueError):
    """An npz file's difference from the expected arrays, as the end of a sentence."""


def _check_npz(archive: zipfile.ZipFile, ranks: Mapping[str, int], what: str, most: int) -> None:
    """Compare names, sizes and headers; `_Unlike` if they are not those of `ranks`."""
    sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
    if set(sizes) != set(ranks):
        held = ", ".join(sorted(sizes)) or "nothing"
        raise _Unlike(f" is not a file of {what}: it holds {held:.200}")
    if (total := sum(info.file_size for info in archive.infolist())) > most:
        raise _Unlike(f": its arrays take {total:,} bytes, and a file of its size at most {most:,}")
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _Unlike(f": {info.filename!r} in it is not compressed as numpy does")
    for name, rank in ranks.items():
        shape, _, dtype = _member(archive, name, _read_header)
        if dtype.kind not in "iuf" or len(shape) != rank:
            raise _Unlike(
                f": {name!r} has the type {dtype} and the shape {shape}, where {what} have numbers "
                f"with {rank} axes"
            )
        if math.prod(shape) * dtype.itemsize > sizes[name]:
            raise _Unlike(f": {name!r} of shape {shape} has more numbers than the file")


def _member(archive: zipfile.ZipFile, name: str, read: Callable[[IO[bytes]], Any]) -> Any:
    with archive.open(f"{name}.npy") as stream:
        return read(stream)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    if npy.read_magic(stream) == (1, 0):
        return npy.read_array_header_1_0(stream)
    return npy.read_array_header_2_0(stream)


def open_zip(stream: IO[bytes]) -> zipfile.ZipFile:
    """Open an archive to read; BadZipFile if its list of files has more than `MAX_LIST` bytes.

    zipfile takes some 600 bytes of memory for a file that may take 46 on the list.
    """
    return zipfile.ZipFile(_ListLimited(stream))


class _ListLimited:
    """A stream that gives at most `MAX_LIST` bytes at once, as zipfile reads the list of files."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream

    def read(self, count: int = -1) -> bytes:
        if count > MAX_LIST:
            raise zipfile.BadZipFile(f"a list of files of {count:,} bytes")
        return self.stream.read(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
