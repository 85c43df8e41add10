"""The tokenizer of a checkpoint, and what its files say of ids and of texts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.models.hub import spiece, t5x_files
from specjax.models.hub.checkpoint import DEFAULT_MAX_SOURCE_LEN


def load(directory: Path) -> Any:
    """The tokenizer, or None where the directory has none."""
    # What is imported here takes a second, and advises to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    names = ("tokenizer.json", "tokenizer_config.json")
    pieces = spiece.find(directory)
    if pieces is None and t5x_files.is_checkpoint(directory):
        pieces = spiece.find(directory.absolute().parent)  # beside all steps of a run
    if pieces is not None and not (directory / names[0]).is_file():
        return spiece.load(pieces)
    if not any((directory / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        fix = (
            "Copy or download it again."
            if (directory / "tokenizer.json").is_file()
            else "It has no tokenizer.json: `pip install sentencepiece protobuf` to convert the "
            "older format, or copy tokenizer.json from the model's page."
        )
        raise ValueError(
            f"The tokenizer in {directory} cannot be read ({type(error).__name__}: {reason}). {fix}"
        ) from error


def real_vocab_size(tokenizer: Any, rows: int, directory: Path) -> int:
    """How many ids stand for something: those of the tokenizer, without the embedding's padding."""
    if tokenizer is None:
        return rows
    real = max(tokenizer.get_vocab().values()) + 1
    if real > rows:
        raise ValueError(
            f"{directory}: the tokenizer has {real} ids and the model only {rows} (vocab_size in "
            "config.json). They belong to different models: copy or download both again."
        )
    return real


def eos_ids(value: Any) -> tuple[int, ...]:
    """From an id, a list of them or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(sorted(set(ids)))


def max_source_len(tokenizer: Any, raw: Mapping[str, Any], config: Any) -> int:
    """What the tokenizer says, at most the positions of the model; else those, or a default."""
    # A tokenizer that knows no limit says 10³⁰.
    limit = 10**30 if tokenizer is None else tokenizer.model_max_length
    if type(limit) not in (int, float) or not limit >= 1:
        raise ValueError(
            f"tokenizer_config.json: model_max_length={limit!r} should be a number ≥ 1."
        )
    if limit < 10**6:
        limit = int(limit)
        return min(limit, config.max_positions or limit)
    return config.max_positions or int(raw.get("n_positions") or DEFAULT_MAX_SOURCE_LEN)


def prefix(raw: Mapping[str, Any], directory: Path) -> str:
    """transformers' field for what its pipelines put before every text."""
    prefix = raw.get("prefix") or ""
    if not isinstance(prefix, str):
        raise ValueError(f"{directory / 'config.json'}: prefix={prefix!r} should be a text.")
    return prefix
