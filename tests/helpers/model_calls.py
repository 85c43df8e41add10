"""Calls of a model, as the tests of contract 1 make them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.base import started
from specjax.models.attention import KV
from specjax.types import Inputs


def example(variants, variant):
    """Tokens (B, T) of a variant, its source (B, S), which may have width 0, and the lengths."""
    if hasattr(variants, "inputs"):
        source, lengths, tokens = variants.inputs(variant)
        return tuple(map(jnp.asarray, (tokens, source, lengths)))
    tokens = jnp.asarray(variants.texts())
    return tokens, jnp.zeros((len(tokens), 0), jnp.int32), jnp.zeros((len(tokens),), jnp.int32)


@jax.jit
def uncached(model, tokens, source=None, source_len=None):
    """Logits (B, T, V) of whole texts in one call, as in training."""
    module, zeros = model.module(), jnp.zeros((len(tokens),), jnp.int32)
    source = jnp.zeros((len(tokens), 0), jnp.int32) if source is None else source
    context = module.encode(source, zeros if source_len is None else source_len)
    return model.logits(module(tokens, zeros, context, None)[0])


@functools.partial(jax.jit, static_argnames="buffer_len")
def begin(model, prompt, prompt_len=None, buffer_len=16):
    """Context and cache of a decoder-only model after `start`."""
    batch, width = prompt.shape
    prompt_len = jnp.full((batch,), width, jnp.int32) if prompt_len is None else prompt_len
    source = jnp.zeros((batch, 0), jnp.int32)
    inputs = Inputs(source, jnp.zeros_like(prompt_len), prompt, prompt_len)
    return started(model, inputs, buffer_len)


@jax.jit
def call(model, tokens, start, context, cache):
    """Logits (B, K, V) and the cache."""
    hidden, cache = model(tokens, start, context, cache)
    return model.logits(hidden), cache


@jax.jit
def by_slot(model, tokens, start, context, cache):
    """(B, T): how much a row's output changes with what each slot of the cache holds.

    Derivatives along one random direction of a slot; forward, through the loop of attention.
    """

    def per_row(cache):
        hidden, _ = model(tokens, start, context, cache)
        return jnp.sum(jnp.sin(hidden), axis=(1, 2))

    rng = np.random.default_rng(0)
    draws = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), cache)
    slots = jnp.arange(cache[0].values.shape[2], dtype=jnp.int32)

    def by(slot):
        here = (slots == slot).astype(jnp.float32)[None, None, :, None]
        direction = tuple(jax.tree.map(jnp.multiply, KV.of(here, here), layer) for layer in draws)
        return jax.jvp(per_row, (cache,), (direction,))[1]

    return jnp.abs(jax.vmap(by)(slots)).T
