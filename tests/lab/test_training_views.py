"""Training a view of its target: the loss is of what is drafted, and the adapter alone moves."""

import jax
import numpy as np
import optax
import pytest

import specjax
from experiments.train.steps import teacher_forced
from experiments.train.train_drafter import known_tokens, params_of, with_params
from experiments.train.views import KangarooTrainer
from specjax.drafters.views import kangaroo
from test_exits import pointers
from test_training_exits import BATCH
from tiny_models import random_model

FAMILIES = ("t5", "gpt2", "llama")


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
    assert pointers(params) == pointers(jax.tree.leaves(begun.own))

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
