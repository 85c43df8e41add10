"""The command; see the package."""

import contextlib
import io
import pathlib
import tempfile
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import config_flags

import experiments.reproduce
from experiments import command
from experiments.reproduce import (
    alphas,
    figures,
    lenience,
    quality,
    side_by_side,
    speedups,
    timelines,
    traces,
)
from experiments.reproduce.study import Study, check_counts, find, identity, open_results
from specjax.cli import hosts
from specjax.measure import doubts
from specjax.measure.provenance import Results
from specjax.support import command_line, files, processes
from specjax.support.named import short

# Speedups need α, and the figures of one output need speedups.
TABLES: dict[str, ModuleType] = {
    "alpha": alphas,
    "speedup": speedups,
    "lenience": lenience,
    "quality": quality,
    "trace": traces,
    "timeline": timelines,
}
FIGURES = ("trace", "timeline")  # which the config's `tables` does not name


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    check(config)
    with hosts.on_one_mesh(args, config, "they run each program on one mesh") as group:
        if group.index:
            follow(config, args.measure)
            return
        workdir = command_line.make_workdir(args.workdir)
        with files.only_writer(workdir, within=True) if group.joined else contextlib.nullcontext():
            lead(config, workdir, args.measure)


def check(config) -> None:
    """Raise ValueError for errors that show before anything is loaded."""
    known = [name for name in TABLES if name not in FIGURES]
    if unknown := [name for name in config.tables if name not in known]:
        raise ValueError(f"tables: no {unknown[0]!r}; choose from {', '.join(known)}.")
    check_counts(config, *(f"{name}_inputs" for name in config.tables))


def lead(config, workdir: pathlib.Path, measured: bool) -> None:
    """Measure in the process that has the workdir, and write and print the report.

    Args:
      measured: whether to measure what is missing.
    """
    console = command.console()
    study = Study(config, open_results(workdir, config))
    if measured:
        processes.firsts(study.results.done)
        fill(study)
    by_table = whole(study)
    if left := [name for name in wanted(config) if name not in by_table]:
        console.print(f"Not measured, and left out: {', '.join(left)}.")
    rows = [row for of in by_table.values() for row in of]
    if not rows:
        raise ValueError(f"{study.results.path} has no table that is complete: measure first.")
    sections = [TABLES[name].section(config, of) for name, of in by_table.items()]
    if {"alpha", "speedup"} <= by_table.keys():
        tables = by_table["alpha"], by_table["speedup"]
        sections.insert(0, side_by_side.section(config, *tables))
    figures.draw(config, workdir, rows)
    command.publish(workdir, f"{config.task}: the paper's tables, measured", sections, rows)
    for row in by_table.get("trace", ()):
        console.print(traces.coloured(row))
    if timed := by_table.get("speedup"):
        console.print(speedups.conclusion(timed), soft_wrap=True)


def follow(config, measured: bool) -> None:
    """Measure the cells that the first process measures, whose rows this one keeps in a directory
    of its own and drops."""
    if not measured:
        return
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        file = pathlib.Path(place) / "results.jsonl"
        files.write_rows(file, processes.firsts(None))
        fill(Study(config, Results(file)))


def wanted(config) -> list[str]:
    """The config's tables, and the figures of one output, in the order of the work."""
    chosen = {*config.tables}
    if "speedup" in chosen:
        chosen |= {"trace", *(("timeline",) if config.timeline else ())}
    return [name for name in TABLES if name in chosen]


def cells(config, name: str) -> list[dict[str, Any]]:
    """What identifies each row of a table."""
    return [{"table": name, **key} for key in TABLES[name].keys(config)]


def fill(study: Study) -> None:
    """Measure what is missing, cell by cell; lines on standard error say what is done."""
    config, results = study.config, study.results
    missing = [cell for cell in in_order(config) if not find(results.done, cell)]
    if missing and (busy := doubts.busy_before(doubts.load_average())):
        command_line.say(busy)
    bar = command_line.Steps(missing, unit="cell", disable=True)  # for what Ctrl-C says
    for number, cell in enumerate(bar, 1):
        command_line.say(f"{number} of {len(missing)}: {described(cell)}")
        row = {**cell, **TABLES[cell["table"]].measure(study, cell), **identity(study)}
        results.append(processes.firsts(row))
        if cell["table"] == "speedup":
            bar.write(speedups.line_of(row))


def described(cell: Mapping[str, Any]) -> str:
    """Format a cell, such as "speedup, draft-small, T = 1"."""
    parts = {name: short(str(value)) for name, value in cell.items()}
    if "temperature" in cell:
        parts["temperature"] = f"T = {cell['temperature']:g}"
    return ", ".join(parts.values())


def in_order(config) -> list[dict[str, Any]]:
    """All cells in the order of the work: each speedup stands right after the α that it needs, so
    that the first one is there soon."""
    asked = [cell for name in wanted(config) for cell in cells(config, name)]
    timed = [{**cell, "table": "alpha"} for cell in asked if cell["table"] == "speedup"]
    pairs = [one for alpha in timed for one in (alpha, {**alpha, "table": "speedup"})]
    return pairs + [cell for cell in asked if cell not in pairs]


def whole(study: Study) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table that has all its rows, in order."""
    made = {
        name: [find(study.results.done, cell) for cell in cells(study.config, name)]
        for name in wanted(study.config)
    }
    return {name: [row for row in of if row] for name, of in made.items() if all(of)}


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and figures.")
    flags.DEFINE_bool("measure", True, "--nomeasure: the report of the rows that are there.")
    hosts.define_flags("measure together")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, experiments.reproduce.__doc__)
