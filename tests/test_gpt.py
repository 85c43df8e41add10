"""The GPT module: the numbers of transformers, and the contract of a model call."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gpt_variants
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.hub import load
from specjax.models.language_model import LanguageModel
from specjax.models.layers import KV
from specjax.types import Inputs

REFERENCE = np.load(Path(__file__).parent / "data" / "gpt_reference.npz")
IDS = {"bos_token_id": 1, "pad_token_id": 0}
SMALL = {"vocab_size": 40, "n_positions": 16, **IDS}


def load_variant(name, directory, **options):
    return load(gpt_variants.write(directory, gpt_variants.VARIANTS[name]), **options).model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Three layers and heads, a feed-forward width of its own: most of what can be confused."""
    return load_variant("odd_heads", tmp_path_factory.mktemp("gpt"))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(gpt_variants.texts())


@jax.jit
def uncached(model, tokens):
    """Logits (B, T, V) of whole texts in one call, as in training."""
    module, batch = model.module(), len(tokens)
    context = module.encode(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch,), jnp.int32))
    hidden, _ = module(tokens, jnp.zeros((1,), jnp.int32), context, None)
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


# --- the same numbers as transformers ----------------------------------------------------------


@pytest.mark.parametrize("name", gpt_variants.VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path, tokens):
    logits = uncached(load_variant(name, tmp_path), tokens)
    assert len(np.unique(logits.argmax(-1))) > 5  # else agreement would prove little
    np.testing.assert_allclose(logits, REFERENCE[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_layout_of_an_accelerator_gives_the_same_logits(name, tmp_path, tokens, monkeypatch):
    """`arrange` turns projections on a CPU; here they are (out, in)."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    untouched = load_variant(name, tmp_path)
    assert not untouched.module().input_first
    np.testing.assert_allclose(uncached(untouched, tokens), REFERENCE[name], rtol=0, atol=1e-4)


def test_half_precision_stays_near_float32(tmp_path, tokens):
    half = load_variant("untied", tmp_path, dtype=jnp.bfloat16)
    context, cache = begin(half, tokens[:, :1])
    logits, cache = call(half, tokens, jnp.zeros((3,), jnp.int32), context, cache)
    assert logits.dtype == cache[0].keys.dtype == jnp.bfloat16
    error = np.abs(np.asarray(logits, np.float32) - REFERENCE["untied"])
    assert error.mean() < 0.1 * REFERENCE["untied"].std()


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
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=0, atol=5e-5)


def test_rows_advance_on_their_own(model, tokens):
    """Prompts of 1, 4 and 6 tokens, prefilled together with their padding."""
    prompt_len = jnp.array([1, 4, 6], jnp.int32)
    prompt = jnp.where(jnp.arange(6)[None, :] < prompt_len[:, None], tokens[:, :6], 39)
    context, cache = begin(model, prompt, prompt_len)
    for ahead in (-1, 2):  # the last token of the prompt is fed first
        start = prompt_len + ahead
        slots = start[:, None] + jnp.arange(3)[None, :]
        block = jnp.take_along_axis(tokens, slots, axis=1)
        logits, cache = call(model, block, start, context, cache)
        expected = np.take_along_axis(uncached(model, tokens), np.asarray(slots)[..., None], 1)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)


def test_a_rejected_block_leaves_no_trace(model, tokens):
    """To the bit: stale slots get exactly no weight until they are overwritten."""
    context, cache = begin(model, tokens[:, :6])
    at, garbage = jnp.array([3, 5, 1], jnp.int32), jnp.full((3, 8), 39, jnp.int32)
    _, dirty = call(model, garbage, at, context, cache)
    assert not np.array_equal(dirty[0].keys, cache[0].keys)
    for step in range(3):
        block = tokens[:, step : step + 2]
        clean_logits, cache = call(model, block, at + 2 * step, context, cache)
        dirty_logits, dirty = call(model, block, at + 2 * step, context, dirty)
        np.testing.assert_array_equal(dirty_logits, clean_logits)


def test_positions_past_the_last_share_it(model, tokens):
    """As if the table went on with copies of its last row; within it, nothing changes."""
    longer = model.module()
    table = longer.positions[...]
    longer.positions.set_value(jnp.concatenate([table, jnp.repeat(table[-1:], 7, axis=0)]))
    longer.config = dataclasses.replace(longer.config, n_positions=23)
    start = jnp.array([13, 15, 18], jnp.int32)
    context, cache = begin(model, tokens[:, :6], buffer_len=24)
    logits, _ = call(model, tokens[:, :5], start, context, cache)
    expected, _ = call(LanguageModel.of(longer), tokens[:, :5], start, context, cache)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


# --- causality, by gradient --------------------------------------------------------------------


def test_a_position_depends_on_all_tokens_up_to_it_and_on_none_after(tmp_path):
    """With distinct tokens, the gradient by a row of the embedding is that by one position."""
    module = load_variant("untied", tmp_path).module()
    tokens, start = jnp.arange(8, dtype=jnp.int32)[None, :], jnp.zeros((1,), jnp.int32)
    graphdef, params = nnx.split(module)

    def hidden_at(params, position):
        hidden, _ = nnx.merge(graphdef, params)(tokens, start, (), None)
        return jnp.sum(jnp.sin(hidden[0, position]))

    gradient = jax.jit(jax.grad(hidden_at))
    for position in (0, 3, 7):
        found = gradient(params, position)
        for name in ("embedding", "positions"):
            by_token = np.abs(found[name][...]).sum(-1)[:8]
            assert (by_token[: position + 1] > 0).all()
            assert (by_token[position + 1 :] == 0).all()


def test_a_query_sees_no_stale_slot(model, tokens):
    """The derivative by the cache's content: before `start` only, neither in the block nor on."""
    context, cache = begin(model, tokens)
    start = jnp.array([2, 4, 6], jnp.int32)

    def per_row(cache):
        hidden, _ = model(tokens[:, :3], start, context, cache)
        return jnp.sum(jnp.sin(hidden), axis=(1, 2))

    def by(slot):
        """Along a random direction of this slot alone, for each row; forward through the loop."""
        rng = np.random.default_rng(0)
        here = jnp.float32(jnp.arange(cache[0].values.shape[2]) == slot)[None, None, :, None]
        draws = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), cache)
        direction = tuple(jax.tree.map(jnp.multiply, KV.of(here, here), layer) for layer in draws)
        return jax.jvp(per_row, (cache,), (direction,))[1]

    slots = jnp.arange(cache[0].values.shape[2], dtype=jnp.int32)
    by_slot = np.abs(jax.jit(jax.vmap(by))(slots)).T  # (B, T)
    for row, first in enumerate([2, 4, 6]):
        assert (by_slot[row, :first] > 0).all()
        assert (by_slot[row, first:] == 0).all()


