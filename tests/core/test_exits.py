"""Early exit and heads over frequent ids: whose arrays they hold, what they refuse, and that the
output's distribution stays the target's."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import doctor, drafters, loop
from specjax.batching import pack
from specjax.decoding import building
from specjax.drafters import frequent, ngram
from specjax.drafters.base import started
from specjax.models import table
from specjax.models.llama import Llama, Qwen2Config
from specjax.models.memory import nbytes, temporaries
from specjax.sampling import Sampling, row_keys
from specjax.settings import Drafting
from table_models import inputs_of
from tiny_models import FAMILIES, quick, random_model

EOS = 2
PROMPTS = [[3, 5, 9, 1], [7], [11, 4], [1, 1, 1, 6, 8]]


def wide(family, **options):
    return random_model(family, 40, **options)


def logits_of(model) -> np.ndarray:
    """(4, V): after five tokens, the last of which differs, and a source of each row's own."""
    inputs = inputs_of([[1, 2, 3, 4, 5]] * 4, [[4, 6], [3], [9, 8, 7], [5]])
    return np.asarray(_logits_of(model, inputs))


@jax.jit
def _logits_of(model, inputs):
    context, cache = started(model, inputs, 8)
    last = jnp.int32([[3], [7], [11], [1]])
    hidden, _ = model(last, jnp.full(4, 4, jnp.int32), context, cache)
    return model.logits(hidden[:, 0])


# --- early exit ---------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("family", quick(FAMILIES, "t5", "llama"))
def test_the_layers_that_run(family):
    """As a model of its own with the same weights in its layers; others change nothing."""
    target = wide(family)
    found = logits_of(specjax.early_exit(target, (0, 2)).model)
    stack = "decoder" if "t5" in family else "layers"
    changed = jax.tree.map(lambda x: x, target.model.params)
    changed[stack][1] = jax.tree.map(lambda x: x + 1.0, changed[stack][1])
    other = specjax.Checkpoint(
        "other", type(target.model)(changed, target.model.graphdef, 40), target.config
    )
    np.testing.assert_array_equal(logits_of(specjax.early_exit(other, [0, 2]).model), found)
    assert np.abs(logits_of(specjax.early_exit(other, 2).model) - found).max() > 0.1
    assert np.abs(logits_of(target.model) - found).max() > 0.1
    first = specjax.early_exit(target, 2)
    np.testing.assert_array_equal(
        logits_of(first.model), logits_of(specjax.early_exit(target, np.arange(2)).model)
    )
    assert first.name == "early_exit(layers=2)"
    assert first.model.module().cache_shape()[0] == 2
    assert first.config.max_positions == target.config.max_positions


def test_windows_follow_their_layers():
    """Layer 2 of a Qwen sees everything, wherever it stands among those that run."""
    raw = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4}
    config = Qwen2Config(
        vocab_size=9, num_attention_heads=2, sliding_window=3, full_layers=(0, 2), **raw
    )
    module = Llama(config, rngs=nnx.Rngs(0))
    module.keep([1, 2])
    assert module.config.windows == (3, 0)


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_it_shares_the_targets_arrays(family):
    """Every leaf of the draft is an array of the target's, in the method that jit is handed too;
    memory is counted once."""
    target = wide(family)
    draft = specjax.early_exit(target, 2)
    method = building.build(target, draft, gamma=2, sampling=Sampling(0.0))
    own, theirs = jax.tree.leaves(method.target), jax.tree.leaves(method.drafter)
    assert pointers(theirs) < pointers(own) == pointers(jax.tree.leaves(target.model))
    assert nbytes((method.target, method.drafter)) == nbytes(target.model)
    assert drafters.parameters(draft, target) == 0
    copied = jax.tree.map(jnp.copy, method.drafter)
    assert not pointers(jax.tree.leaves(copied)) & pointers(own)
    assert nbytes((method.target, copied)) > nbytes(target.model)


def pointers(arrays) -> set[int]:
    return {array.unsafe_buffer_pointer() for array in arrays}


@pytest.mark.sweep
def test_the_loop_makes_no_copy_of_shared_arrays():
    """Its program holds no more beside its arguments than with a draft that has copies, and the
    arguments are the target's arrays, before and after."""
    target = wide("gpt2")
    method = building.build(target, specjax.early_exit(target, 2), gamma=2, sampling=Sampling(0.0))
    zeros = jnp.zeros(2, jnp.int32)
    inputs = pack([[3, 4], [5]], start_id=None, rows=2, width=4)
    start = inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 4
    context, state = loop.start(method, *start, buffer_len=16)
    handed = jax.tree.leaves(method)
    assert len(handed) > len({id(x) for x in handed})
    apart = dataclasses.replace(method, drafter=jax.tree.map(jnp.copy, method.drafter))
    held = [temporaries(loop.decode.lower(by, context, state).compile()) for by in (method, apart)]
    assert held[0] == held[1]
    before = pointers(jax.tree.leaves(method.drafter))
    loop.decode(method, context, state)
    assert pointers(jax.tree.leaves(method.drafter)) == before


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (0, r"layers=0 .* \[1, 2\]; the model has 3 layers"),
        (3, r"layers=3 .* \[1, 2\]"),
        (True, "layers=True"),
        ((), r"layers=\(\) .* not empty"),
        ((0, 3), r"layers=3 .* \[0, 2\]"),
        ((1, 0), r"layers=\(1, 0\) .* ascending order"),
        ((1, 1), r"layers=\(1, 1\) .* each once"),
        ((0, 1, 2), r"some of the layers 0 … 2"),
        ("two", "layers='two'"),
    ],
)
def test_layers_that_cannot_be(layers, words):
    with pytest.raises(ValueError, match=words):
        specjax.early_exit(wide("gpt2"), layers)


