"""What each family of models can do: the cells of the table in docs/checkpoints.md.

`make test` runs each column once, in families that differ, and `make slow` all cells.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import gguf_variants
import specjax
import test_mesh
from family_rows import ROWS, cells
from specjax.checkpoints import load, save
from specjax.drafters import eagle

pytestmark = pytest.mark.sweep
TEXTS = [[5, 9, 4, 7], [8, 2, 6], [9, 9, 3, 5, 7], [4, 4], [11, 12, 13]]
NEW = "mT5", "umT5", "ByT5"


def near(target):
    """A draft with some noise on every weight of the target."""
    rng = np.random.default_rng(0)
    shaken = jax.tree.map(
        lambda x: x * (1 + 0.1 * rng.normal(size=x.shape).astype(x.dtype)), target.model
    )
    return dataclasses.replace(target, name="near", model=shaken)


def loaded(row, **options):
    with tempfile.TemporaryDirectory() as place:
        found = load(ROWS[row].write(Path(place)), **options)
    many = tuple(range(2, found.config.vocab_size, 4))  # so that rows end apart
    return dataclasses.replace(found, eos_ids=many)


@functools.cache
def target_of(row):
    return loaded(row)


def outputs(target, draft=None, **options):
    return specjax.generate(target, draft, TEXTS, max_new_tokens=10, **options)


@functools.cache
def plain(row):
    return outputs(target_of(row)).tokens


WAYS = {
    "trees": lambda target: (near(target), {"tree": "fixed(2, 1)"}),
    "admission": lambda target: (near(target), {"batch_size": 2}),
    "packed": lambda target: (near(target), {"policy": "fixed(2)"}),
    "int8": lambda target: (near(target_of(target.name)), {}),
    "EAGLE": lambda target: (eagle.fresh(target, version=3, heads=2, taps=(0, 1, 2)), {}),
    "early exit": lambda target: ("early_exit(layers=1)", {}),
}


QUICK = {
    ("umT5", "trees"), ("GPT-2", "admission"), ("Qwen 2", "packed"), ("Gemma 2", "int8"),
    ("T5Gemma 2", "EAGLE"), ("Gemma 3", "early exit"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "column"), cells(*WAYS, quick=QUICK))
def test_greedy_tokens_are_plain_decodings(row, column):
    if column == "int8":
        target = dataclasses.replace(loaded(row, weights="int8", cache="int8"), name=row)
        expected = outputs(target).tokens
    else:
        target, expected = target_of(row), plain(row)
    draft, options = WAYS[column](target)
    found = outputs(target, draft, **options)
    assert found.tokens == expected
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert found.verified.sum() > 0
    assert found.accepted.sum() > 0 or column in ("EAGLE", "early exit")  # are not trained


@pytest.mark.parametrize(("row", "column"), cells("mesh", quick=set()))
def test_a_mesh_decodes_the_tokens_of_one_device(row, column, tmp_path):
    """Two devices for rows and two for each layer, in a process of its own."""
    target = loaded(row)
    save(tmp_path / row / "target", target)
    save(tmp_path / row / "draft", near(target))
    one = test_mesh.case(row, "data=2,model=2", 0.0)
    found = test_mesh.ask(tmp_path, [one, test_mesh.alone(one)])
    there, here = (found[json.dumps(case)] for case in (one, test_mesh.alone(one)))
    assert there["tokens"] == here["tokens"]
    assert there["collectives"]
    assert here["accepted"] > 0


@pytest.mark.parametrize(("row", "column"), cells("GGUF", quick={(row, "GGUF") for row in NEW}))
def test_gguf_gives_the_same_parameters(row, column, tmp_path):
    """The file of an mT5 is one of a T5: nothing in it says otherwise."""
    key = row.lower().replace(" ", "")
    module = ROWS[row].variants
    _, variant = gguf_variants.MODELS.get(key, (module, ROWS[row].made))
    if "relative_attention_max_distance" in variant.raw:
        variant = gguf_variants.changed(variant, **gguf_variants.DISTANCE)
    plain = load(module.write(tmp_path / "plain", variant))
    found = load(gguf_variants.write(tmp_path / "x.gguf", variant, module.tensors(variant)))
    assert vars(found.config) == vars(plain.config)
    jax.tree.map(np.testing.assert_array_equal, found.model.params, plain.model.params)
