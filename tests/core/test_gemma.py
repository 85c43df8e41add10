"""Gemma 2 and 3: logits by the papers' equations, windows, caps, and both loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gemma_variants
import specjax
from model_calls import uncached
from specjax.checkpoints import load
from specjax.drafters import eagle
from specjax.drafters.views import early_exit
from tiny_models import slow

VARIANTS = gemma_variants.VARIANTS


def norm(x, weight, epsilon=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * (1 + weight)


def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def by_hand(config, tensors, ids):
    """Logits (T, V) of one text in float64, head by head and without a cache."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    size, count = config.head_dim, len(ids)
    groups = config.num_attention_heads // config.num_key_value_heads
    embedding = w["model.embed_tokens.weight"]
    x = embedding[ids] * config.hidden_size**0.5
    ahead = np.arange(count)[:, None] - np.arange(count)[None, :]  # query − key
    for i, window in enumerate(config.windows):
        layer = f"model.layers.{i}"

        def part(name, x, layer=layer):
            name = f"{layer}.{name}"
            return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

        def scale(name, layer=layer):
            return w[f"{layer}.{name}.weight"]

        rope = config.local_rope if window and config.local_rope else config.rope
        speed = rope.theta ** (-2 * np.arange(size // 2) / size) / rope.factor
        turn = np.exp(1j * np.arange(count)[:, None] * speed)

        def turned(head, turn=turn):
            pairs = (head[:, : size // 2] + 1j * head[:, size // 2 :]) * turn
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        seen = norm(x, scale("input_layernorm"))
        queries, keys, values = (part(f"self_attn.{name}_proj", seen) for name in "qkv")
        heads = []
        for h in range(config.num_attention_heads):
            own, shared = (slice(j * size, (j + 1) * size) for j in (h, h // groups))
            query, key = queries[:, own], keys[:, shared]
            if config.qk_norm:
                query = norm(query, scale("self_attn.q_norm"))
                key = norm(key, scale("self_attn.k_norm"))
            scores = turned(query) @ turned(key).T / config.query_pre_attn_scalar**0.5
            scores = capped(scores, config.attn_logit_softcapping)
            near = (ahead >= 0) & (ahead < (window or count))
            weights = np.where(near, np.exp(scores), 0)
            heads.append(weights / weights.sum(-1, keepdims=True) @ values[:, shared])
        mixed = part("self_attn.o_proj", np.concatenate(heads, axis=-1))
        x = x + norm(mixed, scale("post_attention_layernorm"))
        seen = norm(x, scale("pre_feedforward_layernorm"))
        inner = gelu(part("mlp.gate_proj", seen)) * part("mlp.up_proj", seen)
        x = x + norm(part("mlp.down_proj", inner), scale("post_feedforward_layernorm"))
    head = w.get("lm_head.weight", embedding)
    return capped(norm(x, w["model.norm.weight"]) @ head.T, config.final_logit_softcapping)


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
