"""What tests change in a checkpoint's directory, and how they compare what is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specjax.checkpoints.tensors import read_into

WORDS = ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz")


def make_tokenizer(words=WORDS, **options) -> PreTrainedTokenizerFast:
    """One token a letter; </s> at the end, as T5's tokenizer does."""
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(99), strict=False)), "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles | options)


def edit_json(path: Path, **changes) -> None:
    """Change fields of a JSON file, which is made if need be."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **changes}))


def edit_weights(directory: Path, edit: Callable[[dict], dict | None]) -> None:
    """Change the dict of tensors in place, or replace it by what `edit` returns."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    changed = edit(tensors)
    save_file(tensors if changed is None else changed, file, metadata={"format": "pt"})


def contents(tensor) -> np.ndarray:
    """All numbers of a tensor."""
    out = np.empty(tensor.shape, tensor.dtype)
    read_into(tensor, out)
    return out


def assert_same(a, b) -> None:
    """Two checkpoints have equal configs, ends and parameters."""
    assert a.config == b.config
    assert type(a.config) is type(b.config)
    assert a.eos_ids == b.eos_ids
    jax.tree.map(np.testing.assert_array_equal, a.model, b.model)
