"""The command; see the package."""

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich.console import Console

import experiments.benchmark
from experiments.benchmark import tables
from experiments.benchmark.cases import chosen
from experiments.benchmark.measure import Lab, measure
from experiments.reproduce import pages
from experiments.reproduce.pages import Section
from experiments.reproduce.study import check_counts, find
from specjax.measure import provenance, report
from specjax.support import command_line, files, runs


def main(_) -> None:
    config = flags.FLAGS.config
    # Peers and child processes need room on the same accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    check_counts(config)
    cases = chosen(config)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    results = open_results(workdir, config)
    left = fill(config, results, cases)
    sections = tables.sections(config, results.done)
    write(workdir, config, sections, results.done)
    pages.show(console, sections)
    if left:
        console.print(f"{left} cases are left: the same command goes on with them.")
    console.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)


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


def write(workdir: pathlib.Path, config, sections: Sequence[Section], rows) -> None:
    """report.md."""
    lines = ["# Benchmark", ""]
    if mixed := provenance.warning(rows):
        lines += [f"> {mixed}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        lines += [report.markdown(section.columns, [dict(row) for row in section.rows]), ""]
        texts = section.words, section.legend, section.origin
        lines += [line for text in texts if text for line in (text, "")]
    names = (*provenance.environment(), *SETTINGS)
    facts = {name: provenance.counted(rows, name) for name in names}
    speeds = [row["bandwidth_gb_s"] for row in rows if "bandwidth_gb_s" in row]
    if speeds:
        facts["bandwidth"] = f"{min(speeds):.1f} to {max(speeds):.1f} GB/s, by case"
    facts["load"] = f"up to {max(row['load'] for row in rows):.1f}"
    lines += ["## Where", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    files.write_text(workdir / "report.md", "\n".join(lines))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, experiments.benchmark.__doc__)
