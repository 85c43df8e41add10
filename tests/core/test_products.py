"""Products of float32 rows and bfloat16 matrices, in each form that a CPU may choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import devices, sampling
from specjax.checkpoints import load
from specjax.models import int8, llama, products
from specjax.models.language_model import LanguageModel
from specjax.models.layers import narrow_weights, quantise_weights
from specjax.models.memory import dtype_of
from tests.helpers import t5_variants


@pytest.fixture(scope="module", params=[True, False], ids=["units", "no units"])
def multiplies(request):
    """Whether the processor multiplies bfloat16; for all tests of one kind after another."""
    jax.clear_caches()  # a choice that was traced is kept
    yield request.param
    jax.clear_caches()


@pytest.fixture
def units(multiplies, monkeypatch):
    """The same, as `devices` says it."""
    monkeypatch.setattr(devices, "cpu_multiplies", lambda _: multiplies)
    return multiplies


def factors(count: int, width: int = 96, outputs: int = 40):
    keys = jax.random.split(jax.random.key(count))
    rows = jax.random.normal(keys[0], (count, width), jnp.float32)
    return rows, jax.random.normal(keys[1], (width, outputs), jnp.float32).astype(jnp.bfloat16)


@pytest.mark.parametrize("input_first", [True, False])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_the_factors_are_bfloat16_and_the_sums_float32(units, count, input_first):
    """Every form gives the product of the rounded factors, for any number of rows."""
    rows, matrix = factors(count)
    stored = matrix if input_first else matrix.T
    found = jax.jit(products.product, static_argnums=2)(rows, stored, input_first)
    exact = np.float64(rows.astype(jnp.bfloat16)) @ np.float64(matrix)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)
    unrounded = np.float64(rows) @ np.float64(matrix)
    assert np.abs(exact - unrounded).max() > 1e-3  # so the bound above separates the two


def test_a_row_does_not_depend_on_the_rows_beside_it(units):
    """The added rows are zeros, and a pass of several positions multiplies as one of one does."""
    rows, matrix = factors(6)
    together = products.product(rows, matrix, True)
    alone = jnp.concatenate([products.product(row[None], matrix, True) for row in rows])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


def test_few_rows_are_filled_up_where_there_are_units(units):
    rows, matrix = factors(1)
    for stored, input_first, count in ((matrix, True, 4), (matrix.T, False, 2)):
        program = jax.jit(products.product, static_argnums=2).lower(rows, stored, input_first)
        assert (f"tensor<{count}x96xbf16>" in program.as_text()) == units


def test_a_large_narrow_weight_is_the_left_factor(units, monkeypatch):
    """Where there are units it stays (out, in), beside rows of float32."""
    monkeypatch.setattr(devices, "LARGE", {"int8": 1500, "bfloat16": 1500})
    monkeypatch.setattr(devices, "DEEP", 24)
    module = llama.Llama(llama.LlamaConfig(64, 24, 48, 1, 4), rngs=nnx.Rngs(0))
    for narrowed in (
        narrow_weights(nnx.clone(module), jnp.bfloat16),
        quantise_weights(nnx.clone(module)),
    ):
        laid = LanguageModel.of(narrowed, platform="cpu").module()
        assert laid.input_first != units  # 64 · 24 numbers
        assert laid.layers[0].attention.output.input_first  # 24 · 24
        assert LanguageModel.of(narrowed, platform="gpu").module().input_first is False
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(module))
    for rows_too in (module, nnx.merge(nnx.graphdef(module), narrow)):
        assert LanguageModel.of(rows_too, platform="cpu").module().input_first


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_a_left_factor_stays_one(on_cpu, dtype, monkeypatch):
    """XLA rewrites a product of floats whose result is transposed at once."""
    monkeypatch.setattr(devices, "cpu_multiplies", lambda _: True)
    rows = jnp.ones((3, 256))
    weight = jnp.ones((512, 256), dtype)

    def apply(rows, weight):
        if dtype == jnp.int8:
            return int8.in_parts(rows, weight, False)
        return products.product(rows, weight, False)

    options = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
    text = jax.jit(apply, compiler_options=options).lower(rows, weight).compile().as_text()
    (found,) = [line for line in text.split("\n") if " dot(" in line]
    assert "32[512," in found.partition(" dot(")[0]  # the weight's rows come first


def test_float32_matrices_are_multiplied_in_float32(units):
    rows, matrix = factors(3)
    wide = matrix.astype(jnp.float32)
    np.testing.assert_array_equal(products.product(rows, wide, True), jnp.matmul(rows, wide))


def test_on_a_cpu_matrices_alone_are_bfloat16(tmp_path):
    """Norms, biases and hidden states are float32, in which a CPU computes."""
    variant = t5_variants.VARIANTS["deep_encoder"]
    model = load(t5_variants.write(tmp_path, variant), dtype=jnp.bfloat16).model
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params) if leaf.ndim == 1} == {
        jnp.dtype(jnp.float32)
    }
    assert dtype_of(model) == jnp.bfloat16
    module = model.module()
    assert module.dtype == jnp.float32
    assert module.head.dtype == module.embedding.dtype == jnp.bfloat16


def test_the_processor_lists_its_units(monkeypatch):
    """Words of /proc/cpuinfo, whole ones: avx512_bf16 is in no other flag's name."""
    for text, expected in (
        ("flags\t: fpu avx2 avx512_bf16 amx_int8", True),
        ("flags\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t: fpu avx2 avx512f", False),
    ):
        monkeypatch.setattr("pathlib.Path.read_text", lambda _, text=text: text)
        assert devices.cpu_multiplies.__wrapped__("bfloat16") is expected


