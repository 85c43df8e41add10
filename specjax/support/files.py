"""Files: reading with errors that name them, and writing that leaves no file half-written."""

import contextlib
import errno
import fcntl
import fnmatch
import glob
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import IO, Any

from specjax.support import renamed


def decode(data: bytes, name: str | os.PathLike) -> str:
    """Decode a UTF-8 file, without the byte-order mark that Windows' editors write.

    Raises:
      ValueError: it is not UTF-8; the message has `name`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error}). Convert it first.") from None


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
      ValueError: another process, or this one elsewhere, holds `path`; the message has its id. Or
        the lock's place holds anything but a lock, or cannot be written.
    """
    path = pathlib.Path(path)
    lock = path / ".lock" if within else path.with_name(f".{path.name}.lock")
    while True:
        stream = _open_lock(path, lock)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            owner = stream.read(32).decode(errors="replace").strip() or "unknown"
            stream.close()
            raise ValueError(
                f"{path} is being written by another process (id {owner}). Wait until it ends, or "
                "name another place."
            ) from None
        # The last holder of the lock may have removed the file between `open` and `flock`.
        if _is_at(stream, lock):
            break
        stream.close()
    with stream:
        if not LOCKED.fullmatch(stream.read(32)):
            raise ValueError(
                f"{lock} would mark {path} as being written, but it is a file of something else. "
                "Move it away, or name another place."
            )
        try:
            with _naming(path):
                os.ftruncate(stream.fileno(), 0)
                os.pwrite(stream.fileno(), str(os.getpid()).encode(), 0)
            yield
        finally:
            if _is_at(stream, lock):
                lock.unlink()


LOCKED = re.compile(rb"[0-9]{0,20}")  # what a lock holds: its process's id, or nothing yet


def _open_lock(path: pathlib.Path, lock: pathlib.Path) -> IO[bytes]:
    """Open the lock of `path` without changing it; ValueError if it is no regular file."""
    how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = os.fdopen(os.open(lock, how, 0o666), "rb", buffering=0)
    except OSError as error:
        link = "a link is there" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(
            f"Cannot write {lock}, which marks {path} as being written: {link}. {_way_out(error)}"
        ) from None
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise ValueError(
            f"{lock} would mark {path} as being written, but it is no regular file. Move it away, "
            "or name another place."
        )
    return stream


def _is_at(stream: IO[bytes], path: pathlib.Path) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give a file to write, which becomes `path` at the end unless there was an error.

    Raises:
      ValueError: there is a device, a pipe or a directory at `path`, or the disk is full.
    """
    check_regular(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with _naming(path):
            yield part
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_within(
    directory: str | os.PathLike, replaced: Collection[str] = ()
) -> Iterator[pathlib.Path]:
    """Give a directory to write; its files become those of `directory` unless there was an error.

    `directory` appears when it is complete, and keeps nothing of what it held before. Parents are
    made. Leftovers of a killed process are removed.

    Args:
      replaced: as in `check_replaced`.

    Raises:
      ValueError: as `check_directory` and `check_replaced`; another process writes to it; or the
        disk is full.
    """
    directory = check_directory(directory)
    with only_writer(directory), _naming(directory):
        check_replaced(directory, replaced)
        begin = f".{directory.name}.specjax-"
        for left in directory.parent.glob(f"{glob.escape(begin)}*.part"):
            shutil.rmtree(left, ignore_errors=True)
        part = pathlib.Path(tempfile.mkdtemp(".part", begin, directory.parent))
        try:
            new = part / "new"  # with the usual permissions, which `part` lacks
            new.mkdir()
            yield new
            check_replaced(directory, replaced)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _move(new, directory)
        shutil.rmtree(part)


def _move(new: pathlib.Path, directory: pathlib.Path) -> None:
    """Replace all files of a directory, which may be a mount or somebody's working directory.

    config.json leaves first and comes last, so that no mixture of two models is ever loaded.
    """
    if not directory.exists():
        os.replace(new, directory)
        return
    (directory / CONFIG).unlink(missing_ok=True)
    files = sorted(new.iterdir(), key=lambda file: file.name == CONFIG)
    for old in directory.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif not (new / old.name).exists():
            old.unlink()
    for file in files:
        os.replace(file, directory / file.name)


CONFIG = "config.json"  # which every model has


def check_replaced(directory: str | os.PathLike, replaced: Collection[str]) -> None:
    """Raise ValueError if a directory holds anything but files and folders of these names.

    Args:
      replaced: patterns of names, as `fnmatch` takes them; those of folders end in a slash.
    """
    path = pathlib.Path(directory)
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        name = entry.name + "/" * entry.is_dir()
        if not any(fnmatch.fnmatchcase(name, one) for one in replaced):
            raise ValueError(
                f"{path} holds {entry.name}, which would not be replaced but lost. Name another "
                "directory, or move it away."
            )


def check_directory(directory: str | os.PathLike) -> pathlib.Path:
    """Check a directory to write, which need not exist, and return its absolute path.

    Raises:
      ValueError: its name is empty or not UTF-8, it is a file or below one, a loop of links, or it
        cannot be written to; or its parent cannot, where it is made.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise ValueError(f"The name {str(directory)!r} is not UTF-8. Name another place.") from None
    path = pathlib.Path(os.path.realpath(directory))
    if not str(directory) or not path.name:
        raise ValueError(f"{str(directory)!r} does not name a directory that can be made.")
    if path.is_symlink():  # `realpath` has followed all that lead anywhere
        raise ValueError(f"{path} is a loop of links. Name another place.")
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


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room: on the disk, of a quota, in a file


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Name the file in errors of a full disk, which lack it or have that of a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL and error.filename is not None:
            raise
        raise OSError(
            f"Cannot write {path}: {error.strerror or error}. What was there before is kept. "
            f"{_way_out(error)}"
        ) from error


