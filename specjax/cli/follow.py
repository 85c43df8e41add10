"""View of rows as they are decoded, in a terminal: a line for each that runs."""

import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specjax.results import Progress, Row

ROUNDS = 4  # rounds between two updates of the view


def follow(events: Iterable[Row | Progress], console: Console) -> Iterator[Row | Progress]:
    """Pass events on, and show them."""
    running: dict[tuple[int, int], Progress] = {}
    ended = 0
    # Output to this terminal goes above the view; output into a pipe is not redirected.
    with Live(console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as live:
        for event in events:
            label = event.index, event.sample
            if isinstance(event, Progress):
                running[label] = event
            else:
                running.pop(label, None)
                ended += 1
            live.update(lines(list(running.values()), ended, console.width))
            yield event


def lines(running: Iterable[Progress], ended: int, width: int) -> RenderableType:
    """Format a line for each row: input, draw, tokens so far, and the end of its text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right", style="dim")
    table.add_column(no_wrap=True)
    for row in sorted(running, key=lambda row: (row.index, row.sample)):
        name = f"{row.index}" + (f".{row.sample}" if row.sample else "")
        text, room = " ".join(row.text.split()), max(10, width - 24)
        shown = text if len(text) <= room else f"…{text[1 - room :]}"
        table.add_row(name, f"{len(row.tokens)} tokens", Text(shown))
    table.add_row("", "", Text(f"{ended} ended", style="dim"))
    return table
