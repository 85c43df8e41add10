"""Compiled programs on disk, so that the next process finds them.

JAX keeps none by default. `enable_compilation_cache` names a directory. The commands call it; a
program of your own may. What the user has set stays as it is:

- another place: `JAX_COMPILATION_CACHE_DIR=DIR`, or `jax_compilation_cache_dir` of `jax.config`;
- off: `JAX_ENABLE_COMPILATION_CACHE=false`, or `jax_enable_compilation_cache`.

Both variables are JAX's own.
"""

import os
import pathlib
import time
from typing import Any

import jax
import jax.monitoring

MIN_SECONDS = 0.5  # of compiling, for a program to be kept; JAX's default leaves out too many
MIN_SECONDS_OF_JAX = 1.0


def directory() -> pathlib.Path:
    """`$XDG_CACHE_HOME/specjax/compiled`, or the same below `~/.cache`.

    Raises:
      RuntimeError: there is no home directory, or its name is empty, for which Python takes "/".
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG says to ignore a relative path.
    if os.path.isabs(base):
        cache = pathlib.Path(base)
    elif os.environ.get("HOME") == "":
        raise RuntimeError("HOME is empty.")
    else:
        cache = pathlib.Path.home() / ".cache"
    return cache / "specjax" / "compiled"


def enable_compilation_cache() -> None:
    """Keep compiled programs in `directory()`. Changes nothing that the user has set."""
    found = jax.config.values
    if found["jax_compilation_cache_dir"] or not found["jax_enable_compilation_cache"]:
        return
    try:
        path = directory()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home, or none that can be written to: every process compiles for itself
    if not os.access(path, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if found["jax_persistent_cache_min_compile_time_secs"] == MIN_SECONDS_OF_JAX:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)


class Watch:
    """A watch that measures how long JAX traces and compiles, from when it is made."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def seconds(self) -> float:
        """Seconds of tracing and compiling so far; the watch ends. Spans within others, such as
        those of a function that another one calls, count once."""
        jax.monitoring.unregister_event_duration_listener(self._note)
        total, reached = 0.0, 0.0
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total
