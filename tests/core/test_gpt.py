"""The GPT module: positions past the last, sizes and initial weights. What every family promises is
in `test_model_calls.py`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gpt_variants
from model_calls import begin, call
from specjax.checkpoints import load
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel

IDS = {"bos_token_id": 1, "pad_token_id": 0}
SMALL = {"vocab_size": 40, "n_positions": 16, **IDS}


@pytest.mark.sweep
def test_positions_past_the_last_share_it(tmp_path):
    """As if the table went on with copies of its last row; within it, nothing changes."""
    variant = gpt_variants.VARIANTS["odd_heads"]
    model = load(gpt_variants.write(tmp_path, variant)).model
    tokens = jnp.asarray(gpt_variants.texts())
    longer = model.module()
    table = longer.positions[...]
    longer.positions.set_value(jnp.concatenate([table, jnp.repeat(table[-1:], 7, axis=0)]))
    longer.config = dataclasses.replace(longer.config, n_positions=23)
    start = jnp.array([13, 15, 18], jnp.int32)
    context, cache = begin(model, tokens[:, :6], buffer_len=24)
    logits, _ = call(model, tokens[:, :5], start, context, cache)
    expected, _ = call(LanguageModel.of(longer), tokens[:, :5], start, context, cache)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


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
