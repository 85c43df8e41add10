"""Tables and pictures of results, for the terminal, for Markdown and as PNG."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from specjax.trace import TracedRound

# Chosen to differ in lightness too, for readers who do not see red and green apart.
COLOURS = {"accepted": "#2e7d32", "rejected": "#c62828", "corrected": "#1565c0"}

Column = tuple[str, Callable[[dict[str, Any]], str]]  # heading, and a row's cell


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]], title: str) -> Table:
    """A table for the terminal; all columns but the first are right-aligned."""
    made = Table(title=title, title_justify="left")
    for i, (heading, _) in enumerate(columns):
        made.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*(cell(row) for _, cell in columns))
    return made


def markdown(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """The same table in Markdown."""
    lines = [
        "| " + " | ".join(heading for heading, _ in columns) + " |",
        "|---" + "|---:" * (len(columns) - 1) + "|",
        *("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows),
    ]
    return "\n".join(lines)


def spans(
    rounds: Sequence[TracedRound], decode: Callable[[list[int]], str]
) -> list[list[tuple[str, str]]]:
    """For each round, pieces of text with what happened to them: accepted, rejected, corrected.

    Of a rejected tail only the first token was tested, and only it is shown.
    """
    lines: list[list[tuple[str, str]]] = []
    known: list[int] = []
    for round_ in rounds:
        line = []
        for kind, ids, grows in (
            ("accepted", round_.accepted, True),
            ("rejected", round_.rejected[:1], False),
            ("corrected", round_.next_token, True),
        ):
            for token in ids:
                # A token's text depends on what comes before it: spaces, pieces of characters.
                piece = decode([*known, token])[len(decode(known)) :] if known else decode([token])
                line.append((piece, kind))
                if grows:
                    known.append(token)
        lines.append(line)
    return lines


def coloured(lines: Sequence[Sequence[tuple[str, str]]]) -> Text:
    """Figure 1 for a terminal: a line for each target call."""
    text = Text()
    for number, line in enumerate(lines, 1):
        text.append(f"{number:3d} ", style="dim")
        for piece, kind in line:
            struck = " strike" if kind == "rejected" else ""
            text.append(piece, style=f"{COLOURS[kind]}{struck}")
        text.append("\n")
    return text


def draw_trace(lines: Sequence[Sequence[tuple[str, str]]], title: str) -> Figure:
    """Figure 1 as a picture: a line for each target call, tokens coloured by what happened."""
    height = 0.27 * len(lines) + 1.0
    longest = max(sum(len(piece) for piece, _ in line) for line in lines) + 6
    figure = Figure(figsize=(max(6.5, 0.095 * longest), height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, figure.get_figwidth() / 0.088)
    axes.set_ylim(height, 0)
    axes.text(1, 0.3, title, fontsize=10, weight="bold", va="center")
    axes.text(1, height - 0.25, "accepted", color=COLOURS["accepted"], fontsize=9, va="center")
    axes.text(11, height - 0.25, "rejected", color=COLOURS["rejected"], fontsize=9, va="center")
    axes.text(21, height - 0.25, "the target's own", color=COLOURS["corrected"], fontsize=9,
              va="center")  # fmt: skip
    for number, line in enumerate(lines):
        y, x = 0.68 + 0.27 * number, 5.0
        axes.text(3, y, str(number + 1), fontsize=8, color="0.6", ha="right", va="center")
        for piece, kind in line:
            axes.text(x, y, piece, fontsize=9, family="monospace", color=COLOURS[kind], va="center",
                      parse_math=False)  # fmt: skip
            if kind == "rejected":
                axes.plot([x, x + len(piece)], [y, y], color=COLOURS[kind], linewidth=0.8)
            x += len(piece)
    return figure


def draw_gains(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Measured gains beside both predictions, a group of bars for each row."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    series = (
        ("predicted, Thm 3.8 (v = 1)", "predicted_paper", "#c9d6e8"),
        ("predicted, τ/(γc+v+overhead)", "predicted", "#7f9fca"),
        ("measured, decode only", "gain_decode", "#1f4e8c"),
        ("measured, end to end", "gain_end_to_end", "#e08a2e"),
    )
    width = 0.2
    for i, (name, field, colour) in enumerate(series):
        heights = [row[field] for row in rows]
        places = [x + (i - 1.5) * width for x in range(len(rows))]
        axes.bar(places, heights, width * 0.92, label=name, color=colour)
    axes.axhline(1, color="0.35", linestyle=":", linewidth=1)
    axes.set_xticks(range(len(rows)), ["\n".join(textwrap.wrap(label, 18)) for label in labels])
    axes.set_ylabel("gain over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
    return figure
