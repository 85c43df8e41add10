"""Results of decoding: outputs, their counts, and the counts over all of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One output: draw `sample` of input `index`, with its counts."""

    index: int
    sample: int
    text: str  # the text after the prompt, without special tokens
    tokens: list[int]  # without the prompt, EOS included
    target_calls: int
    drafted: int  # tokens, in trees nodes
    levels: int  # drafted tokens on each round's longest path; in chains all
    accepted: int
    accepted_lengths: list[int]  # rounds by accepted length, 0 … γ_max; autoregressive: [calls]
    tested: list[int]  # rounds in which draft position i was reached, 0 … γ_max−1
    rounds: tuple[dict[str, Any], ...] = ()  # in order, if they were logged

    @property
    def emitted(self) -> int:
        """Number of tokens of the output."""
        return len(self.tokens)

    def lines(self) -> list[dict[str, Any]]:
        """The row's logged rounds, each with input and sample."""
        return [{"input": self.index, "sample": self.sample, **line} for line in self.rounds]


@dataclasses.dataclass(frozen=True)
class Progress:
    """A row that is being decoded: draw `sample` of input `index`."""

    index: int
    sample: int
    text: str  # so far, up to the last complete character
    tokens: list[int]  # so far, without the prompt


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts over all outputs. Plain decoding drafts nothing, and every token is a bonus."""

    outputs: int
    tokens: int  # accepted + corrections + bonus
    iterations: int  # target calls; prefill is not counted
    drafted: int  # tokens, in trees nodes
    levels: int  # sequential calls of the drafter; in chains one per token
    accepted: int
    corrections: int  # the target's tokens in the place of rejected ones
    bonus: int  # the target's tokens after a fully accepted or empty draft
    acceptance: list[float | None]
    """Share of tested tokens that were accepted, by draft position; None where none was tested."""
    exact: bool | None = True
    """Whether the outputs keep the target's distribution. None: the rule does not say."""

    @property
    def tokens_per_iteration(self) -> float:
        """τ, the block efficiency."""
        return self.tokens / max(self.iterations, 1)


@dataclasses.dataclass(frozen=True)
class Result:
    """Outputs in the order of the inputs; `samples` rows for each input."""

    rows: list[Row]
    exact: bool | None = True
    """Whether the outputs keep the target's distribution; see `rules.exactness`."""

    @property
    def summary(self) -> Summary:
        """Counts over all rows, and acceptance by position."""
        return summarize(self.rows, self.exact)

    @property
    def texts(self) -> list[str]:
        """Text of each row, without special tokens."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each row, without the prompt, EOS included."""
        return [row.tokens for row in self.rows]

    @property
    def target_calls(self) -> np.ndarray:
        """Verify passes of each row; in plain decoding, its tokens."""
        return np.array([row.target_calls for row in self.rows])

    @property
    def drafted(self) -> np.ndarray:
        """Drafted tokens that the target scored, for each row."""
        return np.array([row.drafted for row in self.rows])

    @property
    def accepted(self) -> np.ndarray:
        """Number of drafted tokens in the output of each row."""
        return np.array([row.accepted for row in self.rows])

    @property
    def emitted(self) -> np.ndarray:
        """Number of tokens in the output of each row."""
        return np.array([row.emitted for row in self.rows])

    @property
    def accepted_lengths(self) -> np.ndarray:
        """Rounds of each row that accepted 0, 1, … drafted tokens, (rows, γ_max+1)."""
        return np.array([row.accepted_lengths for row in self.rows])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The logged rounds of all rows, each with input and sample: lines of a table."""
        return [line for row in self.rows for line in row.lines()]

    @property
    def block_efficiency(self) -> float:
        """τ: tokens per target call, over all rows."""
        return float(self.emitted.sum() / max(self.target_calls.sum(), 1))


def summarize(rows: Sequence[Row], exact: bool | None = True) -> Summary:
    """Sum the counts of some outputs of one method; `exact`: see `rules.exactness`."""
    rates = acceptance_by_position(rows).tolist() if rows else []
    emitted = sum(row.emitted for row in rows)
    accepted = sum(row.accepted for row in rows)
    # Each accepted token was tested, and so was each that a correction replaces.
    corrections = sum(sum(row.tested) for row in rows) - accepted
    return Summary(
        outputs=len(rows),
        tokens=emitted,
        iterations=sum(row.target_calls for row in rows),
        drafted=sum(row.drafted for row in rows),
        levels=sum(row.levels for row in rows),
        accepted=accepted,
        corrections=corrections,
        bonus=emitted - accepted - corrections,
        acceptance=[None if np.isnan(rate) else rate for rate in rates],
        exact=exact,
    )


def acceptance_by_position(rows: Sequence[Row]) -> np.ndarray:
    """P(position i is accepted | it was reached), for i = 1 … γ_max; NaN where it never was.

    Each rate is conditional on all earlier positions being accepted. So these rates compare with
    α, and accepted/drafted does not.
    """
    lengths = np.sum([row.accepted_lengths for row in rows], axis=0)
    return acceptance_rates(lengths, np.sum([row.tested for row in rows], axis=0))


def acceptance_rates(lengths: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Acceptance by position, from `accepted_lengths` and `tested` summed over rows."""
    tested = tested.astype(np.float64)
    passed = np.cumsum(lengths[::-1])[::-1][1:]
    return np.divide(passed, tested, out=np.full_like(tested, np.nan), where=tested > 0)
