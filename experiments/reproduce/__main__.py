"""The command; see the package."""

import sys
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

import experiments.reproduce
from experiments import common
from experiments.reproduce import alphas, beams, figures, gains, lenience, pages, quality
from experiments.reproduce.study import Study, find, identity, open_results, short

# In the order of the work: gains need α, and figures need gains.
TABLES: dict[str, ModuleType] = {
    "alpha": alphas,
    "gain": gains,
    "lenience": lenience,
    "quality": quality,
    "beam": beams,
}


def main(_) -> None:
    config = flags.FLAGS.config
    if unknown := [name for name in config.tables if name not in TABLES]:
        raise ValueError(f"tables: no {unknown[0]!r}; choose from {', '.join(TABLES)}.")
    workdir = common.make_workdir(flags.FLAGS.workdir)
    # A pipe has no width of its own, and 80 columns would cut the tables.
    # Code is full of brackets, which rich would take for markup.
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False)
    study = Study(config, open_results(workdir, config))
    rows = fill(study)
    sections = [
        table.section(config, [row for row in rows if row["table"] == name])
        for name, table in TABLES.items()
        if name in config.tables
    ]
    figures.of_tables(config, workdir, rows)
    lines = Text()
    if "gain" in config.tables:
        drawn, lines = figures.example(study, workdir, rows)
        sections.append(drawn)
    if config.timeline:
        sections += [figures.when(study, workdir, rows), figures.formulas(workdir)]
    title = f"{config.task}: the paper's tables, measured"
    pages.write(workdir, title, sections, rows[-1])
    pages.show(console, sections)
    console.print(lines)
    console.print(f"Report and figures: {workdir / 'report.md'}", soft_wrap=True)


def fill(study: Study) -> list[dict[str, Any]]:
    """Measure what is missing, cell by cell, and return the rows of all cells in order."""
    config, results = study.config, study.results
    cells = [
        {"table": name, **key}
        for name, table in TABLES.items()
        if name in config.tables
        for key in table.keys(config)
    ]
    missing = [cell for cell in cells if not find(results.done, cell)]
    for cell in (bar := tqdm(missing, unit="cell")):
        bar.set_description(" ".join(short(str(part)) for part in cell.values()))
        results.append({**cell, **TABLES[cell["table"]].measure(study, cell), **identity(study)})
    return [row for cell in cells if (row := find(results.done, cell))]


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and figures.")
    flags.mark_flags_as_required(["config", "workdir"])
    common.run(main, experiments.reproduce.__doc__)
