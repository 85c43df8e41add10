"""Several processes of one command, on one machine or many, which share the rows of its output.

`joined` brings them together by `jax.distributed`. Each then works on its own rows with its own
devices, so nothing but a few texts passes between them: they go through the key-value store of
jax's coordinator, which lives in process 0. Rows go through files: `SharedRows`.

No process waits for one that is gone. Each tells the store once a second that it lives; one that
has been silent for `timeout` seconds, or has failed, ends all others with a message. Where process
0 itself is killed, jax ends the others at once, in its own words.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed  # for the store, which has no public name

from specjax.support import files

AUTO = "auto"  # as coordinator: jax finds the cluster
INTERVAL = 1.0  # seconds from one sign of life to the next
INTERRUPTED = 128 + signal.SIGINT  # the exit status after Ctrl-C
NEVER = 10**7  # seconds: for limits of jax's own, in whose place ours stand
AGAIN = "The rows that are there are kept: start all processes again to go on."


@dataclasses.dataclass(frozen=True)
class Group:
    """This process among `count`; as it stands, the only one."""

    index: int = 0
    count: int = 1
    client: Any = dataclasses.field(default=None, repr=False)

    def exchange(self, name: str, text: str = "") -> list[str]:
        """The texts of all processes, in their order, once all have given theirs.

        Args:
          name: of this exchange, the same in all processes; each is used once.
        """
        if self.client is None:
            return [text]
        self.client.key_value_set(f"{name}/{self.index}", text)
        return [
            self.client.blocking_key_value_get(f"{name}/{i}", 1000 * NEVER)
            for i in range(self.count)
        ]


ALONE = Group()


@contextlib.contextmanager
def joined(
    coordinator: str = "", count: int = 0, index: int = 0, timeout: float = 60
) -> Iterator[Group]:
    """This process among the others, which are left together at the end.

    To be entered before jax runs anything. An error within ends the other processes too.

    Args:
      coordinator: HOST:PORT, where process 0 can be reached and no other program listens; "auto":
        jax finds it, the count and the index by itself (TPU pods, Slurm, Open MPI); "": there is
        one process.
      timeout: seconds for all to join, and for which a process may be silent. Who cannot join by
        then is ended, with a message.

    Raises:
      ValueError: arguments that do not go together, or there is no cluster that jax knows.
    """
    if not check_flags(coordinator, count, index, timeout):
        yield ALONE
        return
    client = _join(coordinator, count, index, timeout)
    group = Group(
        distributed.global_state.process_id, distributed.global_state.num_processes, client
    )
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(group, timeout, over), daemon=True)
    watch.start()
    try:
        yield group
        group.exchange("end")
    except BaseException as error:
        over.set()  # or the watch might report this error as another process's
        client.key_value_set(f"failed/{group.index}", str(error) or type(error).__name__)
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        atexit.register(_leave, group, status)  # jax would wait for the others to shut down
        raise
    finally:
        over.set()
    watch.join()
    jax.distributed.shutdown()


def check_flags(coordinator: str, count: int, index: int, timeout: float) -> bool:
    """Whether there are several processes; ValueError if the flags do not go together."""
    if timeout <= 0:
        raise ValueError(f"--timeout={timeout} must be a number of seconds > 0.")
    if coordinator in ("", AUTO):
        if count > 1 or index:
            raise ValueError(
                f"--processes={count} --process={index} need --coordinator=HOST:PORT, the same for "
                "all processes: where process 0 can be reached."
            )
        return coordinator == AUTO
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"--coordinator={coordinator} must be HOST:PORT, or {AUTO}.")
    if not 0 <= index < count:
        raise ValueError(
            f"--process={index} must be one of 0 … --processes − 1, with --processes={count}: give "
            "--coordinator, --processes and --process together."
        )
    return True


def _join(coordinator: str, count: int, index: int, timeout: float) -> Any:
    """The store's client. jax ends a process that cannot join without a word of where: we do."""
    limits = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    given: dict[str, Any] = dict.fromkeys(limits, NEVER)
    if coordinator == AUTO:
        here = "This process"
        advice = "See that all processes of the cluster are started"
    else:
        here = f"Process {index} of {count}"
        given |= {
            "coordinator_address": coordinator, "num_processes": count, "process_id": index,
            "cluster_detection_method": "deactivate",
        }  # fmt: skip
        advice = (
            f"See that processes 0 … {count - 1} are all started, with this --coordinator and "
            f"--processes={count}, and that process 0 can be reached there"
        )
    late = threading.Timer(
        timeout,
        _end,
        [
            f"error: {here} could not join the others at --coordinator={coordinator} within "
            f"{timeout:g} s. {advice}; --timeout=SECONDS waits longer."
        ],
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(**given)
    except ValueError:
        raise ValueError(
            f"--coordinator={AUTO}: jax finds no cluster here. Give --coordinator=HOST:PORT "
            "--processes=N --process=I."
        ) from None
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"{here} could not join the others at --coordinator={coordinator} ({reason}). Name "
            "another port of the machine of process 0."
        ) from None
    finally:
        late.cancel()
    return distributed.global_state.client


