"""Calls of a model, as the tests of contract 1 make them."""

import functools

import jax
import jax.numpy as jnp

from specjax.drafters.base import started
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
