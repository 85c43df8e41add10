"""The T5 module: the numbers of transformers, and the contract of a model call."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import t5_variants
from model_calls import by_slot, call
from specjax import devices
from specjax.checkpoints import load
from specjax.drafters.base import started
from specjax.models.attention import KV
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5, T5Config, relative_buckets
from specjax.types import Inputs

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "t5_reference.npz")
BUCKETS = [name for name in REFERENCE.files if name.startswith("buckets_")]


def load_variant(name, directory):
    return load(t5_variants.write(directory, t5_variants.VARIANTS[name])).model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Different depths, d_kv × heads ≠ d_model, gated, untied: most of what can be confused."""
    return load_variant("deep_encoder", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def sources():
    source, source_len, _ = t5_variants.inputs(t5_variants.VARIANTS["deep_encoder"])
    return jnp.asarray(source), jnp.asarray(source_len)


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(t5_variants.inputs(t5_variants.VARIANTS["deep_encoder"])[2])


@jax.jit
def uncached(model, source, source_len, tokens):
    """Logits (B, T, V) of whole prefixes in one call, as in training."""
    module, start = model.module(), jnp.zeros((len(tokens),), jnp.int32)
    hidden, _ = module(tokens, start, module.encode(source, source_len), None)
    return model.logits(hidden)


@functools.partial(jax.jit, static_argnames="buffer_len")
def begin(model, source, source_len, prompt=None, buffer_len=16):
    """Context and cache after `start`."""
    batch = len(source)
    prompt = jnp.zeros((batch, 1), jnp.int32) if prompt is None else prompt
    prompt_len = jnp.full((batch,), prompt.shape[1], jnp.int32)
    return started(model, Inputs(source, source_len, prompt, prompt_len), buffer_len)


# --- the same numbers as transformers ----------------------------------------------------------


@pytest.mark.parametrize("name", t5_variants.VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path):
    variant = t5_variants.VARIANTS[name]
    source, source_len, tokens = map(jnp.asarray, t5_variants.inputs(variant))
    logits = uncached(load_variant(name, tmp_path), source, source_len, tokens)
    assert len(np.unique(logits.argmax(-1))) > 5  # else agreement would prove little
    np.testing.assert_allclose(logits[:, :: variant.every], REFERENCE[name], rtol=0, atol=1e-4)


def test_a_umt5_whose_layers_share_a_bias_is_a_t5(tmp_path):
    """And each layer's bias matters; tests/torch compares biases that differ."""
    variant = t5_variants.VARIANTS["v1_1"]
    file = t5_variants.write(tmp_path, variant) / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps({**variant.raw, "model_type": "umt5"}))
    arrays, later = load_file(file), []
    for name in [name for name in arrays if "relative_attention_bias" in name]:
        later.append(name.replace("block.0", "block.1"))
        arrays[later[-1]] = arrays[name]
    save_file(arrays, file)
    inputs = tuple(map(jnp.asarray, t5_variants.inputs(variant)))
    logits = uncached(load(tmp_path).model, *inputs)
    np.testing.assert_allclose(logits, REFERENCE["v1_1"], rtol=0, atol=1e-4)
    for name in later:
        save_file({**arrays, name: arrays[name][::-1].copy()}, file)
        other = uncached(load(tmp_path).model, *inputs)
        assert np.abs(other - logits).max() > 0.1


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_those_of_transformers_up_to_distance_2048(name):
    bidirectional, num_buckets, max_distance = map(int, name.split("_")[1:])
    buckets = relative_buckets(
        np.arange(-2048, 2049),
        bidirectional=bool(bidirectional),
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    np.testing.assert_array_equal(buckets, REFERENCE[name])


def test_buckets_of_a_few_distances_by_hand():
    """Half of 32 one-directional buckets are exact; the last begins at distance 113 of 128."""
    distances = np.array([0, 1, 15, 16, 17, 19, 20, 112, 113, 127, 128, 10_000])
    buckets = relative_buckets(-distances, bidirectional=False, num_buckets=32, max_distance=128)
    assert buckets.tolist() == [0, 1, 15, 16, 16, 17, 17, 30, 31, 31, 31, 31]


# --- padding -----------------------------------------------------------------------------------


def test_what_stands_in_the_padding_does_not_matter(model, sources, tokens):
    source, source_len = sources
    garbage = jnp.where(jnp.arange(source.shape[1])[None, :] < source_len[:, None], source, 7)
    assert (garbage != source).any()
    np.testing.assert_array_equal(
        uncached(model, source, source_len, tokens), uncached(model, garbage, source_len, tokens)
    )


def test_width_of_the_padding_and_neighbours_do_not_matter(model, sources, tokens):
    source, source_len = sources
    together = uncached(model, jnp.pad(source, ((0, 0), (0, 23))), source_len, tokens)
    for row in (1, 2):
        one, length = slice(row, row + 1), int(source_len[row])
        alone = uncached(model, source[one, :length], source_len[one], tokens[one])
        np.testing.assert_allclose(together[one], alone, rtol=0, atol=1e-5)


# --- contract 1: a call says where it writes ---------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 2, 4), (12,)])
def test_cached_equals_uncached(model, sources, tokens, sizes):
    whole = uncached(model, *sources, tokens)
    context, cache = begin(model, *sources)
    at, pieces = 0, []
    for size in sizes:
        start = jnp.full((len(tokens),), at, jnp.int32)
        logits, cache = call(model, tokens[:, at : at + size], start, context, cache)
        pieces.append(np.asarray(logits))
        at += size
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=0, atol=2e-5)


