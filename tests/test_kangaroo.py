"""Kangaroo's adapter: what it starts as, whose arrays it holds, that it is read back, and that
training moves it alone. tests/test_exits.py enumerates it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax
from specjax.drafters import attached
from specjax.drafters.kangaroo import Kangaroo, adapted, kangaroo
from specjax.training.kangaroo import loss
from test_exits import logits_of, pointers
from test_training_exits import BATCH
from tiny_models import random_model

FAMILIES = ("t5", "gpt2", "llama")


def moved(adapter):
    """Another adapter."""
    return jax.tree.map(lambda x: x + jnp.linspace(0.0, 0.1, x.size).reshape(x.shape), adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_an_exit_and_is_read_back(family, tmp_path):
    target = random_model(family, 40)
    drafter = kangaroo(target, 1)
    start = logits_of(specjax.early_exit(target, 2).model)
    np.testing.assert_array_equal(logits_of(drafter.model), start)
    new = pointers(jax.tree.leaves(drafter)) - pointers(jax.tree.leaves(target.model))
    assert new == pointers(jax.tree.leaves(drafter.adapter))
    other = Kangaroo(adapted(target.model, 1, moved(drafter.adapter)), 1)
    expected = logits_of(other.model)
    assert np.abs(expected - start).max() > 0.01
    attached.save(tmp_path, other, target, dtype=np.float32)
    again = attached.load(tmp_path, target)
    np.testing.assert_array_equal(logits_of(again.model), expected)
    # As stored they do not depend on the platform's layout.
    elsewhere = random_model(family, 40, platform="gpu")
    there = Kangaroo.from_tensors(other.settings(), other.tensors(), elsewhere)
    np.testing.assert_allclose(logits_of(there.model), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_another_target_is_refused():
    drafter = kangaroo(random_model("gpt2", 12), 1)
    tensors = drafter.tensors()
    tensors["layer.attention.qkv.weight"] = np.zeros((24, 9), np.float32)
    words = r"layer\.attention\.qkv\.weight has shape \(24, 9\), and gpt2 asks for \(24, 8\)"
    with pytest.raises(ValueError, match=words):
        Kangaroo.from_tensors(drafter.settings(), tensors, random_model("gpt2", 12))
    with pytest.raises(ValueError, match=r"layers=3 .* \[1, 2\]"):
        kangaroo(random_model("gpt2", 12), 3)


def forward_kl(target_logprobs, draft_logprobs, tokens):
    return (jnp.exp(target_logprobs) * (target_logprobs - draft_logprobs)).sum(-1)


def test_training_moves_the_adapter_alone(standard_promotion):
    """40 steps on one batch bring the draft's distributions close to the target's."""
    target = random_model("gpt2", 12)
    of_adapter = functools.partial(
        loss, target=target.model, layers=1, batch=BATCH, divergence=forward_kl
    )
    by = optax.adam(3e-2)

    @jax.jit
    def step(adapter, state):
        value, gradient = jax.value_and_grad(lambda a: of_adapter(a)[0] / of_adapter(a)[1])(adapter)
        updates, state = by.update(gradient, state)
        return optax.apply_updates(adapter, updates), state, value

    adapter = kangaroo(target, 1).adapter
    state, values = by.init(adapter), []
    for _ in range(40):
        adapter, state, value = step(adapter, state)
        values.append(float(value))
    assert values[-1] < 0.3 * values[0]
