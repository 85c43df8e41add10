"""Views of a target that own parameters: what they start as, whose arrays they hold, and files.
test_exits.py has early exits, test_parts.py enumerates; tests/lab/test_training_views.py trains."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.drafters import attached
from specjax.drafters.views import View, kangaroo, shallow
from test_exits import logits_of, pointers
from test_int8 import in_int8
from tiny_models import random_model

KINDS = {"kangaroo": (kangaroo, 1, 2), "shallow": (shallow, (0, 2), (0, 2))}  # and the exit
CASES = [
    *(("kangaroo", family) for family in ("t5", "gpt2", "llama", "umt5")),
    *(("shallow", family) for family in ("t5", "umt5")),
]


def trained(drafter: View) -> View:
    """Another view, of weights near these."""
    moved = jax.tree.map(lambda x: x + jnp.linspace(0, 0.1, x.size).reshape(x.shape), drafter.own)
    return dataclasses.replace(drafter, own=moved)


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_it_starts_as_an_exit_and_is_read_back(kind, family, tmp_path):
    target, (make, layers, same) = random_model(family, 40), KINDS[kind]
    begun = make(target, layers)
    start = logits_of(specjax.early_exit(target, same).model)
    np.testing.assert_array_equal(logits_of(begun.model), start)
    new = pointers(jax.tree.leaves(begun)) - pointers(jax.tree.leaves(target.model))
    assert new == pointers(jax.tree.leaves(begun.own))
    drafter = trained(begun)
    expected = logits_of(drafter.model)
    assert np.abs(expected - start).max() > 0.01
    attached.save(tmp_path, drafter, target, dtype=np.float32)
    again = drafters.load(str(tmp_path), target)
    np.testing.assert_array_equal(logits_of(again.model), expected)
    assert drafters.parameters(again, target) == sum(x.size for x in jax.tree.leaves(begun.own))
    # As stored it does not depend on the platform's layout.
    elsewhere = random_model(family, 40, platform="gpu")
    there = View.from_tensors(drafter.settings(), drafter.tensors(), elsewhere)
    np.testing.assert_allclose(logits_of(there.model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "family"), [("kangaroo", "gpt2"), ("shallow", "t5")])
def test_files_of_release_2_are_read(kind, family, tmp_path):
    """They named the adapter "layer" and "norm", and a shallow decoder as the target does."""
    target, (make, layers, _) = random_model(family, 40), KINDS[kind]
    drafter = trained(make(target, layers))
    tensors = drafter.tensors()
    settings = {"layers": layers} if kind == "kangaroo" else {"encoder": "target", "layers": [0, 2]}
    if kind == "kangaroo":
        names = {"layers.1": "layer", "norm": "norm"}
        tensors = {
            names[old] + name.removeprefix(old): array
            for name, array in tensors.items()
            for old in names
            if name.startswith(old)
        }
        assert "layer.attention.qkv.weight" in tensors
    old = View.from_tensors(settings, tensors, target)
    np.testing.assert_array_equal(logits_of(old.model), logits_of(drafter.model))
    attached.save(tmp_path, drafter, target)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["specjax_drafter"] == "view"
    config |= {"specjax_drafter": kind, "settings": {"layers": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot be loaded"):  # as a file of this kind
        attached.load(tmp_path, target)


def test_its_parameters_stay_in_floats_beside_int8(tmp_path):
    """They start as the floats that a target in int8 stands for, and load beside one."""
    target = random_model("t5", 40)
    narrow = in_int8(target, cache=False)
    for make, layers, _ in KINDS.values():
        begun, exact = (jax.tree.leaves(make(one, layers).own) for one in (narrow, target))
        for one, other in zip(begun, exact, strict=True):
            assert one.dtype == jnp.float32
            assert jnp.abs(one - other).max() <= 0.501 * jnp.abs(other).max() / 127
        assert any(jnp.any(one != other) for one, other in zip(begun, exact, strict=True))
    attached.save(tmp_path, trained(shallow(target, 1)), target, dtype=np.float32)
    of_floats, beside = (drafters.load(str(tmp_path), one) for one in (target, narrow))
    for one, other in zip(jax.tree.leaves(of_floats.own), jax.tree.leaves(beside.own), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_it_refuses(tmp_path):
    """Another target, with both names; a tensor that does not fit; layers; no encoder."""
    target, other = (
        dataclasses.replace(random_model("gpt2", 12, seed=seed), name=f"target {seed}")
        for seed in (0, 3)
    )
    drafter = kangaroo(target, 1)
    attached.save(tmp_path, drafter, target)
    words = "belongs to the target 'target 0', and 'target 3' has other weights"
    with pytest.raises(ValueError, match=f"The drafter .*{tmp_path.name} {words}"):
        attached.load(tmp_path, other)
    with pytest.raises(ValueError, match=r"The drafter View belongs .* other weights"):
        specjax.generate(other, drafter, [[3, 1]])
    tensors = drafter.tensors() | {"layers.1.attention.qkv.weight": np.zeros((24, 9), np.float32)}
    words = r"layers\.1\.attention\.qkv\.weight has shape \(24, 9\), .* asks for \(24, 8\)"
    with pytest.raises(ValueError, match=words):
        View.from_tensors(drafter.settings(), tensors, target)
    with pytest.raises(ValueError, match=r"layers=3 .* \[1, 2\]"):
        kangaroo(target, 3)
    with pytest.raises(ValueError, match="encoder='own' should be 'target'"):
        View.from_tensors({"encoder": "own", "layers": [0]}, {}, target)
    with pytest.raises(ValueError, match=r"target 0 has no encoder .* early_exit"):
        shallow(target, 1)
