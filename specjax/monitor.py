"""What is watched where speculation runs: the counts of a run, and where its time goes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from specjax.decoding import Row


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts over all outputs. Plain decoding drafts nothing, and every token is a bonus."""

    outputs: int
    tokens: int  # accepted + corrections + bonus
    iterations: int  # target calls; prefill is not counted
    drafted: int
    accepted: int
    corrections: int  # the target's tokens in the place of rejected ones
    bonus: int  # and those after a draft that was accepted to its end, or had no tokens
    acceptance: list[float | None]
    """At each position of a draft, of the tokens that were tested there; None where none was."""
    exact: bool | None = True
    """Whether the outputs keep the target's distribution. None: the rule does not say."""

    @property
    def tokens_per_iteration(self) -> float:
        """τ, the block efficiency."""
        return self.tokens / max(self.iterations, 1)


@dataclasses.dataclass(frozen=True)
class Times:
    """Where the time goes, and what speculation gains: beside plain decoding, without prefill."""

    phases: Mapping[str, float]
    """Seconds over all batches, by phase of the loop: an estimate, from phases that were timed by
    themselves, since within the jitted loop nothing can be."""
    c: float  # time(draft step) / time(target step), at this batch size
    v: float  # time(verify pass) / time(target step)
    expected_gain: float | None
    """From the measured c, v and round. None: lost in noise."""
    measured_gain: float = float("nan")  # of both loops in turns; NaN: only estimated
    measured_gain_end_to_end: float = float("nan")  # the same with prefill


def summarize(rows: "Sequence[Row]", exact: bool | None = True) -> Summary:
    """The counts of some outputs, of one method; `exact` as `accept.exactness` has it."""
    rates = acceptance_by_position(rows).tolist() if rows else []
    emitted = sum(row.emitted for row in rows)
    accepted = sum(row.accepted for row in rows)
    # Each accepted token was tested, and so was each that a correction stands for.
    corrections = sum(sum(row.tested) for row in rows) - accepted
    return Summary(
        outputs=len(rows),
        tokens=emitted,
        iterations=sum(row.target_calls for row in rows),
        drafted=sum(row.drafted for row in rows),
        accepted=accepted,
        corrections=corrections,
        bonus=emitted - accepted - corrections,
        acceptance=[None if np.isnan(rate) else rate for rate in rates],
        exact=exact,
    )


def acceptance_by_position(rows: "Sequence[Row]") -> np.ndarray:
    """P(position i is accepted | it was reached), for i = 1 … γ_max; NaN where it never was.

    Rates of later positions are conditional on all earlier ones having been accepted, which is
    why they, and not accepted/drafted, can be compared with α.
    """
    lengths = np.sum([row.accepted_lengths for row in rows], axis=0)
    tested = np.sum([row.tested for row in rows], axis=0).astype(np.float64)
    passed = np.cumsum(lengths[::-1])[::-1][1:]
    return np.divide(passed, tested, out=np.full_like(tested, np.nan), where=tested > 0)