def test_rows_advance_on_their_own(model, sources, tokens):
    """Rows at positions 1, 4 and 6 take three tokens each in one call."""
    whole = uncached(model, *sources, tokens)
    context, cache = begin(model, *sources)
    _, cache = call(model, tokens[:, :6], jnp.zeros((3,), jnp.int32), context, cache)
    start = jnp.array([1, 4, 6], jnp.int32)
    slots = start[:, None] + jnp.arange(3)[None, :]
    block = jnp.take_along_axis(tokens, slots, axis=1)
    logits, _ = call(model, block, start, context, cache)
    expected = np.take_along_axis(whole, np.asarray(slots)[:, :, None], axis=1)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_a_rejected_block_leaves_no_trace(model, sources, tokens):
    """To the bit: stale slots get exactly no weight until they are overwritten."""
    context, cache = begin(model, *sources)
    at = jnp.array([3, 5, 1], jnp.int32)
    _, cache = call(model, tokens[:, :5], jnp.zeros((3,), jnp.int32), context, cache)
    garbage = jnp.full((3, 8), 39, jnp.int32)
    _, dirty = call(model, garbage, at, context, cache)
    assert not np.array_equal(dirty[0].keys, cache[0].keys)
    for step in range(3):
        block = tokens[:, step : step + 2]
        clean_logits, cache = call(model, block, at + 2 * step, context, cache)
        dirty_logits, dirty = call(model, block, at + 2 * step, context, dirty)
        np.testing.assert_array_equal(dirty_logits, clean_logits)


def test_writes_past_the_buffer_are_dropped(model, sources, tokens):
    context, cache = begin(model, *sources, buffer_len=8)
    _, cache = call(model, tokens[:, :6], jnp.zeros((3,), jnp.int32), context, cache)
    start = jnp.array([6, 7, 8], jnp.int32)
    _, after = call(model, tokens[:, :4], start, context, cache)
    for row, kept in enumerate([6, 7, 8]):
        for part, axis in ((0, 2), (1, 1)):  # keys by column, values by row
            old, new = (
                np.asarray(c[0][part])[row].swapaxes(0, axis)[:kept] for c in (cache, after)
            )
            np.testing.assert_array_equal(new, old)


def test_start_prefills_all_but_the_last_token_of_the_prompt(model, sources, tokens):
    context, cache = begin(model, *sources, prompt=tokens[:, :5])
    logits, _ = call(model, tokens[:, 4:5], jnp.full((3,), 4, jnp.int32), context, cache)
    expected = uncached(model, *sources, tokens)[:, 4:5]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


