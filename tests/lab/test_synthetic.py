"""Synthetic rollouts have the moments that were asked for, and `describe` finds them again; replay
along them is what the paper's formulas say, and below the oracle."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import by_loop
from experiments.when import synthetic
from experiments.when.synthetic import Chances
from specjax import formulas
from specjax.measure import costing
from specjax.policies import constant, parse
from specjax.replay import replay

KEY = jax.random.key(1)
MANY = {"outputs": 1024, "tokens": 128, "gamma_max": 1}
# Of 131,072 positions. α varies with the outputs' levels by up to √(.2 · .16/1024) = .006.
TOLERANCE = {
    "alpha": 0.02, "between": 0.03, "within": 0.03, "autocorrelation": 0.04,
    "informativeness": 0.06, "slope": 0.15, "offset": 0.1,
}  # fmt: skip
VARIED = [
    Chances(0.7, 0.1, 0.3, 0.5, 0.6),
    Chances(0.8, 0.2, 0.5, 0.8, 0.4, slope=2.0, offset=-0.5),
    Chances(0.6, 0.0, 0.4, 0.0, 1.0),
    Chances(0.9, 0.05, 0.3, 0.4, 0.5, slope=0.8, offset=0.3),
]


def assert_near(found: Chances, asked: Chances, **wider) -> None:
    for name, most in {**TOLERANCE, **wider}.items():
        assert getattr(found, name) == pytest.approx(getattr(asked, name), abs=most), name


@pytest.mark.parametrize("asked", VARIED)
def test_moments(asked):
    """Straight from the chances: means and variances of outputs, and of neighbours."""
    chance = np.asarray(synthetic.rollouts(asked, KEY, **MANY).overlap, np.float64)[:, :-1, 0]
    most, inside = asked.alpha * (1 - asked.alpha), chance - chance.mean(axis=1, keepdims=True)
    assert chance.mean() == pytest.approx(asked.alpha, abs=TOLERANCE["alpha"])
    assert chance.var() / most == pytest.approx(asked.between + asked.within, abs=0.03)
    # The mean of 128 tokens varies by what is within, too: by at most (1 + a)/(1 − a)/128 of it.
    extra = asked.within * (1 + asked.autocorrelation) / (1 - asked.autocorrelation) / 128
    assert chance.mean(axis=1).var() / most == pytest.approx(asked.between, abs=0.02 + extra)
    near = (inside[:, 1:] * inside[:, :-1]).mean() / inside.var()
    assert near == pytest.approx(asked.autocorrelation, abs=0.05)


def test_beliefs_are_calibrated():
    """The mean chance of positions with like belief is the belief; and a belief of slope 2 is the
    same with its quantile doubled."""
    asked = Chances(0.7, 0.1, 0.3, 0.5, 0.6)
    found = synthetic.seen(synthetic.rollouts(asked, KEY, **MANY))
    for least in np.arange(0.3, 0.9, 0.1):
        like = (found.top1 >= least) & (found.top1 < least + 0.1) & found.there
        assert like.sum() > 1000
        assert found.chance[like].mean() == pytest.approx(found.top1[like].mean(), abs=0.02)
    sure = synthetic.seen(synthetic.rollouts(dataclasses.replace(asked, slope=2.0), KEY, **MANY))
    some = found.there & (found.top1 > 0.1) & (found.top1 < 0.95)  # float32 holds both
    calibrated, doubled = (synthetic.ndtri(each.top1[some]) for each in (found, sure))
    np.testing.assert_allclose(doubled, 2 * calibrated, atol=0.01)


@pytest.mark.parametrize("asked", VARIED)
def test_described_again(asked):
    assert_near(synthetic.describe(synthetic.rollouts(asked, KEY, **MANY)), asked)


@pytest.mark.parametrize("asked", [VARIED[0], VARIED[1]])
def test_described_where_chances_are_settled(asked):
    """As at temperature 0: from acceptances and beliefs alone."""
    found = synthetic.rollouts(asked, KEY, **MANY, settled=True)
    assert set(np.unique(found.overlap)) == {0.0, 1.0}
    assert_near(synthetic.describe(found), asked, within=0.06, informativeness=0.1)


def test_settled_and_told_nothing():
    """Neighbours alone show how chances vary."""
    asked = Chances(0.8, 0.2, 0.5, 0.8, 0.0)
    found = synthetic.describe(synthetic.rollouts(asked, KEY, **MANY, settled=True))
    assert_near(found, asked, within=0.08, autocorrelation=0.08)


def test_nothing_varies():
    found = synthetic.describe(synthetic.rollouts(Chances(0.7), KEY, **MANY, settled=True))
    assert found.between < 0.01
    assert found.within < 0.01


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_constants_are_the_papers(alpha):
    """Where nothing varies: speedups within 2% of Thm 3.8 with v, so that the best γ is the
    formula's or as good."""
    c, verify, most = 0.1, 0.05, 8
    passes = [1 + verify * gamma for gamma in range(most + 1)]
    tables = by_loop.by_formula(c, passes, 0.0, ())
    found = synthetic.rollouts(Chances(alpha), KEY, outputs=32, tokens=1000, gamma_max=most)
    gammas = range(1, most + 1)
    replayed = replay.replay([constant(gamma) for gamma in gammas], found, KEY)
    speedups = [
        float(replay.score(one, found, tables[costing.static(gamma)]).speedup[0])
        for gamma in gammas
        for one in [jax.tree.map(lambda counts, at=gamma - 1: counts[at : at + 1], replayed)]
    ]
    expected = formulas.walltime_speedup(alpha, np.array(gammas), c, passes)
    np.testing.assert_allclose(speedups, expected, rtol=0.02)
    best = formulas.optimal_gamma(alpha, c, passes)
    assert speedups[best - 1] >= max(speedups) * 0.98


