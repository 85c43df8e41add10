"""When adaptive draft lengths pay: as a function of α, its variance between and within outputs, how
much the drafter's belief shows of it, c and v. Simulated by replay, and measured traces beside it.

    python -m experiments.when --config=configs/when.py --workdir=runs/when
    python -m experiments.trace --config=configs/embedded.py:prose --workdir=runs/prose
    python -m experiments.when --config=configs/when.py --workdir=runs/when --traces=runs/prose

For every point of the config's sweeps and every cost: outputs whose chances of acceptance vary so,
every static γ in a loop of its own, every policy and the oracle, replayed. For each trace that
experiments.trace wrote: where it stands among the points, what policies do there, and what they do
in a simulation with its numbers. Writes results.jsonl, report.md and pictures to the workdir. A run
that was cut off goes on where it was; traces may be added later.
"""

import pathlib

from absl import flags

from experiments import command
from experiments.reproduce.study import check_counts, open_results
from experiments.when import pictures, points, sweep
from specjax.support import runs


def main(config, workdir: pathlib.Path) -> None:
    check_counts(config, "draws")
    traces = points.found([*filter(None, flags.FLAGS.traces)])
    results = open_results(workdir, config)
    facts = {
        **{name: config[name] for name in ("outputs", "tokens", "gamma_max", "seed")},
        "dtype": "float32",
        "batch": 1,
        "run": runs.fingerprint(runs.settings(config)),
    }
    sweep.fill(results, config, facts)
    points.fill(results, config, facts, traces)
    rows = results.done
    sections = [*pictures.sections(workdir, rows, config), *points.sections(rows)]
    command.publish(workdir, "When adaptivity pays", sections, rows)


if __name__ == "__main__":
    flags.DEFINE_list("traces", [], "Directories that experiments.trace wrote.")
    command.run(main, __doc__, "What to simulate.")
