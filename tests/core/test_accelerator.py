"""What an accelerator would run, run on a CPU: other loops, but the same attention and tokens."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import test_loops
import toy_policies
from command_line import ROOT
from specjax import checkpoints, devices, loop, speculative
from specjax.decoding import building
from specjax.decoding.programs import blank_arguments
from specjax.decoding.starting import room_of
from specjax.drafters.base import ModelDrafter
from specjax.drafters.ngram import PromptLookup
from specjax.models.attention import KV, attend_and_write, causal_bias, empty
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.layers import arrange
from specjax.models.llama import Gemma3Config, Llama, Qwen2Config
from specjax.models.t5 import T5, T5Config
from specjax.models.t5gemma import T5Gemma, T5Gemma2Config
from specjax.policies.constant import Constant
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from specjax.state import unfinished
from specjax.types import Inputs
from table_models import TableModel, inputs_of, random_table

PLATFORMS = ("cpu", "accelerator")


@pytest.fixture
def on(monkeypatch):
    """on(platform, function): the function as it would be there, compiled for this CPU."""

    def choose(platform, function):
        @jax.jit
        def run(*args):
            with monkeypatch.context() as patch:
                patch.setattr(devices, "by_platform", lambda *x, **forms: forms[platform](*x))
                return function(*args)

        return run

    return choose


# --- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("start", [[0, 0], [5, 127], [128, 2], [290, 298], [299, 299]])
def test_both_forms_of_attention_agree(start, window, stored, on):
    """Slots past a row's start hold large rubbish."""
    length, count, heads, size = 320, 3, 2, 4
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    stale = jnp.where(jnp.arange(length) >= max(start), 1e4, 0.0)[None, None, None, :]
    keys, values = normal(2, heads, size, length), normal(2, heads, length, size)
    cache = KV(keys + stale, values + jnp.moveaxis(stale, 2, 3))
    position = jnp.array(start, jnp.int32)
    bias = causal_bias(position, count, length, window)
    queries, keys, values = (normal(2, heads, count, size) for _ in range(3))
    cache = cache.quantised() if stored == "int8" else cache
    args = queries, KV.of(keys, values), cache, bias, position
    (mixed, one), (also, other) = (on(platform, attend_and_write)(*args) for platform in PLATFORMS)
    np.testing.assert_allclose(mixed, also, rtol=1e-5, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    alone = attend_and_write(*args[:2], None, *args[3:])[0]
    assert max(start) == 0 or not np.allclose(mixed, alone, rtol=1e-2)


def decoder(family: str):
    if family == "t5":
        config = T5Config(31, 8, 4, 8, num_layers=1, num_decoder_layers=2, num_heads=2)
        return T5(config, rngs=nnx.Rngs(0))
    if family == "gpt2":
        config = GPTConfig(31, 64, 8, 2, 2, bos_token_id=1, pad_token_id=0)
        return GPT(config, rngs=nnx.Rngs(0))
    shape = 31, 8, 16, 2, 4, 2
    if family == "t5gemma2":
        config = T5Gemma2Config(*shape, encoder=Gemma3Config(*shape), sliding_window=5)
        return T5Gemma(config, rngs=nnx.Rngs(0))
    config = Qwen2Config(*shape, sliding_window=5, full_layers=(1,))
    return Llama(config, rngs=nnx.Rngs(0))


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["t5", "gpt2", "llama", "t5gemma2"])
def test_families_say_the_same(family, on):
    """Rows at positions of their own, behind a prompt; the T5 with its bias, the Llama layout with
    groups, and with a window in one of its layers."""
    graphdef, params = nnx.split(decoder(family))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 31, jnp.int32)
    ids = jnp.array([[3, 4, 1], [5, 1, 0]], jnp.int32)
    inputs = Inputs(ids, jnp.array([3, 2], jnp.int32), tokens, jnp.array([9, 9], jnp.int32))

    def run(params, tokens, start, context, cache):
        model = nnx.merge(graphdef, params)
        hidden, cache = model(tokens, start, context, cache)
        return model.logits(hidden), cache

    begun = jax.jit(lambda params: nnx.merge(graphdef, params).start(inputs, 24))(params)
    args = params, tokens[:, :4], jnp.array([8, 5], jnp.int32), *begun
    here, there = (on(platform, run)(*args) for platform in PLATFORMS)
    assert len(np.unique(np.asarray(here[0]).round(3))) > 100
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), here, there)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_softmax_of_short_floats_is_float32(platform, on):
    short = jnp.ones((1, 1, 2, 4), jnp.bfloat16)
    cache = empty(1, 1, 64, 4, jnp.bfloat16)
    start = jnp.array([3], jnp.int32)
    args = short, KV.of(short, short), cache, causal_bias(start, 2, 64), start
    traced = on(platform, attend_and_write).trace(*args)
    wide = re.findall(r":(\w+)\[[^\]]*\] = exp ", str(traced.jaxpr))
    assert set(wide) == {"f32"}
    # On a CPU of a tile, and of what was there.
    assert len(wide) == {"cpu": 2, "accelerator": 1}[platform]


# --- logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_short_weights_are_float32(dtype, turned, tied):
    """Those of float32 products of the same numbers, and not these rounded to what weights are."""
    config = GPTConfig(
        301, 16, 64, 0, 2, tie_word_embeddings=tied, bos_token_id=1, pad_token_id=0
    )  # fmt: skip
    module = arrange(GPT(config, rngs=nnx.Rngs(0), dtype=dtype), "cpu" if turned else None)
    hidden = (10 * jax.random.normal(jax.random.key(0), (2, 3, 64))).astype(dtype)
    logits = module.logits(hidden)
    assert logits.dtype == jnp.float32
    head = np.asarray(module.turned_weight()[...], np.float64)
    exact = np.asarray(hidden, np.float64) @ (head if turned else head.T)
    rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(dtype), np.float64)
    error, of_rounding = (np.abs(x - exact).max() for x in (np.asarray(logits), rounded))
    assert error < 0.01 * of_rounding


