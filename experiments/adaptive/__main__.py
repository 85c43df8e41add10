"""The command; see the package."""

import pathlib
from typing import Any

import experiments.adaptive
from experiments import command
from experiments.adaptive import board, pictures, race
from experiments.reproduce import study
from experiments.reproduce.study import Study, open_results


def main(config, workdir: pathlib.Path) -> None:
    study.check_chain(config, "experiments.adaptive compares lengths of chains")
    race.check(config)
    on = Study(config, open_results(workdir, config))

    def complete(cell) -> bool:
        wanted = ({**cell, "method": name} for name in race.names(on, cell["draft"]))
        return all(study.find(on.results.done, key) for key in wanted)

    def measured(**cell: Any) -> list[dict]:
        return race.measure(on, cell)

    cells = study.keys(config, config.drafts)
    rows = command.fill(on.results, cells, measured, lambda: study.identity(on), complete)
    sections = [*board.sections(rows, config.shown), pictures.panels(workdir, rows)]
    command.publish(workdir, f"{rows[0]['task']}: how long should a draft be?", sections, rows)


if __name__ == "__main__":
    command.run(main, experiments.adaptive.__doc__, "What to measure.")
