"""The command; see the package."""

import pathlib
from typing import Any

from absl import flags

import experiments.adaptive
from experiments import command
from experiments.adaptive import board, pictures, race
from experiments.reproduce import study
from experiments.reproduce.study import Study, open_results
from specjax.support import files


def main(config, workdir: pathlib.Path) -> None:
    study.check_chain(config, "experiments.adaptive compares lengths of chains")
    race.check(config)
    apart = flags.FLAGS.only_report
    rows = gather(workdir, apart) if apart else fill(Study(config, open_results(workdir, config)))
    sections = [
        *board.sections(rows, config.shown),
        pictures.panels(workdir, rows),
    ]
    command.publish(workdir, f"{rows[0]['task']}: how long should a draft be?", sections, rows)


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

    def measured(**cell: Any) -> list[dict]:
        return race.measure(on, cell)

    return command.fill(on.results, cells, measured, lambda: study.identity(on), complete)


if __name__ == "__main__":
    flags.DEFINE_list(
        "only_report", [], "Directories of races run apart: one report of all, and race nothing."
    )
    command.run(main, experiments.adaptive.__doc__, "What to measure.")
