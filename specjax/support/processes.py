"""Several processes of one command, which share the rows of its output.

Process i of N makes the rows i, i + N, i + 2N, … on its own devices. It appends them to a part file
beside the output. The processes exchange nothing: the one that makes the last row merges all parts.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.support import files, runs

AUTO = "auto"  # the coordinator's value that lets jax find the cluster
UNLIMITED = 10**7  # seconds that a process waits for the others to end
GRACE = 2.0  # seconds for the others to name an error of all, before process 0 takes them along


@dataclasses.dataclass(frozen=True)
class Group:
    """This process among `count`; by default, the only one."""

    index: int = 0
    count: int = 1
    joined: bool = False  # by `jax.distributed`: a mesh may then take the devices of all


ALONE = Group()


def check_alike(settings: Mapping[str, Any]) -> None:
    """Raise ValueError in every joined process if one's settings differ from process 0's.

    Args:
      settings: JSON values by name.
    """
    words = np.frombuffer(bytes.fromhex(runs.fingerprint(settings)), np.uint32)
    every = multihost_utils.process_allgather(words)
    if differing := np.flatnonzero((every != every[0]).any(axis=1)).tolist():
        raise ValueError(
            f"Processes {', '.join(map(str, differing))} have another config, input or checkpoint "
            "than process 0. Give all the same command."
        )


def group(coordinator: str, count: int, index: int, timeout: float) -> Group:
    """Make the group that flags describe. Call it before jax runs anything.

    Args:
      coordinator: HOST:PORT, where process 0 can be reached and no other program listens; "auto":
        jax finds it, the count and the index by itself (TPU pods, Slurm, Open MPI); "": the
        processes do not join, and each has its own devices.
      timeout: seconds for all to join.

    Raises:
      ValueError: flags that do not go together, or there is no cluster that jax knows.
    """
    if timeout <= 0:
        raise ValueError(f"--timeout={timeout} must be a number of seconds > 0.")
    limits: dict[str, Any] = {
        "initialization_timeout": int(max(1, timeout)),
        "shutdown_timeout_seconds": UNLIMITED,
    }
    if coordinator == AUTO:
        try:
            jax.distributed.initialize(**limits)
        except ValueError:
            raise ValueError(
                f"--coordinator={AUTO}: jax finds no cluster here. Give --coordinator=HOST:PORT "
                "--processes=N --process=I."
            ) from None
        return Group(jax.process_index(), jax.process_count(), joined=True)
    if not 0 <= index < max(count, 1) or (coordinator and not count):
        raise ValueError(
            f"--process={index} must be one of 0 … --processes − 1, with --processes={count}: give "
            "both together."
        )
    if not coordinator:
        return Group(index, max(count, 1))
    jax.distributed.initialize(
        coordinator, count, index, cluster_detection_method="deactivate", **limits
    )
    return Group(index, count, joined=True)


@contextlib.contextmanager
def joined(args) -> Iterator[Group]:
    """Make the group of the flags `coordinator`, `processes`, `process` and `timeout`.

    A joined process that fails inside ends without the others. jax's own end waits for them, and
    they wait for this process in an exchange.

    Raises:
      ValueError: as `group`.
    """
    made = group(args.coordinator, args.processes, args.process, args.timeout)
    try:
        yield made
    except BaseException as error:
        if made.joined:
            interrupted = isinstance(error, KeyboardInterrupt)
            # Python calls it before jax's own, and after the command has printed the error.
            atexit.register(_leave, made, 128 + signal.SIGINT if interrupted else 1)
        raise


def _leave(group: Group, status: int) -> None:
    if not group.index:
        time.sleep(GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def firsts(value: Any) -> Any:
    """Return process 0's value in every joined process; in a process alone, its own.

    Args:
      value: JSON; all but process 0 may give None.
    """
    if jax.process_count() == 1:
        return value
    words = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(words))))
    words = np.resize(words, size)  # of the others' bytes none is read
    return json.loads(multihost_utils.broadcast_one_to_all(words).tobytes())


class SharedRows:
    """The numbered rows of a JSON-lines file of which this process makes a share.

    Rows that an earlier run left in the output or in any part are not made again, whatever the
    number of processes.
    """

    def __init__(self, group: Group, file: pathlib.Path, total: int):
        """Open this process's part, and read the rows that exist.

        Args:
          file: the output, in a directory that all processes share.
          total: the number of all rows.
        """
        self.group, self.file, self.total = group, file, total
        own = part(file, group.index)
        own.touch()  # from here on, the output is this run's
        self.own = files.Rows(own)
        done = rows_of(self.file)
        self.missing = [i for i in range(group.index, total, group.count) if i not in done]

    def append(self, number: int, row: dict[str, Any]) -> None:
        """Write one row of this process through to its file."""
        self.own.append({"row": number, **row})

    def merge(self) -> int:
        """Merge all rows into the output, in order, and drop the parts, if no row is missing.

        Returns:
          The number of missing rows: other processes have yet to make them.
        """
        alone = self.group.count == 1  # it holds the file already
        with contextlib.nullcontext() if alone else files.only_writer(self.file, wait=True):
            found = rows_of(self.file)
            missing = self.total - len(found)
            if not missing and parts(self.file):
                files.write_rows(self.file, [found[number] for number in range(self.total)])
                for merged in parts(self.file):
                    merged.unlink()
        return missing


def rows_of(file: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Read the rows of an output and of all its parts, by number.

    Raises:
      ValueError: a part holds a row without a number.
    """
    found = dict(enumerate(files.read_rows(file)))
    for some in parts(file):
        with contextlib.suppress(FileNotFoundError):  # merged and dropped meanwhile
            for row in files.read_rows(some):
                if type(number := row.pop("row", None)) is not int or number < 0:
                    raise ValueError(
                        f"{some} was edited: row={number!r} should be the number of a row. Delete "
                        "the file: the same command makes its rows again."
                    )
                found[number] = row
    return found


@contextlib.contextmanager
def beginning(file: pathlib.Path) -> Iterator[None]:
    """Hold the beginning of a run with this output, which processes pass one by one.

    Raises:
      ValueError: a process that writes the whole output is running.
    """
    with files.only_writer(part(file, "begin"), wait=True), files.only_writer(file):
        yield


def parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The existing part files of an output."""
    return sorted(file.parent.glob(part(file, "*").name))


def part(file: pathlib.Path, index: int | str) -> pathlib.Path:
    """The part file of a process."""
    return file.with_name(f".{file.name}.part-{index}.jsonl")
