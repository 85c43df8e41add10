"""Timings that contradict themselves, and busy machines: no conclusion follows from either."""

import math
import os
import pathlib
import time
from collections.abc import Iterable

from specjax.policies import Costs

# A round may take less than its phases by this share of γc + v: phases that are timed alone find
# colder caches.
MAX_NEGATIVE_OVERHEAD = 0.15
# A pass over more positions takes as long as one over a single position, up to noise.
MIN_V = 0.9
# A speedup and its prediction from the same rounds may differ by this factor.
MAX_RATIO = 1.5
MAX_LOAD = 2.0  # per processor; a measurement reaches 1.3 by itself
MAX_COST_ERROR = 0.05  # of a typical call that costs were fitted to
MAX_USED_BEFORE = 0.25  # share of the processors that others use, before anything is measured

AGAIN = "Measure again on a machine that does nothing else."


def contradictions(
    gamma: int,
    c: float,
    v: float,
    overhead: float = 0.0,
    *,
    smaller: bool = False,
    measured: float | None = None,
    predicted: float | None = None,
) -> tuple[str, ...]:
    """List contradictions in timings; empty if they agree.

    Args:
      gamma: draft steps of a round.
      c, v, overhead: a draft step, a verify pass, and the rest of a round, in target steps.
      smaller: whether the draft has fewer parameters than the target.
      measured, predicted: speedups of the same rounds; None if unknown.
    """
    found = []
    if smaller and c > 1:
        found.append(
            f"c = {c:.2f}: a draft with fewer parameters is slower than the target (this can only "
            "be if it has more layers)"
        )
    if v < MIN_V:
        found.append(f"v = {v:.2f}: a verify pass takes less than one position of it")
    if overhead < -MAX_NEGATIVE_OVERHEAD * (gamma * c + v):
        found.append(f"overhead {overhead:.2f}: a round takes less than its own phases")
    if measured and predicted and abs(math.log(measured / predicted)) > math.log(MAX_RATIO):
        found.append(
            f"a speedup of {measured:.2f}, where the times of its rounds give {predicted:.2f}"
        )
    return tuple(found)


def poor_fit(of: str, table: Costs, limit: float = MAX_COST_ERROR) -> str:
    """Describe costs that explain the calls badly that they were fitted to; "" if they fit.

    Args:
      of: what they are costs of.
      limit: for the error of a typical call; a longer draft may seem cheaper by twice as much,
        the worst of many differences.
    """
    error, drop = float(table.error), float(table.drop)
    if not (error > limit or drop > 2 * limit):  # NaN: nothing was fitted
        return ""
    return (
        f"The costs of {of} fit poorly: a typical call is off by {error:.0%} (the worst by "
        f"{float(table.largest_error):.0%}), and a longer draft was timed as cheaper by up to "
        f"{drop:.0%}, where {limit:.0%} and {2 * limit:.0%} are the limits."
    )


def check_clock(seconds: Iterable[float]) -> None:
    """Raise ValueError if a timed call took no time: the clock stood still, or went back."""
    if (least := min(seconds)) <= 0:
        raise ValueError(
            f"A timed call took {least:.3g} s: the clock stands still or went back. Measure again "
            "where it runs."
        )


def load_average() -> float:
    """The last minute's load average per processor; NaN where the system has none."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return float("nan")


def used_by_others(seconds: float = 0.4) -> float:
    """The share of all processor time that other processes take now; NaN where it is not known.

    Linux counts this time; elsewhere the load average stands for it.

    Args:
      seconds: how long to watch.
    """

    def read() -> tuple[float, float]:
        times = [int(n) for n in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        idle = times[3] + times[4]
        own = os.times()
        return sum(times) - idle - (own.user + own.system) * ticks, sum(times)

    try:
        ticks = os.sysconf("SC_CLK_TCK")
        before, begun = read()
        time.sleep(seconds)
        after, ended = read()
    except (AttributeError, IndexError, OSError, ValueError):
        return min(load_average(), 1.0)
    return max(0.0, after - before) / max(ended - begun, 1)


def busy_before(used: float) -> str:
    """Describe other work on the machine before a measurement; "" if there is little.

    Args:
      used: from `used_by_others`, before the first measurement.
    """
    if not used > MAX_USED_BEFORE:  # NaN: unknown
        return ""
    return (
        f"Other programs use this machine: {used:.0%} of its processors. The measurements take "
        f"longer and say less; above a load average of {MAX_LOAD:g} no draft is recommended."
    )


def busy(loads: Iterable[float | None]) -> str:
    """Describe other work on the machine in a sentence; "" if there was little, or it is unknown.

    Args:
      loads: from `load_average`, at the time of each measurement.
    """
    most = max((x for x in loads if x is not None and not math.isnan(x)), default=0.0)
    if most <= MAX_LOAD:
        return ""
    return (
        f"The machine was busy: a load average of up to {most:.1f} for each processor. The timings "
        f"say little. {AGAIN}"
    )
