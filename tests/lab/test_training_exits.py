"""Training with a loss at exits: what a step's loss is, which layers are left out, and that a run
learns to exit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from experiments.train import exits, loop, steps
from experiments.train.batches import Batch
from experiments.train.config import TrainConfig
from experiments.train.exits import Exits
from tiny_models import random_model

FAMILIES = ("t5", "gpt2", "llama")
# The first 0 is a token, as "!" is in GPT-2's vocabulary; the last one fills the row.
BATCH = Batch(
    np.int32([[3, 4, 1], [5, 1, 0]]),
    np.int32([3, 2]),
    np.int32([[7, 0, 1, 0], [9, 4, 6, 1]]),
    np.int32([3, 4]),
)


def parts(family):
    """A checkpoint, its graphdef and its parameters as training has them."""
    checkpoint = random_model(family, 12, platform="gpu")  # projections as they are built
    return checkpoint, *nnx.split(checkpoint.model.module())


@functools.partial(jax.jit, static_argnums=0)
def loss_of(graphdef, params):
    """Sum and count over the batch."""
    return steps.data_loss(graphdef, params, BATCH)


@functools.partial(jax.jit, static_argnums=(0, 1))
def trained(asked, graphdef, params, progress):
    """What a step would minimise."""
    total, count = asked(loss_of, graphdef, params, progress)
    return total / count


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_step(family):
    """(L + w · mean Lₑ) / (1 + w), where Lₑ is the loss of `specjax.early_exit`."""
    checkpoint, graphdef, params = parts(family)
    found = trained(Exits((1, 2), 0.5), graphdef, params, jnp.float32(0.5))

    def own(model):
        total, count = loss_of(*nnx.split(model.model.module()))
        return total / count

    others = [own(specjax.early_exit(checkpoint, layers)) for layers in (1, 2)]
    assert loss_of(graphdef, params)[1] == 3 + 4
    expected = (own(checkpoint) + 0.5 * sum(others) / 2) / 1.5
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    none = trained(Exits(), graphdef, params, jnp.float32(0.5))
    np.testing.assert_allclose(none, own(checkpoint), rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_left_out_add_nothing(family):
    """As if they were not there."""
    checkpoint, graphdef, params = parts(family)
    found, _ = loss_of(graphdef, exits.without(params, jnp.float32([0, 1, 0])))
    kept = specjax.early_exit(checkpoint, (0, 2))
    expected, _ = loss_of(*nnx.split(kept.model.module()))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_later_layers_are_left_out_more_often_and_more_so_later():
    """Layer l of 3: dropout · (2^(l/2) − 1) · (2^progress − 1); the same step, the same layers."""
    _, _, params = parts("gpt2")
    one = jax.jit(functools.partial(exits.left_out, params, 0.8))
    for begin, end in ((0.0, 0.1), (0.9, 1.0)):
        steps = np.linspace(begin, end, 500)
        shares = np.mean([one(jnp.float32(p)) for p in steps], axis=0)
        expected = [0.8 * (2 ** (i / 2) - 1) * np.mean(2**steps - 1) for i in range(3)]
        np.testing.assert_allclose(shares, expected, atol=0.07)  # 3 standard errors
    assert shares[2] > 0.6
    np.testing.assert_array_equal(one(jnp.float32(0.7)), one(jnp.float32(0.7)))


def test_a_run_learns_to_exit(standard_promotion):
    """60 steps of the trainer on one batch: the exit's own loss falls far only if it is taught."""
    _, graphdef, params = parts("gpt2")
    config = TrainConfig(steps=60, warmup_steps=1, learning_rate=3e-2)
    found = {}
    for asked in (Exits(), Exits((1,), dropout=0.1)):
        trainer = steps.Trainer(graphdef, loop.optimizer(config), exits=asked, steps=60)
        own = jax.tree.map(jnp.copy, params)
        state = trainer.optimizer.init(own)
        for _ in range(60):
            own, state, _ = trainer.step(own, state, BATCH)
        total, count = loss_of(*exits.exit_of(graphdef, own, 1))
        found[asked] = float(total / count)
    taught, untaught = found[Exits((1,), dropout=0.1)], found[Exits()]
    assert taught < 0.5 < untaught


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exit_weight": -1.0}, r"exit_weight=-1\.0"),
        ({"layer_dropout": 1.0}, r"layer_dropout=1\.0 .* \[0, 1\)"),
    ],
)
def test_settings_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**options)


def test_exits_that_the_model_has_not():
    with pytest.raises(ValueError, match=r"layers=3 .* \[1, 2\]; the model has 3 layers"):
        Exits((1, 3)).check(3)
