"""Memory maps of this process: compiled programs take them, and Linux limits their number.

A decoding loop of XLA's CPU backend takes some 1,000 maps, and JAX keeps it for good. Linux kills a
process that reaches `vm.max_map_count`, 65,530 by default. So code that is about to compile calls
`make_room`, which drops JAX's compiled programs before that. A program that is needed again is read
from the cache on disk (`compilation_cache`), or compiled again. Other systems need nothing.
"""

import contextlib
import pathlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax import monitoring

MAPS_OF_A_METHOD = 1_500  # for its programs `start` and `decode`
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of programs read from disk


class _Process:
    """The state of this process: flags and counts of maps."""

    compiled = False  # whether it has compiled since the maps were last counted
    left = 0  # maps after the last clearing; another clearing would not free them
    kept = 0  # entered blocks of `kept`
    warned = False
    clearings = 0  # how often programs were dropped
    lock = threading.RLock()


def used() -> int:
    """The number of memory maps of this process; 0 on systems other than Linux."""
    try:
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def limit() -> int:
    """The most memory maps that a process may have; 0 if there is no such limit."""
    try:
        return int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0


def clearings() -> int:
    """How often `make_room` has dropped the compiled programs of this process."""
    return _Process.clearings


def make_room(methods: int = 1) -> None:
    """Drop JAX's compiled programs if the process nears its limit of memory maps.

    Maps are counted only if something has compiled since the last count. Nothing is dropped within
    `kept`, or if the last clearing left nearly as many maps. What runs meanwhile, such as a
    generator of `specjax.stream`, continues: its next call compiles again.

    Args:
      methods: the number that will compile before the next call.
    """
    with _Process.lock:
        if _Process.kept or not _Process.compiled:
            return
        _Process.compiled = False
        if not (most := limit()):
            return
        found, needed = used(), max(most // 4, methods * MAPS_OF_A_METHOD)
        if found + needed <= most or found - _Process.left <= most // 16:
            return
        jax.clear_caches()
        _Process.clearings += 1
        _Process.left = used()
        if not _Process.warned:
            _Process.warned = True
            warnings.warn(
                f"This process had {found:,} of the {most:,} memory maps that Linux allows. "
                "Compiled programs take most of them, so JAX's were dropped: each is compiled "
                "again, or read from the cache on disk, when it is next called. To keep more, "
                "raise vm.max_map_count (sysctl), or use fewer shapes in one process.",
                RuntimeWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def kept(methods: int = 0) -> Iterator[None]:
    """Keep compiled programs inside this block, such as while they are timed.

    Args:
      methods: the number that compile inside; `make_room` is called for them first.
    """
    if methods:
        make_room(methods)
    with _Process.lock:
        _Process.kept += 1
    try:
        yield
    finally:
        with _Process.lock:
            _Process.kept -= 1


def _listen(event: str, duration_secs: float, **details: Any) -> None:
    if event == _COMPILED:
        _Process.compiled = True


monitoring.register_event_duration_secs_listener(_listen)
