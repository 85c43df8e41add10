"""The GPT module: the numbers of transformers, and the contract of a model call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.types import Inputs

SIZES = {"vocab_size": 40, "n_positions": 16, "n_embd": 18, "n_layer": 2, "n_head": 3}
CONFIG = GPTConfig(**SIZES, bos_token_id=1, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    """Untied, with a head size of 6 and biases; layers as strong as the embedding."""
    config = GPTConfig(**SIZES, tie_word_embeddings=False, bos_token_id=1, pad_token_id=0)
    return strong(LanguageModel.of(GPT(config, rngs=nnx.Rngs(0))))


def strong(model):
    """All parameters drawn anew: GPT-2's own start has zero biases and hardly looks around."""
    leaves, structure = jax.tree.flatten(model)
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, drawn)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(2, 40, (3, 12)), jnp.int32)


@jax.jit
def uncached(model, tokens):
    """Logits (B, T, V) of whole texts in one call, as in training."""
    hidden, _ = model.module()(tokens, jnp.zeros((1,), jnp.int32), (), None)
    return model.logits(hidden)


@functools.partial(jax.jit, static_argnames="buffer_len")
def begin(model, prompt, prompt_len=None, buffer_len=16):
    """Context and cache after `start`."""
    batch, width = prompt.shape
    prompt_len = jnp.full((batch,), width, jnp.int32) if prompt_len is None else prompt_len
    source = jnp.zeros((batch, 0), jnp.int32)
    return model.start(Inputs(source, jnp.zeros_like(prompt_len), prompt, prompt_len), buffer_len)


@jax.jit
def call(model, tokens, start, context, cache):
    """Logits (B, K, V) and the cache."""
    hidden, cache = model(tokens, start, context, cache)
    return model.logits(hidden), cache


# --- contract 1: a call says where it writes ---------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 2, 4), (12,)])
def test_cached_equals_uncached(model, tokens, sizes):
    whole = uncached(model, tokens)
    context, cache = begin(model, tokens[:, :1])
    at, pieces = 0, []
    for size in sizes:
        start = jnp.full((len(tokens),), at, jnp.int32)
        logits, cache = call(model, tokens[:, at : at + size], start, context, cache)
        pieces.append(np.asarray(logits))
        at += size
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=0, atol=2e-5)
