"""Timings of methods side by side on the same inputs, compilation excluded."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from specjax.policies import Costs
from specjax.results import Row
from specjax.support import memory_maps

PLAIN, SPECULATIVE = "plain decoding", "speculative"

ALL = slice(None)

MIN_REPEATS = 2  # where time is short: one says nothing about noise

Item = TypeVar("Item")
Say = Callable[[str], None]
"""Reports the next work, such as "turn 2 of 3"; a command prints it."""


def silent(what: str) -> None:
    """Report nothing."""


# A run's seconds, of the loop alone and with the encoder and prefill; its rows, and a note.
Run = tuple[float, float, Sequence[Row], Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Timings of methods that decoded the same batches in turns, several times; by name.

    The others are compared with `PLAIN`. `SPECULATIVE` is the default where a name is asked for.
    """

    decode: Mapping[str, Float[np.ndarray, "R N"]]
    """Seconds of the loop alone, by repeat and batch."""
    whole: Mapping[str, Float[np.ndarray, "R N"]]
    """Seconds with the encoder and prefill, by repeat and batch."""
    rows: Mapping[str, list[list[Row]]]
    """Rows of the last repeat, by batch."""
    notes: Mapping[str, list[Any]]
    """Notes of the last repeat, by batch."""
    _costs: Costs | None = None
    """`costs`, where they were measured."""

    def outputs(self, name: str = SPECULATIVE) -> list[Row]:
        """Rows of all batches, in the order of the inputs."""
        return [row for batch in self.rows[name] for row in batch]

    def per_token(self, name: str, *, whole: bool = False) -> Float[np.ndarray, " R"]:
        """Seconds per emitted token, by repeat; with the encoder and prefill if `whole`."""
        seconds = (self.whole if whole else self.decode)[name].sum(axis=1)
        return seconds / sum(row.emitted for row in self.outputs(name))

    def ratio(self, name: str = SPECULATIVE, over: str = PLAIN) -> Float[np.ndarray, " R"]:
        """Speedup per token over another method, of the loops alone, by repeat."""
        return self.per_token(over) / self.per_token(name)

    def speedups(self, name: str = SPECULATIVE) -> dict[str, float]:
        """Speedups for a row of results: medians over repeats of the ratio within one repeat.

        `speedup_decode` is of the loops alone, with its quartiles as the noise.
        `speedup_end_to_end` includes encoder and prefill.
        """
        ends = self.per_token(PLAIN, whole=True) / self.per_token(name, whole=True)
        found = quartiles("speedup_decode", self.ratio(name))
        return found | {"speedup_end_to_end": float(np.median(ends))}

    @property
    def speedup(self) -> float:
        """Measured speedup of the loops alone: the median over repeats."""
        return self.speedups()["speedup_decode"]

    @property
    def speedup_end_to_end(self) -> float:
        """Measured speedup with the encoder and prefill: the median over repeats."""
        return self.speedups()["speedup_end_to_end"]

    @property
    def costs(self) -> Costs:
        """Costs of rounds of the speculative loop, as `compare` measures them: c and v(γ)."""
        if self._costs is None:
            raise ValueError("No costs were measured beside these methods: `compare` does it.")
        return self._costs

    @property
    def predicted(self) -> float | None:
        """The speedup that the costs promise for these rounds, see `Costs.speedup`."""
        return self.costs.speedup(self.costs.gamma_max, *self.lasting())

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the speculative loop over all batches, for draft steps and for all else.

        An estimate by the costs of rounds: no clock is read within the loop.
        """
        _, rounds, draft_calls = (count * len(self.rows[SPECULATIVE]) for count in self.lasting())
        verify = self.costs.verify[-1] + self.costs.rest[-1]
        return {"draft": draft_calls * self.costs.draft.item(), "verify": rounds * verify.item()}

    def lasting(self, name: str = SPECULATIVE) -> list[float]:
        """Tokens, rounds and calls of the drafter that a batch waits for, means over batches.

        A batch lasts as long as its slowest row, and a round's drafting as long as its longest
        draft: at least as long as the row that drafts most.
        """
        counts = [
            [[row.emitted, row.target_calls, row.draft_calls] for row in batch]
            for batch in self.rows[name]
        ]
        return np.mean([np.max(batch, axis=0) for batch in counts], axis=0).tolist()

    def part(self, repeats: slice = ALL, batches: slice = ALL) -> "Comparison":
        """Select some repeats and batches, with the rows of the last repeat of all."""
        decode, whole = (
            {name: seconds[repeats, batches] for name, seconds in taken.items()}
            for taken in (self.decode, self.whole)
        )
        rows, notes = (
            {name: of[batches] for name, of in kept.items()} for kept in (self.rows, self.notes)
        )
        return dataclasses.replace(self, decode=decode, whole=whole, rows=rows, notes=notes)

    def halves(self) -> tuple["Comparison", "Comparison"]:
        """Every other batch, by which to choose, and the rest, which then measures the choice.

        The winner was lucky on the batches that chose it. A single batch is in both.
        """
        several = int(len(self.rows[PLAIN]) > 1)
        chooses, rest = (self.part(batches=slice(at, None, 1 + several)) for at in (0, several))
        return chooses, rest

    def identical(self, name: str = SPECULATIVE) -> bool:
        """Whether a method gave the tokens of plain decoding for every input."""
        both = zip(self.outputs(PLAIN), self.outputs(name), strict=True)
        return all(one.tokens == another.tokens for one, another in both)


def quartiles(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median and quartiles for a row of results: `name`, name_low, name_high."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {name: float(median), f"{name}_low": float(low), f"{name}_high": float(high)}


def named(names: Collection[str]) -> str:
    """The names, or their number where they are many."""
    return " and ".join(names) if len(names) <= 4 else f"{len(names)} loops"


def spread(items: Sequence[Item], count: int) -> Sequence[Item]:
    """Select `count` items spread over the list, or all: a file may be sorted by length."""
    return items[:: max(1, len(items) // max(1, count))][:count]


@memory_maps.kept()
def in_turns(
    runs: Mapping[str, Callable[[Item], Run]],
    batches: Sequence[Item],
    repeats: int,
    *,
    turn: int = 1,
    between: Callable[[], None] = lambda: None,
    order: random.Random | None = None,
    until: float = math.inf,
    say: Say = silent,
) -> Comparison:
    """Call every run on every batch, `repeats` times, runs taking turns.

    Their order is drawn anew for each turn: a program is some percent faster if it ran last.

    Args:
      runs: functions by name, from a batch to a `Run`. They have compiled.
      turn: batches of a turn. Where many programs take turns at short calls, each finds its code
        cold, which costs some percent. With more batches in a row only the first call does.
      between: is called after each turn, to time other work under the same conditions.
      until: the time of `time.monotonic` after which no repeat beyond `MIN_REPEATS` should end.
      say: reports each repeat.
    """
    order, turns = order or random.Random(0), list(runs)
    taken: dict[str, list[list[Run]]] = {name: [] for name in runs}
    begun = time.monotonic()
    for repeat in range(repeats):
        each = (time.monotonic() - begun) / max(repeat, 1)
        if repeat >= MIN_REPEATS and time.monotonic() + each > until:
            say(f"no time for turn {repeat + 1} of {repeats}")
            break
        say(f"timing {named(runs)}, turn {repeat + 1} of {repeats}")
        for name in runs:
            taken[name].append([])
        for at in range(0, len(batches), turn):
            order.shuffle(turns)
            for name in turns:
                taken[name][-1].extend(runs[name](batch) for batch in batches[at : at + turn])
            between()
    decode, whole = (
        {name: np.array([[run[i] for run in of] for of in all_]) for name, all_ in taken.items()}
        for i in range(2)
    )
    rows = {name: [list(run[2]) for run in all_[-1]] for name, all_ in taken.items()}
    notes = {name: [run[3] for run in all_[-1]] for name, all_ in taken.items()}
    return Comparison(decode, whole, rows, notes)
