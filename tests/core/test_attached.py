"""Drafters that belong to one target: saved, loaded, refused, and named wherever a draft is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from eagles import eagle_of, target_of
from experiments.train import medusa
from pairs import TEXTS
from specjax import doctor, drafters
from specjax.checkpoints import Checkpoint
from specjax.drafters import attached, eagle
from specjax.drafters.ngram import PromptLookup
from specjax.models.language_model import LanguageModel
from specjax.models.layers import narrow_weights
from specjax.settings import Drafting


def loaded_again(target, drafter, directory, **options):
    attached.save(directory, drafter, target, dtype=np.float32)
    return attached.load(directory, target, **options)


@pytest.mark.parametrize(("kind", "version"), [("t5", 1), ("llama", 3)])
def test_what_is_saved_is_loaded(kind, version, tmp_path):
    target = target_of(kind)
    drafter = eagle_of(target, version)
    found = loaded_again(target, drafter, tmp_path / "drafter")
    assert jax.tree.structure(found) == jax.tree.structure(drafter)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(drafter), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["specjax_drafter"] == "eagle"
    assert raw["target"]["name"] == f"tiny {kind}"
    assert drafters.parameters(found) == sum(x.size for x in jax.tree.leaves(drafter.params))


def test_medusa_too(tmp_path):
    target = target_of("gpt")
    drafter = medusa.init(target.model, 2, hydra=True)
    found = loaded_again(target, drafter, tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(drafter)
    assert found.target is target.model
    assert drafters.parameters(found) == sum(x.size for x in jax.tree.leaves(drafter.heads))


def test_half_precision_by_default(tmp_path):
    target = target_of("gpt")
    attached.save(tmp_path, eagle_of(target, 1), target)
    size = (tmp_path / "model.safetensors").stat().st_size
    found = attached.load(tmp_path, target)
    assert size < 2 * drafters.parameters(found) + 2000
    assert found.dtype == jnp.float32
    assert attached.load(tmp_path, target, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def as_dtype(target: Checkpoint, dtype) -> Checkpoint:
    model = jax.tree.map(lambda x: x.astype(dtype), target.model)
    return dataclasses.replace(target, model=model)


@pytest.mark.parametrize("kind", ["eagle", "hydra"])
def test_matrices_are_as_narrow_as_the_targets(kind, tmp_path):
    """A CPU's bfloat16 is that of matrices alone, in the target and in what drafts for it."""
    target = target_of("llama")
    made = eagle_of(target, 3) if kind == "eagle" else medusa.init(target.model, 2, hydra=True)
    attached.save(tmp_path, made, target)
    module = narrow_weights(target.model.module(), jnp.bfloat16)
    target = dataclasses.replace(target, model=LanguageModel.of(module))
    assert (module.dtype, module.matrix_dtype) == (jnp.float32, jnp.bfloat16)
    found = attached.load(tmp_path, target)
    own = found.params if kind == "eagle" else found.heads
    assert {leaf.ndim: leaf.dtype for leaf in jax.tree.leaves(own)} == {
        1: jnp.float32, 2: jnp.bfloat16,
    }  # fmt: skip
    ids = [[1, 2, 3], [4]]
    result = specjax.generate(target, found, ids, gamma=2, max_new_tokens=12)
    plain = specjax.generate(target, None, ids, max_new_tokens=12)
    assert result.tokens == plain.tokens
    assert result.verified.sum() > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_target_in_another_dtype_or_turned_is_the_same(dtype, tmp_path):
    """And so is one whose matrices lie as on another platform."""
    target = target_of("llama")
    attached.save(tmp_path, eagle_of(target, 1), target)
    attached.load(tmp_path, as_dtype(target, dtype))
    other = "gpu" if jax.default_backend() == "cpu" else "cpu"
    turned = LanguageModel.of(target.model.module(), platform=other)
    shapes = [jax.tree.map(jnp.shape, model.params) for model in (turned, target.model)]
    assert shapes[0] != shapes[1]
    attached.load(tmp_path, dataclasses.replace(target, model=turned))


