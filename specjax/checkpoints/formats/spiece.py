"""Reads T5's tokenizer from `spiece.model` alone, without the package sentencepiece.

The file is a message of protocol buffers, sentencepiece_model.proto
(https://github.com/google/sentencepiece). Read are pieces with their scores, and the table that
normalizes texts before they are cut into pieces.
"""

from pathlib import Path
from typing import Any

from specjax.checkpoints.tensors import AGAIN
from specjax.support.files import read_json

FILES = ("spiece.model", "sentencepiece.model")  # Hugging Face's name and T5X's
UNIGRAM = 1  # the kind of model that T5 uses
CONTROL, USER_DEFINED = 3, 4  # kinds of pieces
UNKNOWN_ID = 2  # where transformers' T5 tokenizer has <unk>
EXTRA_IDS = 100  # the default of tokenizer_config.json
SPECIAL = ("eos_token", "unk_token", "pad_token")


def find(directory: Path) -> Path | None:
    """Find a directory's file of pieces; None if it has none."""
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


def load(path: Path) -> Any:
    """Load transformers' tokenizer of T5, with the ids of its own conversion.

    tokenizer_config.json and special_tokens_map.json beside the file are followed.

    Raises:
      ValueError: the file is damaged, or not of T5's kind.
    """
    from transformers import AddedToken, T5Tokenizer  # imported here because it takes a second

    directory, found = path.parent, read(path)
    if (found.trainer_spec.model_type, found.trainer_spec.unk_id) != (UNIGRAM, UNKNOWN_ID):
        raise ValueError(
            f"{path} is no tokenizer of a T5: those are unigram models with <unk> at {UNKNOWN_ID}."
        )
    stored: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            stored |= {k: v for k, v in read_json(directory / name).items() if v is not None}
    count = stored.get("extra_ids", EXTRA_IDS)
    if type(count) is not int or not 0 <= count <= 100_000:
        raise ValueError(f"{directory}: extra_ids={count!r} should be an integer ≥ 0.")
    vocab = [(piece.piece, piece.score) for piece in found.pieces]
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    there = {text for text, _ in vocab}
    options = {key: _text(stored[key]) for key in SPECIAL if key in stored}
    if (limit := stored.get("model_max_length")) is not None:
        options["model_max_length"] = limit
    special = [
        AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL)
        for piece in found.pieces
        if piece.type in (CONTROL, USER_DEFINED)
    ]
    try:
        return T5Tokenizer(
            vocab=[*vocab, *((text, 0.0) for text in extra if text not in there)],
            _spm_precompiled_charsmap=found.normalizer_spec.precompiled_charsmap or None,
            extra_ids=count,
            additional_special_tokens=[*special, *reversed(extra)],
            **options,
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"{path} cannot be read ({error}). {AGAIN}") from error


def _text(token: Any) -> Any:
    """The text of a token, which older files describe by an object."""
    return token.get("content") if isinstance(token, dict) else token


def read(path: Path) -> Any:
    """Read a `ModelProto` of sentencepiece; ValueError if the file is cut short or damaged."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from transformers.convert_slow_tokenizer import import_protobuf

    found = import_protobuf().ModelProto()
    try:
        found.ParseFromString(path.read_bytes())
        if not found.pieces or not all(isinstance(one.piece, str) for one in found.pieces):
            raise ValueError("no pieces, or one that is no text")
        charsmap = found.normalizer_spec.precompiled_charsmap
        if charsmap and not is_charsmap(charsmap):
            raise ValueError("its table that normalizes texts is not as long as it says")
    except (DecodeError, ValueError) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}). {AGAIN}") from None
    return found


def is_charsmap(table: bytes) -> bool:
    """Whether the trie at the beginning of a precompiled charsmap has its stated length."""
    size = int.from_bytes(table[:4], "little")
    return len(table) >= 4 and 0 < size <= len(table) - 4 and size % 4 == 0
