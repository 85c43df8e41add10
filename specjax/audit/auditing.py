"""Audits of samplers: how far the distribution of an output is from the target's."""

import collections
import dataclasses
import math
import numbers
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from specjax.audit.findings import Finding, by_hand, compared, completed, margin, watched, words
from specjax.audit.kinds import KINDS, Fault, Function, Kind, Problem, Rows
from specjax.audit.randomness import Refused, TooMany, outcomes

Rng = Literal["branching", "generator", "key"]
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
DRAWS = {"generator": 20_000, "key": 200_000}  # of one problem, by default
MAX_DRAWS = 10_000_000  # of one problem; with keys they are in memory at once
MAX_SEED = (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of `audit`; `str` of it is the report.

    Attributes:
      name: the function's name.
      kind: a key of `KINDS`, or "rule".
      tolerance: the largest total variation that counts as exact.
      draws: samples drawn for each problem; 0 if every outcome was enumerated.
      findings: one for each problem.
      left_out: how many problems of several rows have too many outcomes to be enumerated.
    """

    name: str
    kind: str
    tolerance: float
    draws: int
    findings: tuple[Finding, ...]
    left_out: int = 0

    @property
    def fault(self) -> str:
        """The first exception or invalid output; "" if there is none."""
        return next((finding.fault for finding in self.findings if finding.fault), "")

    @property
    def total_variation(self) -> float:
        """The largest total variation; NaN if no problem had an output."""
        found = [f.total_variation for f in self.findings if not f.fault]
        return max(found, default=math.nan)

    @property
    def at_least(self) -> float:
        """The largest total variation that is certain: with draws, at 99.9%."""
        return max((f.total_variation - f.margin for f in self.findings if not f.fault), default=0)

    @property
    def exact(self) -> bool:
        """Whether nothing was found: no fault, and no total variation above the tolerance."""
        return not self.fault and self.at_least <= self.tolerance

    @property
    def sizes(self) -> str:
        """The largest sizes among the problems, such as "V up to 5, γ up to 4, one round"."""
        size = max(finding.problem.tables[0].size for finding in self.findings)
        gamma = max(finding.problem.tables[0].gamma for finding in self.findings)
        rows = max(len(finding.problem.tables) for finding in self.findings)
        drafted = [f"γ up to {gamma}", *[f"up to {rows} rows"] * (rows > 1), "one round"]
        return ", ".join([f"V up to {size}", *(drafted if gamma else ["one token"])])

    @property
    def verdict(self) -> str:
        """A sentence: exact, consistent with exact, biased, or invalid."""
        if self.fault:
            return f"invalid: {self.fault}"
        if self.draws and self.exact:
            most = min(1, max(f.total_variation + f.margin for f in self.findings))
            return (
                f"consistent with exact: TV at most {most:.2g} (99.9%) for {self.sizes}, by "
                f"{self.draws:,} draws of each table"
            )
        if self.exact:
            left_out = f"; larger batches left out: {self.left_out}" * (self.left_out > 0)
            return f"exact: TV {self.total_variation:.1g} for {self.sizes}{left_out}"
        if self.draws:
            return f"biased: TV at least {self.at_least:.3f} (99.9%)"
        silent = self.kind != "lengths" and not any(finding.drew for finding in self.findings)
        remark = "; it drew nothing from rng" if silent else ""
        return f"biased: TV {self.total_variation:.3f}{remark}"

    @property
    def worst(self) -> Finding | None:
        """The problem to check by hand: the smallest that is biased by a third of the largest."""
        biased = [
            finding
            for finding in self.findings
            if not finding.fault
            and finding.total_variation - finding.margin > max(self.tolerance, self.at_least / 3)
        ]
        return min(biased, key=lambda f: f.problem.expected.size, default=None)

    def __repr__(self) -> str:
        return f"Audit({self.name}, {self.kind}: {self.verdict})"

    def __str__(self) -> str:
        count = Counter(finding.problem.kind for finding in self.findings)
        width = max(map(len, count))
        lines = [f"{self.name} ({self.kind})", "", f"  {'tables':<{width}}  count  largest TV"]
        for kind, number in count.items():
            found = [finding for finding in self.findings if finding.problem.kind == kind]
            fault = next((finding.fault for finding in found if finding.fault), "")
            figure = f"{max(finding.total_variation for finding in found):10.2g}"
            lines.append(
                f"  {kind:<{width}}  {number:5}  {f'invalid: {fault}' if fault else figure}"
            )
        if self.worst is not None:
            lines += ["", *by_hand(self.worst)]
        return "\n".join([*lines, "", self.verdict])


def audit(
    function: Any,
    kind: str = "verify",
    *,
    rng: Rng = "branching",
    draws: int | None = None,
    dtype: str = "float64",
    seed: int = 0,
) -> Audit:
    """Compare the output of a sampler with the target's distribution, on small tables.

    Args:
      function: a sampler in the signature of its kind (`KINDS`), or an acceptance rule with `stop`
        and `next_probs`.
      kind: a key of `KINDS`; not read for a rule.
      rng: what the function draws from. "branching": an object like numpy's `Generator`, whose
        every outcome is taken. "generator": numpy's own; samples are drawn. "key": a key of jax;
        samples are drawn in one vmap, and kind must be verify (the function returns γ+1 tokens and
        the number of those that count) or sampler.
      draws: samples for each table; None: 20,000, or 200,000 with keys.
      dtype: "float64" or "float32": of the probabilities that the function gets. Below a total
        variation of 1e-9 or 1e-5 the function counts as exact.
      seed: picks the random tables.

    Raises:
      ValueError: no such kind, another signature, a function that cannot be enumerated, or one that
        calls `sys.exit`.
    """
    if dtype not in [*TOLERANCES]:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(TOLERANCES)}.")
    if rng not in ["branching", *DRAWS]:
        raise ValueError(f"rng={rng!r} must be one of branching, {', '.join(DRAWS)}.")
    if not is_integer(seed, 0, MAX_SEED):
        raise ValueError(f"seed={seed!r} must be an integer from 0 to 2⁶³ − 1.")
    if draws is not None and (rng == "branching" or not is_integer(draws, 1, MAX_DRAWS)):
        raise ValueError(
            f"draws={draws!r} must be an integer from 1 to {MAX_DRAWS:,}, and goes with "
            "rng='generator' or 'key'."
        )
    name = getattr(function, "__name__", reprlib.repr(function))
    count = DRAWS.get(rng, 0) if draws is None else draws
    try:
        if hasattr(function, "stop") and hasattr(function, "next_probs"):
            from specjax.audit import of_rules  # it imports jax

            problems = KINDS["verify"].problems(seed)
            verify = of_rules.verifier(function, problems)
            found = enumerated(verify, KINDS["verify"], problems, "float64")
            return Audit(name, "rule", of_rules.tolerance(), 0, tuple(found))
        if kind not in [*KINDS]:
            raise ValueError(f"There is no kind {kind!r}: it is one of {', '.join(KINDS)}.")
        KINDS[kind].check_signature(function)
        problems = KINDS[kind].problems(seed)
        if rng == "branching":
            found = enumerated(function, KINDS[kind], problems, dtype)
        elif rng == "generator":
            problems = few(problems)
            found = drawn(function, KINDS[kind], problems, count, dtype, seed)
        else:
            from specjax.audit import by_key  # it imports jax

            problems = few(problems)
            found = by_key.findings(function, kind, problems, count, dtype, seed)
        findings = tuple(found)
        missing = len(problems) - len(findings)
        return Audit(name, kind, TOLERANCES[dtype], count, findings, missing)
    except Refused as error:
        raise ValueError(f"{name}: {error}") from None
    except SystemExit as error:  # it would end a command with the function's status
        raise ValueError(f"{name}: It leaves the process by {error!r}, with no result.") from error


def is_integer(value: Any, least: int, most: int) -> bool:
    """Whether a value is an integer, of Python or numpy, within bounds."""
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return integral and least <= value <= most


def few(problems: list[Problem]) -> list[Problem]:
    """The first random problem of each size, and the largest of every other kind."""
    chosen: dict[Any, Problem] = {}
    for problem in problems:
        place = problem.kind, problem.size if problem.kind.startswith("random") else None
        if place not in chosen or problem.size > chosen[place].size:
            chosen[place] = problem
    return list(chosen.values())


def enumerated(
    function: Function, kind: Kind, problems: list[Problem], dtype: str
) -> Iterator[Finding]:
    """Take every outcome of drafts and function.

    A function that draws for all positions of all rows at once has many outcomes: the larger
    batches are left out then.
    """
    smallest = min(problem.size for problem in problems)
    for problem in problems:
        try:
            yield one(function, kind, problem, dtype)
        except TooMany:
            if len(problem.tables) == 1 or problem.size == smallest:
                raise


def one(function: Function, kind: Kind, problem: Problem, dtype: str) -> Finding:
    """Take every outcome on one problem."""
    drew = False

    def run(random) -> Rows:
        nonlocal drew
        rows = kind.run(function, problem, random, dtype, random.branch)
        drew |= random.used
        return rows

    try:
        weights: dict[Rows, float] = collections.defaultdict(float)
        with watched(problem):
            for weight, rows in outcomes(run):
                weights[rows] += weight
    except Fault as fault:
        return Finding(problem, fault=f"{fault} ({words(problem)})")
    return compared(problem, completed(problem, weights), drew=drew)


def drawn(
    function: Function, kind: Kind, problems: list[Problem], count: int, dtype: str, seed: int
) -> Iterator[Finding]:
    """Draw samples of every problem with numpy's generator."""
    generator = np.random.default_rng(seed)

    def branch(chances) -> int:
        return int(np.searchsorted(np.cumsum(chances), generator.random() * np.sum(chances)))

    for problem in problems:
        counts: Counter[Rows] = Counter()
        try:
            with watched(problem):
                for _ in range(count):
                    counts[kind.run(function, problem, generator, dtype, branch)] += 1
        except Fault as fault:
            yield Finding(problem, fault=f"{fault} ({words(problem)})")
            continue
        law = completed(problem, {rows: number / count for rows, number in counts.items()})
        yield compared(problem, law, margin(law.size, count, len(problems)))
