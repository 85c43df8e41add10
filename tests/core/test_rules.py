"""The acceptance rules against examples done by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as smp
from specjax.dice import Dice
from specjax.pytrees import pytree
from specjax.rules import (
    Block,
    Gumbel,
    Lenient,
    Token,
    ends,
    exactness,
    overlap,
    own_acceptance,
    remark,
    residual,
    surviving,
)
from specjax.sampling import Sampling

P = np.float32([0.35, 0.25, 0.15, 0.10, 0.07, 0.04, 0.02, 0.02])
Q = np.float32([0.20, 0.20, 0.20, 0.15, 0.10, 0.08, 0.05, 0.02])


def log(probs):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probs, dtype=np.float32))


def distributions(gamma: int):
    """P at γ+1 positions and Q at γ, for one row."""
    return log(np.tile(P, (1, gamma + 1, 1))), log(np.tile(Q, (1, gamma, 1)))


def random_distributions(rows: int, gamma: int, vocab_size: int):
    """Pairs of distributions with zeros, and drafts that their distributions allow."""
    rng = np.random.default_rng(0)
    p = rng.exponential(size=(rows, gamma + 1, vocab_size)) ** 2
    q = rng.exponential(size=(rows, gamma, vocab_size)) ** 2
    p[rng.random(p.shape) < 0.2] = 1e-30
    p[rng.random(p.shape) < 0.2] = 0
    p[..., 0] += 0.01
    drafts = rng.integers(vocab_size, size=(rows, gamma)).astype(np.int32)
    p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
    return log(p), log(q), jnp.asarray(drafts)


def test_overlap():
    """Σ min(p, q) = .20 + .20 + .15 + .10 + .07 + .04 + .02 + .02."""
    np.testing.assert_allclose(overlap(log(P), log(Q)), 0.8, rtol=1e-6)
    np.testing.assert_allclose(overlap(log(P), log(P)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(overlap(log(np.eye(8)[0]), log(np.eye(8)[1])), 0.0)


def test_residual_of_equal_distributions_is_the_distribution():
    """Nothing is left of p − p, nor of p − q where q is above it by a rounding throughout."""
    p = jnp.asarray(P)[None]
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.nextafter(p, jnp.float32(1))), p)


def test_residual_of_almost_equal_distributions_is_a_distribution():
    """What is left may be one rounding: it sums to 1 all the same."""
    p = jnp.asarray(P)[None]
    q = p.at[0, 2].set(jnp.nextafter(p[0, 2], jnp.float32(0)))
    np.testing.assert_array_equal(residual(p, q)[0], np.eye(8)[2])
    tiny = jnp.float32([[1.0, 1e-37]])
    np.testing.assert_allclose(residual(tiny, jnp.float32([[1.0, 0.0]]))[0], [0, 1])


def test_survival():
    """Tokens 0, 2, 3, 7 have p/q = 1.75, .75, ⅔, 1."""
    drafts = jnp.int32([[0, 2, 3, 7]])
    survival = surviving(Token().stop(*distributions(4), drafts, jnp.int32([4])))
    np.testing.assert_allclose(survival[0], [1, 0.75, 0.5, 0.5], rtol=1e-5)


def test_survival_ends_with_the_draft():
    """Entries past the end are arbitrary, and none of them survives."""
    target, draft = distributions(3)
    draft = draft.at[:, 1:].set(jnp.nan)
    survival = surviving(Token().stop(target, draft, jnp.int32([[2, 0, 0]]), jnp.int32([1])))
    np.testing.assert_allclose(survival[0], [0.75, 0, 0], rtol=1e-5)
    nothing = surviving(Token().stop(target, draft, jnp.int32([[2, 0, 0]]), jnp.int32([0])))
    np.testing.assert_array_equal(nothing[0], [0, 0, 0])


@pytest.mark.parametrize(("accepted", "draft_len"), [(0, 2), (1, 2), (2, 2), (0, 0), (1, 1)])
def test_next_distribution(accepted, draft_len):
    """The residual where a token was rejected, the target's own distribution after the whole
    draft."""
    target, draft = distributions(2)
    drafts = jnp.int32([[2, 3]])
    found = Token().next_probs(target, draft, drafts, jnp.int32([draft_len]), jnp.int32([accepted]))
    rejected = accepted < draft_len
    expected = [0.75, 0.25, 0, 0, 0, 0, 0, 0] if rejected else P
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


@pytest.mark.parametrize("point", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_uniform(point, monkeypatch):
    """u = 0 accepts nothing that is impossible; u → 1 accepts whatever is certain."""
    monkeypatch.setattr(smp, "uniform", lambda keys, dtype: jnp.full(keys.shape, point, dtype))
    survival = jnp.float32([[0, 0], [1, 0], [1, 1]])

    class NoState:
        keys, rounds = jax.random.split(jax.random.key(0), 3), jnp.zeros((3,), jnp.int32)

    np.testing.assert_array_equal(Dice().accepted(NoState, ends(survival)), [0, 1, 2])


# What a rule says of itself.


@pytree
class Silent(Token):
    """Keeps everything, and says nothing of it."""

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        return ends(jnp.ones(drafts.shape))


@pytree
class Honest(Silent):
    """A rule like `Silent` that declares itself."""

    strength: float
    exact = False

    def acceptance(self, target_logprobs, draft_logprobs):
        return jnp.ones(target_logprobs.shape[:-1])


@pytree
class Renamed(Block):
    """Decides nothing by itself."""

    def acceptance(self, target_logprobs, draft_logprobs):
        return overlap(target_logprobs, draft_logprobs)


class Bare:
    """A rule without a base, with a function that decides."""

    stop = next_probs = target_distribution = Silent.stop

    def under(self, sampling):
        return self


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rule", "expected", "said"),
    [
        (Token(), True, ""),
        (Block(), True, ""),
        (Gumbel(), True, ""),
        (Renamed(), True, ""),
        (Lenient(1.0), True, ""),
        (Lenient(0.3), False, "Lenient(lenience=0.3) is not exact"),
        (Honest(2.0), False, "Honest(strength=2) is not exact"),
        (Silent(), None, "Silent() does not say whether it is exact: "),
        (Bare(), None, "Bare does not say"),
    ],
)
def test_exactness(rule, expected, said, temperature):
    """What a class declares does not pass to a subclass that decides in another way."""
    assert exactness(rule, Sampling(temperature)) is expected
    assert remark(rule, Sampling(temperature)).startswith(said)
    assert bool(said) == bool(remark(rule, Sampling(temperature)))


def test_own_acceptance():
    """Every rule of the library has its own; one that only changes `stop` has another's."""
    for rule in (Token(), Block(), Gumbel(), Lenient(0.3), Honest(1.0), Renamed()):
        assert own_acceptance(rule, Sampling(1.0))
        assert own_acceptance(rule, Sampling(0.0))
    assert not own_acceptance(Silent(), Sampling(1.0))
    assert not own_acceptance(Bare(), Sampling(1.0))


