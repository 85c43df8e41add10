"""Reads T5's tokenizer from `spiece.model` alone, without the packages sentencepiece and protobuf.

The file is a message of protocol buffers (https://protobuf.dev/programming-guides/encoding), whose
fields are those of sentencepiece_model.proto (https://github.com/google/sentencepiece). Read are
pieces with their scores, and the table that normalizes texts before they are cut into pieces.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checkpoints.tensors import AGAIN, read_json

FILES = ("spiece.model", "sentencepiece.model")  # Hugging Face's name and T5X's
UNIGRAM = 1  # the kind of model that T5 uses
CONTROL, USER_DEFINED = 3, 4  # kinds of pieces
UNKNOWN_ID = 2  # where transformers' T5 tokenizer has <unk>
EXTRA_IDS = 100  # the default of tokenizer_config.json
SPECIAL = ("eos_token", "unk_token", "pad_token")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class Piece(NamedTuple):
    """A token, its log probability, and its kind."""

    text: str
    score: float
    kind: int


class Spiece(NamedTuple):
    """The parts of a tokenizer."""

    pieces: list[Piece]
    model_type: int
    unknown_id: int
    charsmap: bytes


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
    if found.model_type != UNIGRAM or found.unknown_id != UNKNOWN_ID:
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
    vocab = [(piece.text, piece.score) for piece in found.pieces]
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    there = {piece.text for piece in found.pieces}
    options = {key: _text(stored[key]) for key in SPECIAL if key in stored}
    if (limit := stored.get("model_max_length")) is not None:
        options["model_max_length"] = limit
    special = [
        AddedToken(piece.text, normalized=False, special=piece.kind == CONTROL)
        for piece in found.pieces
        if piece.kind in (CONTROL, USER_DEFINED)
    ]
    try:
        return T5Tokenizer(
            vocab=[*vocab, *((text, 0.0) for text in extra if text not in there)],
            _spm_precompiled_charsmap=found.charsmap or None,
            extra_ids=count,
            additional_special_tokens=[*special, *reversed(extra)],
            **options,
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"{path} cannot be read ({error}). {AGAIN}") from error


def _text(token: Any) -> Any:
    """The text of a token, which older files describe by an object."""
    return token.get("content") if isinstance(token, dict) else token


def read(path: Path) -> Spiece:
    """Read the parts of a sentencepiece model; ValueError if the file is cut short or damaged."""
    pieces, model_type, unknown_id, charsmap = [], UNIGRAM, 0, b""
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:
                inner = dict(_fields(value))
                score = struct.unpack("<f", inner[2])[0] if 2 in inner else 0.0
                pieces.append(Piece(inner[1].decode(), score, inner.get(3, 1)))
            elif field == 2:
                inner = dict(_fields(value))
                model_type, unknown_id = inner.get(3, UNIGRAM), inner.get(40, 0)
            elif field == 3:
                charsmap = dict(_fields(value)).get(2, b"")
        if not pieces:
            raise ValueError("no pieces")
        if charsmap and not is_charsmap(charsmap):
            raise ValueError("its table that normalizes texts is not as long as it says")
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}). {AGAIN}") from None
    return Spiece(pieces, model_type, unknown_id, charsmap)


def is_charsmap(table: bytes) -> bool:
    """Whether the trie at the beginning of a precompiled charsmap has its stated length."""
    size = int.from_bytes(table[:4], "little")
    return len(table) >= 4 and 0 < size <= len(table) - 4 and size % 4 == 0


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield each field's number and value: an int, or bytes if it is longer."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire == BYTES:
            size, at = _varint(message, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {wire}")
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield field, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Read a number in base 128, lowest digits first; return it and its end."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number without end")
