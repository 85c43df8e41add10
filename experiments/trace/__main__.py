"""Trace once: record what both models say along the target's outputs, for `experiments.replay`.

    python -m experiments.trace --config=configs/embedded.py --workdir=runs/trace

For each draft and temperature of the config: outputs of the target, a rollout of --gamma_max
drafted tokens from every position of them with both models' logits there, and what a draft step,
rounds and calls take here. Writes an npz file for each and results.jsonl, a row for each,
to the workdir. A run that was cut off goes on where it was. Replay is for chains: --config.tree is
refused.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import numpy as np
from absl import flags

from experiments import command
from experiments.reproduce import speedups, study
from experiments.reproduce.study import Study
from specjax.measure import costing, report
from specjax.measure.counting import Undecided
from specjax.replay import rollouts
from specjax.support.named import short

GAMMA_MAX = 8  # where neither flag nor config says it
COLUMNS: list[report.Column] = [
    ("draft", lambda row: short(row["draft"])),
    ("category", lambda row: row.get("category", "–")),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("outputs", lambda row: str(row["outputs"])),
    ("positions", lambda row: str(row["positions"])),
    ("α", lambda row: f"{row['alpha']:.3f}"),
    ("c", lambda row: f"{row['c']:.3f}" if "c" in row else "–"),
    ("round of γ_max", lambda row: f"{row['round']:.2f}" if "c" in row else "–"),
    ("costs off by", lambda row: f"{row['costs']['policies']['error']:.1%}" if "c" in row else "–"),
    ("MB", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    ("s", lambda row: f"{row['seconds']:.0f}"),
]


def main(config, workdir: pathlib.Path) -> None:
    args = flags.FLAGS
    study.check_chain(config, "experiments.trace records rollouts for replay, which are of chains")
    gamma_max = longest(args.gamma_max, config)
    if gamma_max < 1 or args.inputs < 1:
        raise ValueError(f"--gamma_max={gamma_max} and --inputs={args.inputs} must be ≥ 1.")
    with config.unlocked():
        config.trace = {"gamma_max": gamma_max, "inputs": args.inputs, "hidden": args.hidden}
        config.trace.widths = command.widths(args.widths, gamma_max)
        config.trace.update({name: False for name in ("costs", "judged") if not args[name].value})
    on = Study(config, study.open_results(workdir, config))
    rows = fill(on, workdir)
    report.show(command.console(), COLUMNS, rows, f"Rollouts of {gamma_max} tokens: {workdir}")


def fill(on: Study, workdir) -> list[dict[str, Any]]:
    """Trace what is missing; all rows in order."""
    config = on.config
    drafts = *config.timed_ngrams, *(config.get("names", ()) or config.drafts)
    cells = study.keys(config, drafts)
    if categories := config.get("categories", ()):
        cells = [{**cell, "category": category} for category in categories for cell in cells]
        cells.sort(key=lambda cell: config.temperatures.index(cell["temperature"]))
    part = functools.lru_cache(1)(on.of_category)  # its drafts find the target's outputs there

    def measured(**cell: Any) -> list[dict[str, Any]]:
        category = cell.get("category", "")
        return [measure(part(category) if category else on, cell, workdir)]

    return command.fill(on.results, cells, measured, lambda: study.identity(on))


def longest(flag: int | None, config) -> int:
    """γ_max: the flag's, or the config's, or `GAMMA_MAX`."""
    return config.get("gamma_max", GAMMA_MAX) if flag is None else flag


def measure(on: Study, cell: dict[str, Any], workdir) -> dict[str, Any]:
    """Record and save; and time the phases."""
    config, draft, temperature = on.config, cell["draft"], cell["temperature"]
    count, gamma_max = min(config.trace.inputs, len(on.examples)), config.trace.gamma_max
    begin = time.perf_counter()
    outputs = on.outputs(temperature, count)
    recorder = rollouts.Recorder(config.trace.hidden, config.trace.get("judged", True))
    found = on.record(draft, temperature, outputs, gamma_max, recorder=recorder)
    seconds = time.perf_counter() - begin
    names = short(draft), f"T{temperature:g}", *cell.get("category", "").split()
    file = workdir / f"{'-'.join(names)}.npz"
    rollouts.save(file, found)
    emitted = np.asarray(found.emitted)
    tokens = np.arange(found.tokens.shape[1]) < emitted[:, None]
    return {
        "file": file.name,
        "gamma_max": gamma_max,
        "outputs": len(emitted),
        "positions": int(tokens.sum()),
        "alpha": float(np.asarray(found.overlap)[:, :, 0][tokens].mean()),
        "bytes": file.stat().st_size,
        "seconds": seconds,
        **(costs_of(on, draft, temperature) if config.trace.get("costs", True) else {}),
        "batch": 1,  # of what was timed
    }


def costs_of(on: Study, draft: str, temperature: float) -> dict[str, Any]:
    """At batch 1, from calls of the loops: costs in seconds; c and the longest round in tokens of
    plain decoding."""
    gamma_max, widths = on.config.trace.gamma_max, tuple(on.config.trace.widths)
    cell = on, draft, temperature
    gammas = sorted({1, 2, 4, 8, gamma_max} & {*range(1, gamma_max + 1)})
    shared = speedups.method(*cell, gamma_max)
    loops = {
        costing.POLICIES: dataclasses.replace(shared, policy=Undecided(), passes=widths),
        **{costing.static(gamma): speedups.method(*cell, gamma) for gamma in gammas},
    }
    found = speedups.cost(*cell, loops, on.config.repeats, refusals=True)
    table = found[costing.POLICIES]
    return {
        "c": table.c,
        "round": float(table.round_times(gamma_max)[-1] / table.token),
        "costs": {name: of.as_row() for name, of in found.items()},
    }


if __name__ == "__main__":
    flags.DEFINE_integer("gamma_max", None, "Drafted tokens from every position. None given: the "
                         f"config's gamma_max, or {GAMMA_MAX}.")  # fmt: skip
    flags.DEFINE_integer("inputs", 200, "Inputs, the first of the config's split.")
    flags.DEFINE_list("widths", [], "Of the policies' verify passes: none, all, or some numbers.")
    flags.DEFINE_bool("costs", True, "Time rounds and calls too.")
    flags.DEFINE_bool("judged", True, "The target reads what follows a rejected token.")
    flags.DEFINE_bool("hidden", False, "Record the drafter's hidden states too.")
    command.run(main, __doc__, "What to decode, by what.")
