"""Gemma 2 and 3: logits by the papers' equations, windows, caps, and both loops."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import gemma_variants
from gemma_equations import capped, run
from model_calls import uncached
from specjax.checkpoints import load

VARIANTS = gemma_variants.VARIANTS


def by_hand(config, tensors, ids):
    """Logits (T, V) of one text."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    embedding = w["model.embed_tokens.weight"]
    hidden = run(w, "model", config, embedding[ids] * config.hidden_size**0.5)
    return capped(hidden @ w.get("lm_head.weight", embedding).T, config.final_logit_softcapping)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_equations(name, tmp_path):
    found = load(gemma_variants.write(tmp_path, VARIANTS[name]))
    texts = gemma_variants.texts()
    logits = np.asarray(uncached(found.model, jnp.asarray(texts)))
    assert len(np.unique(logits.argmax(-1))) > 5
    tensors = gemma_variants.tensors(VARIANTS[name])
    expected = np.stack([by_hand(found.config, tensors, ids) for ids in texts])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_the_factor_of_embeddings_has_the_dtype_of_the_weights(tmp_path):
    """√24 is 4.90625 in bfloat16, as transformers rounds it."""
    made = VARIANTS["gemma2"]
    made = dataclasses.replace(made, config={**made.config, "hidden_size": 24})
    model = load(gemma_variants.write(tmp_path, made), dtype=jnp.bfloat16).model
    rows = gemma_variants.tensors(made)["model.embed_tokens.weight"][:3]
    narrow = np.asarray(rows.astype(jnp.bfloat16), np.float32)
    found = model.module().embed(jnp.arange(3, dtype=jnp.int32)[None])[0]
    np.testing.assert_array_equal(found, narrow * np.float32(4.90625))
