"""Weights and caches in 8 bits: how far they are from the floats, that no loop keeps the floats
too, and that the output's distribution is that of the quantised target."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import gpt_variants
import llama_variants
import specjax
import t5_variants
from eagles import EOS, eagle_of, target_of
from experiments.beam.decoding import beam_search
from lowered import Found, loops
from reference import sequence_distribution, total_variation
from specjax import autoregressive, checkpoints, devices, drafters, loop, speculative
from specjax.checkpoints import tensors
from specjax.cli import defaults
from specjax.decoding import building, programs
from specjax.drafters import attached
from specjax.drafters.base import ModelDrafter
from specjax.drafters.frequent import frequent
from specjax.drafters.views import early_exit
from specjax.measure.provenance import dtype_of
from specjax.models import int8, memory
from specjax.models.attention import KV
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange, quantise_weights
from specjax.models.t5 import T5, T5Config
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from specjax.testing.enumeration import output_distribution
from specjax.types import Inputs
from table_models import inputs_of

pytestmark = pytest.mark.sweep

BOTH = {"weights": "int8", "cache": "int8"}
FAMILIES = {
    "t5": (t5_variants, "v1_1"),
    "t5 tied": (t5_variants, "v1_0"),
    "gpt": (gpt_variants, "untied"),
    "gpt tied": (gpt_variants, "tied"),
    "llama": (llama_variants, "llama3"),
}
KINDS = ("t5", "gpt", "llama")
SLOW = pytest.mark.slow


@pytest.fixture(params=FAMILIES)
def directory(request, tmp_path):
    module, variant = FAMILIES[request.param]
    return module.write(tmp_path, module.VARIANTS[variant])


def in_int8(checkpoint, weights=True, cache=True):
    """The same, as `load` would give it."""
    module = checkpoint.model.module()
    if weights:
        quantise_weights(module)
    if cache:
        module.int8_cache = True
    model = LanguageModel.of(module, checkpoint.model.vocab_size)
    return dataclasses.replace(checkpoint, model=model)


@functools.cache
def target_in_int8(kind, size=5, dtype=jnp.float32):
    return in_int8(target_of(kind, size, dtype))


def wide(matrix, scale, turned):
    """The floats that a matrix in int8 stands for."""
    scale = np.expand_dims(np.asarray(scale[...]), 0 if turned else 1)
    return np.asarray(matrix[...], np.float32) * scale


def matrices(narrow, floats):
    """Each matrix in int8: itself, its scales, the floats, and whether both are (in, out)."""
    ours, theirs = (
        [node for _, node in nnx.iter_graph(module) if hasattr(node, "matrices")]
        for module in (narrow, floats)
    )
    for mine, other in zip(ours, theirs, strict=True):
        for name, turned in mine.matrices().items():
            yield getattr(mine, name), getattr(mine, f"{name}_scale"), getattr(other, name), turned


def check_rounding(narrow, floats):
    """|w − ŵ| ≤ scale / 2, where scale is what 127 stands for, of each output channel."""
    count = 0
    for matrix, scale, exact, turned in matrices(narrow.module(), floats.module()):
        exact, axis = np.asarray(exact[...], np.float32), 0 if turned else 1
        assert matrix.dtype == np.int8
        assert scale.shape == (exact.shape[1 - axis],)
        np.testing.assert_allclose(scale[...], np.abs(exact).max(axis) / 127, rtol=1e-6)
        error = np.abs(wide(matrix, scale, turned) - exact)
        assert np.all(error <= np.expand_dims(scale[...], axis) * (0.5 + 1e-4))
        assert error.max() > 0
        count += exact.size
    return count


def test_weights_are_rounded_as_they_are_read(directory, monkeypatch):
    """A piece at a time, to half a step of each output channel; and as a model in memory is."""
    floats = checkpoints.load(directory)
    monkeypatch.setattr(tensors, "CHUNK", 200)  # a few rows
    found = checkpoints.load(directory, weights="int8")
    count = check_rounding(found.model, floats.model)
    assert count > 0.9 * sum(x.size for x in jax.tree.leaves(floats.model))
    other = in_int8(floats, cache=False).model
    assert jax.tree.structure(found.model) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, found.model, other)
    outlined = checkpoints.outline(directory, weights="int8").model
    assert jax.tree.structure(outlined) == jax.tree.structure(other)
    assert memory.nbytes(outlined) == memory.nbytes(other) < 0.45 * memory.nbytes(floats.model)
    assert dtype_of(found) == "float32, weights int8"


@pytest.mark.parametrize(("axis", "reads"), [(0, 1), (1, 3)])
def test_whole_rows_are_read_once(axis, reads):
    """Pieces of rows do for scales and numbers; pieces of columns are read again for numbers."""
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    begun = []

    @dataclasses.dataclass(frozen=True, eq=False)
    class InTwo(tensors.Held):
        def pieces(self):
            begun.append(axis)
            for part in np.split(np.arange(self.shape[axis]), 2):
                at = [slice(None), slice(None)]
                at[axis] = slice(part[0], part[-1] + 1)
                yield tuple(at), self.array[tuple(at)]

    out, scale = np.zeros((4, 6), np.int8), np.zeros(4, np.float32)
    tensors.read_int8(InTwo(pathlib.Path("x"), x.dtype, x.shape, x), out, scale)
    assert len(begun) == reads
    jax.tree.map(np.testing.assert_array_equal, (out, scale), int8.quantise(x, axis=1))


def logits(model, tokens=((3, 1, 2, 4, 1), (1, 1, 4, 0, 2))):
    """(B, K, V) of whole texts."""
    return read(model, jnp.asarray(tokens, jnp.int32), inputs_of([[0], [0]], [[3, 1], [4]]))


@jax.jit
def read(model, tokens, inputs):
    context, cache = model.start(inputs, 8)
    hidden, _ = model(tokens, jnp.zeros((2,), jnp.int32), context, cache)
    return model.logits(hidden)


@pytest.mark.parametrize("kind", ["t5", "gpt", pytest.param("llama", marks=SLOW)])
def test_logits_are_those_of_the_rounded_weights(kind, monkeypatch):
    """A model in floats with the same numbers gives them too; the exact ones are near. So do
    integers, and blocks, of which the last overlaps the one before.
    """
    monkeypatch.setattr(devices, "cpu_multiplies", lambda _: False)
    read.clear_cache()
    floats = target_of(kind)
    weights = in_int8(floats, cache=False).model
    module = floats.model.module()
    for matrix, scale, exact, turned in matrices(weights.module(), module):
        exact.set_value(jnp.asarray(wide(matrix, scale, turned)))
    same, exact = logits(LanguageModel.of(module)), logits(floats.model)
    found = logits(weights)
    np.testing.assert_allclose(found, same, atol=2e-5 * float(jnp.abs(same).max()))
    size = float(jnp.std(exact))
    assert 1e-4 * size < float(jnp.abs(found - exact).max()) < 0.2 * size
    with monkeypatch.context() as patch:
        patch.setattr(devices, "cpu_multiplies", lambda _: True)
        read.clear_cache()
        np.testing.assert_allclose(logits(weights), found, atol=2e-4 * float(jnp.abs(same).max()))
    if kind != "gpt":
        return
    monkeypatch.setattr(int8, "BLOCK", 40)  # weights; most matrices have 64 to 288
    read.clear_cache()
    np.testing.assert_allclose(logits(weights), found, atol=2e-5 * float(jnp.abs(same).max()))


# --- caches --------------------------------------------------------------------------------------


def test_a_vector_and_its_scale():
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    x[1, 2] = 0
    for kind in (np.asarray, jnp.asarray):
        narrow, scale = int8.quantise(kind(x), axis=1)
        assert (narrow.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (2, 5))
        error = np.abs(np.asarray(narrow) * np.asarray(scale)[:, None] - x)
        assert np.all(error <= np.asarray(scale)[:, None] * (0.5 + 1e-4))
        assert np.abs(np.asarray(narrow)).max() == 127


def in_pieces(model, tokens, inputs, counts):
    """Hidden states of a text in several calls."""
    context, cache = model.start(inputs, 200)
    piece = jax.jit(lambda model, *args: model(*args))
    at, found = jnp.zeros((len(tokens),), jnp.int32), []
    for count in counts:
        first = int(at[0])
        hidden, cache = piece(model, tokens[:, first : first + count], at, context, cache)
        found.append(hidden)
        at += count
    return jnp.concatenate(found, axis=1)


def apart(model):
    """By how much the hidden states of a text in pieces and in one call differ, of 129 tokens of
    which the first block of attention holds 128; by their size."""
    tokens = jax.random.randint(jax.random.key(0), (2, 129), 0, 5, jnp.int32)
    ids = jnp.array([[3, 4, 1], [4, 1, 0]], jnp.int32)
    inputs = Inputs(ids, jnp.array([3, 2], jnp.int32), tokens[:, :1], jnp.ones((2,), jnp.int32))
    module, zeros = model.module(), jnp.zeros((2,), jnp.int32)
    context = module.encode(inputs.source, inputs.source_len)
    whole, _ = jax.jit(lambda model, *args: model.module()(*args, None))(
        model, tokens, zeros, context
    )
    pieces = in_pieces(model, tokens, inputs, (126, 1, 1, 1))
    return jnp.abs(pieces - whole) / whole.std()


@pytest.mark.parametrize("kind", ["t5", pytest.param("llama", marks=SLOW)])
def test_an_int8_cache_in_pieces(kind, monkeypatch):
    """What a query sees does not depend on the call in which a token came, nor on whether there is
    a cache at all. With scales that are larger in a call of more tokens it would."""
    model = target_in_int8(kind).model
    assert float(apart(model).max()) < 1e-4
    if kind == "llama":
        plain = KV.quantised

        def coarser(self):
            keys, values = (scale * scale.shape[2] for scale in plain(self)[2:])
            rounded = (
                jnp.rint(self.keys / keys[:, :, None, :]).astype(jnp.int8),
                jnp.rint(self.values / values[..., None]).astype(jnp.int8),
            )
            return KV(*rounded, keys, values)

        monkeypatch.setattr(KV, "quantised", coarser)
        jax.clear_caches()
        assert float(apart(model).max()) > 1e-2


def test_bytes_of_a_cache():
    """A quarter, and a scale for each key and each value."""
    model = target_in_int8("t5").model
    inputs = Inputs(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 30), (2,), (2, 1), (2,))))

    def size(model):
        return memory.nbytes(jax.eval_shape(lambda m, i: m.start(i, 64), model, inputs))

    slots = 2 * 2 * 2 * (64 + 64)  # of keys and values, in whole tiles: layers, rows, heads
    floats = size(in_int8(target_of("t5"), cache=False).model)
    assert floats - size(model) == 2 * slots * (4 * 4 - (4 + 4))
    need, narrow = (
        programs.needed(building.plain(t, Sampling(0.0)), t, 30, rows=2, max_new_tokens=40)
        for t in (target_of("t5"), in_int8(target_of("t5")))
    )
    assert narrow.params < 0.6 * need.params
    assert narrow.state < need.state


# --- what XLA makes of it ------------------------------------------------------------------------


def outlined(cache):
    """A T5 whose loop would keep megabytes of floats, as shapes."""
    config = T5Config(64, 256, 32, 512, num_layers=1, num_decoder_layers=2, num_heads=8)

    def make():
        module = arrange(quantise_weights(T5(config, rngs=nnx.Rngs(0))), "cpu")
        module.int8_cache = cache
        return module

    return LanguageModel.of(nnx.eval_shape(make), platform="cpu")


def temporaries(model):
    """Bytes of the compiled loop of plain decoding of 16 rows with sources of 512 tokens."""
    method = autoregressive.Autoregressive(model, Sampling(0.0), jnp.int32([1]))
    inputs = inputs_of([[0]] * 16, [[3] * 512] * 16)
    zeros = jnp.zeros((16,), jnp.int32)
    args = method, inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
    context, state = jax.eval_shape(lambda *args: loop.start(*args, buffer_len=16), *args)
    # What is moved out of a loop is so before code is made.
    options = {"xla_backend_optimization_level": 0}
    return memory.temporaries(loop.decode.lower(method, context, state).compile(options))


def test_no_loop_keeps_the_floats(monkeypatch):
    """Neither of the weights nor of the encoder's keys and values. Without `late` it keeps those of
    the weights."""
    monkeypatch.setattr(devices, "cpu_multiplies", lambda _: False)
    loop.decode.clear_cache()
    model = outlined(cache=True)
    layers_of = model.params["decoder"]
    weights = 4 * sum(x.size for x in jax.tree.leaves(layers_of) if x.dtype == jnp.int8)
    assert temporaries(model) < 0.5 * weights
    monkeypatch.setattr(int8, "late", lambda narrow, *_: narrow)
    loop.decode.clear_cache()
    assert temporaries(model) > weights


def test_loops_lower_for_every_platform():
    """Both loops, in bfloat16, and on an accelerator with no loop more than floats have: there the
    weights stand behind a barrier."""

    def model(layers):
        config = T5Config(16, 8, 4, 8, num_layers=1, num_decoder_layers=layers, num_heads=2)
        module = quantise_weights(T5(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        module.int8_cache = True
        return LanguageModel.of(module, platform="gpu")

    inputs, platforms = inputs_of([[0], [0]], [[3, 1], [4]]), ("cpu", "cuda", "tpu")
    zeros, eos, warm = jnp.zeros((2,), jnp.int32), jnp.int32([1]), Sampling(0.7)
    target, draft = model(2), ModelDrafter(model(1))
    plain = autoregressive.Autoregressive(target, warm, eos)
    both = speculative.Speculative(target, draft, Token(), constant(3), warm, eos, 3)
    # A layer has 6 projections and the encoder's keys and values; and the head.
    of_target, of_draft = 2 * 8 + 1, 8 + 1
    for method, whiles, barriers in ((plain, 1, of_target), (both, 2, of_target + 2 * of_draft)):
        args = method, inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
        lowered = export.export(loop.start, platforms=platforms)(*args, buffer_len=12)
        assert lowered.platforms == platforms
        state = jax.eval_shape(lambda *args: loop.start(*args, buffer_len=12), *args)
        traced = loop.decode.trace(method, *state)
        for platform in platforms[1:]:
            assert loops(traced, platform) == Found(whiles, open_whiles=1, open_branches=0)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert text.count("stablehlo.optimization_barrier") == barriers


# --- decoding ------------------------------------------------------------------------------------

TEXTS = [[3, 1, 2], [1, 1], [4, 3, 2, 1]]


def same(target, draft, **options):
    """Outputs of speculative decoding, which are those of plain decoding with the same target."""
    options = {"max_new_tokens": 12} | ({} if "tree" in options else {"gamma": 3}) | options
    found = specjax.generate(target, draft, TEXTS, **options)
    options = {"max_new_tokens": options["max_new_tokens"]}
    assert found.tokens == specjax.generate(target, None, TEXTS, **options).tokens
    return found


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_greedy_identity(kind):
    """With a target in 8 bits; and with a draft in 8 bits of a target that is not."""
    target, narrow = target_of(kind), target_in_int8(kind)
    same(narrow, target)
    same(target, narrow)


def test_enumerated_distribution_is_that_of_the_quantised_target():
    """Outputs of up to 4 tokens over 3, through the real step: TV < 1e-6. That of the floats is
    further away."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        floats, inputs, warm = target_of("gpt", 3, jnp.float64), inputs_of([[1, 0]]), Sampling(0.7)
        target = target_in_int8("gpt", 3, jnp.float64)
        drafter = ModelDrafter(target_of("gpt", 3, jnp.float64, 1).model)
        method = speculative.Speculative(
            target.model, drafter, Token(), constant(2), warm, jnp.int32([EOS]), 2
        )
        expected = sequence_distribution(target.model, inputs, warm, {EOS}, 4)
        found = output_distribution(method, inputs, 4)
        assert total_variation(found, expected) < 1e-6
        others = sequence_distribution(floats.model, inputs, warm, {EOS}, 4)
        assert total_variation(found, others) > 1e-4


