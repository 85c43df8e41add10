"""The end of a command: its report in the workdir, and the same tables in the terminal."""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from experiments.reproduce import pages


def publish(
    workdir: pathlib.Path,
    title: str,
    sections: Sequence[pages.Section],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write report.md, print its sections and name the file; `rows`: all that it shows."""
    pages.write(workdir, title, sections, rows)
    # A pipe has no width of its own, and 80 columns would cut the tables.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    pages.show(console, sections, rows)
    console.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)
