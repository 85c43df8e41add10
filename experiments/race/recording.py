"""Plain and speculative decoding of the same inputs, round by round, at their real pace.

The jitted loop shows no times from within. So its rounds are stepped from Python and timed, and the
loop itself is timed as a whole: a stepped round takes a little longer, so the rounds of an output
are scaled to what the loop took for it. Nothing else is made up.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from experiments import figure1
from experiments.figure1 import TracedRound
from specjax import loop
from specjax.decoding.outputs import text_of
from specjax.loop import Method
from specjax.measure.stopwatch import Stopwatch
from specjax.models.checkpoint import Checkpoint
from specjax.state import State
from specjax.support import memory_maps

Piece = tuple[str, str]  # text, and what happened to it: see `figure1.spans`


class Moment(NamedTuple):
    """The end of a round, or of the start of an input."""

    seconds: float  # since the race began
    source: int  # the number of the input
    pieces: list[Piece]  # of the round; none at the start
    tokens: int  # of all outputs so far


class Side(NamedTuple):
    """One method, with all that it did."""

    name: str
    moments: list[Moment]

    @property
    def seconds(self) -> float:
        """Until the last output was complete."""
        return self.moments[-1].seconds

    @property
    def tokens(self) -> int:
        return self.moments[-1].tokens

    def at(self, seconds: float) -> list[Moment]:
        """What has happened by then."""
        return [moment for moment in self.moments if moment.seconds <= seconds]


@memory_maps.kept(methods=2)  # the loop, and its round
def record(
    name: str,
    method: Method,
    target: Checkpoint,
    sources: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    repeats: int = 5,
) -> Side:
    """Decode the inputs one after the other, at batch 1, and time every round.

    Args:
      sources: token ids of each input, as `decoding.texts.tokenize` gives them.
      repeats: of each timing, of which the median counts; one more comes first, and compiles.
    """
    watch = Stopwatch(target, max_new_tokens, key)
    moments: list[Moment] = []
    now, tokens = 0.0, 0
    for index in range(len(sources)):
        prepare = partial(watch.begin, method, sources, [index])
        runs = [_timed(method, prepare) for _ in range(1 + repeats)][1:]
        start, whole = np.median([(start, whole) for start, whole, *_ in runs], axis=0)
        stepped = np.median([steps for *_, steps, _ in runs], axis=0)
        lasted = stepped * whole / stepped.sum()
        now += float(start)
        moments.append(Moment(now, index, [], tokens))
        rounds = runs[0][3]
        lines = figure1.spans(rounds, partial(text_of, target, sources[index]))
        for round_, pieces, seconds in zip(rounds, lines, lasted.tolist(), strict=True):
            now += seconds
            tokens += len(round_.accepted) + len(round_.next_token)
            moments.append(Moment(now, index, figure1.broken(pieces)[0], tokens))
    return Side(name, moments)


def compile_(
    method: Method, target: Checkpoint, sources: Sequence[Sequence[int]], **options: Any
) -> None:
    """Compile all that `record` runs, by decoding the first input; for the options see there."""
    _timed(method, partial(Stopwatch(target, **options).begin, method, sources))


def _timed(
    method: Method, prepare: Callable[[], tuple[Any, State]]
) -> tuple[float, float, Sequence[float], Sequence[TracedRound]]:
    """Seconds of the start, of the whole loop and of each stepped round; and the rounds."""
    begin = time.perf_counter()
    context, state = jax.block_until_ready(prepare())
    started = time.perf_counter()
    jax.block_until_ready(loop.decode(method, context, state))
    whole = time.perf_counter() - started
    context, state = jax.block_until_ready(prepare())
    spent, rounds = zip(*figure1.steps(method, context, state), strict=True)
    return started - begin, whole, spent, rounds


# --- What can be seen of it ---------------------------------------------------------------------


def screen(side: Side, seconds: float, width: int, height: int) -> list[list[Piece]]:
    """The last lines of what a side has written by then, each at most `width` characters.

    An output begins on a new line. Of a rejected tail the one token that was tested is shown, and
    of a tree what was kept alone.
    """
    lines: list[list[Piece]] = []
    for _, group in itertools.groupby(side.at(seconds), key=lambda moment: moment.source):
        pieces = itertools.chain.from_iterable(moment.pieces for moment in group)
        lines += wrapped(pieces, width)
    return lines[-height:]


def wrapped(pieces: Iterator[Piece], width: int) -> list[list[Piece]]:
    """Break pieces into lines, where an output breaks them and at `width` characters.

    ␣ is a space at a token's edge, but for indents that were kept.
    """
    lines: list[list[Piece]] = [[]]
    room = width
    for text, kind in pieces:
        parts = [figure1.token_text(text)]
        if kind != "rejected" and ("\n" in text or text.isspace()):
            parts = [figure1.printable(part) for part in text.split("\n")]
        for number, part in enumerate(parts):
            while part or number:
                if number or room == 0:
                    lines.append([])
                    room, number = width, 0
                head, part = part[:room], part[room:]
                lines[-1] += [(head, kind)] if head else []
                room -= len(head)
    return lines


def share(side: Side, seconds: float) -> float:
    """The part of all tokens that a side has written by then, from 0 to 1."""
    done = side.at(seconds)
    return done[-1].tokens / side.tokens if done else 0.0


def clock(side: Side, seconds: float) -> str:
    """Such as "0.31 s, 124 tokens, 402 tokens/s", as of then; a side that is done stands still."""
    done = side.at(seconds)
    now = min(seconds, side.seconds)
    tokens = done[-1].tokens if done else 0
    return f"{now:.2f} s, {tokens} tokens, {tokens / now if now > 0 else 0:.0f} tokens/s"


def outcome(sides: Sequence[Side]) -> str:
    """The race in a sentence; the first side is plain decoding."""
    plain, other = sides
    results = [f"{side.name}: {clock(side, side.seconds)}" for side in sides]
    return f"{'; '.join(results)}. {plain.seconds / other.seconds:.2f} times as fast."
