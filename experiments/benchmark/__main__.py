"""The command; see the package."""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import experiments.benchmark
from experiments import command
from experiments.benchmark import tables
from experiments.benchmark.cases import chosen
from experiments.benchmark.measure import Lab, measure
from experiments.reproduce.study import check_counts, find
from specjax.measure import provenance
from specjax.support import command_line, runs


def main(config, workdir: pathlib.Path) -> None:
    # Peers and child processes need room on the same accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_counts(config)
    cases = chosen(config)
    results = open_results(workdir, config)
    left = fill(config, results, cases)
    rows = results.done
    if left:
        command_line.say(f"{left} cases are left: the same command goes on with them.")
    command.publish(workdir, "Benchmark", tables.sections(config, rows), rows, facts(rows))


SETTINGS = ("repeats", "keys_per_repeat", "steps")  # of the config, in every row


def fill(config, results: provenance.Results, cases: Sequence[Any]) -> int:
    """Measure what is missing, as long as the config's minutes last; how many cases are left."""
    lab, begin = Lab(config), time.monotonic()
    command_line.say("compiling programs, each before it first runs")
    missing = [case for case in cases if not find(results.done, case.cell)]
    for done, case in enumerate(bar := command_line.Steps(missing, unit="case", disable=None)):
        # A case is begun only if one of the mean length so far would end in time.
        spent = (time.monotonic() - begin) / 60
        if done and config.minutes and spent * (done + 1) / done > config.minutes:
            return len(missing) - done
        bar.set_description(f"{case.kind} {tables.named(case.cell)}")
        first = time.monotonic()
        row = measure(lab, case)
        took = {"seconds": round(time.monotonic() - first, 1), "load": os.getloadavg()[0]}
        results.append({**case.cell, "seed": 0, **row, **took, **identity(config)})
    return 0


def open_results(workdir: pathlib.Path, config) -> provenance.Results:
    """Rows of earlier runs, of any part, on the same machine."""
    results, facts = provenance.Results(workdir / "results.jsonl"), provenance.environment()
    settings = {name: config[name] for name in SETTINGS}
    settings |= {name: facts[name] for name in ("device", "cores")}
    what = "rows of another machine, or of other repeats, keys or steps"
    runs.keep_settings(results, settings, identity(config)["run"], what)
    return results


def identity(config) -> dict[str, Any]:
    """What was run; `Results` adds where."""
    facts = provenance.environment()
    settings = {name: config[name] for name in SETTINGS}
    return {
        **settings,
        "run": runs.fingerprint(*settings.values(), facts["device"], facts["cores"]),
    }


def facts(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What the report says of the machine beside its versions."""
    found = {name: provenance.counted(rows, name) for name in SETTINGS}
    speeds = [row["bandwidth_gb_s"] for row in rows if "bandwidth_gb_s" in row]
    if speeds:
        found["bandwidth"] = f"{min(speeds):.1f} to {max(speeds):.1f} GB/s, by case"
    return found


if __name__ == "__main__":
    command.run(main, experiments.benchmark.__doc__, "What to measure.")