# --- sizes and initial weights -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("gpt-97m", 97), ("gpt-6m", 6)])
def test_the_paper_s_models_have_the_paper_s_sizes(name, millions):
    from configs import train

    said = train.get_config(name)
    config = GPTConfig(said.vocab_size, **IDS, **said.model)
    module = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(module)))
    assert abs(count / 1e6 / millions - 1) < 0.05  # a tied head misses by more


def test_initial_weights_are_those_of_gpt2():
    config = GPTConfig(**SMALL, n_embd=48, n_layer=2, n_head=4, tie_word_embeddings=False)
    for path, variable in nnx.to_flat_state(nnx.state(GPT(config, rngs=nnx.Rngs(0)))):
        array = np.asarray(variable[...])
        if path[-1] in ("bias", "scale"):
            assert (array == (path[-1] == "scale")).all()
        else:
            expected = 0.02 / 2 if "output" in path else 0.02
            assert abs(array.std() / expected - 1) < 0.1, path


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"activation_function": "silu"}, "activation_function='silu' is not.*gelu_new"),
        ({"n_embd": 20, "n_head": 3}, "n_embd=20 is not divisible by n_head=3"),
        ({"bos_token_id": 40}, "bos_token_id=40 is no id of a vocabulary of 40"),
        ({"pad_token_id": 50256}, "pad_token_id=50256 is no id"),
    ],
)
def test_configs_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SMALL, **wrong})


def test_the_feed_forward_width_is_four_times_the_model_s():
    assert GPTConfig(n_embd=24).n_inner == 96
    assert GPTConfig(n_embd=24, n_inner=7).n_inner == 7
