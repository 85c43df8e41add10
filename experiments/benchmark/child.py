"""A process that has just started: how soon each loop decodes, and how much memory it takes.

    python -m experiments.benchmark.child '{"target": "t5-base", "kind": "start"}'

`measure.start` runs it, twice. Prints one JSON object.
"""

import json
import pathlib
import resource
import sys
import time

import jax

from experiments.benchmark import measure, models
from experiments.benchmark.cases import Case
from specjax import devices
from specjax.loop import Method


def main(text: str) -> None:
    case = Case(**json.loads(text))
    target, draft = measure.Lab(None).pair(case)
    found = {"weights_gb": _gigabytes(target) + (_gigabytes(draft) if draft else 0.0)}
    jax.block_until_ready(models.inputs(case, target))
    methods: dict[str, Method] = {"autoregressive": measure.plain_of(case, target)}
    if draft is not None:
        methods["speculative"] = measure.build(case, target, draft)
    for name, method in methods.items():
        begin = time.perf_counter()
        rows = measure.call(case, target, method)[2]
        # What the first output takes, less its tokens after the first.
        seconds = time.perf_counter() - begin
        decode, whole, again, _ = measure.call(case, target, method)
        found[f"{name}_s"] = seconds - decode * (1 - 1 / case.tokens)
        found[f"{name}_call_s"] = whole
        assert rows == again
    print(json.dumps({**found, "peak_gb": _peak()}))


def _gigabytes(checkpoint) -> float:
    return sum(x.nbytes for x in jax.tree.leaves(checkpoint.model.params)) / 1e9


def _peak() -> float:
    """The most that the device, or on a CPU the process, ever held."""
    stats = devices.find().memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    # Linux counts in ru_maxrss what the parent held when it forked; VmHWM begins with this program.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


if __name__ == "__main__":
    main(sys.argv[1])
