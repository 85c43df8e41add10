"""Attention over a cache that is read only as far as it is filled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models.attention import (
    KV,
    MASKED,
    TILE,
    CausalBias,
    attend_and_write,
    causal_bias,
    empty,
)
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.llama import Gemma2Config, Gemma3Config, Llama, LlamaConfig, MistralConfig
from specjax.models.t5 import T5, T5Config
from specjax.models.t5gemma import T5Gemma, T5Gemma2Config
from specjax.types import Inputs
from tiny_models import slow

BATCH, HEADS, SIZE = 3, 2, 4


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "start", [[0, 0, 0], [5, 0, 127], [128, 2, 9], [129, 129, 129], [318, 7, 255], [316, 317, 319]]
)
def test_attention(start, count):
    """Against a softmax over each query's own slots; stale slots hold NaN-free rubbish."""
    length = 320
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    cache = KV(draw(BATCH, HEADS, SIZE, length), draw(BATCH, HEADS, length, SIZE))
    queries, keys, values = (draw(BATCH, HEADS, count, SIZE) for _ in range(3))
    offsets = draw(HEADS, 2 * length)  # a bias by slot − query
    position = np.array(start)[:, None] + np.arange(count)
    slot_bias = offsets[:, length + np.arange(length)[None, None] - position[:, :, None]]
    before = np.moveaxis(slot_bias, 0, 1)
    before = np.where(np.arange(length) < np.array(start)[:, None, None, None], before, MASKED)
    near = np.arange(count)[None] - np.arange(count)[:, None]
    within = np.where(near <= 0, offsets[:, length + near], MASKED)[None]
    mixed, written = jax.jit(attend_and_write)(
        queries, KV.of(keys, values), cache, CausalBias(before, within), jnp.array(start, jnp.int32)
    )
    for b in range(BATCH):
        wanted = [np.array(part[b]) for part in cache[:2]]
        for k in range(count):
            if start[b] + k < length:  # what is past the buffer is dropped
                wanted[0][:, :, start[b] + k] = keys[b, :, k]
                wanted[1][:, start[b] + k] = values[b, :, k]
        for part, whole in zip(written[:2], wanted, strict=True):
            np.testing.assert_array_equal(part[b], whole)
        for k in range(count):
            seen = start[b] + k + 1
            if seen > length:
                continue
            for h in range(HEADS):
                scores = queries[b, h, k] @ wanted[0][h, :, :seen]
                scores += offsets[h, length + np.arange(seen) - (start[b] + k)]
                weights = np.exp(scores - scores.max())
                expected = weights / weights.sum() @ wanted[1][h, :seen]
                found = mixed[b, k, h * SIZE : (h + 1) * SIZE]
                np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["t5", slow("gpt2"), "llama", "mistral", "gemma2", "t5gemma2"])
def test_a_long_text_in_pieces(family):
    """200 tokens, of which the cache's first block holds 128, against all of them in one call."""
    if family == "t5":
        config = T5Config(
            vocab_size=31, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=2,
            num_heads=2,
        )  # fmt: skip
        model = T5(config, rngs=nnx.Rngs(0))
    elif family == "t5gemma2":
        shape = (31, 8, 16, 2, 4, 2)
        encoder, window = Gemma3Config(*shape), {"sliding_window": 20, "full_layers": (1,)}
        config = T5Gemma2Config(*shape, encoder=encoder, **window)
        model = T5Gemma(config, rngs=nnx.Rngs(0))
    elif family == "gpt2":
        model = GPT(GPTConfig(31, 256, 8, 2, 2, bos_token_id=1, pad_token_id=0), rngs=nnx.Rngs(0))
    else:
        shape = (31, 8, 16, 2, 4, 2)
        window = {"llama": {}, "mistral": {"sliding_window": 20}}
        window["gemma2"] = {
            "sliding_window": 20,
            "full_layers": (1,),
            "attn_logit_softcapping": 0.1,
        }
        kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "gemma2": Gemma2Config}
        config = kinds[family](*shape, **window[family])
        model = Llama(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 200), 0, 31, jnp.int32)
    ids = jnp.array([[3, 4, 1], [5, 1, 0]], jnp.int32)
    inputs = Inputs(ids, jnp.array([3, 2], jnp.int32), tokens[:, :1], jnp.ones((2,), jnp.int32))
    zero = jnp.zeros((2,), jnp.int32)
    whole, _ = model(tokens, zero, model.encode(inputs.source, inputs.source_len), None)
    context, cache = model.start(inputs, 320)
    piece = nnx.jit(type(model).__call__)
    at, found = 0, []
    for count in (1, 126, 1, 1, 4, 60, 7):
        hidden, cache = piece(model, tokens[:, at : at + count], zero + at, context, cache)
        found.append(hidden)
        at += count
    assert at == 200
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=2e-5)


@pytest.mark.parametrize("start", [[0, 3], [150, 290], [280, 299], [316, 318]])
def test_slots_before_every_window_are_not_read(start):
    """Tiles that no query sees may hold even NaN; what is read is as without skipping."""
    length, window, count = 320, 20, 2
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    keys, values = draw(2, HEADS, SIZE, length), draw(2, HEADS, length, SIZE)
    queries, new = draw(2, HEADS, count, SIZE), draw(2, HEADS, count, SIZE)
    bias = causal_bias(jnp.array(start, jnp.int32), count, length, window)
    skipped = max(min(start) - window + 1, 0) // TILE * TILE
    assert int(bias.first) // TILE * TILE == skipped
    attend = jax.jit(attend_and_write)
    position = jnp.array(start, jnp.int32)
    whole, _ = attend(queries, KV.of(new, new), KV(keys, values), bias._replace(first=0), position)
    holes = np.where(np.arange(length) < skipped, np.float32(np.nan), np.float32(0))
    poisoned = KV(keys + holes, values + holes[:, None])
    found, _ = attend(queries, KV.of(new, new), poisoned, bias, position)
    np.testing.assert_allclose(found, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "count", "dtype"),
    [(1, 1, "f32"), (1, 4, "f32"), (3, 1, "f32"), (3, 4, "f32"), (3, 4, "s8")],
)
def test_no_cache_is_copied(on_cpu, batch, count, dtype):
    """In a loop that carries the cache, XLA on a CPU copies it if it is read beside the loop over
    tiles. For CUDA see `test_no_cache_is_copied_on_a_gpu`.
    """
    length = 320
    within = jnp.where(jnp.tri(count, dtype=bool), 0.0, MASKED)[None, None]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, queries, steps):
        def body(i, carry):
            queries, cache = carry
            start = jnp.full((batch,), i, jnp.int32)
            old = jnp.arange(length)[None, None, None, :] < start[:, None, None, None]
            bias = CausalBias(jnp.where(old, 0.0, MASKED), within)
            mixed, cache = attend_and_write(queries, KV.of(queries, queries), cache, bias, start)
            mixed = jnp.moveaxis(mixed.reshape(batch, count, HEADS, SIZE), 1, 2)
            return jnp.sin(mixed), cache

        return jax.lax.fori_loop(0, steps, body, (queries, cache))

    cache = empty(batch, HEADS, length, SIZE, {"f32": jnp.float32, "s8": jnp.int8}[dtype])
    queries = jnp.ones((batch, HEADS, count, SIZE))
    text = loop.lower(cache, queries, 9).compile().as_text()
    for part in jax.tree.leaves(cache):
        kind = "s8" if part.dtype == jnp.int8 else "f32"
        whole = f"{kind}[{','.join(map(str, part.shape))}]"
        assert whole in text
        assert [line for line in text.splitlines() if whole in line and " copy(" in line] == []
