"""The command; see the package."""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags
from rich.console import Console

import experiments.adaptive
from experiments.adaptive import board, pictures, race
from experiments.reproduce import pages, study
from experiments.reproduce.study import Study, open_results
from specjax.support import command_line, files
from specjax.support.named import short


def main(_) -> None:
    config = flags.FLAGS.config
    study.check_chain(config, "experiments.adaptive compares lengths of chains")
    race.check(config)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False)
    if flags.FLAGS.only_report:
        report(console, workdir, gather(workdir, flags.FLAGS.only_report), config.shown)
        return
    on = Study(config, open_results(workdir, config))
    if flags.FLAGS.only_costs:
        for cell in study.keys(config, config.drafts):
            title = " ".join(short(str(part)) for part in cell.values())
            deciding = race.deciding_policies(on, cell["draft"])
            both = [race.cost(on, cell, deciding) for _ in range(2)]
            board.compare_costs(console, title, *both)
        return
    report(console, workdir, fill(on), config.shown)


def report(console: Console, workdir: pathlib.Path, rows: list[dict], shown: str) -> None:
    """Tables and figures, in the workdir and for the terminal."""
    sections = [
        *board.sections(rows, shown),
        pictures.panels(workdir, rows),
        pictures.lengths(workdir, rows),
        pictures.example(workdir, rows),
        pictures.regrets(workdir, rows),
    ]
    title = f"{rows[0]['task']}: how long should a draft be?"
    pages.write(workdir, title, sections, rows)
    pages.show(console, sections, rows)
    console.print(f"Report and figures: {workdir / 'report.md'}", soft_wrap=True)


def gather(workdir: pathlib.Path, directories: list[str]) -> list[dict]:
    """The rows of races that were run apart, which are written to the workdir.

    Raises:
      ValueError: a directory without any, rows of several tasks, or a race from two directories.
    """
    rows: list[dict] = []
    raced: dict[tuple, str] = {}
    for directory in directories:
        found = files.read_rows(pathlib.Path(directory) / "results.jsonl")
        if not found:
            raise ValueError(
                f"--only_report: {directory} has no rows of races: name their workdirs."
            )
        rows += found
        for cell in dict.fromkeys((row["draft"], row["temperature"]) for row in found):
            if cell in raced:
                raise ValueError(
                    f"--only_report: {raced[cell]} and {directory} both have the race of {cell[0]} "
                    f"at T={cell[1]:g}. Name one of them."
                )
            raced[cell] = directory
    if len(tasks := sorted({row["task"] for row in rows})) > 1:
        raise ValueError(f"--only_report: rows of {' and of '.join(tasks)}. Name those of one.")
    files.write_rows(workdir / "results.jsonl", rows)  # as they were measured
    return rows


def fill(on: Study) -> list[dict]:
    """Measure every draft and temperature that is missing; all rows in order."""
    cells = study.keys(on.config, on.config.drafts)

    def complete(cell) -> bool:
        wanted = ({**cell, "method": name} for name in race.names(on, cell["draft"]))
        return all(study.find(on.results.done, key) for key in wanted)

    missing = [cell for cell in cells if not complete(cell)]
    # Methods are compared with each other: those of a race that was cut off run again.
    on.results.keep(lambda row: not any(cell.items() <= row.items() for cell in missing))
    for cell in (bar := command_line.Steps(missing, unit="race", disable=None)):
        bar.set_description(" ".join(short(str(part)) for part in cell.values()))
        for row in race.measure(on, cell):
            on.results.append({**cell, **row, **study.identity(on)})
    return [row for cell in cells for row in on.results.done if cell.items() <= row.items()]


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and figures.")
    flags.DEFINE_bool("only_costs", False, "Measure costs twice, compare them, and race nothing.")
    flags.DEFINE_list(
        "only_report", [], "Directories of races run apart: one report of all, and race nothing."
    )
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, experiments.adaptive.__doc__)
