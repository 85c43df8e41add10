"""Asks a worker, a script that sets its own virtual devices before it imports jax."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def ask(worker: ModuleType, cases: Sequence[Any], *arguments: str) -> list[Any]:
    """Run a worker on cases, a JSON value on its standard input; return its line for each."""
    run = subprocess.run(
        [sys.executable, worker.__file__, *arguments], input=json.dumps(cases), text=True,
        capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(cases)
    return found