# --- causality, by gradient --------------------------------------------------------------------


def test_a_position_depends_on_all_tokens_up_to_it_and_on_none_after(model):
    """With distinct tokens, the gradient by a row of the embedding is that by one position."""
    module = model.module()
    source, source_len = jnp.full((1, 3), 30, jnp.int32), jnp.array([3], jnp.int32)
    tokens, start = jnp.arange(8, dtype=jnp.int32)[None, :], jnp.zeros((1,), jnp.int32)
    graphdef, params = nnx.split(module)

    def hidden_at(params, position):
        copy = nnx.merge(graphdef, params)
        hidden, _ = copy(tokens, start, copy.encode(source, source_len), None)
        return jnp.sum(jnp.sin(hidden[0, position]))

    gradient = jax.jit(jax.grad(hidden_at))
    for position in (0, 3, 7):
        by_token = np.abs(gradient(params, position)["embedding"][...]).sum(-1)[:8]
        assert (by_token[: position + 1] > 0).all()
        assert (by_token[position + 1 :] == 0).all()


def test_a_query_sees_no_stale_slot(model, sources, tokens):
    """The derivative by the cache's content: before `start` only, neither in the block nor on."""
    context, cache = begin(model, *sources)
    _, cache = call(model, tokens, jnp.zeros((3,), jnp.int32), context, cache)
    start = jnp.array([2, 4, 6], jnp.int32)

    found = by_slot(model, tokens[:, :3], start, context, cache)
    for row, first in zip(np.asarray(found), [2, 4, 6], strict=True):
        np.testing.assert_array_equal(row > 0, np.arange(len(row)) < first)


# --- LanguageModel -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v1_0", "odd_heads"])
def test_the_layout_of_an_accelerator_gives_the_same_logits(name, tmp_path, monkeypatch):
    """`arrange` turns projections on a CPU; here they stay as the files have them."""
    variant = t5_variants.VARIANTS[name]
    monkeypatch.setattr(devices, "input_first", lambda *_: False)
    untouched = load_variant(name, tmp_path)
    assert not untouched.module().input_first
    logits = uncached(untouched, *map(jnp.asarray, t5_variants.inputs(variant)))
    np.testing.assert_allclose(logits, REFERENCE[name], rtol=0, atol=1e-4)


def test_padded_ids_are_cut_off(model, sources, tokens):
    context, cache = begin(model, *sources)
    start = jnp.zeros((3,), jnp.int32)
    whole, _ = call(model, tokens[:, :1], start, context, cache)
    cut = LanguageModel(model.params, model.graphdef, 33)
    logits, _ = call(cut, tokens[:, :1], start, context, cache)
    assert logits.shape == (3, 1, 33)
    np.testing.assert_array_equal(logits, whole[..., :33])


def test_other_weights_of_one_architecture_do_not_retrace():
    config = T5Config(16, 8, 4, 8, 1, 1, 2)
    traces = []

    @jax.jit
    def embedding_sum(model):
        traces.append(model)
        return jnp.sum(model.module().embedding[...])

    sums = {
        float(embedding_sum(LanguageModel.of(T5(config, rngs=nnx.Rngs(seed))))) for seed in (0, 1)
    }
    assert len(sums) == 2
    assert len(traces) == 1


def test_half_precision_stays_near_float32(tmp_path, sources, tokens):
    variant, dtype = t5_variants.VARIANTS["deep_encoder"], jnp.bfloat16
    half = load(t5_variants.write(tmp_path, variant), dtype=dtype).model
    context, cache = begin(half, *sources)
    assert isinstance(cache[0], KV)
    assert cache[0].keys.dtype == jnp.float32  # a CPU computes in it
    logits, _ = call(half, tokens, jnp.zeros((3,), jnp.int32), context, cache)
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits, np.float32) - REFERENCE["deep_encoder"])
    assert error.mean() < 0.1  # of logits with a standard deviation of 1


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"feed_forward_proj='gated-tanh'.*gated-gelu"):
        T5Config(feed_forward_proj="gated-tanh")
