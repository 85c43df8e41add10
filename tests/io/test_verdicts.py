"""Verdicts of the doctor from observations, and the distributions that its checks compare."""

import math
import shutil

import numpy as np
import pytest

import reference
from pairs import TEXTS
from specjax import doctor
from specjax.checkpoints.compatibility import Check
from specjax.doctor import checks, distributions, verdicts
from specjax.doctor.case import Case
from specjax.measure.metrics import Alpha
from specjax.models.memory import Need
from specjax.policies import Costs
from specjax.results import Row
from specjax.sampling import Sampling
from specjax.settings import Drafting

FINE = Check("token ids", True, "3 tokens", "3 tokens")
REMARK = Check("padding token", False, "0", "1", way_out="", required=False)
FAULT = Check("start token", False, "0", "2", way_out="Another draft.")
NEEDS = [Need(300, 100, 100), Need(50, 25, 25)]
TWO = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]
NAN = math.nan


def acceptance(alpha, rates, low=None):
    return verdicts.acceptance(Alpha(alpha, low, low, 9, []), 2.0, np.array(rates))


CASES = [  # a finding, its verdict, and a part of what it says
    (verdicts.tokenizer(32100, 32128, 0.0), "pass", ""),
    (verdicts.tokenizer(300, 32128, 0.0), "warn", "model's own"),
    (verdicts.tokenizer(32100, 32128, 0.2), "warn", "--input"),
    (verdicts.outputs([[0], [0]], 0.0, 1), "warn", ""),  # a vocabulary of one id
    (verdicts.compatibility([FINE], (9, 9)), "pass", ""),
    (verdicts.compatibility([REMARK, FINE], (9, 9)), "warn", ""),
    (verdicts.compatibility([REMARK, FAULT], (7, 9)), "fail", "Another draft."),
    (
        verdicts.compatibility([REMARK, FAULT], (7, 9)),
        "fail",
        "; 1 more; the draft is never right about 2 of the target's 9 ids",
    ),
    *(
        (verdicts.memory(NEEDS, free, 8, 20), verdict, "")
        for free, verdict in ((None, "pass"), (1000, "pass"), (700, "warn"), (599, "fail"))
    ),
    (verdicts.outputs(TWO, 1.0, 300), "pass", ""),
    (verdicts.outputs(TWO, 5.5, 300), "warn", "chance"),
    (verdicts.outputs(TWO, 1e-4, 300), "warn", "not differ"),
    (verdicts.outputs([*TWO[:1] * 2, []], 1.0, 300), "warn", "same output"),
    (verdicts.outputs(TWO[:1], 1.0, 300), "pass", ""),
    (verdicts.outputs([[1] * 12, [7, *[2, 3] * 9]], 1.0, 300), "warn", "loop"),
    (verdicts.outputs([[1] * 12, TWO[0]], 1.0, 300), "pass", ""),
    (verdicts.identity([], 8, 100, 1e-4), "pass", ""),
    (verdicts.identity([1e-6, 5e-5], 8, 100, 1e-4), "warn", "near-ties"),
    (verdicts.identity([1e-6, 1e-2], 8, 100, 1e-4), "fail", ""),
    (verdicts.identity([math.inf], 8, 100, 1e-4), "fail", ""),
    (acceptance(0.7, [0.7, 0.7, 0.8, NAN]), "pass", "(–: too few outputs or rounds to say)"),
    (acceptance(0.3, [0.3, 0.3, NAN, NAN]), "warn", "bigrams"),
    (acceptance(0.7, [0.7, 0.6, 0.3, NAN]), "warn", "fall off"),
    (acceptance(0.7, [NAN] * 4), "pass", ""),
    (verdicts.speed(Costs(0.1, [1.4] * 5), 4, "γ=4"), "pass", ""),
    (verdicts.speed(Costs(0.5, [1.4] * 5), 4, "γ=4"), "warn", "v(γ=4) 1.40"),
    (verdicts.speedup(1.5, 4, 4, "γ=4"), "pass", ""),
    (verdicts.speedup(1.5, 4, 2, "γ=4"), "pass", "γ=2 promises more"),
    (verdicts.speedup(1.0, 4, 2, "γ=4"), "warn", "--config.gamma=2"),
    (verdicts.speedup(1.0, 4, 0, "γ=4"), "warn", "Decode plainly"),
    (verdicts.speedup(1.04, 4, 4, "γ=4"), "warn", "Decode plainly"),
]


@pytest.mark.parametrize(("found", "verdict", "said"), CASES)
def test_verdicts(found, verdict, said):
    assert found.verdict == verdict
    assert said in found.seen + found.way_out


def test_no_dash_is_explained_where_there_is_none():
    assert "–" not in acceptance(0.7, [0.7], low=0.6).seen


