"""A tiny target and draft with a tokenizer, as Hugging Face directories, for whole commands."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

import llama_variants
import t5_variants
from experiments.train import tokenizer as tokenizers
from specjax.checkpoints import Checkpoint, load

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
def make_tokenizer(*, decoder_only: bool = False):
    """300 pieces; inputs over 40 ids are too long."""
    trained = tokenizers.train(TEXTS, IDS, decoder_only=decoder_only)
    return tokenizers.to_transformers(trained, max_length=40)


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
    weights = {}
    for name, array in shaken(t5_variants.tensors(variant), noise).items():
        if name in ("shared.weight", "lm_head.weight"):
            # Of two opposite rows one is likely, whatever the hidden state.
            large = 4 * array[: padding // 2]
            array = np.concatenate([array, large, -large])
        weights[name] = array
    return _save(directory, weights, {**variant.raw, "vocab_size": IDS + padding}, make_tokenizer())


def write_qwen(directory: Path, *, noise: float = 0.0) -> Path:
    """A checkpoint of the Llama layout with two layers, one of which has a window."""
    sizes = {"vocab_size": IDS, "bos_token_id": 0, "tie_word_embeddings": True}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    variant = llama_variants.Variant("pair", "qwen2", {**sizes, **windows})
    weights = shaken(llama_variants.tensors(variant), noise)
    return _save(directory, weights, variant.raw, make_tokenizer(decoder_only=True))


def shaken(weights: dict[str, np.ndarray], noise: float) -> dict[str, np.ndarray]:
    """With noise on each, in units of its deviation."""
    rng = np.random.default_rng(1)
    return {
        name: x + noise * x.std() * rng.normal(size=x.shape).astype(np.float32)
        for name, x in weights.items()
    }


def _save(directory: Path, weights, raw, tokenizer) -> Path:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}))
    tokenizer.save_pretrained(directory)
    return directory
