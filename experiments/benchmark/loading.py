"""Seconds and memory of loading models one after the other, by dtype, each in a fresh process.

    python -m experiments.benchmark.loading TARGET.gguf DRAFT.gguf

Seconds are those of `specjax.load`, after imports. The peak is that of the process above what it
held before.
"""

import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax

from specjax import checkpoints
from specjax.models.memory import gigabytes, nbytes

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8"},
}
HEAD = "| dtype | seconds | parameters | peak |\n|---|---:|---:|---:|"


def held(field: str) -> int:
    """Bytes of this process, by a field of Linux's /proc/self/status."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])  # type: ignore[index]


def row(way: str, names: list[str]) -> str:
    """Load all models, and format a row of the table."""
    jax.devices()
    before, begin = held("VmRSS"), time.perf_counter()
    models = [checkpoints.load(name, **WAYS[way]).model for name in names]
    seconds = time.perf_counter() - begin
    sizes = sum(map(nbytes, models)), held("VmHWM") - before
    return f"| {way} | {seconds:.1f} | {' | '.join(map(gigabytes, sizes))} |"


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    if first in WAYS:
        print(row(first, others))
    else:
        print(HEAD, flush=True)
        for way in WAYS:
            command = [sys.executable, "-m", "experiments.benchmark.loading", way, *sys.argv[1:]]
            subprocess.run(command, check=True)