@pytest.mark.parametrize("verify", [0.0, 0.1])
def test_the_oracle_bounds_all(verify):
    """And beliefs that are the chances are worth more than beliefs that say nothing."""
    passes = [1 + verify * gamma for gamma in range(7)]
    tables = by_loop.by_formula(0.2, passes, 0.0, range(1, 7))
    costs = tables[costing.POLICIES]
    policies = [constant(2), parse("lookahead", costs=costs), parse("goodput", costs=costs)]
    speedups = []
    for informativeness in (0.0, 1.0):
        asked = Chances(0.7, 0.1, 0.5, 0.2, informativeness)
        found = synthetic.rollouts(asked, KEY, outputs=64, tokens=64, gamma_max=6)
        scored = replay.score(replay.replay(policies, found, KEY), found, costs).speedup
        bound = replay.oracle(found, KEY, list(tables.values())).speedup
        assert max(scored) <= bound
        speedups.append([*scored, float(bound)])
    (fixed, blind, goodput, oracle), (same, sees, again, bound) = speedups
    assert (fixed, goodput, oracle) == (same, again, bound)  # chances do not change with beliefs
    assert sees > 1.05 * blind


def test_refused():
    with pytest.raises(ValueError, match=r"between \+ within=1.1"):
        Chances(0.7, 0.5, 0.6)
    with pytest.raises(ValueError, match="alpha=1"):
        Chances(1.0)
    with pytest.raises(ValueError, match="outputs=0"):
        synthetic.rollouts(Chances(0.5), KEY, outputs=0, tokens=1, gamma_max=1)
    found = synthetic.seen(
        synthetic.rollouts(Chances(0.5), KEY, outputs=64, tokens=64, gamma_max=1)
    )
    with pytest.raises(ValueError, match="1 outputs"):
        synthetic.describe(synthetic.Seen(*(field[:1] for field in found)))
    with pytest.raises(ValueError, match="never varies"):
        synthetic.describe(found._replace(chance=np.ones_like(found.chance)))
