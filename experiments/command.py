"""What commands of experiments share: flags, missing rows, the console and the report."""

import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments.reproduce import pages
from specjax.measure.provenance import Results
from specjax.support import command_line, files
from specjax.support.named import short

flags.disclaim_key_flags()  # --help shows them as the command's own
Row = dict[str, Any]


def run(main: Callable[[Any, pathlib.Path], Any], usage: str | None, config: str) -> None:
    """Define --config and --workdir, and start a command: `main(config, workdir)`.

    Args:
      config: the help of --config.
    """
    config_flags.DEFINE_config_file("config", None, config, lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and pictures.")
    flags.mark_flags_as_required(["config", "workdir"])

    def start(_: list[str]) -> None:
        main(flags.FLAGS.config, command_line.make_workdir(flags.FLAGS.workdir))

    start.__module__ = main.__module__
    command_line.run(start, usage)


def fill(
    results: Results,
    cells: Sequence[Row],
    measure: Callable[..., Iterable[Row]],
    facts: Callable[[], Mapping[str, Any]],
    complete: Callable[[Row], bool] | None = None,
) -> list[Row]:
    """Measure the cells that are missing, and return the rows of all cells in order.

    Rows of one cell are compared with each other: a cell that was cut off is measured again.

    Args:
      measure: returns the rows of a cell, whose fields are its arguments.
      facts: what each row says of the run, such as `study.identity`.
      complete: whether the rows of a cell are all there; default: any is.
    """

    def rows_of(cell: Row) -> list[Row]:
        return [row for row in results.done if cell.items() <= row.items()]

    missing = [cell for cell in cells if not (complete or rows_of)(cell)]
    if any(map(rows_of, missing)):
        results.keep(lambda row: not any(cell.items() <= row.items() for cell in missing))
    for cell in (bar := command_line.Steps(missing, unit="cell", disable=None)):
        bar.set_description(", ".join(f"{name} {short(str(of))}" for name, of in cell.items()))
        for row in measure(**cell):
            results.append({**cell, **row, **facts()})
    return [row for cell in cells for row in rows_of(cell)]


def numbers(flag: str, values: Sequence[str], kind: Callable[[str], Any] = float) -> list[Any]:
    """The numbers of a flag's list."""
    try:
        return [kind(value) for value in values or [""]]
    except ValueError:
        given = ",".join(values)
        raise ValueError(
            f"--{flag}={given} must be {kind.__name__}s, commas between them."
        ) from None


def widths(given: Sequence[str], gamma_max: int) -> list[int]:
    """The widths of verify passes from a flag: all of 1 … γ_max, none, or those listed."""
    if list(given) == ["all"]:
        return list(range(1, gamma_max + 1))
    if list(given) == ["none"]:
        return []
    if not all(width.isdecimal() and int(width) > 0 for width in given):
        raise ValueError(f"--widths={','.join(given)} must be all, none or a list of numbers ≥ 1.")
    return [int(width) for width in given]


def console(width: int = 160) -> Console:
    """Make a console; a pipe has no width of its own, and 80 columns would cut the tables."""
    return Console(width=None if sys.stdout.isatty() else width, markup=False)


def publish(
    workdir: pathlib.Path,
    title: str,
    sections: Sequence[pages.Section],
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write report.md, and its tables in report.tex, print its sections and name the file.

    Args:
      rows: all that the report shows.
      facts: what it says of the machine, beside its versions and its load.
    """
    pages.write(workdir, title, sections, rows, facts)
    files.write_text(workdir / "report.tex", pages.latex(sections))
    to = console()
    pages.show(to, sections, rows)
    to.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)
