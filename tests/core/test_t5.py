"""The T5 module: biases, padding, parameters. What every family promises is in
`test_model_calls.py`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import t5_variants
from model_calls import example, uncached
from specjax.checkpoints import load
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5, T5Config, relative_buckets

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "t5_reference.npz")
BUCKETS = [name for name in REFERENCE.files if name.startswith("buckets_")]


def load_variant(name, directory):
    return load(t5_variants.write(directory, t5_variants.VARIANTS[name])).model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Different depths, d_kv × heads ≠ d_model, gated, untied: most of what can be confused."""
    return load_variant("deep_encoder", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def texts():
    """Tokens, sources and their lengths."""
    return example(t5_variants, t5_variants.VARIANTS["deep_encoder"])


# --- biases ------------------------------------------------------------------------------------


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
    inputs = example(t5_variants, variant)
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


# --- LanguageModel -----------------------------------------------------------------------------


def test_padded_ids_are_cut_off(model, texts):
    cut = LanguageModel(model.params, model.graphdef, 33)
    logits = uncached(cut, *texts)
    assert logits.shape[-1] == 33
    np.testing.assert_array_equal(logits, uncached(model, *texts)[..., :33])


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


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"feed_forward_proj='gated-tanh'.*gated-gelu"):
        T5Config(feed_forward_proj="gated-tanh")