def test_another_target_is_refused_by_name(tmp_path):
    """Other weights, another vocabulary, another width, another kind."""
    target = target_of("llama")
    attached.save(tmp_path, eagle_of(target, 1), target)
    way_out = "belongs to the target 'tiny llama', and 'tiny (llama|gpt)' has {}.*experiments.train"
    trained = dataclasses.replace(
        target, model=jax.tree.map(lambda x: x * jnp.float32(1.05), target.model)
    )
    for other, words in (
        (target_of("llama", seed=3), "other weights"),
        (trained, "other weights"),
        (target_of("llama", 6), "a vocabulary of 6, where its own has 5"),
        (target_of("gpt"), "the model type 'gpt2', where its own has 'llama'"),
    ):
        with pytest.raises(ValueError, match=way_out.format(words)):
            attached.load(tmp_path, other)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["target"]["width"] = 16
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="has the width 8, where its own has 16"):
        attached.load(tmp_path, target)


def test_a_drafter_in_memory_of_another_target_is_refused():
    """But not one of the same weights, loaded once more."""
    target = target_of("gpt")
    drafter = eagle_of(target, 1)
    again = dataclasses.replace(target, model=jax.tree.map(jnp.array, target.model))
    for fitting in (target, again):
        attached.check_target(drafter, fitting)
    for other, words in ((target_of("gpt", seed=3), "other weights"), (target_of("gpt", 6), "6")):
        with pytest.raises(ValueError, match=f"The drafter Eagle belongs to .* has .*{words}"):
            specjax.generate(other, drafter, [[3, 1]])
    attached.check_target(PromptLookup(5), target)


def test_damaged_directories(tmp_path):
    target = target_of("gpt")
    attached.save(tmp_path, eagle_of(target, 1), target)
    raw = json.loads((tmp_path / "config.json").read_text())
    for changes, words in (
        ({"specjax_drafter": "owl"}, "='owl' is no kind of drafter that is loaded here"),
        ({"specjax_drafter": ["eagle"]}, "is no kind of drafter that is loaded here"),
        ({"settings": {}}, "the setting 'layer' is missing"),
        ({"target": {**raw["target"], "fingerprint": [1, 2]}}, "fingerprint .* is damaged"),
        ({"target": None}, "does not say which target"),
        ({"settings": {**raw["settings"], "taps": [0, 1, 2]}}, "missing from the weights"),
        ({"settings": {**raw["settings"], "speed": 1}}, "cannot be loaded.*'speed'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
        with pytest.raises(ValueError, match=words):
            attached.load(tmp_path, target)
    for dtype in ("int8", "float64", "float7"):
        with pytest.raises(ValueError, match=f"dtype='{dtype}' must be one of float32, bfloat16"):
            attached.save(tmp_path / "other", eagle_of(target, 1), target, dtype=dtype)
        for draft in (str(tmp_path), "lookup"):
            with pytest.raises(ValueError, match=f"dtype='{dtype}' must be one of float32"):
                drafters.load(draft, target, dtype=dtype)
    with pytest.raises(ValueError, match="target='x' must be a checkpoint, as"):
        drafters.load("lookup", "x")
    with pytest.raises(ValueError, match="PromptLookup is no drafter that is saved"):
        attached.save(tmp_path / "other", PromptLookup(5), target)
    assert not (tmp_path / "other").exists()


@pytest.mark.sweep
def test_what_takes_a_draft_takes_its_directory(pair, tmp_path):
    """generate, by name; specjax.load says how it is loaded; the doctor examines it."""
    target = pair.target
    drafter = eagle.fresh(target, heads=2, inner=16)
    place = str(tmp_path / "drafter")
    attached.save(place, drafter, target)
    options = {"gamma": 3, "max_new_tokens": 12}
    found = specjax.generate(target, place, TEXTS[:2], **options)
    assert found.tokens == specjax.generate(target, None, TEXTS[:2], max_new_tokens=12).tokens
    with pytest.raises(ValueError, match=r"holds no model but a drafter.*generate\(target"):
        specjax.load(place)
    plan = doctor.Plan(target.name, place, texts=TEXTS[:2], max_new_tokens=12, drafting=Drafting(3))
    chosen = [
        check for check in doctor.CHECKS
        if check.name in ("target files", "draft files", "tokenizer", "compatibility", "weights")
    ]  # fmt: skip
    findings = {finding.name: finding for finding in doctor.examine(plan, chosen)}
    assert {finding.verdict for finding in findings.values()} <= {"pass", "warn"}
    assert f"a drafter of {drafters.parameters(drafter):,} parameters" in (
        findings["draft files"].seen
    )
