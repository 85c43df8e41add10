"""What an audit found for one problem: the distribution of the output, and how far it is off."""

import contextlib
import dataclasses
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from specjax.audit.kinds import Problem, Rows

ERROR = 1e-3  # the probability that a bound on drawn samples is wrong, for the whole audit
PATIENCE = 30  # seconds for one table, before a warning names it
MAX_ROWS = 8  # of a shown table


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came out for one problem.

    Attributes:
      total_variation: half the sum of absolute differences from the target's probabilities.
      margin: how far the true total variation may be off; 0 where all outcomes were enumerated.
      law: the distribution of the output, an axis for each token.
      fault: what the function did instead of an output; "" if nothing.
      drew: False if the function drew nothing from an enumerated rng.
    """

    problem: Problem
    total_variation: float = math.nan
    margin: float = 0.0
    law: np.ndarray | None = None
    fault: str = ""
    drew: bool = True


def margin(outcomes: int, draws: int, problems: int) -> float:
    """How far the total variation of drawn samples may be from the true one, in either direction.

    The mean error is at most ½√((K − 1)/n) for K outcomes and n draws, by Cauchy and Schwarz. One
    draw moves the error by at most 1/n, so it exceeds its mean by t with probability exp(−2nt²) at
    most (McDiarmid). All problems together go wrong with probability `ERROR`.
    """
    excess = math.log(problems / ERROR) / (2 * draws)
    return math.sqrt((outcomes - 1) / draws) / 2 + math.sqrt(excess)


def compared(problem: Problem, law: np.ndarray, margin: float = 0.0, drew: bool = True) -> Finding:
    """The total variation of an output's distribution from the target's."""
    distance = float(np.abs(law - problem.expected).sum() / 2)
    return Finding(problem, distance, margin, law, drew=drew)


def completed(problem: Problem, weights: Mapping[Rows, float]) -> np.ndarray:
    """The distribution of γ + 1 tokens of each row; the target completes shorter outputs."""
    law = np.zeros_like(problem.expected)
    for rows, weight in weights.items():
        law += weight * problem.law(rows)
    return law


@contextlib.contextmanager
def watched(problem: Problem) -> Iterator[None]:
    """Warn while one problem takes long: a function without an end cannot be stopped from here."""
    message = (
        f"No result after {PATIENCE} seconds of {words(problem)}. Interrupt the audit if the "
        "function may never return."
    )
    timer = threading.Timer(PATIENCE, warnings.warn, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- A problem in words ---------------------------------------------------------------------------


def words(problem: Problem) -> str:
    """Name a problem in a line."""
    table = problem.tables[0]
    draft = f", draft {_numbers(table.draft[()])}" if table.gamma else ""
    target = _numbers(table.target[()])
    return f"tables {problem.kind!r}, {_place(problem)}, target {target}{draft}"


def _place(problem: Problem) -> str:
    """The sizes of a problem, and what else the function gets."""
    table, rows = problem.tables[0], len(problem.tables)
    parts = [f"V = {table.size}"]
    parts += [f"γ = {table.gamma}"] if table.gamma else []
    parts += [f"{rows} rows"] if rows > 1 else []
    parts += [f"parents {problem.more[0]}"] if len(problem.more) == 1 else []
    if len(problem.more) == 2:
        parts += [f"T = {problem.more[1]:g}", f"logits {_numbers(problem.more[0])}"]
    return ", ".join(parts)


def by_hand(finding: Finding) -> list[str]:
    """Format a problem and its output as a table that one can check by hand."""
    problem, law = finding.problem, finding.law
    assert law is not None
    table, rows = problem.tables[0], len(problem.tables)
    length = table.gamma + 1
    # The first tokens alone, if they show most of it.
    for first in range(1, length + 1):
        axes = tuple(row * length + i for row in range(rows) for i in range(first, length))
        found, expected = law.sum(axis=axes), problem.expected.sum(axis=axes)
        distance = np.abs(found - expected).sum() / 2
        if distance > finding.total_variation / 2:
            break
    lines = [f"To check by hand: {_place(problem)}", ""]
    for row, each in enumerate(problem.tables):
        prefixes = [prefix for prefix in each.target if len(prefix) < first]
        for prefix in prefixes[:MAX_ROWS]:
            after = f"after {' '.join(map(str, prefix))}" if prefix else "first token"
            after = f"row {row}, {after}" if rows > 1 else after
            line = f"  {after:<20}  target {_numbers(each.target[prefix])}"
            drafted = len(prefix) < each.gamma
            lines.append(line + f"  draft {_numbers(each.draft[prefix])}" * drafted)
    order = np.argsort(-np.abs(found - expected), axis=None, kind="stable")[:MAX_ROWS]
    lines += ["", f"  {'output':<20}  comes out  should"]
    for at in sorted(order):
        index = np.unravel_index(at, found.shape)
        tokens = [" ".join(str(int(i)) for i in index[n : n + first]) for n in _starts(rows, first)]
        output = " | ".join(tokens) + (" …" if first < length else "")
        lines.append(f"  {output:<20}  {found[index]:9.4f}  {expected[index]:6.4f}")
    lines.append(f"  half the sum of the differences: {distance:.4f}")
    return lines


def _starts(rows: int, length: int) -> range:
    return range(0, rows * length, length)


def _numbers(values: Any) -> str:
    return "(" + " ".join(f"{float(value):.4g}" for value in values) + ")"
