"""Kangaroo's adapter: what it starts as, whose arrays it holds, that it is read back, and that
training moves it alone. tests/core/test_parts.py enumerates it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax
from experiments.train.kangaroo import KangarooTrainer
from experiments.train.steps import teacher_forced
from experiments.train.train_drafter import known_tokens, params_of, with_params
from specjax.drafters import attached
from specjax.drafters.kangaroo import Kangaroo, kangaroo
from test_exits import logits_of, pointers
from test_training_exits import BATCH
from tiny_models import random_model

FAMILIES = ("t5", "gpt2", "llama")


def moved(adapter):
    """Another adapter."""
    return jax.tree.map(lambda x: x + jnp.linspace(0.0, 0.1, x.size).reshape(x.shape), adapter)


@pytest.mark.parametrize("family", [*FAMILIES, "umt5"])
def test_it_starts_as_an_exit_and_is_read_back(family, tmp_path):
    target = random_model(family, 40)
    drafter = kangaroo(target, 1)
    start = logits_of(specjax.early_exit(target, 2).model)
    np.testing.assert_array_equal(logits_of(drafter.model), start)
    new = pointers(jax.tree.leaves(drafter)) - pointers(jax.tree.leaves(target.model))
    assert new == pointers(jax.tree.leaves(drafter.adapter))
    other = dataclasses.replace(drafter, adapter=moved(drafter.adapter))
    expected = logits_of(other.model)
    assert np.abs(expected - start).max() > 0.01
    attached.save(tmp_path, other, target, dtype=np.float32)
    again = attached.load(tmp_path, target)
    np.testing.assert_array_equal(logits_of(again.model), expected)
    # As stored they do not depend on the platform's layout.
    elsewhere = random_model(family, 40, platform="gpu")
    there = Kangaroo.from_tensors(other.settings(), other.tensors(), elsewhere)
    np.testing.assert_allclose(logits_of(there.model), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_another_target_is_refused(tmp_path):
    """By name, from its directory and from memory; and if a tensor does not fit."""
    target, other = (random_model("gpt2", 12, seed=seed) for seed in (0, 3))
    drafter = kangaroo(target, 1)
    attached.save(tmp_path, drafter, target)
    words = "belongs to the target .* and 'gpt2' has other weights"
    with pytest.raises(ValueError, match=f"The drafter .*{tmp_path.name} {words}"):
        attached.load(tmp_path, other)
    with pytest.raises(ValueError, match=f"The drafter Kangaroo {words}"):
        specjax.generate(other, drafter, [[3, 1]])
    tensors = drafter.tensors()
    tensors["layer.attention.qkv.weight"] = np.zeros((24, 9), np.float32)
    words = r"layer\.attention\.qkv\.weight has shape \(24, 9\), and gpt2 asks for \(24, 8\)"
    with pytest.raises(ValueError, match=words):
        Kangaroo.from_tensors(drafter.settings(), tensors, random_model("gpt2", 12))
    with pytest.raises(ValueError, match=r"layers=3 .* \[1, 2\]"):
        kangaroo(random_model("gpt2", 12), 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_of_what_is_drafted(family):
    """Before training it drafts as an exit of one layer more: forward KL to that, and α, over the
    real tokens."""
    target = random_model(family, 12)
    models = target.model, specjax.early_exit(target, 2).model
    p, q = (
        np.asarray(jax.nn.softmax(teacher_forced(model.graphdef, model.params, BATCH)))
        for model in models
    )
    real = np.array([True, True, True, False] + 4 * [True])
    drafter = kangaroo(target, 1)
    trainer = KangarooTrainer(layers=1)
    found = jax.jit(lambda d: trainer.loss(d, known_tokens(d, BATCH), None))(drafter)
    assert int(found.positions) == real.sum()
    np.testing.assert_allclose(found.total, (p * np.log(p / q)).sum(-1)[real].sum(), rtol=1e-4)
    alpha = np.minimum(p, q).sum(-1)[real].mean()
    np.testing.assert_allclose(found.seen["alpha_1"], alpha, rtol=1e-4)


def test_training_moves_the_adapter_alone(standard_promotion):
    """40 steps on one batch bring the draft's distributions close to the target's."""
    begun = kangaroo(random_model("gpt2", 12), 1)
    trainer, by = KangarooTrainer(layers=1), optax.adam(3e-2)
    params = params_of(begun)
    assert pointers(params) == pointers(jax.tree.leaves(begun.adapter))

    @jax.jit
    def step(params, state):
        def mean(params):
            drafter = with_params(begun, params)
            found = trainer.loss(drafter, known_tokens(drafter, BATCH), None)
            return found.total / found.positions, found.seen["alpha_1"]

        (value, alpha), gradient = jax.value_and_grad(mean, has_aux=True)(params)
        updates, state = by.update(gradient, state)
        return optax.apply_updates(params, updates), state, (value, alpha)

    state, seen = by.init(params), []
    for _ in range(40):
        params, state, found = step(params, state)
        seen.append([float(x) for x in found])
    (first, alpha), (last, later) = seen[0], seen[-1]
    assert last < 0.3 * first
    assert later > alpha + 0.1