@pytest.mark.slow
def test_trees():
    """`compact` copies the scales along."""
    same(target_in_int8("llama"), target_of("llama"), tree="fixed(2, 1)")


def test_rows_that_share_what_the_encoder_said():
    """Beams ask one row of keys and values, which stays one."""
    one = KV(jnp.ones((1, 2, 8, 16)), jnp.ones((1, 2, 16, 8))).quantised()
    kept = jax.jit(KV.kept_narrow)(one, jnp.ones((3, 2, 1, 8)))
    for before, after in zip(one, kept, strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.slow
def test_beams(pair):
    """A beam that takes another's cache takes its scales too."""
    narrow, options = in_int8(pair.target), {"width": 2, "max_new_tokens": 5}
    plain = beam_search(narrow, None, TEXTS[:1], **options)
    found = beam_search(narrow, pair.draft, TEXTS[:1], **options, draft_width=4, gamma=2)
    tokens = [[one.tokens for one in row.hypotheses] for row in plain]
    assert [[one.tokens for one in row.hypotheses] for row in found] == tokens


def test_what_shares_the_targets_arrays():
    """An exit has its scales too; a head over frequent ids takes theirs."""
    target = target_in_int8("gpt")
    ours = {id(x) for x in jax.tree.leaves(target.model)}
    assert ours >= {id(x) for x in jax.tree.leaves(early_exit(target, 1).model)}
    few = frequent(target, [0, 1, 3]).model
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    ids = [0, 1, EOS, 3]
    np.testing.assert_allclose(few.logits(hidden)[:, ids], target.model.logits(hidden)[:, ids])


def test_a_drafter_of_the_floats_serves_the_rounded_target(tmp_path):
    """And the other way round; other weights are refused in int8 too."""
    floats, narrow = target_of("gpt"), target_in_int8("gpt")
    attached.save(tmp_path / "floats", eagle_of(floats, 1), floats)
    attached.save(tmp_path / "narrow", eagle_of(narrow, 1), narrow)
    for directory in ("floats", "narrow"):
        for target in (floats, narrow):
            assert attached.load(tmp_path / directory, target).dtype == jnp.float32
        for other in (target_of("gpt", seed=7), in_int8(target_of("gpt", seed=7))):
            with pytest.raises(ValueError, match="other weights"):
                attached.load(tmp_path / directory, other)


# --- names and refusals --------------------------------------------------------------------------


def test_by_name(tmp_path):
    directory = gpt_variants.write(tmp_path / "gpt", gpt_variants.VARIANTS["tied"])
    target = checkpoints.load(directory, **BOTH)
    assert dtype_of(target) == "float32, weights and cache int8"
    assert dtype_of(checkpoints.load(directory, cache="int8")) == "float32, cache int8"
    for name, said in (
        (f"int8(draft='{directory}')", "float32, weights int8"),
        (f"int8(draft='{directory}', cache=True)", "float32, weights and cache int8"),
    ):
        draft = drafters.load(name, target)
        assert draft.name == name
        assert dtype_of(draft) == said
        assert drafters.parameters(draft) > drafters.parameters(checkpoints.load(directory))
    with pytest.raises(ValueError, match="is no model of its own"):
        drafters.load("int8(draft='lookup')", target)
    config = defaults.decode()
    config.dtype, config.weights = "bfloat16", "int8"
    assert defaults.precision(config) == {"dtype": jnp.bfloat16, "weights": "int8", "cache": None}
    loaded = checkpoints.load(directory, **defaults.precision(config))
    assert dtype_of(loaded) == "float32, weights int8"  # a CPU computes in float32
    config.cache = "int4"
    with pytest.raises(ValueError, match="cache='int4' must be one of '', 'int8'"):
        defaults.precision(config)


def test_what_is_refused(tmp_path, monkeypatch):
    directory = gpt_variants.write(tmp_path / "gpt", gpt_variants.VARIANTS["tied"])
    with pytest.raises(ValueError, match="weights='int4' must be 'int8', or be left out"):
        checkpoints.load(directory, weights="int4")
    with pytest.raises(ValueError, match="cache='bfloat16' must be 'int8'"):
        checkpoints.outline(directory, cache="bfloat16")
    with pytest.raises(ValueError, match=r"weights in int8.* Save what specjax\.load gives w"):
        checkpoints.save(tmp_path / "out", checkpoints.load(directory, **BOTH))
    checkpoints.save(tmp_path / "out", checkpoints.load(directory, cache="int8"))
    monkeypatch.setattr(memory, "memory_free", lambda device: 5)
    with pytest.raises(ValueError, match=r"in int8 need .*\. Choose a smaller model, or free"):
        checkpoints.load(directory, weights="int8")


def test_what_is_not_finite_stays_so(tmp_path):
    """A damaged weight is no zero: its channel's scale, and so what it says, is NaN."""
    x = np.ones((4, 3), np.float32)
    x[2, 1] = np.nan
    x[3, 0] = np.inf
    out, scale = np.zeros((4, 3), np.int8), np.zeros(4, np.float32)
    tensors.read_int8(tensors.Held.of(x), out, scale)
    np.testing.assert_array_equal(np.isfinite(scale), [True, True, False, False])
