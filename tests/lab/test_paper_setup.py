"""The paper's setup: each config as it stands, but for lengths and counts.

Hub names are looked up as directories first, so tiny models of both architectures and tiny corpora
in the hub's layout stand in for what the names mean.
"""

import dataclasses
import functools
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import command_line
import corpora
import t5_variants
from configs import paper as paper_config
from experiments import tasks
from experiments.reproduce import printed, scores
from specjax import checkpoints, generate
from specjax.batching import bucket
from specjax.models.t5 import T5, T5Config
from specjax.types import Inputs
from tiny_models import quick

DOC = command_line.ROOT / "experiments" / "reproduce" / "README.md"


# --- the configs run ---------------------------------------------------------------------------

PADDING = 28  # rows of the embedding beyond the tokenizer's ids, as T5 has
# Added to each weight, in units of its deviation: the larger a draft, the nearer its target.
NOISE = {"small": 0.1, "base": 0.05, "large": 0.02}
LENGTHS = {"gamma": 3, "max_new_tokens": 16}
SAMPLES = 40  # outputs of each input, at temperature 1


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with all that the configs name: google-t5/…, google/…, wmt/… and abisee/…."""
    root = tmp_path_factory.mktemp("hub")
    corpora.write(root)
    tokenizer = make_tokenizer()
    for prefix, targets, variant in (
        ("google-t5/t5-", ("3b", "11b"), t5_variants.VARIANTS["v1_0"]),
        ("google/flan-t5-", ("xl", "xxl"), t5_variants.VARIANTS["v1_1"]),
    ):
        sizes = {
            "vocab_size": len(tokenizer) + PADDING, "num_layers": 1, "num_decoder_layers": 1
        }  # fmt: skip
        variant = dataclasses.replace(variant, config={**variant.config, **sizes})
        untrained = checkpoints.load(t5_variants.write(root / variant.name, variant))
        # Words that end a row, so that some rows end early.
        eos_ids = (1, *range(10, len(tokenizer), 30))
        made = dataclasses.replace(untrained, tokenizer=tokenizer, eos_ids=eos_ids)
        for size in targets:
            checkpoints.save(root / f"{prefix}{size}", changed(made, 0.0))
        for size, noise in NOISE.items():
            checkpoints.save(root / f"{prefix}{size}", changed(made, noise))
    return root


def make_tokenizer():
    """An id for each word and mark of the corpora: whatever a model says can be scored."""
    texts = (
        text for d in (corpora.GERMAN, corpora.HIGHLIGHTS) for pair in d.items() for text in pair
    )
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text)})
    ids = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **specials)


def changed(checkpoint, noise):
    """With noise on each weight, and then surer of its next token, for which it looks to its input.

    As they are, a random T5 with a tied head only repeats itself.
    """
    rng = np.random.default_rng(0)
    factors = {"['cross']['query']": 3, "['cross']['output']": 10, "decoder_norm": 4}
    if checkpoint.config.scale_decoder_outputs:
        factors["decoder_norm"] = 4 * checkpoint.config.d_model**0.5

    def change(path, weight):
        moved = weight + noise * weight.std() * rng.normal(size=weight.shape).astype(np.float32)
        name = jax.tree_util.keystr(path)
        return moved * next((by for part, by in factors.items() if part in name), 1)

    params = jax.tree_util.tree_map_with_path(change, checkpoint.model.params)
    return dataclasses.replace(
        checkpoint, model=dataclasses.replace(checkpoint.model, params=params)
    )


@pytest.mark.parametrize("name", quick(paper_config.CHOICES, "t5-11b_cnn-dm"))
def test_methods_agree_as_the_config_says(name, root, monkeypatch):
    monkeypatch.chdir(root)
    config = paper_config.get_config(name)
    pairs = tasks.load(config.task, config.split, files=config.data_dir)
    texts = [pair.input for pair in pairs]
    target = checkpoints.load(config.target, dtype=jnp.dtype(config.dtype))
    drafts = [checkpoints.load(path, dtype=jnp.dtype(config.dtype)) for path in config.drafts]
    assert config.temperatures == (0, 1)

    def decode(checkpoint, draft, **options):
        options = {**LENGTHS, "max_source_len": config.max_source_len, **options}
        return generate(checkpoint, draft, texts, **options)

    greedy = decode(target, None, batch_size=config.batch_size)
    assert len(set(greedy.texts)) > len(texts) / 2
    for draft in drafts:
        result = decode(target, draft, batch_size=config.batch_size)
        assert result.tokens == greedy.tokens
        assert result.accepted.sum() > 0
        found = scores.agree(
            config.metric, result.texts, greedy.texts, [pair.target for pair in pairs]
        )
        assert found.identical == 1
        assert found.within

    # The models know no German, but their draws resemble the most likely outputs.
    references = [text for text in greedy.texts for _ in range(SAMPLES)]
    sampled = {"temperature": 1.0, "num_samples": SAMPLES, "batch_size": 64}
    plain = decode(target, None, key=jax.random.key(0), **sampled)
    result = decode(target, drafts[0], key=jax.random.key(1), **sampled)
    assert result.tokens != plain.tokens
    found = scores.agree(config.metric, result.texts, plain.texts, references)
    assert found.within
    alone = decode(drafts[0], None, key=jax.random.key(1), **sampled)
    assert not scores.agree(config.metric, alone.texts, plain.texts, references).within


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