def test_no_softmax_is_fused_with_the_product_of_a_head(on_cpu):
    """XLA's fusion of the two takes far longer from 40 rows of a large vocabulary on."""
    made = llama.LlamaConfig(4096, 32, 48, 1, 4)
    module = narrow_weights(llama.Llama(made, rngs=nnx.Rngs(0)), jnp.bfloat16)
    model, warm = LanguageModel.of(module), sampling.Sampling(0.7)

    def distribution(model, hidden, warm):
        return sampling.standardize(model.logits(hidden), warm)

    options = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
    program = jax.jit(distribution, compiler_options=options)
    text = program.lower(model, jnp.zeros((8, 5, 32)), warm).compile().as_text()
    functions = text.split("\n\n")
    assert any(" dot(" in one for one in functions)
    assert not any(" dot(" in one and " reduce(" in one for one in functions)


# --- int8 ----------------------------------------------------------------------------------------


def int8_factors(count: int, width: int = 96, outputs: int = 40):
    """Rows with outliers, and a weight in int8 with the scales of its channels."""
    rows, matrix = factors(count, width, outputs)
    weight, scale = int8.quantise(matrix.astype(jnp.float32), axis=0)
    return rows.at[:, 3].mul(40), weight, scale


@pytest.mark.parametrize(("count", "input_first"), [(1, True), (3, False), (17, True)])
def test_int8_products_are_those_of_the_widened_weight(units, count, input_first):
    """In integers too, up to 1/64,516 of a row's largest number for each of its numbers."""
    rows, weight, scale = int8_factors(count)
    stored = weight if input_first else weight.T
    found = jax.jit(int8.product, static_argnums=3)(rows, stored, scale, input_first)
    widened = np.float64(weight) * np.float64(scale)
    bound = np.abs(rows).max() / 64_516 * np.abs(widened).sum(axis=0) + 1e-4
    assert found.dtype == jnp.float32
    assert np.all(np.abs(found - np.float64(rows) @ widened) <= bound)


