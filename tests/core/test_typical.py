"""Typical acceptance: the set of tokens that it keeps, and the distribution that comes of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import sequence_distribution, total_variation
from specjax.rules import Token, Typical, surviving
from specjax.sampling import Sampling
from table_models import inputs_of, random_table
from test_lenience import (
    BUDGET,
    EOS,
    PROMPT,
    SAMPLINGS,
    Distributions,
    P,
    Q,
    enumerated,
    log,
    predicted,
)

NUMBERS = [(0.09, 0.3), (0.3, 0.9), (1.0, 1.0)]  # ε and δ; the last keeps the least


def kept(target_probs, epsilon, delta) -> np.ndarray:
    """1 where p > min(ε, δ·exp(−H)) and for the likeliest; by a loop over tokens."""
    entropy = -sum(p * np.log(p) for p in target_probs if p > 0)
    threshold = min(epsilon, delta * np.exp(-entropy))
    best = max(target_probs)
    return np.array([float(p > threshold or p == best) for p in target_probs])


def within(target_probs, epsilon, delta) -> np.ndarray:
    inside = target_probs * kept(target_probs, epsilon, delta)
    return inside / inside.sum()


def typical_distribution(target_probs, draft_probs, epsilon, delta):
    """(accepted, replaced), as the rule's docstring has it."""
    accepted = draft_probs * kept(target_probs, epsilon, delta)
    return accepted, (1 - accepted.sum()) * within(target_probs, epsilon, delta)


@pytest.mark.sweep
@pytest.mark.parametrize("distribution", ["plain", "top-k"])
def test_enumerated_distribution_is_the_predicted_one(distribution):
    """All outputs of up to 5 tokens, γ = 2: TV < 1e-12; and far from the target's distribution."""
    with jax.enable_x64(True):
        chosen = Sampling(**SAMPLINGS[distribution])
        target, draft = random_table(1), random_table(2)
        distributions, inputs = Distributions(target, draft, chosen), inputs_of([list(PROMPT)])
        exact = sequence_distribution(target, inputs, chosen, {EOS}, BUDGET)
        for pair in NUMBERS:
            rule = Typical(*pair)
            epsilon, delta = float(rule.epsilon), float(rule.delta)
            found = enumerated(target, draft, chosen, rule)
            position = partial(typical_distribution, epsilon=epsilon, delta=delta)
            after = partial(within, epsilon=epsilon, delta=delta)
            assert total_variation(found, predicted(distributions, position, after)) < 1e-12
            assert total_variation(found, exact) > 0.05


@pytest.mark.parametrize(
    ("numbers", "count"),
    # exp(−H) of P is .176, and δ·exp(−H) .053 and .158; P = .35 .25 .15 .10 .07 .04 .02 .02
    [((0.09, 0.3), 5), ((0.3, 0.9), 2), ((0.04, 0.3), 5), ((0.01, 0.3), 8), ((1.0, 1.0), 2)],
)
def test_one_position_by_hand(numbers, count):
    """The tokens that are kept, their share of the draft, and what replaces another."""
    rule = Typical(*numbers)
    drafts = jnp.asarray(np.arange(8, dtype=np.int32)[:, None])
    rows = (jnp.tile(log(P), (8, 2, 1)), jnp.tile(log(Q), (8, 1, 1)), drafts)
    length = jnp.ones((8,), jnp.int32)
    survival = surviving(rule.stop(*rows, length))[:, 0]
    np.testing.assert_array_equal(survival, np.arange(8) < count)
    np.testing.assert_allclose(rule.acceptance(log(P), log(Q)), Q[:count].sum(), rtol=1e-6)
    expected = np.where(np.arange(8) < count, P, 0) / P[:count].sum()
    for accepted in (0, 1):
        found = rule.next_probs(*rows, length, jnp.full((8,), accepted, jnp.int32))
        np.testing.assert_allclose(found, np.tile(expected, (8, 1)), rtol=1e-5)


def test_the_likeliest_token_is_always_kept():
    """1,000 random distributions and the uniform one, with δ = ε = 1: something is left of each."""
    probs = np.random.default_rng(0).dirichlet(np.full(50, 0.3), 1000)
    probs = np.concatenate([probs, np.full((1, 50), 1 / 50), np.eye(50)[:1]])
    rule = Typical(1.0, 1.0)
    rows = log(probs)[:, None], log(probs)[:, None][:, :0], jnp.zeros((1002, 0), jnp.int32)
    zeros = jnp.zeros((1002,), jnp.int32)
    found = np.asarray(rule.next_probs(*rows, zeros, zeros))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert np.all(found[np.arange(1002), probs.argmax(axis=1)] > 0)


def test_greedy_is_the_token_rule():
    """The argmax alone of a one-hot distribution is kept."""
    assert Typical().under(Sampling(0.0)) == Token()
    for token in range(3):
        kept_of = Typical().acceptance(log(np.eye(3)[[token] * 3]), log(np.eye(3)))
        np.testing.assert_array_equal(kept_of, np.eye(3)[token])


@pytest.mark.parametrize("numbers", [(0.0, 0.3), (0.09, 1.5), (0.09, float("nan"))])
def test_out_of_range(numbers):
    with pytest.raises(ValueError, match=r"(epsilon|delta)=.* must be a number in \(0, 1\]"):
        Typical(*numbers)
