"""The Llama layout: the numbers of transformers for each model type, and what is its own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import llama_variants
from model_calls import begin, call, uncached
from specjax import devices
from specjax.checkpoints import load
from specjax.models.llama import (
    Llama,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Rope,
    frequencies,
)

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "llama_reference.npz")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def load_variant(name, directory, **options):
    return load(llama_variants.write(directory, llama_variants.VARIANTS[name]), **options).model


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(llama_variants.texts())


# --- the same numbers as transformers ----------------------------------------------------------


@pytest.mark.parametrize("name", llama_variants.VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path, tokens):
    logits = uncached(load_variant(name, tmp_path), tokens)
    assert len(np.unique(logits.argmax(-1))) > 5  # else agreement would prove little
    np.testing.assert_allclose(logits, REFERENCE[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_the_layout_of_an_accelerator_gives_the_same_logits(name, tmp_path, tokens, monkeypatch):
    """`arrange` turns projections on a CPU; here they are (out, in)."""
    monkeypatch.setattr(devices, "input_first", lambda *_: False)
    untouched = load_variant(name, tmp_path)
    assert not untouched.module().input_first
    np.testing.assert_allclose(uncached(untouched, tokens), REFERENCE[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_half_precision_stays_near_float32(name, tmp_path, tokens):
    half = load_variant(name, tmp_path, dtype=jnp.bfloat16)
    context, cache = begin(half, tokens[:, :1])
    logits, cache = call(half, tokens, jnp.zeros((3,), jnp.int32), context, cache)
    assert logits.dtype == jnp.float32
    assert cache[0].keys.dtype == jnp.float32  # a CPU computes in it
    error = np.abs(np.asarray(logits, np.float32) - REFERENCE[name])
    assert error.mean() < 0.1 * REFERENCE[name].std()


# --- groups, windows and rotations -------------------------------------------------------------


def test_keys_are_kept_once_for_a_group(tmp_path, tokens):
    """Neither the cache nor anything made of it has one copy for each query head."""
    model, length = load_variant("llama3", tmp_path), 320  # a size that nothing else has
    context, cache = begin(model, tokens[:, :1], buffer_len=length)
    assert cache[0].keys.shape == (3, 2, 4, length)
    start = jnp.zeros((3,), jnp.int32)
    text = call.lower(model, tokens, start, context, cache).compile().as_text()
    assert f"f32[3,2,4,{length}]" in text
    for copied in (f"3,4,4,{length}", f"3,2,2,4,{length}", f"3,4,{length},4"):
        assert f"[{copied}]" not in text


def test_a_window_reaches_back_by_its_length_in_each_layer(tmp_path):
    """Two layers with a window of 5 see 8 tokens back and no further."""
    module = load_variant("mistral", tmp_path).module()
    tokens, start = jnp.arange(12, dtype=jnp.int32)[None, :], jnp.zeros((1,), jnp.int32)

    def last(tokens):
        return module(tokens, start, (), None)[0][0, -1]

    whole = jax.jit(last)(tokens)
    changed = [not np.array_equal(jax.jit(last)(tokens.at[0, i].set(30)), whole) for i in range(12)]
    assert changed == [False] * 3 + [True] * 9


@pytest.mark.sweep
def test_a_window_as_long_as_the_text_changes_nothing(tokens):
    config = MistralConfig(**SMALL, sliding_window=12)
    narrow = MistralConfig(**SMALL, sliding_window=11)
    whole, same, other = (
        Llama(c, rngs=nnx.Rngs(0))(tokens, jnp.zeros((1,), jnp.int32), (), None)[0]
        for c in (LlamaConfig(**SMALL), config, narrow)
    )
    np.testing.assert_array_equal(same, whole)
    np.testing.assert_array_equal(other[:, :11], whole[:, :11])
    assert not np.array_equal(other[:, 11], whole[:, 11])


@pytest.mark.sweep
def test_only_distances_turn(tokens):
    """The same tokens one position later attend alike: positions enter by rotation alone."""
    module = Llama(LlamaConfig(**SMALL), rngs=nnx.Rngs(0))
    zero = jnp.zeros((3,), jnp.int32)
    here, _ = module(tokens[:, :4], zero, (), None)
    later, _ = module(tokens[:, :4], zero + 50, (), None)
    np.testing.assert_allclose(later, here, atol=1e-5)


def test_which_frequencies_a_scaling_divides():
    """The fast ones stay, the slow ones are divided by the factor, and those between by less."""
    plain = frequencies(Rope(theta=100.0), 16)
    np.testing.assert_allclose(plain, 100.0 ** (-np.arange(8) / 8), rtol=1e-6)
    linear = frequencies(Rope("linear", 100.0, factor=4.0), 16)
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    turns = plain * 64 / (2 * np.pi)  # in the original 64 tokens
    for kind in ("llama3", "yarn"):
        scaled = frequencies(Rope(kind, 100.0, 4.0, 64, slow=0.3, fast=3.0), 16)
        np.testing.assert_allclose(scaled[turns > 4.5], plain[turns > 4.5], rtol=1e-6)
        np.testing.assert_allclose(scaled[turns < 0.2], plain[turns < 0.2] / 4, rtol=1e-6)
        between = (plain / scaled)[(turns > 0.4) & (turns < 2.2)]
        assert ((between > 1.05) & (between < 3.95)).all()
        assert len(between) > 1


# --- sizes and initial weights -----------------------------------------------------------------


def test_initial_weights():
    config = Qwen2Config(**SMALL, num_key_value_heads=2)
    for path, variable in nnx.to_flat_state(nnx.state(Llama(config, rngs=nnx.Rngs(0)))):
        array = np.asarray(variable[...])
        if path[-1] in ("bias", "scale"):
            assert (array == (path[-1] == "scale")).all()
        else:
            assert abs(array.std() / 0.02 - 1) < 0.1, path


def test_sizes_that_follow_from_others():
    config = LlamaConfig(**SMALL)
    assert (config.num_key_value_heads, config.head_dim) == (4, 12)
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32)
    assert (config.num_key_value_heads, config.head_dim) == (2, 32)
    assert Qwen3Config(**SMALL, sliding_window=9, full_layers=[1]).windows == (9, 0)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (LlamaConfig, {"num_key_value_heads": 3}, "heads=4 is not divisible by num_key.*=3"),
        (LlamaConfig, {"head_dim": 5}, "head_dim=5 is odd"),
        (LlamaConfig, {"bos_token_id": 40}, "bos_token_id=40 is no id of a vocabulary of 40"),
        (LlamaConfig, {"pad_token_id": 41}, "pad_token_id=41 is no id"),
        (LlamaConfig, {"sliding_window": 8}, "sliding_window=8 is nothing that .* 'llama' can"),
        (MistralConfig, {"attention_bias": True}, "attention_bias=True is nothing .*'mistral'"),
        (MistralConfig, {"full_layers": (0,)}, "full_layers=.* is nothing .*'mistral'"),
        (Qwen2Config, {"mlp_bias": True}, "mlp_bias=True is nothing .*'qwen2'"),
    ],
)
def test_configs_that_cannot_be(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**{**SMALL, **wrong})


def test_scalings_that_cannot_be():
    with pytest.raises(ValueError, match="rope_type='longrope' is not supported; use one of def"):
        Rope("longrope")
    with pytest.raises(ValueError, match="its lower end 4 is not below its upper end 4"):
        Rope("llama3", slow=4.0, fast=4.0)
