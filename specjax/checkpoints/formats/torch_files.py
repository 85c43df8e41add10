"""Finds the tensors of the files that `torch.save` writes, without torch and without running them.

Two formats are read: the zip archive of torch since 1.6, with a pickle and one uncompressed record
for each storage; and the older one, four pickles followed by the storages. `pickles` reads the
pickles. The numbers are read from their place in the file, whatever their strides are.
"""

import io
import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

from specjax.checkpoints.formats import pickles
from specjax.checkpoints.formats.pickles import Storage, Strided, Unpickled
from specjax.checkpoints.tensors import AGAIN, Stored, Tensor, contiguous, read_bytes
from specjax.support import npz

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the older format
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
LONGEST = 1 << 28  # bytes of a pickle; a model of 10,000 tensors has 2 MB


class Place(NamedTuple):
    """The place of a storage in its file."""

    begin: int
    """Offset in bytes from the beginning of the file."""
    size: int
    """Size in bytes."""
    checksum: int
    """CRC-32 of the bytes; 0: unknown."""


def find(path: Path) -> dict[str, Tensor]:
    """Find all tensors of one file by name.

    Raises:
      ValueError: it is no such file, is cut short or damaged, or its pickle asks for anything but
        tensors.
    """
    with path.open("rb") as stream:
        start = stream.read(4)
        try:
            if start == ZIP:
                strided, places = _read_zip(path, stream)
            elif start[:1] == PICKLE:
                strided, places = _read_pickles(stream)
            else:
                raise Unpickled("it is in neither of the two formats in which torch saves")
            size = path.stat().st_size
            return {
                name: _place(path, name, tensor, places, size) for name, tensor in strided.items()
            }
        except Unpickled as error:
            raise ValueError(f"{path} cannot be read: {error}. {AGAIN}") from None
        # A name in the archive may not be UTF-8.
        except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is cut short or damaged ({error}). {AGAIN}") from None


def _read_zip(path: Path, stream: IO[bytes]) -> tuple[dict[str, Strided], dict[str, Place]]:
    records = {}
    with npz.open_zip(stream) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise Unpickled(f"{info.filename[:100]!r} in it is compressed or encrypted")
            head = read_bytes(path, info.header_offset, 30)
            names = sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
            if head[:4] != ZIP:
                raise zipfile.BadZipFile("a record is not where the list says")
            begin = info.header_offset + 30 + names
            records[info.filename] = Place(begin, info.file_size, info.CRC)
    pickled = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise Unpickled("it is a zip archive that torch did not save")
    prefix = pickled[0].removesuffix("data.pkl")

    def content(name: str) -> bytes:
        place = records[prefix + name]
        if place.size > LONGEST:
            raise Unpickled(f"its {name} has {place.size} bytes")
        data = read_bytes(path, place.begin, place.size)
        if place.checksum and zlib.crc32(data) != place.checksum:
            raise zipfile.BadZipFile(f"wrong checksum of {name}")
        return data

    if f"{prefix}byteorder" in records and content("byteorder") != b"little":
        raise Unpickled("its numbers have their bytes in the other order")
    data = f"{prefix}data/"
    places = {n.removeprefix(data): place for n, place in records.items() if n.startswith(data)}
    return _named(pickles.read(io.BytesIO(content("data.pkl")))), places


def _read_pickles(stream: IO[bytes]) -> tuple[dict[str, Strided], dict[str, Place]]:
    stream.seek(0)
    if pickles.read(stream) != MAGIC or pickles.read(stream) != PROTOCOL:
        raise Unpickled("it is a pickle that torch did not save")
    system = pickles.read(stream)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Unpickled("its numbers have their bytes in the other order")
    strided, keys = _named(pickles.read(stream)), pickles.read(stream)
    end = os.fstat(stream.fileno()).st_size
    storages = [tensor.storage for tensor in strided.values()]
    sizes = {storage.key: (storage.whole, storage.dtype) for storage in storages}
    places = {}
    for key in keys if type(keys) is list else ():
        whole, dtype = sizes.get(key, (None, None)) if type(key) is str else (None, None)
        head = stream.read(8)
        if whole is None or int.from_bytes(head, "little") != whole:
            raise Unpickled("its storages are not those of its tensors")
        count = whole * (1 if dtype is None else dtype.itemsize)
        if count > end - stream.tell():
            raise EOFError("its last storage ends too early")
        places[key] = Place(stream.tell(), count, 0)
        stream.seek(count, os.SEEK_CUR)
    return strided, places


def _named(value: Any) -> dict[str, Strided]:
    """The tensors of a file of weights, by name."""
    if type(value) is not dict:
        raise Unpickled(f"it holds a {type(value).__name__}, not tensors by name")
    for name, tensor in value.items():
        if type(name) is not str or type(tensor) is not Strided:
            raise Unpickled(
                f"its entry {str(name)[:100]!r} is a {type(tensor).__name__} and no tensor, so it "
                "is no model's file of weights"
            )
    return value


def _place(path: Path, name: str, tensor: Strided, places: dict[str, Place], size: int) -> Stored:
    storage: Storage = tensor.storage
    unit = 1 if storage.dtype is None else storage.dtype.itemsize
    place = places.get(storage.key)
    if place is None or place.size != storage.whole * unit or place.begin + place.size > size:
        raise Unpickled(f"the numbers of {name[:100]!r} are missing or cut short")
    count = math.prod(tensor.shape) * tensor.dtype.itemsize
    if count > size:
        raise Unpickled(f"{name[:100]!r} says that it has more numbers than the file")
    begin = place.begin + storage.begin * unit + tensor.begin * tensor.dtype.itemsize
    whole = count == place.size and tensor.strides == contiguous(tensor.shape)
    return Stored(
        path, tensor.dtype, tensor.shape, begin, tensor.strides, place.checksum if whole else 0
    )
