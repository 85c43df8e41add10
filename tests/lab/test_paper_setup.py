"""The paper's setup: what its configs say, and how large the models are that they name."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import command_line
from configs import paper as paper_config
from experiments.reproduce import printed, scores
from specjax import tasks
from specjax.batching import bucket
from specjax.models.t5 import T5, T5Config
from specjax.types import Inputs

DOC = command_line.ROOT / "experiments" / "reproduce" / "README.md"


# --- what the configs say ----------------------------------------------------------------------


@pytest.mark.parametrize("name", paper_config.CHOICES)
def test_rows_of_the_paper_are_named(name):
    config = paper_config.get_config(name)
    ngrams = {"unigram", "bigram"}
    assert set(config.paper) == {pathlib.PurePath(name).name for name in config.drafts} | ngrams
    for name, row in config.paper.items():
        assert tuple(row) in {(r.task, r.draft) for r in printed.TABLE_3}
        found = {r.temperature for r in printed.TABLES_2_AND_4 if (r.task, r.draft) == tuple(row)}
        assert found == (set() if name in ngrams else set(config.temperatures))
    assert config.metric in scores.METRICS
    assert config.task in tasks.TASKS


def test_no_such_config():
    with pytest.raises(ValueError, match=r"paper\.py:t5-3b: choose one of t5-3b_en-de, "):
        paper_config.get_config("t5-3b")


def test_the_docstring_prints_the_paper():
    lines = paper_config.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if "EnDe  T=0" in line)
    for line, (field, size) in zip(
        lines[start + 1 :],
        [(f, s) for f in ("alpha", "measured") for s in paper_config.DRAFT_SIZES],
        strict=False,
    ):
        shown = [float(word) for word in line.split()[-4:]]
        assert size in line
        assert shown == [
            getattr(row, field)
            for task in ("EnDe", "CNNDM")
            for temperature in (0, 1)
            for row in printed.TABLES_2_AND_4
            if (row.task, row.draft, row.temperature) == (task, f"T5-{size}", temperature)
        ]


# --- parameters and memory ---------------------------------------------------------------------

V1_0 = {"feed_forward_proj": "relu", "tie_word_embeddings": True, "scale_decoder_outputs": True}


class Shape(NamedTuple):
    """As in config.json."""

    d_model: int
    d_kv: int
    d_ff: int
    layers: int  # on each side
    heads: int


SHAPES = {
    "t5-small": Shape(512, 64, 2048, 6, 8),
    "t5-base": Shape(768, 64, 3072, 12, 12),
    "t5-large": Shape(1024, 64, 4096, 24, 16),
    "t5-3b": Shape(1024, 128, 16384, 24, 32),
    "t5-11b": Shape(1024, 128, 65536, 24, 128),
    "flan-t5-small": Shape(512, 64, 1024, 8, 6),
    "flan-t5-base": Shape(768, 64, 2048, 12, 12),
    "flan-t5-large": Shape(1024, 64, 2816, 24, 16),
    "flan-t5-xl": Shape(2048, 64, 5120, 24, 32),
    "flan-t5-xxl": Shape(4096, 64, 10240, 24, 64),
}


@functools.cache
def sizes(name, source_len, room):
    """Parameters, and numbers in what one row of the batch keeps for decoding."""
    one, two = (sizes_at_depth(name, layers, source_len, room) for layers in (1, 2))
    return one + (SHAPES[name].layers - 1) * (two - one)  # layers are alike


def sizes_at_depth(name, layers, source_len, room):
    """Sizes of a model with so many layers on each side, without making it."""
    shape = SHAPES[name]
    config = T5Config(
        d_model=shape.d_model, d_kv=shape.d_kv, d_ff=shape.d_ff, num_heads=shape.heads,
        num_layers=layers, num_decoder_layers=layers,
        **({} if name.startswith("flan") else V1_0),
    )  # fmt: skip
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    )
    ids = [jax.ShapeDtypeStruct((1, *s), jnp.int32) for s in ((source_len,), (), (1,), ())]
    kept = jax.eval_shape(lambda p, i: nnx.merge(graphdef, p).start(i, room), params, Inputs(*ids))
    return np.array([sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (params, kept)])


@pytest.mark.parametrize("target", paper_config.TARGETS)
def test_printed_sizes(target):
    """In the docs each model's; in the config's docstring all that is held at once."""
    config = paper_config.get_config(f"{target}_en-de")
    doc = DOC.read_text(encoding="utf-8")
    room = bucket(1 + config.max_new_tokens + max(config.gammas) + 1)
    total = 0
    for name in (target, *(pathlib.PurePath(draft).name for draft in config.drafts)):
        params, kept = sizes(name, config.max_source_len, room)
        weights, rows = (f"{4 * n / 1e9:.2f}" for n in (params, config.batch_size * kept))
        assert f"| {name} | {params:,} | {weights} | {rows} |" in doc
        if name == target or name.endswith("large"):
            total += 4 * (params + config.batch_size * kept) / 1e9
    (line,) = (x for x in paper_config.__doc__.splitlines() if x.split()[:1] == [f"{target}_en-de"])
    assert line.split()[-2:] == [f"{total:.0f}", f"{total / 2:.0f}"]