def test_in_integers_a_row_does_not_depend_on_the_rows_beside_it():
    """Sums of integers are exact in any order, so the bits are the same."""
    rows, weight, _ = int8_factors(6)
    for stored, first in ((weight, True), (weight.T, False)):
        alone = [int8.in_parts(row[None], stored, first) for row in rows]
        found = int8.in_parts(rows, stored, first)
        np.testing.assert_array_equal(found, jnp.concatenate(alone))


def test_uint8_and_the_number_of_rows_change_no_bit():
    """A weight shifted by 128 gives the sums of the int8 one, for 1 to 16 rows."""
    rows, weight, _ = int8_factors(16, width=1100)
    apply = jax.jit(int8.in_parts, static_argnums=2)
    expected = apply(rows, weight.T, False)
    shifted = int8.unsigned(weight.T)
    np.testing.assert_array_equal(int8.signed(shifted), weight.T)
    for count in range(1, 17):
        found = apply(rows[:count], shifted, False)
        np.testing.assert_array_equal(found, expected[:count])


@pytest.mark.parametrize("variant", ["v1_0", "v1_1"])  # a tied head, and one of its own
def test_uint8_is_stored_where_vnni_is(variant, tmp_path, monkeypatch):
    """Embeddings and logits stay the same, and another platform gets int8 back."""
    monkeypatch.setattr(devices, "LARGE", {"int8": 1, "bfloat16": 1})
    place = t5_variants.write(tmp_path, t5_variants.VARIANTS[variant])
    found = []
    for units in ({"int8"}, {"int8", "uint8"}):
        jax.clear_caches()
        monkeypatch.setattr(devices, "cpu_multiplies", lambda name, units=units: name in units)
        module = load(place, weights="int8").model.module()
        head = module.turned_weight()
        assert head.dtype == (jnp.uint8 if "uint8" in units else jnp.int8)
        hidden = jax.random.normal(jax.random.key(0), (1, 5, head.shape[1]))
        moved = LanguageModel.of(module, platform="gpu").module().turned_weight()
        found.append((module.embed(jnp.arange(9)[None]), module.logits(hidden), moved[...]))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_one_part_would_be_seen():
    """With the coarse part alone the error is beyond the bound above."""
    rows, weight, scale = int8_factors(3)
    step = jnp.abs(rows).max(axis=1, keepdims=True) / 127
    coarse = (jnp.rint(rows / step) * step) @ (weight.astype(jnp.float32) * scale[None])
    widened = np.float64(weight) * np.float64(scale)
    exact = np.float64(rows) @ widened
    bound = np.abs(rows).max() / 64_516 * np.abs(widened).sum(axis=0) + 1e-4
    assert np.any(np.abs(coarse - exact) > bound)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(units, wrong):
    """And a row of zeros gives zeros."""
    rows, weight, scale = int8_factors(3)
    rows = rows.at[0, 0].set(wrong).at[1].set(0)
    found = int8.product(rows, weight, scale, True)
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1], 0)
    assert np.isfinite(found[2]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_loop_copies_no_whole_table(tied):
    """It reads rows of a bfloat16 table; else XLA makes a float32 copy of the table on a CPU."""
    made = llama.LlamaConfig(4099, 32, 48, 1, 4, tie_word_embeddings=tied)
    wide = LanguageModel.of(llama.Llama(made, rngs=nnx.Rngs(0)))
    model = LanguageModel.of(narrow_weights(wide.module(), jnp.bfloat16))

    def walk(model, tokens, count):
        def turn(i, total):
            return total + model.module().embed(tokens + i)

        return jax.lax.fori_loop(0, count, turn, jnp.zeros((1, 3, 32)))

    tokens = jnp.array([[1, 2, 3]])
    options = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
    program = jax.jit(walk, compiler_options=options).lower(model, tokens, jnp.int32(2)).compile()
    assert program.memory_analysis().temp_size_in_bytes < model.params["embedding"].nbytes / 2
    expected = wide.module().embed(tokens).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(model.module().embed(tokens), expected)
