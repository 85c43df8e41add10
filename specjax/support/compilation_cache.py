"""The cache of compiled programs on disk, from which later processes read them.

JAX keeps none by default. `enable_compilation_cache` names a directory. The commands call it; your
own program may. Settings of the user stay as they are:

- another place: `JAX_COMPILATION_CACHE_DIR=DIR`, or `jax_compilation_cache_dir` of `jax.config`;
- off: `JAX_ENABLE_COMPILATION_CACHE=false`, or `jax_enable_compilation_cache`.
"""

import os
import pathlib
import time
from typing import Any

import jax
import jax.monitoring

MIN_SECONDS = 0.5  # of compiling a program that is kept; JAX's default leaves out too many
MIN_SECONDS_OF_JAX = 1.0


def directory() -> pathlib.Path:
    """The cache's directory: `$XDG_CACHE_HOME/specjax/compiled`, or the same below `~/.cache`.

    Raises:
      RuntimeError: there is no home directory, or its name is empty, for which Python takes "/".
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # XDG's specification: ignore a relative path.
    if os.path.isabs(base):
        cache = pathlib.Path(base)
    elif os.environ.get("HOME") == "":
        raise RuntimeError("HOME is empty.")
    else:
        cache = pathlib.Path.home() / ".cache"
    return cache / "specjax" / "compiled"


def enable_compilation_cache() -> None:
    """Keep compiled programs in `directory()`. Settings of the user stay as they are."""
    found = jax.config.values
    if found["jax_compilation_cache_dir"] or not found["jax_enable_compilation_cache"]:
        return
    try:
        path = directory()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no writable home: every process compiles for itself
    if not os.access(path, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if found["jax_persistent_cache_min_compile_time_secs"] == MIN_SECONDS_OF_JAX:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)


class Watch:
    """A watch that measures JAX's time of tracing and compiling, from its construction on."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def seconds(self) -> float:
        """Stop the watch, and return the seconds of tracing and compiling so far.

        Nested spans, such as those of a function that another one calls, count once.
        """
        jax.monitoring.unregister_event_duration_listener(self._note)
        total, reached = 0.0, 0.0
        for begin, end in sorted(self._spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total
