"""How good outputs are against references, and whether two methods' outputs are equally good.

bleu    sacreBLEU of the corpus, 0 … 100
rouge   ROUGE-1, ROUGE-2 and ROUGE-Lsum of rouge_score, means of F over inputs, 0 … 100
exact   the share of outputs that are their reference, 0 … 1

bleu and rouge need the extra `data`. Intervals are 95%, by bootstrap over inputs.
"""

import dataclasses
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.chat import tables

METRICS = ("bleu", "rouge", "exact")
ROUGES = ("rouge1", "rouge2", "rougeLsum")


@dataclasses.dataclass(frozen=True)
class Score:
    """A figure, or the difference of two, with its 95% interval."""

    name: str
    value: float
    low: float
    high: float
    signature: str
    """How it was computed, versions included: only figures of one signature may be compared."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Whether two methods do the same."""

    identical: float
    """Share of equal outputs: 1 at temperature 0 in float32."""
    differences: tuple[Score, ...]
    """Of each figure, the first method's less the second's."""

    @property
    def within(self) -> bool:
        """Whether every interval holds 0; of one distribution, each misses it in one run of
        twenty."""
        return all(score.low <= 0 <= score.high for score in self.differences)


def score(metric: str, outputs: Sequence[str], references: Sequence[str]) -> tuple[Score, ...]:
    """The figures of a metric: one for bleu and exact, three for rouge.

    Raises:
      ValueError: no such metric, outputs and references that do not pair up, or no extra `data`.
    """
    figures = _figures(metric, outputs, references)
    return tuple(Score(f.name, *_interval(_draws(f)), f.signature) for f in figures)


def agree(
    metric: str, outputs: Sequence[str], others: Sequence[str], references: Sequence[str]
) -> Agreement:
    """Compare two methods' outputs for the same inputs, in the same order.

    At temperature 0 look at `identical`. At temperature 1 outputs are two draws from what should be
    one distribution, so they differ and their scores must not: look at `within`. The bootstrap is
    paired, since an input that is hard for one method is hard for the other.

    Raises: as `score`.
    """
    _check(metric, others, outputs)
    each = (_figures(metric, some, references) for some in (outputs, others))
    differences = tuple(
        Score(a.name, *_interval(_draws(a) - _draws(b)), a.signature)
        for a, b in zip(*each, strict=True)
    )
    same = [a == b for a, b in zip(outputs, others, strict=True)]
    return Agreement(float(np.mean(same)), differences)


# --- figures: functions of sums over inputs ----------------------------------------------------


class _Figure(NamedTuple):
    name: str
    signature: str
    rows: np.ndarray  # (N, k), what is summed over inputs
    of: Callable[[np.ndarray], float]  # the figure, from the sums (k,)


def _figures(metric: str, outputs: Sequence[str], references: Sequence[str]) -> tuple[_Figure, ...]:
    _check(metric, outputs, references)
    return {"bleu": _bleu, "rouge": _rouge, "exact": _exact}[metric](outputs, references)


def _bleu(outputs: Sequence[str], references: Sequence[str]) -> tuple[_Figure, ...]:
    bleu = _extra("sacrebleu").metrics.BLEU
    corpus = bleu()
    corpus.corpus_score(outputs, [references])  # which makes the signature
    counter = bleu(effective_order=True)  # read for its counts alone; it warns otherwise
    rows = []
    for output, reference in zip(outputs, references, strict=True):
        found = counter.sentence_score(output, [reference])
        rows.append([*found.counts, *found.totals, found.sys_len, found.ref_len])

    def of(sums: np.ndarray) -> float:
        *counts, sys_len, ref_len = sums.tolist()
        return bleu.compute_bleu(
            counts[:4], counts[4:], sys_len, ref_len, smooth_method=corpus.smooth_method
        ).score

    return (_Figure("bleu", corpus.get_signature().format(), np.array(rows), of),)


def _rouge(outputs: Sequence[str], references: Sequence[str]) -> tuple[_Figure, ...]:
    scorer = _extra("rouge_score.rouge_scorer").RougeScorer(ROUGES, use_stemmer=True)
    found = [
        scorer.score(_one_sentence_a_line(reference), _one_sentence_a_line(output))
        for output, reference in zip(outputs, references, strict=True)
    ]
    signature = (
        f"rouge_score {importlib.metadata.version('rouge-score')}, mean F, Porter stemmer, "
        "sentences end at . ! ? or a newline"
    )
    return tuple(
        _mean(name, signature, [100 * scores[name].fmeasure for scores in found]) for name in ROUGES
    )


def _one_sentence_a_line(text: str) -> str:
    """What ROUGE-Lsum takes. CNN/DailyMail's highlights are so; outputs of T5 have no newlines."""
    return re.sub(r"(?<=[.!?])\s+", "\n", text)


def _exact(outputs: Sequence[str], references: Sequence[str]) -> tuple[_Figure, ...]:
    same = [float(a == b) for a, b in zip(outputs, references, strict=True)]
    return (_mean("exact", "share of outputs equal to the reference", same),)


def _mean(name: str, signature: str, values: Sequence[float]) -> _Figure:
    rows = np.stack([np.array(values), np.ones(len(values))], axis=1)
    return _Figure(name, signature, rows, lambda sums: float(sums[0] / sums[1]))


# --- the bootstrap -----------------------------------------------------------------------------


def _draws(figure: _Figure) -> np.ndarray:
    """The figure of all inputs, and of each resampled corpus."""
    return np.array([figure.of(sums) for sums in tables.resamples(len(figure.rows)) @ figure.rows])


def _interval(draws: np.ndarray) -> tuple[float, float, float]:
    """The figure, and the ends of its interval."""
    low, high = np.quantile(draws[1:], [0.025, 0.975])
    return float(draws[0]), float(low), float(high)


# --- what can go wrong -------------------------------------------------------------------------


def _check(metric: str, outputs: Sequence[str], references: Sequence[str]) -> None:
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}: choose from {', '.join(METRICS)}")
    if len(outputs) != len(references):
        raise ValueError(
            f"{len(outputs)} outputs do not pair up with {len(references)} texts to compare with: "
            "give one for each, in the same order"
        )
    if not outputs:
        raise ValueError("no outputs to score: give at least one")


def _extra(module: str) -> Any:
    """A module of the extra `data`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"This metric needs {module.split('.')[0]}: pip install -e '.[data]'."
        ) from None
