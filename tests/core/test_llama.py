"""The Llama layout: groups, windows, rotations, sizes. `test_model_calls.py` has what every family
promises."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import llama_variants
from model_calls import begin, call
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
