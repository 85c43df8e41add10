"""Both loops lower for every platform, so that a change that only a CPU can run is seen; and on an
accelerator a round asks the device nothing but whether it was the last. Chains gather from no
cache.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export
from jax.sharding import AbstractMesh

from lowered import Found, gathered, loops
from specjax import autoregressive, checkpoints, loop, speculative
from specjax.drafters.base import ModelDrafter
from specjax.drafters.ngram import PromptLookup
from specjax.models import meshes, sharding
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Llama, Qwen2Config
from specjax.models.t5 import T5, T5Config
from specjax.policies import constant
from specjax.policies.heuristic import heuristic
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from specjax.trees import fixed
from specjax.trees.speculative import TreeSpeculative
from table_models import inputs_of
from tiny_models import quick, slow

pytestmark = pytest.mark.sweep

PLATFORMS = ("cpu", "cuda", "tpu")
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "plain": Sampling(0.7),
    "filtered": Sampling(0.7, top_k=5, top_p=0.9),
}


def model(layers: int, platform: str) -> LanguageModel:
    config = T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=layers
    )
    return LanguageModel.of(T5(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16), platform=platform)


def check(method):
    """`start`, `decode` and `admit` lower for all platforms, and `decode` is one loop for each."""
    inputs = inputs_of([[0], [0]], [[3, 1], [4]])
    zeros = jnp.zeros((2,), jnp.int32)
    args = method, inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
    lowered = export.export(loop.start, platforms=PLATFORMS)(*args, buffer_len=12)
    assert lowered.platforms == PLATFORMS
    state = jax.eval_shape(lambda *args: loop.start(*args, buffer_len=12), *args)
    lowered = export.export(loop.decode, platforms=PLATFORMS)(method, *state)
    assert lowered.platforms == PLATFORMS
    assert "stablehlo.while" in lowered.mlir_module()
    assert "stablehlo.custom_call" not in lowered.mlir_module()
    some = jax.tree.map(lambda x: x[:1], args[1:])
    lowered = export.export(loop.admit, platforms=PLATFORMS)(method, *state, zeros[:1], *some)
    assert lowered.platforms == PLATFORMS


@pytest.mark.parametrize(
    ("distribution", "platform"),
    quick(
        itertools.product(SAMPLINGS, ("cpu", "gpu")),
        ("greedy", "cpu"), ("plain", "gpu"), ("filtered", "gpu"),
    ),
)  # fmt: skip
def test_loops_lower_for_every_platform(distribution, platform):
    """A tiny T5 pair in bfloat16, with weights as they lie on a CPU and elsewhere."""
    target, chosen, eos = model(2, platform), SAMPLINGS[distribution], jnp.int32([1])
    check(autoregressive.Autoregressive(target, chosen, eos))
    method = speculative.Speculative(
        target, ModelDrafter(model(1, platform)), Token(), constant(3), chosen, eos, 3
    )
    check(method)


def shapes(family: str, layers: int) -> LanguageModel:
    """A decoder of so many layers, as shapes; every other one of the Llama layout has a window."""

    def make() -> nnx.Module:
        common: dict[str, Any] = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16}
        if family == "t5":
            config = T5Config(16, 8, 4, 8, num_layers=1, num_decoder_layers=layers, num_heads=2)
            return T5(config, **common)
        if family == "gpt2":
            ids = {"bos_token_id": 1, "pad_token_id": 0}
            return GPT(GPTConfig(16, 40, 8, layers, 2, **ids), **common)
        full = tuple(range(0, layers, 2))
        config = Qwen2Config(16, 8, 12, layers, 4, 2, sliding_window=4, full_layers=full)
        return Llama(config, **common)

    return LanguageModel.of(nnx.eval_shape(make), platform="gpu")


def started(method, slots=16):
    """Contexts and state, as shapes."""
    inputs = inputs_of([[0, 2, 3], [0, 1, 0]], [[3, 1], [4]])
    zeros = jnp.zeros((2,), jnp.int32)
    args = method, inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
    return jax.eval_shape(lambda *args: loop.start(*args, buffer_len=slots), *args)


def traced(method):
    """`decode`, which any platform can then have."""
    return loop.decode.trace(method, *started(method))


def plain_loop(target, distribution):
    method = autoregressive.Autoregressive(target, SAMPLINGS[distribution], jnp.int32([1]))
    return traced(method)


def method_of(target, drafter, distribution, *, policy=None, passes=()):
    eos = jnp.int32([1])
    return speculative.Speculative(
        target, drafter, Token(), policy or constant(3), SAMPLINGS[distribution], eos, 3, passes
    )


def speculative_loop(*args, **options):
    return traced(method_of(*args, **options))


@pytest.mark.parametrize("family", ["t5", slow("gpt2"), "llama"])
def test_an_accelerator_reads_one_condition_a_round(family):
    """The outer loop's. There is none for a layer: 8 of them have as many as 2."""
    for layers in (2, 8):
        both = shapes(family, layers)
        plain = plain_loop(both, "plain")
        drafting = speculative_loop(both, ModelDrafter(both), "plain")
        for platform in ("cuda", "tpu"):
            assert loops(plain, platform) == Found(whiles=1, open_whiles=1, open_branches=0)
            # And one of γ − 1 turns, for the tokens that are drafted after the first.
            found = loops(drafting, platform)
            assert found == Found(whiles=2, open_whiles=1, open_branches=0)


