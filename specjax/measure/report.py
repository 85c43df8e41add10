"""Tables and figures of results, for the terminal, for Markdown, as HTML and as PNG."""

import functools
import html
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.measure.trace import TracedRound

BENEATH = "beneath"  # a piece that begins a line of its own under a round's: spaces, or a remark
# Chosen to differ in lightness too, for readers who do not see red and green apart.
COLOURS = {
    "accepted": "#2e7d32", "rejected": "#c62828", "corrected": "#1565c0", BENEATH: "#9e9e9e",
}  # fmt: skip

RING: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "0.2", "zorder": 3}

MAX_CALLS = 40  # of the target, in a trace's picture
UNFINISHED = "\ufffd"  # the tokenizer's output for part of a character
SPACE = "␣"

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


def spans(
    rounds: Sequence[TracedRound], decode: Callable[[list[int]], str], most: int = 5
) -> list[list[tuple[str, str]]]:
    """Split the text of each round into pieces: accepted, rejected, corrected.

    Of a rejected tail only the first token was tested, and only it is shown. Branches of a tree
    stand on lines beneath, each where it begins. Accepted and corrected pieces join to the decoded
    text: a character made of several tokens comes with the last.

    Args:
      decode: returns the text of an output's first ids. `partial(decoding.text_of, target, prompt)`
        keeps the space that an output may begin with.
      most: lines beneath a round; the last one counts the branches that are left out.
    """
    lines: list[list[tuple[str, str]]] = []
    below: list[list[tuple[str, str]]] = []
    known: list[int] = []
    shown = ""
    for round_ in rounds:
        line: list[tuple[str, str]] = []
        beneath: list[tuple[str, str]] = []
        count = len(round_.branches)
        fit = count if count <= most else most - 1
        for behind, tokens in round_.branches[:fit]:
            before = decode([*known, *behind]).rstrip(UNFINISHED)
            beneath.append((" " * (len(before) - len(shown)), BENEATH))
            for end in range(1, len(tokens) + 1):
                text = decode([*known, *behind, *tokens[:end]])
                text = text if end == len(tokens) else text.rstrip(UNFINISHED)
                beneath.append((text[len(before) :], "rejected"))
                before = text
        if fit < count:
            beneath.append((f"… {count - fit} more", BENEATH))
        for kind, ids, grows in (
            ("accepted", round_.accepted, True),
            ("rejected", round_.rejected[:1], False),
            ("corrected", round_.next_token, True),
        ):
            for token in ids:
                # A token's text depends on what comes before it: spaces, pieces of characters.
                text = decode([*known, token])
                if grows:
                    known.append(token)
                    text = text.rstrip(UNFINISHED)
                line.append((text[len(shown) :], kind))
                shown = text if grows else shown
        lines.append(line)
        below.append(beneath)
    if known:
        piece, kind = lines[-1][-1]
        lines[-1][-1] = piece + decode(known)[len(shown) :], kind
    return [line + beneath for line, beneath in zip(lines, below, strict=True)]