def test_models_that_have_no_layers_or_no_head():
    own = specjax.wrap(table.fixed([0.5, 0.5]), name="mine")
    for make in (
        functools.partial(specjax.early_exit, layers=1),
        lambda it: specjax.frequent(it, [1]),
    ):
        with pytest.raises(ValueError, match=r"mine has no .* GPT-2"):
            make(own)
    with pytest.raises(ValueError, match="PromptLookup has no layers and head"):
        specjax.frequent(ngram.PromptLookup(9), [1])


# --- frequent ids -------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize(  # two layouts of the head
    ("family", "platform"),
    quick(itertools.product(FAMILIES, ("cpu", "gpu")), ("t5 tied", "cpu"), ("llama", "gpu")),
)
def test_its_logits_are_the_drafts_own(family, platform):
    """At its ids, of which EOS is one; −inf elsewhere. All ids give the draft itself."""
    draft = wide(family, platform=platform)
    ids = [39, 7, 0, 31, 7]
    few = specjax.frequent(draft, ids)
    full, found = logits_of(draft.model), logits_of(few.model)
    kept = sorted({*ids, EOS})
    np.testing.assert_allclose(found[:, kept], full[:, kept], rtol=1e-5, atol=1e-5)
    outside = np.delete(found, kept, axis=1)
    assert outside.shape == (4, 35)
    assert np.all(outside == -np.inf)
    assert few.name.endswith("5 ids)")
    if platform == "cpu":
        everything = specjax.frequent(draft, np.arange(40))
        np.testing.assert_allclose(logits_of(everything.model), full, rtol=1e-5, atol=1e-5)


def test_only_the_rows_of_the_head_are_new():
    draft = wide("llama")
    few = specjax.frequent(draft, range(10)).model
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(draft.model)}
    new = [x for x in jax.tree.leaves(few) if x.unsafe_buffer_pointer() not in own]
    assert sorted(x.size for x in new) == [40, 10 * 8]
    assert drafters.parameters(specjax.frequent(draft, range(10)), draft) == 10 * 8
    with pytest.raises(ValueError, match="no family"):
        specjax.save("nowhere", specjax.frequent(draft, [1]))


@pytest.mark.parametrize("ids", [[], [40], [-1], [1.5], [True], "ab", 3])
def test_ids_that_cannot_be(ids):
    with pytest.raises(ValueError, match="ids="):
        specjax.frequent(wide("gpt2"), ids)


def test_the_most_frequent_ids():
    counts = ngram.count([[5, 6, 6, 1], [6, 5, 9, 1, 9]], vocab_size=12, start_id=0)
    assert frequent.most_frequent(counts, 0.25) == [6, 1, 5]  # of equals the smallest
    assert len(frequent.most_frequent(counts, 1.0)) == 12
    assert frequent.most_frequent(counts, 0.01) == [6]
    with pytest.raises(ValueError, match=r"share=0 .* \(0, 1\]"):
        frequent.most_frequent(counts, 0)


# --- in the loop --------------------------------------------------------------------------------


# --- by name ------------------------------------------------------------------------------------

PARSE = "families/parse/target"


def test_by_name():
    """With the n-gram counts that lie beside the target."""
    target = specjax.load(PARSE)
    draft = drafters.load("early_exit(layers=2)", target)
    assert draft.name == "early_exit(layers=2)"
    assert draft.config.num_decoder_layers == 2
    assert drafters.load("early_exit(layers=(0, 3))", target).config.num_decoder_layers == 2
    for name in (
        "frequent(draft='families/parse/draft-tiny', share=0.25)",
        "frequent(draft='early_exit(layers=1)', share=0.25)",
    ):
        few = drafters.load(name, target)
        assert few.name == name
        counted = frequent.most_frequent(drafters.beside(target), 0.25)
        assert np.sum(np.asarray(few.model.row_of) < 512) == len({*counted, *target.eos_ids})
    with pytest.raises(ValueError, match=r"early_exit.*missing a required argument: 'layers'"):
        drafters.load("early_exit", target)
    with pytest.raises(ValueError, match="PromptLookup has no layers and head"):
        drafters.load("frequent(draft='lookup')", target)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["early_exit(layers=2)", "frequent(draft='early_exit(layers=1)')"])
def test_the_doctor_looks_at_them(name):
    """From outlines, then loaded for real."""
    plan = doctor.Plan(PARSE, name, texts=["parse: x = 1"], max_new_tokens=8, drafting=Drafting(2))
    wanted = ("target files", "draft files", "tokenizer", "compatibility", "weights")
    checks = [check for check in doctor.CHECKS if check.name in wanted]
    found = {finding.name: finding for finding in doctor.examine(plan, checks)}
    assert {finding.verdict for finding in found.values()} <= {"pass", "warn"}, found
    assert re.search(r", a drafter of [\d,]+ parameters$", found["draft files"].seen)
