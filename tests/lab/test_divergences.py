"""Divergences: closed forms, gradients, and distributions with zeros, apart and equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from experiments.train import divergences

V = 5
TOKENS = jnp.array([1, 4, 0], jnp.int32)


def rows(*probs):
    """Log-probabilities, in float32."""
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.array(probs)), jnp.float32)


P = rows([0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.0, 0.5, 0.0, 0.5], [1, 0, 0, 0, 0])
Q = rows([0.3, 0.2, 0.1, 0.2, 0.2], [0.2, 0.2, 0.2, 0.2, 0.2], [0.25, 0.75, 0, 0, 0])


def expected(name, p, q, tokens):
    """The formulas in float64, for rows without divisions by 0."""
    p, q = np.exp(np.asarray(p, np.float64)), np.exp(np.asarray(q, np.float64))

    def kl(a, b):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(a > 0, a * np.log(a / b), 0.0).sum(-1)

    beta = np.minimum(p, q).sum(-1)
    weight = np.exp(-3 * beta)
    match name:
        case "forward_kl":
            return kl(p, q)
        case "reverse_kl":
            return kl(q, p)
        case "jsd":
            return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
        case "tv":
            return 1 - beta
        case "neg_log_beta":
            return -np.log(beta)
        case "kl_tv":
            return weight * kl(p, q) + (1 - weight) * (1 - beta)
        case "kl_ce":
            return kl(p, q) - 0.1 * np.log(q[np.arange(len(q)), tokens])


@pytest.mark.parametrize("name", divergences.NAMES)
def test_values(name):
    # Reverse KL needs p > 0 where q is.
    p, q = (Q[:2], P[:2]) if name == "reverse_kl" else (P, Q)
    tokens = TOKENS[: len(p)]
    found = divergences.parse(name)(p, q, tokens)
    assert found.shape == (len(p),)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(name, p, q, tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", divergences.NAMES)
def test_equal_distributions(name):
    """Nothing is left to learn, but for the tokens of kl_ce."""
    logits = jax.random.normal(jax.random.key(0), (3, V)) * 3
    divergence = divergences.parse("kl_ce(weight=0)" if name == "kl_ce" else name)

    def of(logits):
        return divergence(target, jax.nn.log_softmax(logits), TOKENS).sum()

    target = jax.nn.log_softmax(logits)
    value, gradient = jax.value_and_grad(of)(logits)
    assert value == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize("name", divergences.NAMES)
def test_gradients_against_differences(name):
    """By the logits, in float64; λ is held where it is."""
    with jax.enable_x64():
        p, logits = jax.random.normal(jax.random.key(1), (2, 3, V), jnp.float64) * 2
        p = jax.nn.log_softmax(p)
        divergence = divergences.parse(name)
        if name == "kl_tv":
            q = jax.nn.log_softmax(logits)
            share = jnp.exp(-3 * jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(-1))
            kl, tv = (divergences.parse(part) for part in ("forward_kl", "tv"))

            def held(p, q, tokens):
                return share * kl(p, q, tokens) + (1 - share) * tv(p, q, tokens)

            ours, theirs = (
                jax.grad(lambda x, f=f: f(p, jax.nn.log_softmax(x), TOKENS).sum())(logits)
                for f in (divergence, held)
            )
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
            divergence = held
        check_grads(
            lambda x: divergence(p, jax.nn.log_softmax(x), TOKENS), (logits,), 1, ["rev"],
            atol=1e-6, rtol=1e-6,
        )  # fmt: skip


HARD = {
    "disjoint": (rows([0.5, 0.5, 0, 0, 0]), rows([0, 0, 0.2, 0.4, 0.4])),
    "target one-hot": (rows([0, 1, 0, 0, 0]), rows([0.2] * 5)),
    "draft one-hot": (rows([0.2] * 5), rows([0, 1, 0, 0, 0])),
    "both one-hot, apart": (rows([1, 0, 0, 0, 0]), rows([0, 1, 0, 0, 0])),
    "both one-hot, equal": (rows([1, 0, 0, 0, 0]), rows([1, 0, 0, 0, 0])),
    "next to nothing": (rows([0.5, 0.5, 0, 0, 0]), jnp.array([[-300.0, -400.0, 0, -90, -1e4]])),
}


@pytest.mark.parametrize("name", divergences.NAMES)
def test_hard_distributions(name):
    """Finite values and gradients; logits of −inf are a head's that has not all ids."""
    p, logits = (jnp.concatenate(parts) for parts in zip(*HARD.values(), strict=True))
    tokens = jnp.ones(len(HARD), jnp.int32)

    def of(logits):
        found = divergences.parse(name)(p, jax.nn.log_softmax(logits), tokens)
        return found.sum(), found

    gradient, values = jax.grad(of, has_aux=True)(logits)
    assert np.isfinite(values).all()
    assert (np.asarray(values) > -1e-6).all()
    assert np.isfinite(gradient).all()
    if name != "kl_ce":
        assert values[list(HARD).index("both one-hot, equal")] == pytest.approx(0, abs=1e-6)
    # The draft is to raise what the target has. What weighs by q says nothing there.
    raised = np.asarray(gradient)[list(HARD).index("next to nothing"), :2].min() < -0.1
    assert raised == (name in ("forward_kl", "neg_log_beta", "kl_tv", "kl_ce"))


def test_an_id_that_the_draft_has_not_moves_the_others_as_if_it_were_not_there():
    """A head over fewer ids learns from KL what it would learn among its own ids."""
    p, logits = P[:1], jnp.array([[0.3, -0.2, 0.1, -jnp.inf, 0.5]])
    own = jnp.array([0, 1, 2, 4])

    def kl(p, x):
        return divergences.parse("forward_kl")(p, jax.nn.log_softmax(x), TOKENS[:1])[0]

    whole = jax.grad(kl, argnums=1)(p, logits)[0, own]
    part = jax.grad(kl, argnums=1)(p[:, own], logits[:, own])[0]
    np.testing.assert_allclose(whole, part, atol=1e-6)


def test_no_gradient_reaches_the_target():
    for name in divergences.NAMES:
        gradient = jax.grad(lambda p, name=name: divergences.parse(name)(p, Q, TOKENS).sum())(P)
        np.testing.assert_array_equal(gradient, 0.0)


def test_names():
    assert divergences.parse("kl_tv(rate=1.5)") == divergences.KLTV(1.5)
    zero = divergences.parse("kl_tv(rate=0)")(P[:2], Q[:2], TOKENS[:2])
    kl = divergences.parse("forward_kl")(P[:2], Q[:2], TOKENS[:2])
    np.testing.assert_allclose(zero, kl, rtol=1e-6)
    with pytest.raises(ValueError, match=r"no divergence 'kl': it is one of forward_kl, reverse"):
        divergences.parse("kl")
    with pytest.raises(ValueError, match=r"Divergence 'tv'.*rate"):
        divergences.parse("tv(rate=1)")
    for text in ("kl_tv(rate=-1)", "kl_ce(weight=-1)", "kl_ce(weight='x')"):
        with pytest.raises(ValueError, match=r"(rate|weight)=.*must be a number"):
            divergences.parse(text)
