"""What Leviathan, Kalman and Matias print in "Fast Inference from Transformers via Speculative
Decoding" (arXiv 2211.17192 v2), once, as data: reports put it beside what they measure.

Only printed figures stand here, with the digits that are printed; `formulas` recomputes what
follows from a formula. Speedups are factors of walltime over plain decoding, `c` is
time(draft step) / time(target step), a temperature of 0 is greedy decoding.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Table1Row:
    """What α and γ promise at no draft cost at all, c = ĉ = 0."""

    alpha: float
    gamma: int
    operations: float  # arithmetic operations over plain decoding's, Thm 3.11
    speed: float  # Thm 3.8


TABLE_1 = (
    Table1Row(0.6, 2, 1.53, 1.96),
    Table1Row(0.7, 3, 1.58, 2.53),
    Table1Row(0.8, 2, 1.23, 2.44),
    Table1Row(0.8, 5, 1.63, 3.69),
    Table1Row(0.9, 2, 1.11, 2.71),
    Table1Row(0.9, 10, 1.60, 6.86),
)


@dataclasses.dataclass(frozen=True)
class SpeedupRow:
    """Tables 2 and 4 merged: T5-XXL (11B) at batch 1 on one TPU-v4."""

    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    c: float  # from profiler traces
    expected: float  # Thm 3.8, as printed in Table 4
    measured: float


TABLES_2_AND_4 = (
    SpeedupRow("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    SpeedupRow("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    SpeedupRow("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    SpeedupRow("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    SpeedupRow("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    SpeedupRow("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    SpeedupRow("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    SpeedupRow("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    SpeedupRow("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    SpeedupRow("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    SpeedupRow("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    SpeedupRow("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)


@dataclasses.dataclass(frozen=True)
class AlphaRow:
    """Table 3: α = E[Σ min(target, draft)] over 10,000 tokens that the target generated.

    It is not a rate of accepted tokens. At temperature 0 it is how often both argmaxes agree.
    LaMDA's outputs pass a top-40 filter.
    """

    target: str
    task: str
    draft: str
    alpha_greedy: float  # temperature 0
    alpha_sampled: float  # temperature 1


TABLE_3 = (
    AlphaRow("GPT-like 97M", "lm1b", "unigram", 0.03, 0.03),
    AlphaRow("GPT-like 97M", "lm1b", "bigram", 0.05, 0.05),
    # The one draft whose α is higher at temperature 1: sharper distributions need not agree more
    # often.
    AlphaRow("GPT-like 97M", "lm1b", "GPT-like 6M", 0.88, 0.89),
    AlphaRow("T5-XXL 11B", "EnDe", "unigram", 0.08, 0.07),
    AlphaRow("T5-XXL 11B", "EnDe", "bigram", 0.20, 0.19),
    AlphaRow("T5-XXL 11B", "EnDe", "T5-small", 0.75, 0.62),
    AlphaRow("T5-XXL 11B", "EnDe", "T5-base", 0.80, 0.68),
    AlphaRow("T5-XXL 11B", "EnDe", "T5-large", 0.82, 0.71),
    AlphaRow("T5-XXL 11B", "CNNDM", "unigram", 0.13, 0.08),
    AlphaRow("T5-XXL 11B", "CNNDM", "bigram", 0.23, 0.16),
    AlphaRow("T5-XXL 11B", "CNNDM", "T5-small", 0.65, 0.53),
    AlphaRow("T5-XXL 11B", "CNNDM", "T5-base", 0.73, 0.55),
    AlphaRow("T5-XXL 11B", "CNNDM", "T5-large", 0.74, 0.56),
    AlphaRow("LaMDA 137B", "dialog", "LaMDA 100M", 0.61, 0.57),
    AlphaRow("LaMDA 137B", "dialog", "LaMDA 2B", 0.71, 0.71),
    AlphaRow("LaMDA 137B", "dialog", "LaMDA 8B", 0.75, 0.74),
)


LENIENCES = (1.0, 0.5, 0.3, 0.1)


@dataclasses.dataclass(frozen=True)
class LenienceRow:
    """Table 5: α = E[Σ min(target / lenience, draft)] on EnDe at temperature 1."""

    draft: str
    alphas: tuple[float, ...]  # one for each of LENIENCES


TABLE_5 = (
    LenienceRow("unigram", (0.07, 0.10, 0.11, 0.16)),
    LenienceRow("bigram", (0.19, 0.23, 0.25, 0.32)),
    LenienceRow("T5-small", (0.62, 0.71, 0.76, 0.84)),
    LenienceRow("T5-base", (0.68, 0.80, 0.83, 0.90)),
)

# A.5's text: T5-small at temperature 0, one α for each of LENIENCES. The rule is printed as "accept
# if target(x) ≤ lenience · max(target)", which has to be ≥: only then is a lenience of 1 the strict
# argmax, and only then does α grow as it falls.
GREEDY_LENIENT_ALPHAS = (0.75, 0.75, 0.80, 0.87)
