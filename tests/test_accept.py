"""The acceptance rule against examples done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as smp
from specjax import speculative
from specjax.accept import TokenRule, at_position, at_tokens, overlap, residual
from specjax.draft import fed_after

P = np.float32([0.35, 0.25, 0.15, 0.10, 0.07, 0.04, 0.02, 0.02])
Q = np.float32([0.20, 0.20, 0.20, 0.15, 0.10, 0.08, 0.05, 0.02])


def log(probs):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probs, dtype=np.float32))


def laws(gamma: int):
    """P at γ+1 positions and Q at γ, for one row."""
    return log(np.tile(P, (1, gamma + 1, 1))), log(np.tile(Q, (1, gamma, 1)))


def random_laws(rows: int, gamma: int, vocab_size: int):
    """Pairs of laws with zeros, and drafts that their laws allow."""
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


def test_residual():
    """p − q is positive at tokens 0 (.15) and 1 (.05)."""
    found = residual(jnp.asarray(P)[None], jnp.asarray(Q)[None])
    np.testing.assert_allclose(found[0], [0.75, 0.25, 0, 0, 0, 0, 0, 0], atol=1e-6)


def test_residual_of_equal_laws_is_the_law():
    """Nothing is left of p − p, nor of p − q where q is above it by a rounding throughout."""
    p = jnp.asarray(P)[None]
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.nextafter(p, jnp.float32(1))), p)


def test_residual_of_almost_equal_laws_is_a_law():
    """What is left may be one rounding: it sums to 1 all the same."""
    p = jnp.asarray(P)[None]
    q = p.at[0, 2].set(jnp.nextafter(p[0, 2], jnp.float32(0)))
    np.testing.assert_array_equal(residual(p, q)[0], np.eye(8)[2])
    tiny = jnp.float32([[1.0, 1e-37]])
    np.testing.assert_allclose(residual(tiny, jnp.float32([[1.0, 0.0]]))[0], [0, 1])


def test_survival():
    """Tokens 0, 2, 3, 7 have p/q = 1.75, .75, ⅔, 1."""
    drafts = jnp.int32([[0, 2, 3, 7]])
    survival = TokenRule().survival(*laws(4), drafts, jnp.int32([4]))
    np.testing.assert_allclose(survival[0], [1, 0.75, 0.5, 0.5], rtol=1e-5)


def test_survival_ends_with_the_draft():
    """Entries past the end are arbitrary, and none of them survives."""
    target, draft = laws(3)
    draft = draft.at[:, 1:].set(jnp.nan)
    survival = TokenRule().survival(target, draft, jnp.int32([[2, 0, 0]]), jnp.int32([1]))
    np.testing.assert_allclose(survival[0], [0.75, 0, 0], rtol=1e-5)
    nothing = TokenRule().survival(target, draft, jnp.int32([[2, 0, 0]]), jnp.int32([0]))
    np.testing.assert_array_equal(nothing[0], [0, 0, 0])


def test_survival_never_increases():
    """1,000 random rows with γ = 5 and zeros in p: non-increasing, within [0, 1]."""
    target, draft, drafts = random_laws(1000, 5, 6)
    length = jnp.asarray(np.arange(1000, dtype=np.int32) % 6)
    survival = np.asarray(TokenRule().survival(target, draft, drafts, length))
    assert np.all(np.diff(survival, axis=1) <= 0)
    assert np.all((survival >= 0) & (survival <= 1))
    impossible = np.isneginf(at_tokens(target[:, :5], drafts))
    assert np.all(survival[impossible] == 0)


@pytest.mark.parametrize(("accepted", "draft_len"), [(0, 2), (1, 2), (2, 2), (0, 0), (1, 1)])
def test_next_law(accepted, draft_len):
    """The residual where a token was rejected, the target's own law after the whole draft."""
    target, draft = laws(2)
    drafts = jnp.int32([[2, 3]])
    found = TokenRule().next_probs(
        target, draft, drafts, jnp.int32([draft_len]), jnp.int32([accepted])
    )
    rejected = accepted < draft_len
    expected = [0.75, 0.25, 0, 0, 0, 0, 0, 0] if rejected else P
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_next_law_is_of_its_own_position():
    """Every entry of both models' laws differs: the right one is taken."""
    target, draft, drafts = random_laws(200, 3, 6)
    accepted = jnp.asarray(np.arange(200, dtype=np.int32) % 4)
    length = jnp.full((200,), 3, jnp.int32)
    found = TokenRule().next_probs(target, draft, drafts, length, accepted)
    for row in range(200):
        p = np.exp(np.float64(target[row, accepted[row]]))
        if accepted[row] < 3:
            p = np.maximum(p - np.exp(np.float64(draft[row, accepted[row]])), 0)
        np.testing.assert_allclose(found[row], p / p.sum(), atol=1e-5)


def test_one_position_gives_the_targets_law():
    """q(y) min(1, p/q) + P(rejected) · residual(y) = p(y), for P and Q, within 1e-6."""
    kept = Q * np.minimum(1, P / Q)
    left = np.asarray(residual(jnp.asarray(P)[None], jnp.asarray(Q)[None]))[0]
    np.testing.assert_allclose(kept + (1 - kept.sum()) * left, P, atol=1e-6)


@pytest.mark.parametrize("point", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_uniform(point, monkeypatch):
    """u = 0 accepts nothing that is impossible; u → 1 accepts whatever is certain."""
    monkeypatch.setattr(smp, "uniform", lambda keys, dtype: jnp.full(keys.shape, point, dtype))
    survival = jnp.float32([[0, 0], [1, 0], [1, 1]])

    class NoState:
        keys, rounds = jax.random.split(jax.random.key(0), 3), jnp.zeros((3,), jnp.int32)

    np.testing.assert_array_equal(speculative.Dice().accepted(NoState, survival), [0, 1, 2])


def test_fed_after():
    """Of 3 drafts the last is never fed: 4 known tokens and 0, 2, 3 accepted; and of 1 or none."""
    accepted, drafted = jnp.int32([0, 2, 3, 1, 0]), jnp.int32([3, 3, 3, 1, 0])
    found = fed_after(jnp.full((5,), 4, jnp.int32), accepted, drafted)
    np.testing.assert_array_equal(found, [4, 6, 6, 4, 4])


def test_selectors():
    """at_tokens and at_position pick row by row."""
    laws = jnp.arange(12, dtype=jnp.float32).reshape(2, 2, 3)
    np.testing.assert_array_equal(at_tokens(laws, jnp.int32([[0, 2], [1, 0]])), [[0, 5], [7, 9]])
    np.testing.assert_array_equal(at_position(laws, jnp.int32([1, 0])), [[3, 4, 5], [6, 7, 8]])
