"""The minutes that `select` and `tune` may take: a forecast, and how much is timed within them."""

import dataclasses
import math
import time
from collections.abc import Mapping

import jax

from specjax.autoregressive import Autoregressive
from specjax.loop import decode
from specjax.measure import timing
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.support.ranges import number

FIRST_TOKENS = 4  # decoded for the forecast
# What a thorough measurement compiles beyond a short one: loops of plain decoding's size, or
# speculative loops once one is timed; and the share of the time left for that.
THOROUGH_LOOPS, THOROUGH_SPECULATIVE, MAX_THOROUGH_SHARE = 16, 3, 0.3


def check_minutes(minutes: float) -> float:
    """Return the limit; ValueError if it is no number ≥ 0."""
    return number("minutes", minutes, "[0, ∞)", "0: no limit")


class Pace:
    """A limit of time, and what compiling and decoding plainly take on this machine.

    The limit lowers what is timed. Programs that have to be compiled are compiled all the same.
    """

    def __init__(self, minutes: float, say: timing.Say = timing.silent):
        """Start the clock. Args: minutes, 0 for no limit; `say`, which gets the forecast."""
        self.minutes = check_minutes(minutes)
        self.say = say
        self.compiling = 0.0  # seconds until plain decoding is compiled
        self.loop = 0.0  # until a speculative loop is; 0: not known
        self.token = 0.0  # seconds of a token of plain decoding
        self._end = time.monotonic() + 60 * self.minutes if self.minutes else math.inf

    def left(self, share: float = 1.0) -> float:
        """A share of the seconds that are left; infinite without a limit."""
        return max(0.0, self._end - time.monotonic()) * share if self.minutes else math.inf

    def until(self, share: float = 1.0) -> float:
        """The time of `time.monotonic` at which a share of the seconds will have passed."""
        return time.monotonic() + self.left(share)

    def afford(self, work: float, share: float = 1.0, **counts: tuple[int, int]) -> dict[str, int]:
        """Lower counts until they fit into a share of the time, see `reduced`.

        Args:
          work: tokens of plain decoding, whose time one of each count takes.
        """
        each = work * self.token
        return reduced(counts, self.left(share) / each if each else math.inf)

    def is_short(self, share: float = 1.0) -> bool:
        """Whether a share of the time is too short for a draft's thorough measurement."""
        thorough = THOROUGH_SPECULATIVE * self.loop or THOROUGH_LOOPS * self.compiling
        return thorough > MAX_THOROUGH_SHARE * self.left(share)

    def first_pass(
        self, watch: Stopwatch, plain: Autoregressive, sources: Texts, loops: int, tokens: int
    ) -> None:
        """Compile plain decoding, time a few tokens of it, and report the forecast.

        Args:
          sources: as the stopwatch will take them.
          loops: how many loops of the size of plain decoding's will be compiled, about.
          tokens: of timed calls, as many as plain decoding would make in their time.
        """
        limit = f"; the limit is {self.minutes:g} minutes" if self.minutes else ""
        self.say(f"compiling plain decoding, for a forecast{limit}")
        first = time.monotonic()
        dataclasses.replace(watch, say=timing.silent).warm({timing.PLAIN: plain}, sources)
        few, batch = min(FIRST_TOKENS, watch.max_new_tokens), range(watch.batch_size)
        budgets = [few] * len(sources)
        begun = watch.begin(plain, sources, batch[: len(sources)], budgets)
        context, state = jax.block_until_ready(begun)
        before = time.monotonic()
        jax.block_until_ready(decode(plain, context, state))
        self.compiling, self.token = before - first, (time.monotonic() - before) / few
        compiling, calls = loops * self.compiling, tokens * self.token
        fits = compiling + calls <= self.left()
        seconds = compiling + calls if fits else max(self.left(), compiling)
        less = "" if fits else f", fewer than usual to keep within {self.minutes:g} minutes"
        self.say(
            f"about {seconds / 60:.1f} minutes from here: {loops} loops to compile, "
            f"{self.compiling:.1f} s each, then timed calls at {1e3 * self.token:.3g} ms a token "
            f"of plain decoding{less}"
        )


def reduced(counts: Mapping[str, tuple[int, int]], seconds: float) -> dict[str, int]:
    """Lower counts until their product is at most `seconds`, or each has its least value.

    The count that is the largest multiple of its least value is halved first.

    Args:
      counts: values by name, each with the least.
    """
    found = {name: count for name, (count, _) in counts.items()}
    while math.prod(found.values()) > seconds:
        above = [name for name, (_, least) in counts.items() if found[name] > least]
        if not above:
            break
        name = max(above, key=lambda name: found[name] / counts[name][1])
        found[name] = max(counts[name][1], found[name] // 2)
    return found