def _way_out(error: OSError) -> str:
    if error.errno in (None, *FULL):  # numpy's errors have no number
        return "Make room, and give the same command again."
    return "Name another place."


MAX_JSON = 1 << 26  # bytes of a JSON file; tokenizer.json has some 10 MB


def read_limited(path: pathlib.Path, most: int = MAX_JSON) -> bytes:
    """Read a file; ValueError that names it if it has more bytes than `most`, or has no end."""
    with path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, which is too much to read at once.")
    return data


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON object from a file; ValueError that names the file if it is not one."""
    try:
        value = json.loads(decode(read_limited(path), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). Delete it, or copy it again."
        ) from None
    if type(value) is not dict:
        raise ValueError(f"{path} should hold a JSON object, not a {type(value).__name__}.")
    return value


def json_objects(
    data: bytes, name: str | os.PathLike, way_out: str, made: Callable[..., Any] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse a file of JSON lines, each an object; blank lines are skipped.

    Yields the place of each object, "NAME, line N", for errors, and the object.

    Args:
      name: of the file, for errors.
      way_out: the remedy, for errors.
      made: maps each object of a line, inner ones first.

    Raises:
      ValueError: the file is not UTF-8, or a line is not a JSON object.
    """
    # Not splitlines(): JSON may hold U+2028 and the like unescaped.
    for number, line in enumerate(decode(data, name).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line, object_hook=made)
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

    A last line that is not complete is left out: its writer is at work or was killed. Fields of
    earlier versions get their names of today.

    Raises:
      ValueError: a line is not a JSON object.
    """
    return _parsed(path, _whole_lines(path)) if path.exists() else []


def check_regular(path: pathlib.Path, named: str = "") -> None:
    """Raise ValueError if `path` exists and is not a regular file.

    Args:
      named: the user's name of it, for the error; default: the path.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{named or path} is a loop of links. Name another file.") from None
        return  # there is none, or whoever opens it gets the reason
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"{named or path} is a device, a pipe or a directory, and only regular files can be "
            "replaced or read again. Name another file."
        )


def _whole_lines(path: pathlib.Path) -> bytes:
    check_regular(path)
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1]


def _parsed(path: pathlib.Path, lines: bytes) -> list[dict[str, Any]]:
    way_out = "It is not a file of rows: move it away, or name another one."
    return [row for _, row in json_objects(lines, path, way_out, renamed.fields)]


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
                f"Cannot write to {self.path}: {error.strerror or error}. The rows before are "
                f"kept. {_way_out(error)}"
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
