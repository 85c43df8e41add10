"""What decoding returns: outputs, what each of them took, and the counts over all of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One output: input `index`, draw `sample` of it, and what it took."""

    index: int
    sample: int
    text: str  # what follows the prompt's, without special tokens
    tokens: list[int]  # without the prompt, EOS included
    target_calls: int
    drafted: int  # tokens, in trees nodes
    levels: int  # of those, the ones on each round's longest path: in chains all of them
    accepted: int
    accepted_lengths: list[int]  # rounds by accepted length, 0 … γ_max; autoregressive: [calls]
    tested: list[int]  # rounds in which draft position i was reached, 0 … γ_max−1
    rounds: tuple[dict[str, Any], ...] = ()  # one after the other, where they were logged

    @property
    def emitted(self) -> int:
        """Tokens of the output."""
        return len(self.tokens)

    def lines(self) -> list[dict[str, Any]]:
        """Its rounds, each with input and sample."""
        return [{"input": self.index, "sample": self.sample, **line} for line in self.rounds]


@dataclasses.dataclass(frozen=True)
class Progress:
    """A row that is being decoded: input `index`, draw `sample` of it."""

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
    levels: int  # calls of the drafter one after the other: in chains as many as tokens
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
class Result:
    """Outputs in the order of the inputs; `samples` rows for each input."""

    rows: list[Row]
    exact: bool | None = True
    """Whether the outputs keep the target's distribution, as `rules.exactness` has it."""

    @property
    def summary(self) -> Summary:
        """Tokens, iterations, drafted, accepted, bonus and acceptance by position."""
        return summarize(self.rows, self.exact)

    @property
    def texts(self) -> list[str]:
        """Decoded, without special tokens."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """Ids of each row, without the prompt, EOS included."""
        return [row.tokens for row in self.rows]

    @property
    def target_calls(self) -> np.ndarray:
        """Verify passes of each row; for the autoregressive loop, its tokens."""
        return np.array([row.target_calls for row in self.rows])

    @property
    def drafted(self) -> np.ndarray:
        """Drafted tokens that the target scored, for each row."""
        return np.array([row.drafted for row in self.rows])

    @property
    def accepted(self) -> np.ndarray:
        """Drafted tokens in the output of each row."""
        return np.array([row.accepted for row in self.rows])

    @property
    def emitted(self) -> np.ndarray:
        """Tokens in the output of each row."""
        return np.array([row.emitted for row in self.rows])

    @property
    def accepted_lengths(self) -> np.ndarray:
        """(rows, γ_max+1): how many rounds of each row accepted 0, 1, … drafted tokens."""
        return np.array([row.accepted_lengths for row in self.rows])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """A line for each round that was logged, with input and sample: rows of a table."""
        return [line for row in self.rows for line in row.lines()]

    @property
    def block_efficiency(self) -> float:
        """τ: tokens per target call, over all rows."""
        return float(self.emitted.sum() / max(self.target_calls.sum(), 1))


def summarize(rows: Sequence[Row], exact: bool | None = True) -> Summary:
    """The counts of some outputs, of one method; `exact` as `rules.exactness` has it."""
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
        levels=sum(row.levels for row in rows),
        accepted=accepted,
        corrections=corrections,
        bonus=emitted - accepted - corrections,
        acceptance=[None if np.isnan(rate) else rate for rate in rates],
        exact=exact,
    )


def acceptance_by_position(rows: Sequence[Row]) -> np.ndarray:
    """P(position i is accepted | it was reached), for i = 1 … γ_max; NaN where it never was.

    Rates of later positions are conditional on all earlier ones having been accepted, which is
    why they, and not accepted/drafted, can be compared with α.
    """
    lengths = np.sum([row.accepted_lengths for row in rows], axis=0)
    return acceptance_rates(lengths, np.sum([row.tested for row in rows], axis=0))


def acceptance_rates(lengths: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """`acceptance_by_position` of counts: `accepted_lengths` and `tested`, summed over rows."""
    tested = tested.astype(np.float64)
    passed = np.cumsum(lengths[::-1])[::-1][1:]
    return np.divide(passed, tested, out=np.full_like(tested, np.nan), where=tested > 0)