@pytest.mark.parametrize(
    ("kind", "count", "dtypes", "said"),
    [
        ("cpu", 1, ("float32", "float32"), ""),
        ("cpu", 8, ("float32", "float32"), ""),
        ("cpu", 1, ("bfloat16", "float32"), "slow on this CPU"),
        ("H100", 1, ("float16", "bfloat16"), "overflow"),
        ("H100", 1, ("bfloat16", "bfloat16"), ""),
        ("H100", 2, ("bfloat16", "bfloat16"), "Only the first"),
    ],
)
def test_device_verdicts(kind, count, dtypes, said, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(verdicts, "cpu_multiplies", lambda _: False)
    roles = dict(zip(("target", "draft"), dtypes, strict=True))
    found = verdicts.devices(kind, count, roles, True)
    assert found.verdict == ("warn" if said else "pass")
    assert said in found.way_out
    monkeypatch.setattr(verdicts, "cpu_multiplies", lambda _: True)
    fast = verdicts.devices(kind, count, roles, True)
    assert fast.verdict == ("pass" if "this CPU" in said else found.verdict)


def test_a_gpu_that_is_not_used(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = verdicts.devices("cpu", 1, {"target": "float32"}, True)
    assert (found.verdict, "cuda13" in found.way_out) == ("warn", True)


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([5, 6, 1, 1, 1], True),
        ([1, 1, 1, 2], False),
        ([9, 8, 7, 6, *[1, 2, 3, 4] * 3], False),  # only twice in the second half
        ([9, 8, 7, 6, *[1, 2, 3, 4] * 5], True),
        ([1, 2, 3, 4, 5] * 8, False),  # a longer period
        ([], False),
    ],
)
def test_loops(tokens, looped):
    assert verdicts.in_loop(tokens) == looped


def test_nothing_follows_from_timings_in_doubt(pair, monkeypatch):
    """A draft step of 2.9 target steps by a smaller model, and a pass that takes less than one
    position: they are taken again, and then no speedup is named. On a busy machine neither."""
    wrong, fine = Costs(2.919, [0.37] * 4), Costs(0.1, [1.2] * 4)
    plan = doctor.Plan(pair.target.name, pair.draft.name, drafting=Drafting(3), max_new_tokens=4)
    case = Case(plan)
    case.target, case.draft = pair.target, pair.draft
    case.sources, case.rows, case.alpha = [[3, 1]], [], 0.9
    asked, told, load = [], [], 0.1
    monkeypatch.setattr(
        checks.costing,
        "costs_of",
        lambda watch, *_: asked.append(watch.repeats) or told.pop(0),
    )
    monkeypatch.setattr(checks.doubts, "load_average", lambda: load)
    told += [wrong, wrong]
    found = checks.speed(case)
    assert (found.verdict, asked) == ("warn", [checks.REPEATS, checks.AGAIN])
    assert "The timings contradict themselves: c = 2.92" in found.way_out
    assert "v = 0.37" in found.way_out
    assert checks.speedup(case).verdict == "skip"
    told += [wrong, fine, fine]
    assert (checks.speed(case).verdict, case.doubts) == ("pass", "")
    load = 9.0
    found = checks.speed(case)
    assert (found.verdict, found.way_out[:22]) == ("warn", "The machine was busy: ")
    assert checks.speedup(case).verdict == "skip"


def test_the_best_gamma_of_a_drafter_that_guesses():
    """9 of 10 first tokens are accepted and 1 of 9 second ones; α is .9, and would draft four."""
    row = Row(0, 0, "", [5] * 20, 10, 40, 40, 10, [1, 8, 1, 0, 0], [10, 9, 1, 0])
    passes = np.array([1.0, 1.1, 1.2, 1.3, 1.4])
    assert checks.best_gamma(0.9, [row], 0.1, passes, by_position=True) == 1
    assert checks.best_gamma(0.9, [row], 0.1, passes, by_position=False) == 4
    assert checks.best_gamma(0.9, [row], 1.0, passes, by_position=True) == 0


# --- distributions -----------------------------------------------------------------------------


def test_chi_square_is_that_of_scipy():
    rng = np.random.default_rng(0)
    distribution = dict(enumerate(rng.dirichlet(np.full(40, 0.3))))
    drawn = rng.choice(40, 500, p=list(distribution.values()))
    counts = dict(zip(*(part.tolist() for part in np.unique(drawn, return_counts=True))))  # noqa: B905
    for shift in (0, 10, 40):
        counts[drawn[0]] += shift
        expected = reference.chi_square(counts, distribution)
        assert distributions.chi_square(counts, distribution) == pytest.approx(
            expected, rel=1e-3, abs=1e-7
        )
    assert distributions.chi_square({40: 1}, distribution) == 0
    assert distributions.chi_square({0: 7}, {0: 1.0}) == 1


def test_the_distribution_of_two_tokens(pair):
    """It sums to one; first tokens that end a row, or are not likely, stand alone."""
    case = Case(doctor.Plan(pair.target.name, pair.draft.name, TEXTS))
    case.target, case.draft = pair.target, pair.draft
    source = pair.target.tokenizer(TEXTS[0])["input_ids"]
    method = case.speculative(Sampling())
    likely, expected = distributions.distribution_of_two(method, pair.target, source)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    assert not likely & set(pair.target.eos_ids)
    assert {cell[0] for cell in expected if len(cell) == 2} == likely
    assert {cell[0] for cell in expected if len(cell) == 1} == set(range(300)) - likely
    assert distributions.outcome([min(likely), 7, 8], likely) == (min(likely), 7)
    assert distributions.outcome([1], likely) == (1,)