def _watch(group: Group, timeout: float, over: threading.Event) -> None:
    """Say that this process lives, and end it if another does not."""
    heard = {i: ("", time.monotonic()) for i in range(group.count)}
    interval, beat = min(INTERVAL, timeout / 4), 0
    while not over.wait(interval):
        beat += 1
        group.client.key_value_set(f"alive/{group.index}", str(beat), allow_overwrite=True)
        for key, said in group.client.key_value_dir_get("failed/"):
            if over.is_set():
                return
            index = key.rpartition("/")[2]
            if said == KeyboardInterrupt.__name__:  # Ctrl-C in a terminal is sent to all processes
                _end(f"interrupted in process {index}. {AGAIN}", group, INTERRUPTED)
            _end(f"error: Process {index} has failed: {said} {AGAIN}", group)
        beats = dict(group.client.key_value_dir_get("alive/"))
        now = time.monotonic()
        for i, (last, at) in heard.items():
            if (said := beats.get(f"alive/{i}", "")) != last:
                heard[i] = said, now
            elif now - at > timeout and not over.is_set():
                _end(
                    f"error: Process {i} of {group.count} has been silent for {timeout:g} s: it "
                    f"has died, or cannot be reached. {AGAIN}",
                    group,
                )


def _end(message: str, group: Group = ALONE, status: int = 1) -> None:
    print(message, file=sys.stderr)
    _leave(group, status)


def _leave(group: Group, status: int = 1) -> None:
    """End this process, whatever its other threads wait for."""
    if group.count > 1 and group.index == 0:
        time.sleep(3 * INTERVAL)  # the store goes with this process: let the others read why
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def check_alike(group: Group, settings: Mapping[str, Any]) -> None:
    """ValueError that names the first setting in which a process differs from process 0.

    Args:
      settings: JSON values by name.
    """
    first, *others = map(json.loads, group.exchange("settings", json.dumps(settings)))
    for i, other in enumerate(others, 1):
        for name in dict.fromkeys([*first, *other]):
            here, there = (json.dumps(found.get(name)) for found in (other, first))
            if here != there:
                raise ValueError(
                    f"Process {i} has {name} = {here}, and process 0 has {there}. All processes "
                    "must have the same config, input, output and checkpoints."
                )


class SharedRows:
    """The numbered rows of a JSON-lines file that several processes make together.

    Each appends its own to a part file beside the output, and process 0 merges them at the end.
    Rows that an earlier run has left in the output or in any part are not made again, however many
    processes there are now.
    """

    def __init__(self, group: Group, file: pathlib.Path, total: int):
        """All processes call this together.

        Args:
          file: the output, in a directory that all processes share.
          total: how many rows there will be.
        """
        self.group, self.file, self.total = group, file, total
        self.done = self._read()
        group.exchange("parts are read")
        missing = [number for number in range(total) if number not in self.done]
        self.missing = missing[group.index :: group.count]
        self.own = files.Rows(_part(file, group.index))

    def append(self, number: int, row: dict[str, Any]) -> None:
        """Write one row of this process through to its file."""
        self.own.append({"row": number, **row})

    def merge(self) -> None:
        """Put all rows into the output, in order, and drop the parts; by process 0, when all are
        done.

        Raises:
          ValueError: a row is missing.
        """
        found = self._read()
        if missing := [number for number in range(self.total) if number not in found]:
            raise ValueError(
                f"{len(missing)} rows of {self.file} are missing, the first is {missing[0]}: was a "
                f"part file removed? {AGAIN}"
            )
        files.write_rows(self.file, [found[number] for number in range(self.total)])
        for part in parts(self.file):
            part.unlink()

    def _read(self) -> dict[int, dict[str, Any]]:
        """The rows of the output and of all parts, by number."""
        found = dict(enumerate(files.read_rows(self.file)))
        for part in parts(self.file):
            found |= {row.pop("row"): row for row in files.read_rows(part)}
        return found


def parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The part files of an output that there are."""
    return sorted(file.parent.glob(_part(file, "*").name))


def _part(file: pathlib.Path, index: int | str) -> pathlib.Path:
    return file.with_name(f".{file.name}.part-{index}.jsonl")
