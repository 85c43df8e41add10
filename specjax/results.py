"""Results of decoding: outputs, their counts, and the counts over all of them.

Acceptance by position is conditional here: position i counts where all before it were accepted.
vLLM's figures count every draft instead. `Acceptance` has both, under vLLM's names where those
mean the same: https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.support import renamed


class Acceptance:
    """Acceptance of drafted tokens, from counts; the base of `Row` and `Summary`."""

    verified: int
    accepted: int
    accepted_lengths: list[int]
    tested: list[int]
    drafted, levels = renamed.refused("drafted"), renamed.refused("levels")

    @property
    def acceptance(self) -> list[float | None]:
        """P(position i is accepted | all before it were), for i = 1 … γ_max; None: never tested.

        These rates compare with α. What follows a rejection, or the end of an output, was never
        tested and is left out.
        """
        rates = acceptance_rates(np.array(self.accepted_lengths), np.array(self.tested))
        return [None if np.isnan(rate) else rate for rate in rates.tolist()]

    @property
    def mean_acceptance(self) -> float | None:
        """Accepted tokens over tested ones: the mean of `acceptance`; None: none was tested."""
        tested = sum(self.tested)
        return self.accepted / tested if tested else None

    @property
    def per_position_acceptance_rate(self) -> list[float]:
        """P(position i is accepted), over all drafts, as vLLM logs it: not conditional.

        It falls with i even where every token has the same chance, and a draft that ends before i
        counts as one that is rejected there.
        """
        passed = np.cumsum(self.acceptance_histogram[::-1])[::-1][1:]
        return (passed / max(self.num_spec_steps, 1)).tolist()

    @property
    def num_spec_steps(self) -> int:
        """Target calls that verified a draft of one token or more."""
        return self.tested[0] if self.tested else 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per target call that verified a draft.

        τ also counts calls without a draft, and no token behind an EOS.
        """
        return 1.0 + self.accepted / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens over verified ones, those behind a rejection included; 0: no draft."""
        return self.accepted / max(self.verified, 1)

    @property
    def acceptance_histogram(self) -> list[int]:
        """Target calls that verified a draft and accepted 0, 1, … γ_max of its tokens."""
        idle = sum(self.accepted_lengths) - self.num_spec_steps
        return [self.accepted_lengths[0] - idle, *self.accepted_lengths[1:]]

    def acceptance_fields(self) -> dict[str, Any]:
        """Conditional acceptance by position and its mean, as fields of a row of results."""
        rates = [None if rate is None else round(rate, 4) for rate in self.acceptance]
        mean = self.mean_acceptance
        return {
            "acceptance_by_position": rates,
            "mean_acceptance": None if mean is None else round(mean, 4),
        }


@dataclasses.dataclass(frozen=True)
class Row(Acceptance):
    """One output: draw `sample` of input `index`, with its counts."""

    index: int
    sample: int
    text: str  # the text after the prompt, without special tokens
    tokens: list[int]  # without the prompt, EOS included
    target_calls: int
    verified: int  # draft tokens that the target verified, in trees nodes
    draft_calls: int  # of the drafter, one after another: in trees levels
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
class Summary(Acceptance):
    """Counts over all outputs. Plain decoding drafts nothing, and every token is a bonus."""

    outputs: int
    tokens: int  # accepted + corrections + bonus
    iterations: int  # target calls; prefill is not counted
    verified: int  # draft tokens that the target verified, in trees nodes
    draft_calls: int  # of the drafter, one after another: in trees levels
    accepted: int
    corrections: int  # the target's tokens in the place of rejected ones
    bonus: int  # the target's tokens after a fully accepted or empty draft
    accepted_lengths: list[int]  # rounds by accepted length, 0 … γ_max
    tested: list[int]  # rounds in which draft position i was reached, 0 … γ_max−1
    exact: bool | None = True  # outputs keep the target's distribution; None: the rule is silent

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
    drafted = renamed.refused("drafted")

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
    def verified(self) -> np.ndarray:
        """Draft tokens that the target verified, for each row."""
        return np.array([row.verified for row in self.rows])

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
    lengths = np.sum([row.accepted_lengths for row in rows] or [[0]], axis=0).tolist()
    tested = np.sum([row.tested for row in rows] or [[]], axis=0, dtype=int).tolist()
    emitted = sum(row.emitted for row in rows)
    accepted = sum(row.accepted for row in rows)
    # Each accepted token was tested, and so was each that a correction replaces.
    corrections = sum(tested) - accepted
    return Summary(
        outputs=len(rows),
        tokens=emitted,
        iterations=sum(row.target_calls for row in rows),
        verified=sum(row.verified for row in rows),
        draft_calls=sum(row.draft_calls for row in rows),
        accepted=accepted,
        corrections=corrections,
        bonus=emitted - accepted - corrections,
        accepted_lengths=lengths,
        tested=tested,
        exact=exact,
    )


def acceptance_by_position(rows: Sequence[Row]) -> np.ndarray:
    """P(position i is accepted | all before it were), i = 1 … γ_max; NaN where none was tested."""
    return np.array(summarize(rows).acceptance, float)


def acceptance_rates(lengths: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Acceptance by position, from `accepted_lengths` and `tested` summed over rows."""
    tested = tested.astype(np.float64)
    passed = np.cumsum(lengths[::-1])[::-1][1:]
    return np.divide(passed, tested, out=np.full_like(tested, np.nan), where=tested > 0)
