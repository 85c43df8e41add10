"""A tiny target and draft with a tokenizer, as Hugging Face directories, for whole commands."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

import t5_variants
from specjax.models.hub import Checkpoint, load
from specjax.tasks import tokenizer as tokenizers

IDS = 300  # that the tokenizer has
# The tokenizer's text, and inputs: none has more than 16 ids.
TEXTS = [
    "return self.line",
    "value = other + 1",
    "for name in names:",
    "raise ValueError(name)",
    "import os, sys",
    "x = line.strip()",
    "assert value, str",
    "def default(self):",
]
# Random weights hardly ever prefer one id out of 300; with many that end a row, as
# generation_config.json may say, some rows end early and some at their budget.
EOS_IDS = [1, *range(3, IDS, 30)]


class Pair(NamedTuple):
    """Loaded; `name` of each is its directory. Drafts share one architecture: few compilations."""

    target: Checkpoint
    draft: Checkpoint  # accepts about every third token at temperature 0
    twin: Checkpoint  # the target's weights


@functools.cache
def make_tokenizer():
    """300 pieces; inputs over 40 ids are too long."""
    return tokenizers.to_transformers(tokenizers.train(TEXTS, IDS), max_length=40)


def make(directory: Path) -> Pair:
    """Target and drafts are padded apart."""
    target = write(directory / "target", padding=20)
    draft = write(directory / "draft", padding=8, noise=0.05)
    twin = write(directory / "twin", padding=8)
    return Pair(load(target), load(draft), load(twin))


def write(directory: Path, *, padding: int, noise: float = 0.0, layers: int = 1) -> Path:
    """A checkpoint of T5 v1.1 with one layer each side, or more in the decoder.

    Args:
      padding: rows of the embedding beyond the tokenizer's ids, which the head prefers; even.
      noise: on every weight, in units of its deviation.
    """
    sizes = {"vocab_size": IDS, "num_layers": 1, "num_decoder_layers": layers}
    variant = t5_variants.Variant("pair", {**t5_variants.V1_1, **sizes}, own_head=True)
    rng = np.random.default_rng(1)
    weights = {}
    for name, array in t5_variants.tensors(variant).items():
        array = array + noise * array.std() * rng.normal(size=array.shape).astype(np.float32)
        if name in ("shared.weight", "lm_head.weight"):
            # Of two opposite rows one is likely, whatever the hidden state.
            large = 4 * array[: padding // 2]
            array = np.concatenate([array, large, -large])
        weights[name] = array
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    raw = {**variant.raw, "vocab_size": IDS + padding}
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}))
    make_tokenizer().save_pretrained(directory)
    return directory
