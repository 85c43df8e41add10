"""What every family promises: the numbers of transformers, and contract 1, a call says where it
writes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gemma_variants
import gpt_variants
import llama_variants
import t5_variants
import t5gemma_variants
from model_calls import example, uncached
from specjax import devices
from specjax.checkpoints import load
from specjax.drafters import base
from specjax.models.table import by_last_token
from specjax.pytrees import pytree
from specjax.testing import check_model
from specjax.testing.tables import UNWRITTEN, TableModel, random_table
from specjax.types import Call, Inputs
from tiny_models import quick

DATA = Path(__file__).parents[1] / "data"
FAMILIES = {"gpt": gpt_variants, "llama": llama_variants, "t5": t5_variants}
REFERENCES = {name: np.load(DATA / f"{name}_reference.npz") for name in FAMILIES}
STORED = [(family, name) for family in FAMILIES for name in FAMILIES[family].VARIANTS]

# Three layers and heads, or groups of heads, windows in some or all layers, different depths of two
# stacks: what can be confused.
VARIANTS = {
    "gpt": (gpt_variants, "odd_heads"),
    "llama": (llama_variants, "llama3"),
    "mistral": (llama_variants, "mistral"),
    "qwen2": (llama_variants, "qwen2_windows"),
    "qwen3": (llama_variants, "qwen3"),
    "gemma2": (gemma_variants, "gemma2"),
    "gemma3": (gemma_variants, "gemma3"),
    "t5": (t5_variants, "deep_encoder"),
    "t5gemma": (t5gemma_variants, "t5gemma"),
    "t5gemma2": (t5gemma_variants, "t5gemma2"),
}
TWO_STACKS = ("t5", "t5gemma", "t5gemma2")


# --- the same numbers as transformers ----------------------------------------------------------


def loaded(family, name, directory, **options):
    """A model, and its texts."""
    variants = FAMILIES[family]
    variant = variants.VARIANTS[name]
    found = load(variants.write(directory, variant), **options).model
    return found, example(variants, variant), getattr(variant, "every", 1)


@pytest.mark.parametrize(("family", "name"), STORED)
def test_logits_are_those_of_transformers(family, name, tmp_path):
    model, texts, every = loaded(family, name, tmp_path)
    logits = uncached(model, *texts)
    assert len(np.unique(logits.argmax(-1))) > 5  # else agreement would prove little
    expected = REFERENCES[family][name]
    np.testing.assert_allclose(logits[:, ::every], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt", "tied"), ("gpt", "untied"), ("llama", "llama3"), ("llama", "qwen2"), ("t5", "v1_0"),
     ("t5", "odd_heads")],
)  # fmt: skip
def test_the_layout_of_an_accelerator_gives_the_same_logits(family, name, tmp_path, monkeypatch):
    """`arrange` turns projections on a CPU; here they are (out, in)."""
    monkeypatch.setattr(devices, "input_first", lambda *_: False)
    untouched, texts, _ = loaded(family, name, tmp_path)
    assert not untouched.module().input_first
    expected = REFERENCES[family][name]
    np.testing.assert_allclose(uncached(untouched, *texts), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt", "untied"), ("llama", "llama3"), ("llama", "qwen3"), ("t5", "deep_encoder")],
)
def test_half_precision_stays_near_float32(family, name, tmp_path):
    half, (tokens, source, lengths), _ = loaded(family, name, tmp_path, dtype=jnp.bfloat16)

    @jax.jit
    def run(half):
        first = jnp.ones((len(tokens),), jnp.int32)
        context, cache = half.start(Inputs(source, lengths, tokens[:, :1], first), 16)
        hidden, cache = half(tokens, first - 1, context, cache)
        return half.logits(hidden), cache

    logits, cache = run(half)
    assert logits.dtype == jnp.float32
    assert cache[0].keys.dtype == jnp.float32  # a CPU computes in it
    expected = REFERENCES[family][name]
    assert np.abs(np.asarray(logits) - expected).mean() < 0.1 * expected.std()


# --- contract 1 --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=quick(VARIANTS, "gpt", "gemma2", "t5"))
def case(request, tmp_path_factory):
    """A model, and the inputs of its texts."""
    variants, name = VARIANTS[request.param]
    variant = variants.VARIANTS[name]
    model = load(variants.write(tmp_path_factory.mktemp("model"), variant)).model
    tokens, source, lengths = example(variants, variant)
    return model, Inputs(source, lengths, tokens, jnp.full((len(tokens),), 1, jnp.int32))


@pytest.mark.sweep
def test_a_call_says_where_it_writes(case):
    model, inputs = case
    check_model(model, inputs=inputs)


@pytest.mark.parametrize(
    "model", [random_table(0, 5), by_last_token(np.eye(4) * 0.6 + 0.1)], ids=["random", "last"]
)
def test_tables_keep_the_contract(model):
    check_model(model)


@pytree
class Faulty(TableModel):
    """A table with a fault in its calls."""

    fault: str = dataclasses.field(default="", metadata={"static": True})

    def __call__(self, tokens, start, context, cache):
        call = Call.of(start)
        if self.fault == "rows":
            call = call._replace(start=jnp.broadcast_to(call.start[:1], call.start.shape))
        if self.fault == "layout" and call.layout is not None:
            call = call._replace(layout=None)
        if self.fault == "past":
            call = call._replace(start=jnp.minimum(call.start, cache.shape[1] - tokens.shape[1]))
        if self.fault == "packing" and call.packing is not None:
            call = call._replace(packing=call.packing._replace(of=call.packing.of[::-1]))
        if self.fault == "future":
            tokens = tokens.at[:, 0].add(tokens[:, -1])
        hidden, written = super().__call__(tokens, call, context, cache)
        if self.fault == "stale":
            written = jnp.where(cache == UNWRITTEN, written, cache)
        return hidden, written

    def compact(self, cache, start, path):
        return cache if self.fault == "compact" else super().compact(cache, start, path)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rows", "rows at positions .* disturb others"),
        ("stale", "leave a trace"),
        ("layout", "node . of a tree is not the end of its path"),
        ("past", "past the buffer"),
        ("packing", "packed positions are not those"),
        ("future", "text in pieces of .* is not that in one call"),
        ("compact", "does not leave the cache of a path"),
    ],
)
def test_planted_faults(fault, words):
    with pytest.raises(AssertionError, match=f"Faulty: .*{words}"):
        check_model(Faulty(random_table(0, 5).table, fault))


@pytest.mark.sweep
@pytest.mark.parametrize("width", [6, 12])
def test_long_prompts_are_read_in_pieces(case, width, monkeypatch):
    """The hidden states and the caches are those of one call; rows end anywhere."""
    model, inputs = case
    ends = jnp.array([1, 4, width], jnp.int32)
    inputs = inputs._replace(prompt=inputs.prompt[:, :width], prompt_len=ends)

    def read():
        hidden, cache = base.prefill(model, inputs, *model.start(inputs, 16))
        return hidden, jax.tree.map(lambda x: x, cache)

    whole = jax.jit(read)()
    monkeypatch.setattr(base, "PIECE", 4)
    pieces = jax.jit(lambda: read())()
    assert jax.tree.structure(whole) == jax.tree.structure(pieces)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
