"""Traces that are shipped: what is left out, joined, and told by kind of text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import by_loop
from experiments.replay.__main__ import join
from experiments.replay.evaluation import evaluate
from experiments.trace.pack import packed
from specjax.policies import constant
from specjax.policies.entropy import svip
from specjax.replay import replay, rollouts
from specjax.sampling import Sampling
from table_models import inputs_of
from test_replay import GAMMA_MAX, PROMPTS, greedy_trace, method_of, policy_of, recorded


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rollouts_to_be_shipped(temperature, tmp_path):
    """Without the target behind rejected tokens, packed, and of two files, rounds are the same. A
    belief whose last bits were lost moves a bar of `lookahead` by no more than a round in 50."""
    method, inputs = method_of(constant(1), Sampling(temperature)), inputs_of(PROMPTS)
    whole = recorded(method, inputs, hidden=False)
    short = packed(recorded(method, inputs, hidden=False, judged=False))
    rollouts.save(tmp_path / "a.npz", short)
    short = rollouts.load(tmp_path / "a.npz")
    assert short.entropy.dtype == jnp.float32
    twice = join([short, whole])
    assert twice.input_index.tolist() == list(range(12))
    assert twice.emitted.tolist() == 2 * whole.emitted.tolist()
    policies = [constant(1), constant(3), policy_of("heuristic"), svip(0.5), policy_of("lookahead")]
    first, then = (replay.replay(policies, x, jax.random.key(0), draws=8) for x in (whole, short))
    np.testing.assert_array_equal(first.drafted[:3], then.drafted[:3])
    np.testing.assert_array_equal(first.accepted[:3], then.accepted[:3])
    assert np.abs(first.drafted - then.drafted).sum() <= 0.02 * first.drafted.sum()


def test_speedups_by_kind():
    """Over plain decoding and over the length that is best on other outputs of the kind."""
    found, known = greedy_trace(), by_loop.by_formula(0.1, [1.0] * (GAMMA_MAX + 1), 0.0, ())
    kinds = ["code", "code", "code", "chat", "chat", "chat"]
    *still, oracle, same = evaluate(
        {"same": constant(2)}, found, known, jax.random.key(0), 1, kinds=kinds
    )
    assert same["by"] == still[1]["by"]
    emitted, rounds = np.asarray(found.emitted), [
        replay.replay([constant(2)], found, jax.random.key(0)).drafted[0, part].sum(0)
        for part in (slice(3), slice(3, 6))
    ]  # fmt: skip
    for kind, part, lengths in zip(("code", "chat"), (slice(3), slice(3, 6)), rounds, strict=True):
        took = lengths @ (0.1 * np.arange(GAMMA_MAX + 1) + 1)
        assert same["by"][kind]["speedup"] == pytest.approx(emitted[part].sum() / took)
        assert oracle["by"][kind]["speedup"] >= same["by"][kind]["speedup"]
    assert 0 < same["of_chosen"]["low"] <= same["of_chosen"]["value"] <= same["of_chosen"]["high"]