# Block verification.


def block_by_hand(p, q, drafts):
    """(P(a ≥ 1), …, P(a ≥ L)) and the distribution after each a, in slow numpy: Sun et al. 2024."""
    count, kept, chances, after = len(drafts), 1.0, [], []
    for i in range(count + 1):
        if i > 0:
            kept = min(1.0, kept * p[i - 1, drafts[i - 1]] / q[i - 1, drafts[i - 1]])
        left = np.maximum(kept * p[i] - (q[i] if i < count else 0), 0)
        after.append(left / left.sum() if left.sum() > 0 else None)
        mass = left.sum()
        if i == count:
            chances.append(kept)
        elif i > 0:
            chances.append(mass / (mass + 1 - kept) if mass + 1 - kept > 0 else 1.0)
    missed = 1 - np.array(chances)
    return 1 - np.cumprod(missed[::-1])[::-1], after


def test_block_by_hand():
    """300 random rows with drafts of 0 to 4 tokens, zeros in p: within 2e-5."""
    target, draft, drafts = random_distributions(300, 4, 6)
    p, q = (np.exp(np.asarray(x, np.float64)) for x in (target, draft))
    length = np.arange(300, dtype=np.int32) % 5
    distributions = target, draft, drafts, jnp.asarray(length)
    survival = np.asarray(surviving(Block().stop(*distributions)))
    nexts = [Block().next_probs(*distributions, jnp.full((300,), a, jnp.int32)) for a in range(5)]
    for row, count in enumerate(length):
        chosen = np.asarray(drafts)[row, :count]
        expected, after = block_by_hand(p[row], q[row], chosen)
        np.testing.assert_allclose(survival[row, :count], expected[:count], atol=2e-5)
        for accepted, distribution in enumerate(after):
            if distribution is not None and (accepted == 0 or survival[row, accepted - 1] > 1e-3):
                np.testing.assert_allclose(nexts[accepted][row], distribution, atol=2e-5)


def test_block_keeps_what_a_later_token_makes_good():
    """P and Q throughout: tokens 2 then 0 have ratios .75 and 1.75, so P = 1, .75, 1 and the whole
    draft is accepted, of which the token rule accepts .75; the other way round P = 1, 1, .75.
    """
    target, draft = distributions(2)
    for drafts, expected, token in (([2, 0], [1, 1], [0.75, 0.75]), ([0, 2], [1, 0.75], [1, 0.75])):
        args = target, draft, jnp.int32([drafts]), jnp.int32([2])
        np.testing.assert_allclose(surviving(Block().stop(*args))[0], expected, rtol=1e-5)
        np.testing.assert_allclose(surviving(Token().stop(*args))[0], token, rtol=1e-5)


def expected_accepted(rule, p, q) -> float:
    """E[a] over all drafts of γ = 3 tokens, for distributions (3, V, V) by position and token
    before."""
    gamma, width = q.shape[0], q.shape[1]
    drafts = np.array(list(itertools.product(range(width), repeat=gamma)), np.int32)
    before = np.pad(drafts, ((0, 0), (1, 0)))  # the first token follows token 0
    target = np.stack([p[i, before[:, i]] for i in range(gamma + 1)], axis=1)
    draft = np.stack([q[i, before[:, i]] for i in range(gamma)], axis=1)
    chance = np.take_along_axis(draft, drafts[:, :, None], axis=2).prod(axis=(1, 2))
    length = jnp.full((len(drafts),), gamma, jnp.int32)
    survival = surviving(rule.stop(log(target), log(draft), jnp.asarray(drafts), length))
    return float(chance @ np.asarray(survival, np.float64).sum(axis=1))


@pytest.mark.sweep
def test_block_accepts_more_than_token():
    """30 random pairs of V = 3, γ = 3, all drafts enumerated: E[a] never lower, and .05 higher in
    the mean.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(30):
        p, q = rng.exponential(size=(4, 3, 3)), rng.exponential(size=(3, 3, 3))
        p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
        found.append([expected_accepted(rule, p, q) for rule in (Token(), Block())])
    token, block = np.array(found).T
    print(f"E[a]: token {token.mean():.3f}, block {block.mean():.3f}")
    assert np.all(block >= token - 1e-5)
    assert block.mean() > token.mean() + 0.05