def broken(line: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Split a round's pieces into its own line and those beneath it."""
    parts: list[list[tuple[str, str]]] = [[]]
    for piece in line:
        if piece[1] == BENEATH:
            parts.append([])
        parts[-1].append(piece)
    return parts


def printable(text: str) -> str:
    """Make every character visible, one for one: ↵, → for a tab, � for others without a shape."""
    shapes = {"\n": "↵", "\t": "→"}
    return "".join(c if c.isprintable() else shapes.get(c, UNFINISHED) for c in text)


def token_text(text: str) -> str:
    """Make a token's text `printable`, with ␣ for the spaces at its edges: `)` and `) ` differ."""
    return re.sub("^ +| +$", lambda spaces: SPACE * len(spaces[0]), printable(text))


def _shown(piece: str, kind: str) -> str:
    """Show a piece as `token_text`, unless it only begins a line beneath a round."""
    return printable(piece) if kind == BENEATH else token_text(piece)


@functools.cache
def _drawable() -> frozenset[int]:
    """Characters that all fonts of a trace's picture can draw."""
    fonts = FontProperties(family="monospace"), FontProperties(weight="bold")
    return frozenset.intersection(*(frozenset(FT2Font(findfont(f)).get_charmap()) for f in fonts))


def _drawn(text: str) -> str:
    """Make text `printable`, with � for characters that the fonts lack."""
    return "".join(c if ord(c) in _drawable() else UNFINISHED for c in printable(text))


# Tags that mean deletion and insertion: struck and underlined even without the colours.
_TAGS = {"accepted": "span", "rejected": "del", "corrected": "ins", BENEATH: "span"}
_LEGEND = {"accepted": "accepted", "rejected": "rejected", "corrected": "the target's own"}
_SPACES = f"{SPACE}: a space at a token's edge"


def coloured(lines: Sequence[Sequence[tuple[str, str]]]) -> Text:
    """Draw Figure 1 for a terminal: target calls, branches of a tree beneath, a legend."""
    text = Text()
    for number, line in enumerate(lines, 1):
        text.append(f"{number:3d} ", style="dim")
        for piece, kind in line:
            text.append("\n    " if kind == BENEATH else "")
            text.append(_shown(piece, kind), style=_style(kind))
        text.append("\n")
    text.append("    ")
    for kind, name in _LEGEND.items():
        text.append(name, style=_style(kind)).append(", ")
    return text.append(f"{_SPACES}\n")


def _style(kind: str) -> str:
    """The style of a kind of piece in a terminal."""
    return f"{COLOURS[kind]}{' strike' if kind == 'rejected' else ''}"


_NOTES = (
    "Of what was rejected only the first token was tested, and only it is shown.",
    "Beneath a line stand the branches that were not kept, each where it begins.",
)  # of chains, of trees
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 monospace; color: #333; background: #fff; margin: 2em }}
h1 {{ font-size: 1em }}
h1, h2, li {{ white-space: pre-wrap; overflow-wrap: anywhere }}
h2 {{ font-size: 1em; font-weight: normal }}
{styles}
</style>
<h1>{title}</h1>
<h2>{setting}</h2>
<ol>
{lines}
</ol>
<p>A line for each call of the target. {legend}. {spaces}. {note}</p>
</html>
"""


def html_trace(lines: Sequence[Sequence[tuple[str, str]]], title: str, setting: str = "") -> str:
    """Draw Figure 1 as a page without scripts or fonts: a line for each target call.

    As in a terminal, all characters are visible: ↵ stands for the end of a line, ␣ for a space at
    a token's edge.

    Args:
      setting: the draft, γ and the temperature of the run.
    """

    def tagged(piece: str, kind: str) -> str:
        tag, broke = _TAGS[kind], "<br>" * (kind == BENEATH)
        return f'{broke}<{tag} class="{kind}">{html.escape(_shown(piece, kind))}</{tag}>'

    return _PAGE.format(
        title=html.escape(printable(title)),
        setting=html.escape(printable(setting)),
        styles="\n".join(f".{kind} {{ color: {colour} }}" for kind, colour in COLOURS.items()),
        lines="\n".join(f"<li>{''.join(tagged(*piece) for piece in line)}</li>" for line in lines),
        legend=", ".join(tagged(name, kind) for kind, name in _LEGEND.items()),
        spaces=_SPACES,
        note=_NOTES[any(kind == BENEATH for line in lines for _, kind in line)],
    )


def draw_trace(lines: Sequence[Sequence[tuple[str, str]]], title: str, setting: str = "") -> Figure:
    """Draw Figure 1 as a picture: a line for each target call, tokens coloured by outcome.

    ␣ stands for a space at a token's edge. After `MAX_CALLS` calls the others are counted.

    Args:
      setting: the draft, γ and the temperature of the run.
    """
    top = 0.95 if setting else 0.68  # of the first call's line, in inches
    parts = [(number, broken(line)) for number, line in enumerate(lines[:MAX_CALLS], 1)]
    left_out = len(lines) - len(parts)
    height = 0.27 * (sum(len(part) for _, part in parts) + (left_out > 0)) + top + 0.32
    advance = 9 * 0.602 / 72  # width of a character of the monospace font at 9 points, in inches
    widths = (sum(len(piece) for piece, _ in one) for _, part in parts for one in part)
    widest = max(widths, default=0) + 6
    longest = max(widest, 1.25 * len(title), len(setting) + 2)
    figure = Figure(figsize=(max(6.5, advance * longest), height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, figure.get_figwidth() / advance)
    axes.set_ylim(height, 0)
    axes.text(1, 0.3, _drawn(title), fontsize=10, weight="bold", va="center", parse_math=False)
    axes.text(1, 0.57, _drawn(setting), fontsize=9, va="center", parse_math=False)
    at = 1.0
    for kind, name in (*_LEGEND.items(), (None, _SPACES)):
        write_on(axes, at, height - 0.25, name, kind)
        at += len(name) + 2
    y = top
    for number, part in parts:
        axes.text(3, y, str(number), fontsize=8, color="0.6", ha="right", va="center")
        for line in part:
            x = 5.0
            for piece, kind in line:
                write_on(axes, x, y, _drawn(_shown(piece, kind)), kind)
                x += len(piece)
            y += 0.27
    if left_out:
        write_on(axes, 5.0, y, f"… {left_out} more calls")
    return figure


def write_on(axes: Axes, x: float, y: float, text: str, kind: str | None = None) -> None:
    """Write a piece of one kind in a monospace font, struck if it was rejected; None: a remark.

    Args:
      x: where it begins, on an axis whose unit is a character of the font at 9 points.
    """
    colour = COLOURS[kind] if kind else "0.4"
    axes.text(x, y, text, color=colour, fontsize=9, family="monospace", va="center",
              parse_math=False)  # fmt: skip
    if kind == "rejected":
        axes.plot([x, x + len(text)], [y, y], color=colour, linewidth=0.8)


def draw_speedups(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Draw measured speedups as bars, with quartiles; both predictions as marks over them.

    The axis covers the measurements and their own predictions. Where the paper's formula exceeds
    it, an arrow at the top has its number.

    Args:
      rows: with speedup_decode, speedup_decode_low, speedup_decode_high, speedup_end_to_end,
        predicted, which may be None, and predicted_paper.
      labels: labels of the rows; their lines are kept, and long ones are cut.
    """
    figure = Figure(figsize=(max(7, 1.05 * len(rows)), 4), layout="constrained")
    axes = figure.add_subplot()
    places, width = np.arange(len(rows)), 0.36

    def of(field: str) -> np.ndarray:
        return np.array([math.nan if row[field] is None else row[field] for row in rows])

    loop, whole, predicted = of("speedup_decode"), of("speedup_end_to_end"), of("predicted")
    low, high, paper = of("speedup_decode_low"), of("speedup_decode_high"), of("predicted_paper")
    top = 1.12 * np.nanmax([np.ones(len(rows)), high, whole, predicted])
    above = paper > top
    bars: dict[str, Any] = {"width": width * 0.94, "error_kw": {"linewidth": 1.2, "capsize": 3}}
    made: list[Any] = [
        axes.bar(places - width / 2, loop, yerr=(loop - low, high - loop), color="#6f9bd1", **bars),
        axes.bar(places + width / 2, whole, color="#e08a2e", **bars),
        *axes.plot(places - width / 2, predicted, "_", color="#b0124d", markersize=17,
                   markeredgewidth=2.5),
        *axes.plot(places, np.where(above, math.nan, paper), "D", color="0.15", markersize=5),
    ]  # fmt: skip
    axes.plot(places[above], np.full(above.sum(), 0.97 * top), "^", color="0.15", markersize=5)
    for place, value in zip(places[above], paper[above], strict=True):
        axes.annotate(f"{value:.1f}", (place, 0.97 * top), (7, 0), textcoords="offset points",
                      fontsize=8, va="center")  # fmt: skip
    axes.axhline(1, color="0.35", linestyle=":", linewidth=1)
    axes.set_ylim(0, top)
    lines = [[textwrap.fill(line, 12) for line in label.split("\n")] for label in labels]
    axes.set_xticks(places, ["\n".join(label) for label in lines])
    axes.set_ylabel("times plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    names = (
        "measured, decode only, with quartiles",
        "measured, end to end",
        "predicted, τ/(γc+v+overhead)",
        "predicted, Thm 3.8 (v = 1); ▲ where beyond the axis",
    )
    figure.legend(made, names, frameon=False, fontsize=8, loc="outside upper center", ncols=2)
    return figure


def draw_alphas(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Draw α of each draft with its interval, a colour for each temperature; the paper's as rings.

    Args:
      rows: with temperature, alpha, low and high of its interval, and paper; the last three may be
        None.
      labels: of each row's draft.
    """
    figure = Figure(figsize=(7, 0.45 * len(set(labels)) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    places = {name: y for y, name in enumerate(dict.fromkeys(labels))}
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    height = 0.8 / len(temperatures)
    for i, temperature in enumerate(temperatures):
        chosen = [
            (r, n) for r, n in zip(rows, labels, strict=True) if r["temperature"] == temperature
        ]
        y = [places[name] + (i - (len(temperatures) - 1) / 2) * height for _, name in chosen]
        alphas = [row["alpha"] for row, _ in chosen]
        errors = [
            [0 if row[end] is None else abs(row["alpha"] - row[end]) for row, _ in chosen]
            for end in ("low", "high")
        ]
        axes.barh(y, alphas, height * 0.9, xerr=errors, label=f"T={temperature:g}",
                  color=("#1f4e8c", "#e08a2e")[i % 2], error_kw={"linewidth": 1})  # fmt: skip
        for (row, _), at in zip(chosen, y, strict=True):
            if row["paper"] is not None:
                axes.plot(row["paper"], at, "o", **RING)
    axes.plot([], [], "o", label="the paper's row", **RING)
    axes.set_yticks(list(places.values()), list(places))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("α")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    return figure


def draw_positions(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> Figure:
    """Draw how often the n-th drafted token is accepted after those before it, a line per draft.

    Args:
      rows: with temperature and acceptance_by_position, in which None stands for no such token.
      labels: of each row's draft.
    """
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(figsize=(4.2 * len(temperatures) + 1.6, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(temperatures), sharey=True))
    styles = {name: {"color": f"C{i % 10}", "marker": "osD^v<>P*X"[i % 10]}
              for i, name in enumerate(dict.fromkeys(labels))}  # fmt: skip
    for axes, temperature in zip(panels, temperatures, strict=True):
        for row, name in zip(rows, labels, strict=True):
            if row["temperature"] == temperature:
                rates = [math.nan if r is None else r for r in row["acceptance_by_position"]]
                axes.plot(range(1, len(rates) + 1), rates, markersize=4, label=name, **styles[name])
        axes.set_title(f"T={temperature:g}", fontsize=10)
        axes.set_xlabel("drafted token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accepted, if those before were")
    named = {
        name: line
        for axes in panels
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8,
                  loc="outside right upper")  # fmt: skip
    return figure