@pytest.mark.parametrize("distribution", ["greedy", "filtered"])
@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_no_distribution_and_no_drafter_adds_a_condition(drafter, distribution):
    drafts = {"model": ModelDrafter(shapes("t5", 1)), "lookup": PromptLookup(16)}[drafter]
    found = loops(speculative_loop(shapes("t5", 2), drafts, distribution), "cuda")
    assert found == Found(whiles=2, open_whiles=1, open_branches=0)
    assert loops(plain_loop(shapes("t5", 2), distribution), "cuda").open_whiles == 1


def test_what_else_asks_the_device_is_an_option():
    """A policy that may stop early, and each width. On a CPU nothing is saved by asking less."""
    target, drafter = shapes("t5", 2), ModelDrafter(shapes("t5", 1))
    by_policy = loops(speculative_loop(target, drafter, "greedy", policy=heuristic(2)), "cuda")
    # Whether to draft at all; catching up, and going on.
    assert by_policy == Found(whiles=3, open_whiles=3, open_branches=1)
    wide = loops(speculative_loop(target, drafter, "greedy", passes=(4,)), "cuda")
    assert wide == Found(whiles=4, open_whiles=3, open_branches=0)
    here = loops(speculative_loop(target, drafter, "greedy"), "cpu")
    # Attention in each layer of the draft, twice, and of the target; going on; the outer loop.
    assert here == Found(whiles=6, open_whiles=6, open_branches=1)


PRIME = 64 * 37  # slots of a cache, which divide the size of nothing else


def from_caches(method):
    """Shapes of caches, or of several side by side, from which `decode` gathers."""
    contexts, state = started(method, PRIME)
    held = [x for x in jax.tree.leaves((state.cache, state.drafter)) if x.ndim > 2]
    assert all(x.size % PRIME == 0 for x in held)
    program = loop.decode.trace(method, contexts, state)
    found = [shape for platform in ("cpu", "cuda") for shape in gathered(program, platform)]
    return [shape for shape in found if any(math.prod(shape) % x.size == 0 for x in held)]


@pytest.mark.parametrize("family", [slow("t5"), slow("gpt2"), "llama"])
def test_the_loop_of_chains_gathers_from_no_cache(family):
    """Whether lengths are fixed or not. That of trees does, and is seen: on both platforms it moves
    the accepted path together, in keys and values of two layers."""
    both = shapes(family, 2)
    drafter = ModelDrafter(both)
    assert not from_caches(method_of(both, drafter, "plain"))
    tree = TreeSpeculative(
        both, PromptLookup(16, matches=2), Token(), constant(2), SAMPLINGS["plain"],
        jnp.int32([1]), fixed(2, 1),
    )  # fmt: skip
    assert len(from_caches(tree)) == 2 * 4
    if family == "gpt2":
        early = {"policy": heuristic(2), "passes": (4,)}
        assert not from_caches(method_of(both, drafter, "plain", **early))
        branching = dataclasses.replace(tree, drafter=drafter)
        assert len(from_caches(branching)) > 2 * 4  # a copy of the draft's for each branch


