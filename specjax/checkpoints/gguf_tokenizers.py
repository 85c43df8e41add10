"""Builds the tokenizer that a GGUF file describes."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints import gguf_files, spiece
from specjax.checkpoints.config_json import NO_ID
from specjax.checkpoints.gguf_models import PERIODS, TOKENIZER, TOKENS

PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp's name of a row that has no token
MASK = "<mask>"
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer(path: Path) -> Any:
    """Load the tokenizer as transformers reads it from the file, but without torch.

    Returns: None if the file has none. Its errors are of any kind.
    """
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    fields = gguf_files.read(path).fields
    if TOKENS not in fields:
        return None
    given, options = (
        {
            name: _listed(fields[f"tokenizer.{key}"])
            for key, name in GGUF_TOKENIZER_MAPPING[group].items()
            if f"tokenizer.{key}" in fields
        }
        for group in ("tokenizer", "tokenizer_config")
    )
    tokens, ids = given["tokens"], []
    if given.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)
    for role, stored in SPECIAL.items():
        i = fields.get(f"{TOKENIZER}{stored}_token_id", NO_ID)
        options[f"{role}_token"] = None if i == NO_ID else tokens[i]
        ids.append(i)
    if fields["general.architecture"] in PERIODS and MASK in tokens:
        options["mask_token"] = MASK  # the file has no key for a Gemma's
    end = len(tokens)
    while end and PADDING.fullmatch(tokens[end - 1]):
        end -= 1
    extra = spiece.EXTRA_IDS if given.get("tokenizer_type") == "t5" else 0
    end = min(max(end + extra, *(i + 1 for i in ids)), len(tokens))
    for key in ("tokens", "scores", "token_type"):
        if len(given.get(key, tokens)) != len(tokens):
            raise ValueError(f"{TOKENIZER}{key} are not as many as the tokens")
        if key in given:
            given[key] = given[key][:end]
    built, _ = convert_gguf_tokenizer(fields["general.architecture"], given)
    charsmap = given.get("precompiled_charsmap")  # transformers does not follow it
    if isinstance(charsmap, list) and extra:
        table = bytes(byte % 256 for byte in charsmap)
        if not spiece.is_charsmap(table):
            raise ValueError("precompiled_charsmap is not as long as it says")
        built.normalizer = normalizers.Precompiled(table)
    return PreTrainedTokenizerFast(tokenizer_object=built, **options)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
