"""The Gumbel rule: its chance of acceptance, what a policy sees of it, and a trained pair."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints, loop, speculative
from specjax import sampling as smp
from specjax.drafters.base import ModelDrafter
from specjax.policies import Policy, constant
from specjax.pytrees import pytree
from specjax.rules import Gumbel, Token, coupled_overlap, overlap
from specjax.sampling import Sampling
from table_models import MarkovModel, inputs_of

P = np.float32([0.35, 0.25, 0.15, 0.10, 0.07, 0.04, 0.02, 0.02])
Q = np.float32([0.20, 0.20, 0.20, 0.15, 0.10, 0.08, 0.05, 0.02])
FAMILY = pathlib.Path(__file__).parents[2] / "families" / "parse"


def log(probs):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probs, dtype=np.float32))


def random_distributions(rows: int, vocab_size: int):
    """Pairs of distributions in float64, with zeros in both and the same zeros now and then."""
    rng = np.random.default_rng(0)
    p, q = rng.exponential(size=(2, rows, vocab_size)) ** 3
    for distribution in (p, q):
        distribution[rng.random(distribution.shape) < 0.3] = 0
        distribution[:, 0] += 0.01
    return (distribution / distribution.sum(axis=-1, keepdims=True) for distribution in (p, q))


def chance_by_hand(p, q) -> float:
    """Σₓ 1/Σ_y max(p(y)/p(x), q(y)/q(x)), as it is written."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both)


def test_acceptance():
    """300 random pairs of 7 tokens: the formula, or up to 1/32 of it less; between its bounds; 1
    for equal distributions; 0 for distributions that share no token.
    """
    p, q = random_distributions(300, 7)
    found = np.asarray(Gumbel().acceptance(log(p), log(q)))
    expected = np.array(
        [chance_by_hand(*distributions) for distributions in zip(p, q, strict=True)]
    )
    assert np.all(found <= expected + 1e-5)
    assert np.all(found >= expected * (1 - 1 / 32))
    beta = np.asarray(overlap(log(p), log(q)))
    assert np.all(found <= beta + 1e-5)
    assert np.all(found >= beta / (2 - beta) - 1e-5)
    np.testing.assert_allclose(coupled_overlap(log(p), log(p)), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(coupled_overlap(log(np.eye(8)[0]), log(np.eye(8)[1])), 0.0)


def test_the_noise_agrees_as_often_as_acceptance_says():
    """n = 100,000 positions of one row: P and Q draw the same token, within 4 deviations."""
    count = 100_000
    keys = jnp.repeat(smp.row_keys(jax.random.key(0), jnp.int32([0]), jnp.int32([0])), count)
    position = jnp.arange(count, dtype=jnp.int32)

    @jax.jit
    def drawn(distribution):
        one_hot = Gumbel().given_noise(jnp.tile(distribution[None, :], (count, 1)), keys, position)
        return jnp.argmax(one_hot, axis=1), jnp.sum(jnp.exp(one_hot), axis=1)

    (target, mass), (draft, _) = drawn(log(P)), drawn(log(Q))
    np.testing.assert_array_equal(mass, 1.0)
    chance = float(coupled_overlap(log(P), log(Q)))
    assert abs(np.mean(target == draft) - chance) < 4 * np.sqrt(chance * (1 - chance) / count)


@pytree
class Witness(Policy):
    """Keeps the last distribution that it was shown, and the chances of acceptance."""

    def init(self, keys, gamma_max):
        return jnp.zeros((keys.shape[0], len(P))), jnp.zeros((keys.shape[0], gamma_max))

    def begin(self, state, live, gamma_max):
        return state, jnp.full((state[0].shape[0],), 2, jnp.int32)

    def keep_drafting(self, state, seen):
        return (jnp.exp(seen.draft_logprobs), state[1]), seen.drafting

    def update(self, state, round_):
        return state[0], round_.overlap


def markov_method(rule, policy) -> speculative.Speculative:
    """P and Q after any token."""
    target, draft = (
        MarkovModel(jnp.tile(log(distribution)[None, :], (8, 1))) for distribution in (P, Q)
    )
    never = jnp.int32([-1])
    drafter = ModelDrafter(draft)
    return speculative.Speculative(target, drafter, rule, policy, Sampling(), never, 2)


def started(method):
    keys = smp.row_keys(jax.random.key(0), jnp.int32([0, 1]), jnp.int32([0, 0]))
    budget = jnp.int32([9, 9])
    return loop.start(method, inputs_of([[0], [1]]), keys, budget, buffer_len=16)


@pytest.mark.sweep
def test_a_policy_sees_the_distributions_before_the_noise():
    """The draft's distribution and the chance of acceptance are those of P and Q; only the next
    token is certain.
    """
    method = markov_method(Gumbel(), Witness())
    state, round_ = jax.jit(speculative.step)(method, *started(method))
    shown, chances = state.policy
    np.testing.assert_allclose(shown, np.tile(Q, (2, 1)), rtol=1e-5)
    np.testing.assert_allclose(chances, coupled_overlap(log(P), log(Q)), rtol=1e-5)
    np.testing.assert_allclose(np.exp(round_.drafts.logprobs[0, 1]), Q, rtol=1e-5)
    np.testing.assert_array_equal(np.sort(round_.next_probs, axis=1)[:, -2:], [[0, 1]] * 2)


@pytree
class Sorting(Gumbel):
    """Its acceptance is easily found in a program."""

    def acceptance(self, target_logprobs, draft_logprobs):
        return jnp.sort(target_logprobs + draft_logprobs)[..., 0]


@pytest.mark.sweep
@pytest.mark.parametrize(("policy", "sorts"), [(constant(2), False), (Witness(), True)])
def test_acceptance_costs_nothing_where_no_policy_reads_it(policy, sorts):
    """It is in the compiled loop only for a policy that learns from it."""
    method = markov_method(Sorting(), policy)
    text = loop.decode.lower(method, *started(method)).compile().as_text()
    assert (" sort(" in text) == sorts


def test_greedy_has_no_noise():
    assert Gumbel().under(Sampling(0.0)) == Token()
    assert Gumbel().under(Sampling(0.5)) == Gumbel()


# A trained pair, in float32.

STATEMENTS = [
    "return self.line",
    "x = y + 1",
    "raise ValueError(name)",
    "for name in names: print(name)",
    "import os, sys",
    "assert value, 'none'",
]
BUDGET = 48


@pytest.fixture(scope="module")
def family():
    return [
        checkpoints.load(str(FAMILY / name), dtype=jnp.float32) for name in ("target", "draft-tiny")
    ]