# --- the loop ----------------------------------------------------------------------------------


def method_of(drafter: str, temperature: float, gamma: int) -> Speculative:
    """Drafts of γ tokens where there could be 4, most of which are accepted."""
    target = random_table(1, 5, dtype=jnp.float32)
    draft = TableModel(0.7 * target.table)
    return Speculative(
        target,
        PromptLookup(5, max_ngram=2) if drafter == "lookup" else ModelDrafter(draft),
        Token(),
        Constant(jnp.int32(gamma)),
        Sampling(temperature),
        jnp.int32([3]),
        4,
    )


@pytest.mark.sweep
@pytest.mark.parametrize(("drafter", "temperature"), [("model", 1.0), ("lookup", 0.0)])
def test_drafts_of_known_length_give_the_same_tokens(drafter, temperature, on):
    """Rows with budgets and ends of their own, and drafts that end early or never begin: by their
    budget, by the drafter or because γ < γ_max. The table depends on every slot of the cache."""

    def decode(method, contexts, state):
        def one_round(state):
            return speculative.step(method, contexts, state)[0]

        return jax.lax.while_loop(unfinished, one_round, state)

    here, there = (on(platform, decode) for platform in PLATFORMS)
    for gamma in (1, 2, 4):
        method = method_of(drafter, temperature, gamma)
        inputs = inputs_of([[0], [1, 2, 1], [2, 2], [4], [0, 1]])
        begun = test_loops.begin(method, inputs, [1, 2, 13, 17, 0])
        one, other = here(method, *begun), there(method, *begun)
        assert int(one.stats.verified.sum()) > 0
        for name in ("length", "done", "rounds", "stats", "target_finite", "draft_finite"):
            jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(other, name))
        for row, same, length in zip(one.tokens, other.tokens, one.length, strict=True):
            np.testing.assert_array_equal(row[:length], same[:length])


@pytest.mark.sweep
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_drafter_of_a_fixed_policy_lacks_two_tokens_at_most(platform, on):
    """In every round, whatever was accepted: it need not know how far it is behind."""
    method = method_of("model", 1.0, 2)
    contexts, state = test_loops.begin(method, inputs_of([[0], [1, 2, 1], [4]]), [3, 17, 17])
    step = on(platform, lambda *args: speculative.step(*args)[0])
    rounds = 0
    while unfinished(state):
        assert np.all(np.asarray(state.done | (state.drafter.end >= state.length - 2)))
        # The draft's cache holds the text but for the last two tokens.
        for row, fed, length, done in zip(
            state.tokens, state.drafter.cache, state.length, state.done, strict=True
        ):
            known = max(int(length) - 2, 0)
            assert done or row[:known].tolist() == fed[:known].tolist()
        state, rounds = step(method, contexts, state), rounds + 1
    assert rounds >= 3


def test_only_a_constant_policy_is_fixed():
    """A policy that saves calls of the drafter must be able to on an accelerator as well."""
    found = toy_policies.library(4, 5)
    assert [name for name, policy in found.items() if policy.fixed] == ["constant"]


# What XLA has to know of an H100 to compile for it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 core_count: 132
  threads_per_core_limit: 2048 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def compiled_for_h100(method, target, longest: int, *, max_new_tokens: int, rows: int) -> str:
    """The text of `loop.decode`, compiled from shapes alone for a GPU that is described to XLA."""
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
    everywhere = NamedSharding(topologies.make_mesh(described, (1,), ("device",)), PartitionSpec())
    begun = blank_arguments(target, longest, rows)
    room = room_of(method, begun[0], max_new_tokens)
    args = method, *jax.eval_shape(functools.partial(loop.start, buffer_len=room), method, *begun)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=everywhere), args
    )
    lowered = loop.decode.trace(*args).lower(lowering_platforms=("cuda",))
    # Autotuning would time kernels.
    return lowered.compile({"xla_gpu_autotune_level": 0}).as_text() or ""


@pytest.mark.parametrize("cache", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_cache_is_copied_on_a_gpu(rows, cache):
    """Neither in plain decoding nor in a round with narrower passes; no GPU is needed."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax's plugin for CUDA is not installed")
    family = checkpoints.described(ROOT / "families/prose/draft").config
    model = checkpoints.shapes(family, dtype=jnp.bfloat16, cache=cache, platform="gpu")
    both = checkpoints.Checkpoint("prose", model, family, eos_ids=(1,))
    options: dict[str, Any] = {"gamma": 3, "sampling": Sampling(1.0), "policy": "svip"}
    for method in (
        building.build(both, None, gamma=3, sampling=Sampling(1.0)),
        building.build(both, both, passes=(rows, 2 * rows), **options),
    ):
        text = compiled_for_h100(method, both, 32, max_new_tokens=75, rows=rows)
        # A cache, of 5 heads of 16 and three digits of slots, comes out of updates alone: a copy
        # may hide in a fusion, which XLA names after its last operation.
        cache_of = rf"\[{rows},5,(?:16,\d{{3}}|\d{{3}},16)\]"
        made = rf"^ +(?:ROOT )?%(\S+) = [^=]*{cache_of}[^=]* (?:fusion|copy|copy-start)\("
        names = re.findall(made, re.sub(r"/\*.*?\*/", "", text), re.MULTILINE)
        assert len(names) >= 2
        assert all("update_slice" in name or "scatter" in name for name in names), names
