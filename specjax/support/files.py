"""Files: reading with errors that name them, and writing that leaves no file half-written."""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

MAX_LIST = 1 << 22  # bytes of an archive's list of files; torch writes some 100 per tensor
# Bytes that the arrays of an npz file may take: the first number, and the second for each byte of
# the file. Tables of a vocabulary may be nearly all zeros; other numbers are packed to a third.
SMALL_NPZ, NPZ_RATIO = 1 << 25, 16


def decode(data: bytes, name: str | os.PathLike) -> str:
    """Decode a UTF-8 file, without the byte-order mark that Windows' editors write.

    Raises:
      ValueError: it is not UTF-8; the message has `name`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error}). Convert it first.") from None


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


@contextlib.contextmanager
def only_writer(
    path: str | os.PathLike, *, within: bool = False, wait: bool = False
) -> Iterator[None]:
    """Hold `path`, a file or a directory, for this process alone.

    The lock is advisory (`flock` on `.NAME.lock` beside `path`), and ends with the process. `path`
    itself need not exist, and may be replaced meanwhile. Parents are made.

    Args:
      within: `path` is a directory that exists. The lock is `.lock` in it, since its parent may be
        read-only.
      wait: whether to wait until no other process holds `path`.

    Raises:
      ValueError: another process, or this one elsewhere, holds `path`; the message has its id.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path / ".lock" if within else path.with_name(f".{path.name}.lock")
    while True:
        stream = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            stream.close()
            raise ValueError(
                f"{path} is being written by another process (id {owner}). Wait until it ends, or "
                "name another place."
            ) from None
        # The last holder of the lock may have removed the file between `open` and `flock`.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), lock.stat()):
                break
        stream.close()
    with stream:
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a file to write, which becomes `path` at the end unless there was an error.

    Raises:
      ValueError: there is a device, a pipe or a directory at `path`, or the disk is full.
    """
    check_regular(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _naming(path):
            yield part
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_within(directory: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Give a directory to write; its files go to `directory` unless there was an error.

    Each file appears whole or not at all, and a new directory only when it is complete. Parents are
    made, and files of the same names replaced. Leftovers of a killed process are removed.

    Raises:
      ValueError: as `check_directory`; another process writes to it; or the disk is full.
    """
    directory = check_directory(directory)
    with only_writer(directory):
        part = directory.with_name(f".{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            with _naming(directory):
                part.mkdir()
                yield part
                if directory.exists():
                    for file in sorted(part.iterdir()):
                        os.replace(file, directory / file.name)
                else:
                    os.replace(part, directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def check_directory(directory: str | os.PathLike) -> pathlib.Path:
    """Check a directory to write, which need not exist, and return its absolute path.

    Raises:
      ValueError: its name is empty or not UTF-8, it is a file or below one, or it cannot be written
        to; or its parent cannot, where it is made.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise ValueError(f"The name {str(directory)!r} is not UTF-8. Name another place.") from None
    path = pathlib.Path(directory).resolve()
    if not str(directory) or not path.name:
        raise ValueError(f"{str(directory)!r} does not name a directory that can be made.")
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, not a directory. Name another place.")
    for place in {there, path.parent if there == path else there}:
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"Cannot write to {place}. Name another place.")
    return path


def remove(path: pathlib.Path) -> None:
    """Delete a file if it is there; ValueError if it is no regular file."""
    check_regular(path)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Add the file's name to errors of writing; those of a full disk lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(
            f"Cannot write {path}: {error.strerror or error}. What was there before is kept. Make "
            "room, and give the same command again."
        ) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object from a file; ValueError that names the file if it is not one."""
    try:
        value = json.loads(decode(path.read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). Delete it, or copy it again."
        ) from None
    if type(value) is not dict:
        raise ValueError(f"{path} should hold a JSON object, not a {type(value).__name__}.")
    return value


def json_objects(
    data: bytes, name: str | os.PathLike, way_out: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse a file of JSON lines, each an object; blank lines are skipped.

    Yields the place of each object, "NAME, line N", for errors, and the object.

    Args:
      name: of the file, for errors.
      way_out: the remedy, for errors.

    Raises:
      ValueError: the file is not UTF-8, or a line is not a JSON object.
    """
    # Not splitlines(): JSON may hold U+2028 and the like unescaped.
    for number, line in enumerate(decode(data, name).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON ({error}): {line[:60]!r}. {way_out}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: not a JSON object: {line[:60]!r}. {way_out}")
        yield place, row


def write_text(path: pathlib.Path, text: str) -> None:
    """Replace a file by this text, whole or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replace a file by this value, indented and with sorted keys."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def write_rows(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these rows, a JSON line each."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file; none if there is no such file.

    A last line that is not complete is left out: its writer is at work or was killed.

    Raises:
      ValueError: a line is not a JSON object.
    """
    return _parsed(path, _whole_lines(path)) if path.exists() else []


def check_regular(path: pathlib.Path, named: str = "") -> None:
    """Raise ValueError if `path` exists and is not a regular file.

    Args:
      named: the user's name of it, for the error; default: the path.
    """
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{named or path} is a device, a pipe or a directory, and only regular files can be "
            "replaced or read again. Name another file."
        )


def _whole_lines(path: pathlib.Path) -> bytes:
    check_regular(path)
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]


def _parsed(path: pathlib.Path, lines: bytes) -> list[dict[str, Any]]:
    try:
        # Not splitlines(): JSON may hold U+2028 and the like unescaped.
        rows = [json.loads(line) for line in lines.decode("utf-8").split("\n")[:-1]]
    except (ValueError, RecursionError):
        rows = [None]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} holds lines that are not JSON objects: not a file of rows. Move it away, or "
            "name another one."
        )
    return rows


class Rows:
    """A JSON-lines file to write, which grows by whole rows and can be continued after a cut.

    A last line that is not complete was being written when the run ended; it is dropped.

    `append` and `keep` raise ValueError if anything else has written to the file. Hold
    `only_writer` while rows are written, so that a second process is refused at its start.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.done: list[dict[str, Any]] = []
        self._size = 0
        if path.exists():
            whole = _whole_lines(path)
            self.done, self._size = _parsed(path, whole), len(whole)
            if path.stat().st_size > self._size:
                os.truncate(path, self._size)

    def append(self, row: dict[str, Any]) -> None:
        """Append one row, written through to the file."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        try:
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._check(os.fstat(file.fileno()).st_size)
                file.write(line)
        except OSError as error:
            raise ValueError(
                f"Cannot write to {self.path}: {error.strerror or error}. The rows before are kept."
            ) from None
        self._size += len(line)
        self.done.append(row)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop rows that are not wanted, from the file too."""
        self._check(self.path.stat().st_size if self.path.exists() else 0)
        self.done = [row for row in self.done if wanted(row)]
        write_rows(self.path, self.done)
        self._size = self.path.stat().st_size

    def _check(self, size: int) -> None:
        if size != self._size:
            raise ValueError(
                f"{self.path} has been written by another process meanwhile. Let one process write "
                "at a time: end the other, and start this one again."
            )
