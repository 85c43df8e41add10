"""Contract 1, a call says where it writes, for every decoder-only layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gemma_variants
import gpt_variants
import llama_variants
from model_calls import begin, by_slot, call, uncached
from specjax.checkpoints import load
from specjax.drafters import base
from specjax.models.layers import arrange
from specjax.models.packing import Packing, unpack
from specjax.types import Inputs
from tiny_models import quick

pytestmark = pytest.mark.sweep

# Three layers and heads, or groups of heads, windows in some or all layers: what can be confused.
VARIANTS = {
    "gpt": (gpt_variants, "odd_heads"),
    "llama": (llama_variants, "llama3"),
    "mistral": (llama_variants, "mistral"),
    "qwen2": (llama_variants, "qwen2_windows"),
    "qwen3": (llama_variants, "qwen3"),
    "gemma2": (gemma_variants, "gemma2"),
    "gemma3": (gemma_variants, "gemma3"),
}


@pytest.fixture(scope="module", params=quick(VARIANTS, "gpt", "qwen2", "gemma2"))
def model(request, tmp_path_factory):
    variants, name = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return load(variants.write(directory, variants.VARIANTS[name])).model


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(llama_variants.texts())


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


def test_a_position_depends_on_all_tokens_up_to_it_and_on_none_after(model):
    """With distinct tokens, the gradient by a row of the embedding is that by one position."""
    module = arrange(model.module(), platform=None)
    tokens, start = jnp.arange(8, dtype=jnp.int32)[None, :], jnp.zeros((1,), jnp.int32)
    graphdef, params = nnx.split(module)

    def hidden_at(params, position):
        hidden, _ = nnx.merge(graphdef, params)(tokens, start, (), None)
        return jnp.sum(jnp.sin(hidden[0, position]))

    gradient = jax.jit(jax.grad(hidden_at))
    for position in (0, 3, 7):
        found = gradient(params, position)
        for name in ("embedding", "positions"):  # a GPT's, which are learned
            if name in found:
                by_token = np.abs(found[name][...]).sum(-1)[:8]
                assert (by_token[: position + 1] > 0).all()
                assert (by_token[position + 1 :] == 0).all()


def test_a_query_sees_no_stale_slot(model, tokens):
    """The derivative by the cache's content: before `start`, as far back as the window reaches,
    neither in the block nor on."""
    windows = getattr(model.module().config, "windows", (0,))
    reach = max(windows) if all(windows) else 99
    context, cache = begin(model, tokens)
    first = [2, 4, 7]
    found = by_slot(model, tokens[:, :3], jnp.array(first, jnp.int32), context, cache)
    for row, start in zip(np.asarray(found), first, strict=True):
        seen = [start - reach < slot < start for slot in range(len(row))]
        np.testing.assert_array_equal(row > 0, seen)


@pytest.mark.parametrize("width", [6, 12])
def test_long_prompts_are_read_in_pieces(model, tokens, width, monkeypatch):
    """The hidden states and the caches are those of one call; rows end anywhere."""
    prompt, prompt_len = tokens[:, :width], jnp.array([1, 4, width], jnp.int32)
    inputs = Inputs(jnp.zeros((3, 0), jnp.int32), jnp.zeros((3,), jnp.int32), prompt, prompt_len)

    def read():
        hidden, cache = base.prefill(model, inputs, *model.start(inputs, 16))
        return hidden, jax.tree.map(lambda x: x, cache)

    whole = jax.jit(read)()
    monkeypatch.setattr(base, "PIECE", 4)
    pieces = jax.jit(lambda: read())()
    assert jax.tree.structure(whole) == jax.tree.structure(pieces)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)


@pytest.mark.parametrize("size", [8, 12])
def test_packed_positions_are_those_of_a_whole_call(model, tokens, size):
    """Rows read 2, 1 and 4 of their four tokens, after prompts of 1, 4 and 6, in a call of 8 or 12
    positions; and the next call finds their slots in the cache."""
    prompt_len, count = jnp.array([1, 4, 6], jnp.int32), jnp.array([2, 1, 4], jnp.int32)
    prompt = jnp.where(jnp.arange(6)[None, :] < prompt_len[:, None], tokens[:, :6], 39)
    context, cache = begin(model, prompt, prompt_len)
    start = prompt_len - 1
    blocks = [jnp.take_along_axis(tokens, at[:, None] + jnp.arange(4)[None, :], axis=1)
              for at in (start, start + count)]  # fmt: skip

    @jax.jit
    def packed(model, block, start, context, cache):
        packing = Packing.first(count, 4, size)
        hidden, cache = model(block, start, context, cache, packing=packing)
        return unpack(model.logits(hidden), packing), cache

    whole, after = call(model, blocks[0], start, context, cache)
    found, packed_after = packed(model, blocks[0], start, context, cache)
    for row, (one, other) in enumerate(zip(found, whole, strict=True)):
        some = slice(int(count[row]))
        np.testing.assert_allclose(one[some], other[some], rtol=0, atol=5e-5)
    ends = [call(model, blocks[1], start + count, context, c)[0] for c in (packed_after, after)]
    np.testing.assert_allclose(*ends, rtol=0, atol=5e-5)
