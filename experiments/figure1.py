"""One run, round by round: the outcome of each token, for the terminal and as PNG (Figure 1)."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from rich.text import Text

from specjax.loop import Method
from specjax.models import sharding
from specjax.rounds import Round
from specjax.speculative import Contexts
from specjax.state import State, unfinished

BENEATH = "beneath"  # a piece that begins a line of its own under a round's: spaces, or a remark
# Chosen to differ in lightness too, for readers who do not see red and green apart.
COLOURS = {
    "accepted": "#2e7d32", "rejected": "#c62828", "corrected": "#1565c0", BENEATH: "#9e9e9e",
}  # fmt: skip

MAX_CALLS = 40  # of the target, in a trace's picture
UNFINISHED = "\ufffd"  # the tokenizer's output for part of a character
SPACE = "␣"


# --- what happened -------------------------------------------------------------------------------


@jax.jit
def step(method, context, state):
    after, round_ = method.step(context, state)
    return after, visible(round_)


@jax.jit
def is_running(state, row):
    return unfinished(state) & ~state.done[row]


class Branch(NamedTuple):
    """A part of a tree that was not kept: a node, its first child, the first child of that, …"""

    behind: list[int]  # the round's drafted tokens on the path to it
    tokens: list[int]


class TracedRound(NamedTuple):
    """The outcome of one target call for one row."""

    accepted: list[int]  # drafted tokens that were kept
    rejected: list[int]  # the first drafted token not kept, and those after it, never tested
    next_token: list[int]  # the target's own: a correction, or one more after full acceptance
    branches: Sequence[Branch] = ()  # of a tree, in place of `rejected`: see `branches`


def trace(method: Method, contexts: Contexts, state: State, row: int = 0) -> list[TracedRound]:
    """Step the loop's own body from Python and record one row of the batch."""
    return [round_ for _, round_ in steps(method, contexts, state, row)]


def steps(
    method: Method, contexts: Contexts, state: State, row: int = 0
) -> Iterator[tuple[float, TracedRound]]:
    """The rounds of `trace`, each with its seconds."""
    begin = sharding.fetch(state.length)[row]
    while is_running(state, row):
        since = time.perf_counter()
        state, round_ = jax.block_until_ready(step(method, contexts, state))
        seconds = time.perf_counter() - since
        tokens, length = sharding.fetch((state.tokens, state.length))
        yield seconds, traced(round_, tokens[row, begin : length[row]].tolist(), row)
        begin = length[row]


def visible(round_: Round) -> Round:
    """Keep only what `traced` reads, so that distributions are not computed."""
    drafts, nodes = round_.drafts, round_.nodes
    no: Any = None
    found: dict[str, Any] = dict.fromkeys(Round._fields)
    found |= {
        "accepted": round_.accepted,
        "drafts": drafts and drafts._replace(logprobs=no, belief_logprob=no),
        "nodes": nodes and nodes._replace(logprobs=no, belief=no),
        "node": round_.node,
    }
    return Round(**found)


def traced(round_: Round, output: list[int], row: int = 0) -> TracedRound:
    """Read the outcome of a round for a row.

    Args:
      output: tokens that the row gained.
    """
    round_ = sharding.fetch(round_)
    kept = min(int(round_.accepted[row]), len(output))
    accepted, next_token = output[:kept], output[kept:]
    if round_.nodes is not None:
        return TracedRound(accepted, [], next_token, branches(round_, len(output), row))
    drafted = round_.drafts.tokens[row, : round_.drafts.length[row]].tolist()
    # An EOS among the drafts ends the row: what follows it was not rejected.
    return TracedRound(accepted, drafted[kept:] if next_token else [], next_token)


def branches(round_: Round, gained: int, row: int = 0) -> list[Branch]:
    """List the branches of a row's tree without the accepted path, each node once, the last first.

    Args:
      gained: number of tokens that the row gained. Behind an EOS among them nothing was rejected.
    """
    nodes, last = round_.nodes, round_.node
    assert last is not None
    parent = np.broadcast_to(nodes.parent, (len(nodes.tokens), nodes.size + 1))[row].tolist()
    tokens = [0, *nodes.tokens[row].tolist()]
    below: dict[int, list[int]] = {node: [] for node in range(len(parent))}
    for node in range(1, len(parent)):
        if nodes.submitted[row, node - 1]:
            below[parent[node]].append(node)
    path = [int(last[row])]
    while path[0]:
        path.insert(0, parent[path[0]])
    found = []

    def follow(node: int, behind: list[int]) -> None:
        line = [node]
        while below[line[-1]]:
            line.append(below[line[-1]][0])
        drafted = [tokens[one] for one in line]
        found.append(Branch(behind, drafted))
        for at in reversed(range(len(line))):
            for other in below[line[at]][1:]:
                follow(other, behind + drafted[: at + 1])

    for depth, node in reversed([*enumerate(path)][:gained]):
        for child in below[node]:
            if child not in path:
                follow(child, [tokens[one] for one in path[1 : depth + 1]])
    return found


# --- how it looks --------------------------------------------------------------------------------


def spans(
    rounds: Sequence[TracedRound], decode: Callable[[list[int]], str], most: int = 5
) -> list[list[tuple[str, str]]]:
    """Split the text of each round into pieces: accepted, rejected, corrected.

    Of a rejected tail only the first token was tested, and only it is shown. Branches of a tree
    stand on lines beneath, each where it begins. Accepted and corrected pieces join to the decoded
    text: a character made of several tokens comes with the last.

    Args:
      decode: returns the text of an output's first ids. `partial(outputs.text_of, target, prompt)`
        of `specjax.decoding` keeps the space that an output may begin with.
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


def draw(lines: Sequence[Sequence[tuple[str, str]]], title: str, setting: str = "") -> Figure:
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