def on_a_mesh(
    family: str, mesh: str, platform: str, replicate: bool = False, **narrow: str
) -> LanguageModel:
    """As `shapes`, on devices that nobody has."""
    axes = meshes.sizes_of(mesh)
    placement = sharding.Placement(AbstractMesh(tuple(axes.values()), tuple(axes)), replicate)
    config = shapes(family, 2).module().config
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "platform": platform}
    return checkpoints.shapes(config, placement=placement, **options, **narrow)


@pytest.mark.parametrize(
    ("family", "mesh", "narrow", "split"),
    # Matrices and biases of two layers, embedding and head, keys and values; their scales in int8,
    # but for those of matrices that are split by inputs.
    [
        slow(("t5", "data=2,model=2", {}, 2 * 6 + 2 + 4)),
        ("t5", "data=2,model=2", {"weights": "int8", "cache": "int8"}, 2 * (6 + 3) + 4 + 8),
        slow(("gpt2", "model=2", {}, 2 * 6 + 1 + 4)),
        ("llama", "model=4", {}, 2 * 5 + 2 + 4),
    ],
)
def test_loops_lower_for_a_mesh_of_accelerators(family, mesh, narrow, split):
    """Both loops and `start`, from a CPU. The program says where each parameter and cache lies, and
    asks the host no more than on one device."""
    for platform, layout in (("cuda", "gpu"), ("tpu", "tpu")):
        target, draft = (
            on_a_mesh(family, mesh, layout, replicate, **narrow) for replicate in (False, True)
        )
        placement = target.placement
        for method in (
            autoregressive.Autoregressive(target, SAMPLINGS["plain"], jnp.int32([1])),
            method_of(target, ModelDrafter(draft), "plain"),
        ):
            inputs = inputs_of([[0, 2, 3], [0, 1, 0]], [[3, 1], [4]])
            args = sharding.place_rows(jax.eval_shape(lambda i=inputs: (i, *keys_of(2))), placement)
            begin = loop.start.trace(method, *args, buffer_len=16)
            assert begin.lower(lowering_platforms=(platform,)).as_text()
            contexts, state = started(method)
            cache = jax.tree.map(functools.partial(_by_heads, placement), state.cache)
            program = loop.decode.trace(method, contexts, state.replace(cache=cache))
            text = program.lower(lowering_platforms=(platform,)).as_text()
            sizes = [f'"{name}"={size}' for name, size in placement.mesh.shape.items()]
            assert f"sdy.mesh @mesh = <[{', '.join(sizes)}]>" in text
            assert text.count('{"model"}') == split
            assert loops(program, platform).open_whiles == 1


def keys_of(rows: int):
    """Keys and budgets."""
    zeros = jnp.zeros((rows,), jnp.int32)
    return row_keys(jax.random.key(0), zeros, zeros), zeros + 5


def _by_heads(placement, x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.heads(x.shape))


def test_loops_that_count_are_told_from_others():
    """What `lowered.loops` is worth."""

    def count(body, *args):
        return loops(jax.jit(body).trace(*args), "cuda")

    n = jnp.int32(5)
    assert count(lambda: jax.lax.fori_loop(0, 5, lambda i, x: x + i, 0)) == (1, 0, 0)
    assert count(lambda n: jax.lax.fori_loop(0, n, lambda i, x: x + i, 0), n) == (1, 1, 0)
    assert count(lambda n: jax.lax.fori_loop(n, 9, lambda i, x: x + i, 0), n) == (1, 1, 0)
    assert count(lambda n: jax.lax.while_loop(lambda x: x < 9, lambda x: x + n, 0), n) == (1, 1, 0)
    assert count(lambda n: jax.lax.while_loop(lambda x: x > 1, lambda x: x - 1, n), n) == (1, 1, 0)
    assert count(lambda n: jax.lax.cond(n > 2, lambda: 1, lambda: 2), n) == (0, 0, 1)
    assert count(lambda n: jax.lax.cond(jnp.bool_(True), lambda: n, lambda: 2), n) == (0, 0, 0)
