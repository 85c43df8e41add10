"""What rounds cost: fitted to calls of known lengths, or given."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from experiments import pricing
from experiments.pricing import Timings
from pairs import TEXTS
from specjax import decoding, speculative, timing
from specjax.policies import constant
from specjax.sampling import sampling
from specjax.timing import Timed
from table_models import inputs_of, random_table


def close(values):
    return pytest.approx(values, rel=1e-5)


def test_unit_times():
    """Exact where the calls are sums; where they are not, errors count by a call's length."""
    works = [{"a": 1, "b": 2}, {"a": 1, "b": 5}, {"a": 1, "c": 1}]
    found = timing.unit_times(works, [3.0 + 2 * 0.5, 3.0 + 5 * 0.5, 3.0 + 7.0])
    assert found == close({"a": 3.0, "b": 0.5, "c": 7.0})
    # Of 1 second in one call and 300 in 100: Σ (x/t − 1)² is least at Σ (x/t)/Σ (x/t)².
    (found,) = timing.unit_times([{"a": 1}, {"a": 100}], [1.0, 300.0]).values()
    assert found == close((1 + 1 / 3) / (1 + 1 / 9))


def test_turns(pair):
    """Each method once for each text, and not always in the same order."""
    texts, law = decoding.tokenize(pair.target, TEXTS[:6]), sampling(0.0)
    methods = {
        "plain": decoding.build(pair.target, None, gamma=1, sampling=law),
        "spec": decoding.build(pair.target, pair.draft, gamma=2, sampling=law),
    }
    order = []
    found = timing.side_by_side(
        methods, pair.target, texts, max_new_tokens=8, key=jax.random.key(0), repeats=2,
        note=lambda state: order.append("spec" if state.drafter else "plain"),
    )  # fmt: skip
    turns = [tuple(order[at : at + 2]) for at in range(2, len(order), 2)]  # after the compilation
    assert len(turns) == 2 * 6
    assert set(turns) == {("plain", "spec"), ("spec", "plain")}
    plain, spec = found.values()
    assert [row.index for row in plain.rows] == list(range(6))
    assert timing.identical(plain, spec)
    assert spec.decode == pytest.approx([sum(batches) for batches in spec.batches])
    assert np.shape(spec.batches) == (2, 6)


def timed(calls):
    """What three repeats of (seconds, tokens, rounds, drafted) show, the last of them held up."""
    made = Timed()
    for pause in (0.0, 0.0, 100.0):
        made.start_repeat()
        for seconds, tokens, rounds, drafted in calls:
            row = SimpleNamespace(emitted=tokens, target_calls=rounds, drafted=drafted)
            made.add(seconds + pause, 0.0, [row], None)
    return made


def test_fit():
    """A token takes 2 s and a call 3; one with a draft 5, a round 4, 6 and 7 by drafted tokens, and
    8 in the loop of γ=2. One drafter is silent in half of its rounds."""
    found = pricing.fit(
        {
            pricing.PLAIN: timed([(3 + 10 * 2, 10, 10, 0), (3 + 30 * 2, 30, 30, 0)]),
            "always 0": timed([(5 + 10 * 4, 10, 10, 0)]),
            "always 1": timed([(5 + 4 * 6 + 4 * 4, 10, 8, 4), (5 + 12 * 6, 30, 12, 12)]),
            "always 2": timed([(5 + 5 * 7, 10, 5, 10)]),
            "γ=2": timed([(5 + 6 * 8, 10, 6, 12), (5 + 20 * 8, 30, 20, 40)]),
            "svip": timed([(1e6, 10, 6, 12)]),
        },
        {"γ=2": 2},
        c=0.25,
    )
    assert dataclasses.asdict(found) == {
        "c": 0.25,
        "static": {2: close(4.0)},
        "rounds": close([2.0, 3.0, 3.5]),
        "call": close(2.5),
        "plain_call": close(1.5),
    }
    assert Timings.of_row(found.as_row()) == found


def rounds(table, gamma_max=3):
    return close(np.asarray(table.rounds(gamma_max)).tolist())


def test_prices():
    """γ_max = 3. Of static loops those between the timed ones; a shorter draft spares its steps."""
    made = Timings(0.1, {1: 2.0, 3: 3.0}, rounds=[1.5, 1.8, 2.1, 2.5])
    assert rounds(made.prices()) == [1.5, 1.8, 2.1, 2.5]
    assert rounds(made.static_prices(1)) == [1.9, 2.0, 2.0, 2.0]
    assert rounds(made.static_prices(2)) == [2.3, 2.4, 2.5, 2.5]
    model = made.model(made.prices())
    assert (model.rounds, model.refused) == (close([1.5, 1.8, 2.1, 2.5]), 0.1)
    noisy = Timings(0.5, {1: 1.0}, rounds=[1.0, 0.4])
    assert rounds(noisy.prices(), 1) == [1.0, 0.501]


@pytest.mark.parametrize(
    ("said", "widths", "policies"),
    [
        ("none", [], [1.8, 1.9, 2.0, 2.1]),
        ("all", [1, 2, 3], [1.2, 1.5, 1.8, 2.1]),
        ("2", [2], [1.4, 1.5, 2.0, 2.1]),
    ],
)
def test_given(said, widths, policies):
    """γc + v + overhead; a policy pays for the smallest pass that holds its draft."""
    assert pricing.widths_of(said.split(","), 3) == widths
    made = pricing.given(0.1, [1.0, 1.2, 1.4, 1.6], 0.2, widths)
    assert rounds(made.prices()) == policies
    assert [made.static[gamma] for gamma in (1, 2, 3)] == close([1.5, 1.8, 2.1])
    with pytest.raises(ValueError, match="--widths=1,x"):
        pricing.widths_of(["1", "x"], 3)


def test_always():
    """Each loop drafts its length, as far as the budget goes, and all are one compiled program."""
    tables = (random_table(seed, dtype=jnp.float32) for seed in (1, 2))
    method = dataclasses.replace(test_loops.method_of(*tables, policy=constant(3)), widths=(1,))
    loops = pricing.always(method)
    assert list(loops) == ["always 0", "always 1", "always 2", "always 3"][: method.gamma_max + 1]
    before = speculative.decode._cache_size()
    for n, loop in enumerate(loops.values()):
        state = test_loops.run(loop, inputs_of([[1, 0]]), 30)
        calls, drafted = int(state.stats.target_calls[0]), int(state.stats.drafted[0])
        assert n * (calls - n) <= drafted <= n * calls
    assert speculative.decode._cache_size() == before + 1
