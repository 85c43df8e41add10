"""The origin of numbers: facts that every row of results carries, and a report's words on them.

All experiments write their rows here. A row that lacks one of `NEEDED` is refused; command, commit,
versions and hardware are filled in.
"""

import collections
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import devices
from specjax.measure import doubts
from specjax.models import int8, memory
from specjax.models.checkpoint import Checkpoint
from specjax.support import files

NEEDED = ("dtype", "batch", "seed")
SETTINGS = ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")  # of numbers and times
PACKAGES = ("jax", "jaxlib", "flax", "transformers", "numpy")
_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


class Results(files.Rows):
    """Rows of measurements, each with the facts that a comparison needs."""

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, with command, commit, versions and hardware.

        Raises:
          ValueError: it lacks one of `NEEDED`.
        """
        super().append(complete(row, environment()))


def write(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a whole file of such rows."""
    facts = environment()
    lines = [json.dumps(complete(row, facts), ensure_ascii=False) + "\n" for row in rows]
    files.write_text(path, "".join(lines))


def complete(row: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Add command, load and environment to a row; ValueError if one of `NEEDED` is missing."""
    if lacking := [name for name in NEEDED if row.get(name) is None]:
        raise ValueError(
            f"A row of results lacks {', '.join(lacking)}: whoever measures must say it. The row "
            f"has {', '.join(row)}."
        )
    load = doubts.load_average()  # NaN is no JSON
    load_per_core = None if math.isnan(load) else round(load, 2)
    return {"command": command(), "load_per_core": load_per_core, **row, **facts}


def dtype_of(model: Checkpoint) -> str:
    """The dtype of the parameters, and what is int8: "float32, weights and cache int8"."""
    params = model.model.params
    has = {
        "weights": any(leaf.dtype in int8.DTYPES for leaf in jax.tree.leaves(params)),
        "cache": getattr(model.model, "int8_cache", False),
    }
    narrow = " and ".join(name for name, found in has.items() if found)
    return f"{memory.dtype_of(params)}{f', {narrow} int8' if narrow else ''}"


def origin(rows: Sequence[Mapping[str, Any]], batch: str = "") -> str:
    """Describe where a table's rows are from, and their command; "–" for unknown facts.

    Args:
      batch: the batch size, if known, of rows that lack it.
    """
    facts = [f"{name} {counted(rows, name)}" for name in ("commit", *NEEDED)]
    if batch and any("batch" not in row for row in rows):
        facts.append(f"where the rows do not say their batch, {batch}")
    commands = dict.fromkeys(row["command"] for row in rows if "command" in row)
    by = f" Made by {' and '.join(f'`{one}`' for one in commands)}." if commands else ""
    return f"{len(rows)} row{'s' * (len(rows) != 1)}: {'; '.join(facts)}.{by}"


def warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Warn, at the head of a report, of rows of several runs or of a busy machine; else ""."""
    facts = (*environment(), "dtype", "seed")
    mixed = [name for name in facts if len({row.get(name) for row in rows}) > 1]
    sentences = []
    if mixed:
        values = "; ".join(f"{name} {counted(rows, name)}" for name in mixed)
        sentences.append(
            f"**Warning: the {len(rows)} rows of this report are not of one run: {values}.** "
            "Figures of one table may not go with those of another; each table says where its own "
            "rows are from."
        )
    if any(str(row.get("commit")).endswith("+") for row in rows):
        sentences.append("At a commit with + files were changed and not committed.")
    return " ".join([*sentences, busy(rows)]).strip()


def busy(rows: Sequence[Mapping[str, Any]]) -> str:
    """Explain why nothing follows from rows timed on a busy machine; "" if it was not busy."""
    return doubts.busy(row.get("load_per_core") for row in rows)


def loads(rows: Sequence[Mapping[str, Any]]) -> str:
    """The range of load averages of rows, such as "0.31 to 1.30"; "–" if no row has one."""
    found = sorted(row["load_per_core"] for row in rows if row.get("load_per_core") is not None)
    ends = dict.fromkeys(f"{load:.2f}" for load in (*found[:1], *found[-1:]))
    return " to ".join(ends) or "–"


def counted(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """List the values of a field, each with its number of rows if there are several."""
    found = collections.Counter(str(row.get(name, "–")) for row in rows)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{value} ({count})" for value, count in found.most_common())


def environment() -> dict[str, Any]:
    """Commit, versions and hardware, which a comparison of numbers needs."""
    device = devices.find()
    return {
        "commit": commit(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": device.platform,
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "devices": jax.device_count(),
        "cores": devices.cores(),
    }


def command() -> str:
    """The command of this process, with the variables of `SETTINGS` that are set."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is None:
        words = [pathlib.Path(sys.argv[0]).name]
    else:
        words = ["python", "-m", main.name.removesuffix(".__main__")]
    known = [name for name in SETTINGS if name in os.environ]
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in known]
    return " ".join([*settings, shlex.join([*words, *sys.argv[1:]])])


def commit() -> str:
    """The checkout's commit, with + if files differ from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """The processor's name as given by the system."""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
