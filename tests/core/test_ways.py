"""Ways to decode with one draft: what they promise, and which of them races."""

import types

import numpy as np
import pytest

from pairs import TEXTS
from specjax import devices
from specjax.decoding import building
from specjax.measure import costing, metrics, timing
from specjax.measure.counting import Always
from specjax.measure.timing import PLAIN, SPECULATIVE
from specjax.policies import Costs
from specjax.policies.constant import Constant
from specjax.policies.lookahead import Lookahead
from specjax.sampling import Greedy
from specjax.tuning import fitting
from specjax.tuning.candidates import Candidates
from specjax.tuning.job import Job
from specjax.tuning.ways import Decided, Way, fastest

OVERLAPS = [np.ones(12), np.zeros(12)]  # one output is the drafter's, the other is not


def test_costs_of_loops_of_their_own():
    """Passes of five positions take 4, of two 1.5, and a token 1: between them they grow evenly. A
    draft step takes .1."""
    table = Costs(0.1, [1.5, 1.5, 4.0, 4.0, 4.0], token=1.0)
    for widths, passes in (
        ((), [1.75, 2.5, 3.25, 4.0]),
        ((2, 9), [1.5, 1.5 + 2.5 / 3, 4 - 2.5 / 3, 4.0]),
    ):
        expected = {k: passes[k - 1] + 0.1 * k for k in range(1, 5)}
        assert table.alone(widths) == pytest.approx(expected)
    untold = Costs(0.1, [2.0] * 3, token=np.nan)
    assert untold.alone(()) == pytest.approx({1: 2.1, 2: 2.2})


def test_what_a_way_promises():
    """A length drafts in every output; with a policy each output has its own length, or none."""
    steps = {0: 1.1, 1: 1.5, 3: 2.0}
    method = types.SimpleNamespace(branches=False)
    static = Way(method, 3, 3, 0.1, {1: 1.5, 3: 2.0})
    assert static.promised(OVERLAPS) == pytest.approx(24 / (2.0 * (3 + 12)))
    policy = Way(method, 3, 3, 0.1, steps, policy="lookahead")
    assert policy.promised(OVERLAPS) == pytest.approx(24 / (2.0 * 3 + 1.1 * 12))
    assert policy.promised([]) == static.promised([]) == 0
    assert metrics.rounds_along(np.ones(12), 3) == 3


@pytest.mark.parametrize(
    ("seconds", "tokens", "winner"),
    [
        ((1.0, 1.04, 1.2), (1, 1, 1), PLAIN),
        ((1.0, 1.2, 0.96), (1, 1, 1), PLAIN),  # a draft has to gain 5%
        ((1.0, 0.9, 0.89), (1, 1, 1), SPECULATIVE),  # and decisions 2%
        ((1.0, 0.9, 0.88), (1, 1, 1), "policy"),
        # At T > 0 outputs differ: time is for a token.
        ((1.0, 0.9, 1.0), (4, 4, 5), "policy"),
    ],
)
def test_the_fastest(seconds, tokens, winner):
    names = PLAIN, SPECULATIVE, "policy"
    took = {name: np.full((3, 1), each) for name, each in zip(names, seconds, strict=True)}
    rows = {
        name: [[types.SimpleNamespace(emitted=count)]]
        for name, count in zip(names, tokens, strict=True)
    }
    assert fastest(timing.Comparison(took, {}, rows, {}), names, "policy") == winner


def decided(pair, policy="lookahead", short=False, **how):
    """The loops of a policy on the pair, of up to four tokens."""
    candidates = Candidates(Job(pair.target, TEXTS, max_new_tokens=12, batch_size=1))
    longest = building.build(pair.target, pair.draft, gamma=4, sampling=Greedy(), **how)
    ways = Decided(candidates.inputs, longest, range(1, 5), 1.0, policy)
    ways.short = short
    return ways


TOKENS = {gamma: metrics.tokens_along(OVERLAPS, gamma) for gamma in range(1, 5)}


@pytest.mark.parametrize("short", [False, True])
def test_which_loops_race(pair, monkeypatch, short):
    """The best length in a loop of its own and the policy's, with α along the outputs; where time
    is short both in the timed loop, whose passes hold for all lengths."""
    table = Costs(0.05, [1.1] * 5, token=1.0)
    monkeypatch.setattr(fitting, "costs_of", lambda *_, **__: table)
    ways = decided(pair, short=short)
    static, policy = ways.ways(TOKENS, OVERLAPS)
    assert (static.gamma, static.policy, policy.policy) == (3, "", "lookahead")
    assert static.predicted == pytest.approx(TOKENS[3] / static.steps[3])
    assert policy.predicted == policy.promised(OVERLAPS) > static.predicted
    assert float(policy.settings["costs"].alpha) == 0.5
    if short:
        (timed,) = ways.loops
        kinds = [type(one.method.policy) for one in (static, policy)]
        assert kinds == [Always, Always] == [type(timed.policy), Always]
        lengths = [int(one.method.policy.length) for one in (static, policy)]
        assert lengths == [3, -1]
    else:
        assert isinstance(static.method.policy, Constant)
        assert isinstance(policy.method.policy, Lookahead)
        assert (static.method.gamma_max, static.method.passes) == (3, ())


def test_a_policy_that_prefers_plain_decoding_does_not_race(pair, monkeypatch):
    monkeypatch.setattr(fitting, "costs_of", lambda *_, **__: Costs(9.0, [1.0] * 5, token=1.0))
    (static,) = decided(pair).ways(TOKENS, OVERLAPS)
    assert (static.gamma, static.policy) == (1, "")
    assert decided(pair, "goodput", tree="fixed(2, 1)").loops == []


def test_lengths_have_loops_of_their_own_on_an_accelerator(pair, monkeypatch):
    """Two are timed, as they will run; those between follow. A policy's loop says little of it."""
    timed = []

    def measure(watch, loops, texts, **_):
        timed.append({name: by.gamma_max for name, by in loops.items()})
        took = {1: 3.0, 4: 6.0}
        return {name: Costs(0.0, [took[by.gamma_max]] * (by.gamma_max + 1), token=1.0)
                for name, by in loops.items()}  # fmt: skip

    monkeypatch.setattr(costing, "measure", measure)
    table = Costs(0.1, [1.0] * 5, token=1.0)
    monkeypatch.setattr(fitting, "costs_of", lambda *_, **__: table)
    monkeypatch.setattr(devices, "is_accelerator", lambda _: True)
    static, _ = decided(pair).ways(TOKENS, OVERLAPS)
    assert timed == [{"γ=1": 1, "γ=4": 4}]
    assert static.steps == pytest.approx({1: 3.0, 2: 4.0, 3: 5.0, 4: 6.0})
