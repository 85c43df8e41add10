"""Tables of results, for the terminal and for Markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Column = tuple[str, Callable[[dict[str, Any]], str]]  # heading, and a row's cell


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Build a table for the terminal; all columns but the first are right-aligned."""
    made = Table(title=title, title_justify="left")
    for i, (heading, _) in enumerate(columns):
        made.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        made.add_row(*(cell(row) for _, cell in columns))
    return made


def show(
    console: Console, columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str
) -> None:
    """Print a table; into a pipe or a file, which have no width of their own, all of it."""
    made, usual = table(columns, rows, title), console.width
    if not console.is_terminal:
        console.width = 10_000
        console.width = max(usual, console.measure(made).maximum)
    console.print(made)
    console.width = usual


def markdown(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Render the rows as a table in Markdown."""
    lines = [
        "| " + " | ".join(heading for heading, _ in columns) + " |",
        "|---" + "|---:" * (len(columns) - 1) + "|",
        *("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows),
    ]
    return "\n".join(lines)


def acceptance(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The column of conditional acceptance: its mean, and by position; none where no row has it.

    Args:
      rows: with the fields of `results.Acceptance.acceptance_fields`.
    """
    known = any(row.get("mean_acceptance") is not None for row in rows)
    return [("accepted: mean, by position", acceptance_cell)] if known else []


def acceptance_cell(row: Mapping[str, Any]) -> str:
    """Show the mean of conditional acceptance, and by position; a dash if the row lacks it."""
    if row.get("mean_acceptance") is None:
        return "–"
    rates = ("–" if rate is None else f"{rate:.2f}" for rate in row["acceptance_by_position"])
    return f"{row['mean_acceptance']:.2f}: {' '.join(rates)}"
