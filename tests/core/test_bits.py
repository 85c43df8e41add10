"""On a CPU a token's bits depend on its own text alone: not on the pass that computes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import checkpoints, devices
from specjax.models import layers, products
from specjax.models.attention import KV, attend_and_write, causal_bias, empty
from specjax.models.llama import Gemma2Config, Gemma3Config
from specjax.models.t5gemma import T5Gemma2Config
from specjax.types import Inputs
from tiny_models import config_of, covering

# Compiled as users compile: tests skip what makes programs fast, and so changes their bits.
OPTIONS = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
VOCAB, LENGTH, BATCH = 31, 80, 8
PASSES = {1: 8, 2: 1, 3: 8, 5: 1, 8: 8, 16: 1}  # positions of a pass: rows of its batch
GEMMA = (VOCAB, 64, 160, 2, 4, 2)
GEMMAS = {
    "gemma2": Gemma2Config(
        *GEMMA, sliding_window=20, full_layers=(1,), attn_logit_softcapping=30.0
    ),
    "t5gemma2": T5Gemma2Config(
        *GEMMA, sliding_window=20, full_layers=(1,), encoder=Gemma3Config(*GEMMA)
    ),
}
FAMILIES = ("t5", "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "t5gemma2", "umt5")


def widened(family):
    """The tiny config of a family, with sums of many orders. XLA multiplies still smaller matrices
    of few rows in another way than those of many."""
    if family in GEMMAS:
        return GEMMAS[family]
    config = config_of(family, VOCAB, 2)
    names = {
        "d_model": 64, "d_kv": 16, "d_ff": 160, "hidden_size": 64, "intermediate_size": 160,
        "head_dim": 16, "n_embd": 64, "n_inner": 160, "n_positions": LENGTH,
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{k: v for k, v in names.items() if k in known})


def model_of(family, dtype, int8_cache):
    config = widened(family)
    module = checkpoints.FAMILIES[config.model_type].build(
        config, rngs=nnx.Rngs(0), dtype=jnp.float32
    )
    if dtype == "bfloat16":
        layers.narrow_weights(module, jnp.bfloat16)
    if dtype == "int8":
        layers.quantise_weights(module)
    module.int8_cache = int8_cache
    return layers.arrange(module, "cpu")


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIONS)
def begin(definition, params, source, source_len, prompt):
    inputs = Inputs(source, source_len, prompt, jnp.full_like(source_len, LENGTH))
    return nnx.merge(definition, params).start(inputs, LENGTH + 16)


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIONS)
def run(definition, params, tokens, start, context, cache):
    return nnx.merge(definition, params)(tokens, start, context, cache)


@pytest.mark.parametrize(
    ("family", "dtype", "int8_cache"),
    covering(FAMILIES, ("bfloat16", "int8", "float32"), (False, True), count=5),
)
def test_a_pass_does_not_change_bits(family, dtype, int8_cache, monkeypatch):
    """Hidden states of a text cut into passes of one size, beside others and alone.

    Its source has 9 tokens, and beside others it is padded to 70.
    """
    monkeypatch.setattr(devices, "LARGE", dict.fromkeys(devices.LARGE, 1))
    monkeypatch.setattr(devices, "DEEP", 1)  # small weights too are left factors
    definition, params = nnx.split(model_of(family, dtype, int8_cache))
    rng = np.random.default_rng(0)
    texts = rng.integers(3, VOCAB, size=(BATCH, LENGTH)).astype(np.int32)
    sources = rng.integers(3, VOCAB, size=(BATCH, 70)).astype(np.int32)
    found = {}
    for width, rows in PASSES.items():
        text, source = texts[:rows], sources[:rows, : 70 if rows > 1 else 9]
        lengths = jnp.asarray([9, 70, 33, 65, 1, 64, 9, 20][:rows], jnp.int32)
        context, cache = begin(definition, params, source, lengths, text)
        pieces = []
        for at in range(0, LENGTH - width + 1, width):
            # Row 0 is as long as its pass; the rows beside it began earlier or later.
            start = jnp.asarray(np.maximum(0, at - 3 * np.arange(rows)), jnp.int32)
            tokens = np.stack([row[s : s + width] for row, s in zip(text, start, strict=True)])
            hidden, cache = run(definition, params, tokens, start, context, cache)
            pieces.append(np.asarray(hidden[0]))
        found[width] = np.concatenate(pieces)
    for width, states in found.items():
        np.testing.assert_array_equal(states, found[1][: len(states)], err_msg=f"width {width}")


@pytest.mark.parametrize("shape", [(576, 256), (3200, 256)])
def test_rows_of_any_number_are_multiplied_alike(shape):
    """With 3,200 inputs: without tiles XLA adds in another order from 17 rows on."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=shape[::-1]), jnp.bfloat16)
    rows = jnp.asarray(rng.normal(size=(70, shape[0])), jnp.float32)
    times = jax.jit(products.product, static_argnums=2, compiler_options=OPTIONS)
    whole = times(rows, weight, False)
    for count in (1, 2, 3, 15, 16, 17, 33):
        np.testing.assert_array_equal(times(rows[:count], weight, False), whole[:count])


def test_a_single_row_of_float32_is_multiplied_as_two_are():
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(576, 1536)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(8, 576)), jnp.float32)
    times = jax.jit(products.product, static_argnums=2, compiler_options=OPTIONS)
    whole = times(rows, matrix, True)
    for count in (1, 2, 3):
        np.testing.assert_array_equal(times(rows[:count], matrix, True), whole[:count])


def test_a_single_query_is_averaged_as_two_are():
    """Heads are so small that XLA multiplies a single vector by a matrix in another way."""
    heads, size, length = 2, 8, 70
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(3, 1, heads, length, size)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def step(parts, cache, start):
        queries, keys, values = parts
        bias = causal_bias(start, queries.shape[2], cache.values.shape[2])
        return attend_and_write(queries, KV.of(keys, values), cache, bias, start)

    found = []
    for width in (1, 2):
        cache, pieces = empty(1, heads, length, size), []
        for at in range(0, length, width):
            mixed, cache = step(drawn[:, :, :, at : at + width], cache, jnp.int32([at]))
            pieces.append(np.asarray(mixed))
        found.append(np.concatenate(pieces, axis=1))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("width", [1, 7, 64, 576])
def test_row_sum(width):
    """Exact in integers; the gradient of each number is 1."""
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, size=(5, width)), jnp.float32)
    np.testing.assert_array_equal(products.row_sum(x), x.sum(-1, keepdims=True))
    gradient = jax.grad(lambda x: products.row_sum(x).sum())(x)
    np.testing.assert_array_equal(gradient, jnp.ones_like(x))
