"""Files that are read with errors that name them, and never half-written: replaced whole, or grown
by whole rows.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np


def decode(data: bytes, name: str | os.PathLike) -> str:
    """The text of a UTF-8 file without a byte-order mark, which Windows' editors begin files with.

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
    """The arrays of an npz file.

    Args:
      ranks: names of all its arrays, each of numbers, and how many axes they have.
      what: the file should hold, and
      way_out: what to do about it; for errors.

    Raises:
      OSError: there is no such file, or it cannot be opened.
      ValueError: it is empty, cut short or damaged, or holds anything else.
    """
    with open(path, "rb") as stream:
        try:
            found = dict(np.load(stream, allow_pickle=False))
        except Exception as error:  # of the zip, its compression, the header of an array, …
            raise ValueError(
                f"{path} is not a file of {what}, or it is damaged ({error}). {way_out}"
            ) from error
    if set(found) != set(ranks):
        raise ValueError(
            f"{path} is not a file of {what}: it holds {', '.join(sorted(found)) or 'nothing'}. "
            f"{way_out}"
        )
    for name, rank in ranks.items():
        if found[name].dtype.kind not in "iuf" or found[name].ndim != rank:
            raise ValueError(
                f"{path}: {name!r} has the type {found[name].dtype} and the shape "
                f"{found[name].shape}, where {what} have numbers with {rank} axes. {way_out}"
            )
    return found


@contextlib.contextmanager
def only_writer(path: str | os.PathLike) -> Iterator[None]:
    """Hold `path`, a file or a directory, for this process alone.

    The lock is advisory (`flock` on `.NAME.lock` beside `path`). It ends with the process, however
    that ends. `path` itself need not exist and may be replaced meanwhile. Parents are made.

    Raises:
      ValueError: another process, or this one elsewhere, holds `path`; the message has its id.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    while True:
        stream = lock.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            stream.close()
            raise ValueError(
                f"{path} is being written by another process (id {owner}). Wait until it ends, or "
                "name another place."
            ) from None
        # Whoever held the lock before may have removed the file between `open` and `flock`.
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
    """A file to write, which becomes `path` at the end unless there was an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_within(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory to write files to, which go to `directory` at the end unless there was an error.

    Each appears whole or not at all, and a new directory only when it is complete. Parents are made
    if need be, and files of the same names replaced.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        if directory.exists():
            for file in sorted(part.iterdir()):
                os.replace(file, directory / file.name)
        else:
            os.replace(part, directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


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


class Rows:
    """A JSON-lines file that grows by whole rows, and can be gone on with after a cut.

    A last line that is not complete was being written when the run ended; it is dropped.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.done: list[dict[str, Any]] = []
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            # Not splitlines(): JSON may hold U+2028 and such as they are.
            self.done = [json.loads(line) for line in whole.decode("utf-8").split("\n")[:-1]]
        except ValueError:
            raise ValueError(
                f"{path} holds lines that are not JSON: not a file of rows. Move it away, or name "
                "another one."
            ) from None
        if whole != data:
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row through to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.done.append(row)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other rows, from the file too."""
        self.done = [row for row in self.done if wanted(row)]
        write_rows(self.path, self.done)
