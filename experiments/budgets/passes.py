"""What packing costs: passes over all positions of narrower drafts, and packed ones of that size.

    python -m experiments.budgets.passes --config=configs/budgets.py:prose --workdir=runs/passes

For each batch size and γ of the config, the same number of positions is verified twice: as γ + 1
positions of each row, and packed in a pass that could hold γ_max + 1 of each. Passes take turns.
Prints a table in steps of plain decoding, and writes results.jsonl to the workdir.
"""

from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments import phases
from experiments.reproduce import speedups, study
from experiments.reproduce.pages import number
from experiments.reproduce.study import Study, identity, open_results
from specjax import budgets, decoding
from specjax.measure import report, timing
from specjax.support import command_line

Row = dict[str, Any]
COLUMNS: list[report.Column] = [
    ("rows", lambda row: str(row["batch"])),
    ("γ", lambda row: str(row["gamma"])),
    ("positions", lambda row: str(row["positions"])),
    ("step, ms", lambda row: number(1000 * row["step"])),
    ("v, each row's", lambda row: number(row["whole"] / row["step"])),
    ("v, packed", lambda row: number(row["packed"] / row["step"])),
    ("packed / each row's", lambda row: number(row["packed"] / row["whole"])),
]


def main(_) -> None:
    config = flags.FLAGS.config
    study.check_chain(config, "experiments.budgets.passes times passes of chains")
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    missing = [b for b in config.batch_sizes if not study.find(on.results.done, {"batch": b})]
    for batch in command_line.Steps(missing, unit="batch", disable=None):
        for row in measure(on, batch):
            on.results.append({**row, **identity(on)})
    report.show(Console(markup=False), COLUMNS, on.results.done, "Verify passes")


def measure(on: Study, batch: int) -> list[Row]:
    """A row for each γ, in seconds."""
    config = on.config
    gammas = [gamma for gamma in config.static if gamma < config.gamma_max]
    sizes = {gamma: batch * (gamma + 1) for gamma in gammas}
    method = speedups.method(on, config.draft, 0.0, config.gamma_max)
    method = decoding.with_budget(
        method, budgets.fixed(batch * config.gamma_max), [*sizes.values()]
    )
    ids, run = speedups.ids(on, batch), {"max_new_tokens": config.max_new_tokens}
    context, state = timing.start(
        method, on.target, [ids[i % len(ids)] for i in range(batch)], range(batch),
        key=jax.random.key(0), rows=batch, **run,
    )  # fmt: skip
    take = phases.stopwatch(method, context, state, gammas, sizes=sizes.values())
    samples = [take() for _ in range(config.cost_repeats)]
    took = {name: float(np.median([one[name] for one in samples])) for name in samples[0]}
    return [
        {
            "batch": batch,
            "gamma": gamma,
            "positions": size,
            "whole": took["verify", gamma],
            "packed": took["packed", size],
            "step": took["target", 0],
        }
        for gamma, size in sizes.items()
    ]


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Sizes, inputs.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
