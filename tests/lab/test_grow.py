"""A grown T5 computes what the small one does, and its new parts learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.train.grow import grow
from specjax.models.t5 import T5, T5Config
from tiny_models import slow

SMALL = T5Config(
    vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_decoder_layers=2, num_heads=2
)
V1_0 = dataclasses.replace(
    SMALL, feed_forward_proj="relu", tie_word_embeddings=True, scale_decoder_outputs=True
)
MORE = {"d_ff": 40, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 4}


def logits(model: T5) -> jax.Array:
    return of_params(*nnx.split(model))


@functools.partial(jax.jit, static_argnums=0)
def of_params(graphdef, params):
    """Compiled: an operation at a time takes seconds."""
    model = nnx.merge(graphdef, params)
    context = model.encode(jnp.arange(12).reshape(2, 6), jnp.array([6, 4]))
    hidden, _ = model(jnp.arange(10).reshape(2, 5), jnp.zeros((1,), jnp.int32), context, None)
    return model.logits(hidden)


def pair(config: T5Config, **more: int) -> tuple[T5, T5]:
    """A small and a large model with parameters of their own, norms included."""
    models = []
    for seed, shape in enumerate((config, dataclasses.replace(config, **more))):
        model = T5(shape, rngs=nnx.Rngs(seed))
        for path, node in nnx.iter_graph(model):
            if isinstance(node, nnx.Param) and path[-1] == "scale":
                node.set_value(node[...] + 0.1 * jnp.cos(jnp.arange(node.shape[0]) + seed))
        models.append(model)
    return models[0], models[1]


@pytest.mark.parametrize("config", [SMALL, V1_0])
@pytest.mark.parametrize("more", [*(slow(({name: value},)) for name, value in MORE.items()), MORE])
def test_the_function_is_kept(config, more):
    small, large = pair(config, **more)
    before = logits(small)
    assert float(jnp.abs(logits(large) - before).max()) > 0.1
    grow(small, large)
    np.testing.assert_allclose(logits(large), before, atol=2e-6)


def test_every_new_part_learns():
    """After two steps of plain gradient descent no parameter is where growing left it."""
    small, large = pair(SMALL, **MORE)
    grow(small, large)
    graphdef, params = nnx.split(large)
    start = params
    loss = jax.jit(jax.grad(lambda p: jnp.square(logits(nnx.merge(graphdef, p)) - 1.0).mean()))
    for _ in range(2):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, loss(params))
    for path, moved in jax.tree.leaves_with_path(
        jax.tree.map(lambda a, b: np.any(a != b), params, start)
    ):
        assert moved, path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_ff": 8}, "d_ff=8 in the settings .* must be at least 24, .* grows in d_ff, num_heads"),
        ({"d_model": 32}, "d_model=32 in the settings of the new model must be 16"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj='relu' in .* must be 'gated-gelu'"),
    ],
)
def test_what_cannot_grow(change, message):
    small, large = T5(SMALL, rngs=nnx.Rngs(0)), T5(SMALL, rngs=nnx.Rngs(1))
    large.config = dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match=message):
        grow(small, large)
