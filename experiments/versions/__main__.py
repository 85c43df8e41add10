"""Compare this checkout with another one: the same tokens, ms a token, and compilation.

    git worktree add ../before TAG
    python -m experiments.versions --other=../before

Each decodes the same inputs of both embedded families with the same keys, in processes of its own
that take turns. The command ends with status 1 if a token differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console

from experiments import tasks
from specjax.measure import report
from specjax.support import command_line

ROOT = Path(__file__).parents[2]
DRAFTS = {"parse": "draft-small", "prose": "draft"}
Cells = dict[tuple[str, float], dict[str, Any]]


def decode(checkout: Path, family: str, inputs: Path, repeats: int, new_tokens: int) -> Cells:
    """The rows of `worker`, by cell and temperature, from a process that imports this checkout."""
    worker = ROOT / "experiments" / "versions" / "worker.py"
    models = [str(ROOT / "families" / family / name) for name in ("target", DRAFTS[family])]
    done = subprocess.run(
        [sys.executable, str(worker), *models, str(inputs), str(repeats), str(new_tokens)],
        env=os.environ | {"PYTHONPATH": str(checkout), "JAX_ENABLE_COMPILATION_CACHE": "false"},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(row["cell"], row["temperature"]): row for row in rows}


def compare(ours: list[Cells], theirs: list[Cells]) -> list[dict[str, Any]]:
    """A row for each cell: outputs that differ, and ratios of the least times."""
    rows = []
    for cell, temperature in ours[0]:
        at = cell, temperature
        pairs = zip(ours[0][at]["tokens"], theirs[0][at]["tokens"], strict=True)
        row = {"cell": cell, "temperature": temperature, "outputs": len(ours[0][at]["tokens"])}
        row["different"] = sum(one != other for one, other in pairs)
        for name in ("per_token", "first"):
            least = [min(run[at][name] for run in runs) for runs in (ours, theirs)]
            row |= {name: least[0], f"{name}_ratio": least[0] / least[1]}
        rows.append(row)
    return rows


def show(console: Console, family: str, rows: list[dict[str, Any]]) -> None:
    """Print a table; a ratio below 1: this checkout is faster."""
    columns: list[report.Column] = [
        ("", lambda row: row["cell"]),
        ("T", lambda row: f"{row['temperature']:g}"),
        ("outputs that differ", lambda row: f"{row['different']} of {row['outputs']}"),
        ("ms a token", lambda row: f"{1e3 * row['per_token']:.3f}"),
        ("over the other", lambda row: f"{row['per_token_ratio']:.3f}"),
        ("first call, s", lambda row: f"{row['first']:.2f}"),
        ("over the other", lambda row: f"{row['first_ratio']:.3f}"),
    ]
    report.show(console, columns, rows, family)


def main(argv) -> None:
    args, console = flags.FLAGS, Console()
    other = Path(args.other).resolve()
    if not (other / "specjax").is_dir():
        raise ValueError(f"--other={args.other} holds no specjax/: give the root of a checkout.")
    different = 0
    for family in DRAFTS:
        texts = [example.input for example in tasks.load(family, "test")][: args.inputs]
        with tempfile.TemporaryDirectory() as scratch:
            inputs = Path(scratch) / "inputs.json"
            inputs.write_text(json.dumps(texts))
            runs: dict[Path, list[Cells]] = {ROOT: [], other: []}
            for _ in range(args.turns):
                for checkout, found in runs.items():
                    command_line.say(f"{family}: {checkout.name} …")
                    found.append(decode(checkout, family, inputs, args.repeats, args.new_tokens))
        rows = compare(runs[ROOT], runs[other])
        different += sum(row["different"] for row in rows)
        show(console, family, rows)
    if different:
        raise SystemExit(1)


def run() -> None:
    """The command."""
    flags.DEFINE_string("other", None, "Root of the other checkout.", required=True)
    for name, default, meaning in (
        ("inputs", 200, "Inputs of each family whose tokens are compared."),
        ("turns", 2, "Processes of each checkout."),
        ("repeats", 5, "Timed runs in each process, of 8 inputs at batch 1."),
        ("new_tokens", 64, "New tokens of an output, at most."),
    ):
        flags.DEFINE_integer(name, default, meaning, lower_bound=1)
    command_line.run(main, __doc__)


if __name__ == "__main__":
    run()
