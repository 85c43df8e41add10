"""Gemma 2 and 3: logits by the papers' equations, windows, caps, and both loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gemma_variants
import specjax
from gemma_equations import capped, run
from model_calls import uncached
from specjax.checkpoints import load
from specjax.drafters import eagle
from specjax.drafters.views import early_exit
from tiny_models import slow

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


@pytest.mark.parametrize(
    ("name", "narrow", "some"),
    [
        ("gemma2", True, slice(2)),
        ("gemma3", False, slice(2, 4)),
        slow(("gemma2", False, slice(5))),
        slow(("gemma3", True, slice(5))),
    ],
)
def test_outputs_of_every_method_are_those_of_plain_decoding(name, narrow, some, tmp_path):
    """Greedy: fewer rows than texts, a part of the target's layers, a near draft, a tree, EAGLE."""
    options = {"weights": "int8", "cache": "int8"} if narrow else {}
    target = load(gemma_variants.write(tmp_path, VARIANTS[name]), **options)
    rng = np.random.default_rng(0)

    def shaken(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x * (1 + 0.1 * rng.normal(size=x.shape).astype(np.float32))

    near = dataclasses.replace(target, name="near", model=jax.tree.map(shaken, target.model))
    prompts = [text[: 2 + i % 7].tolist() for i, text in enumerate([*gemma_variants.texts()] * 4)]
    plain = specjax.generate(target, None, prompts, max_new_tokens=20, temperature=0)
    assert len(set(map(tuple, plain.tokens))) > 3
    methods = [
        (near, {"gamma": 3, "batch_size": 5}),
        (early_exit(target, 2), {"gamma": 2}),
        (near, {"gamma": 3}),
        (near, {"tree": "fixed(2, 1, 1)"}),
        (eagle.fresh(target, version=3, heads=4), {"gamma": 2}),
    ]
    for draft, more in methods[some]:
        found = specjax.generate(target, draft, prompts, max_new_tokens=20, temperature=0, **more)
        assert found.tokens == plain.tokens, more
