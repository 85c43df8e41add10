"""Token ids of texts, checked and cut, and the arrays that a model starts from."""

import functools
import re
import warnings
from collections.abc import Mapping, Sequence, Set, Sized
from typing import Any

import numpy as np
from jax import Array

from specjax.batching import bucket, pack
from specjax.checkpoints import tokenizers
from specjax.models.checkpoint import Checkpoint
from specjax.support.ranges import shown, whole
from specjax.types import Inputs, Text

MAX_NEW_TOKENS = 2**20  # of a row: buffers and caches have a slot for each
SURROGATE = re.compile("[\ud800-\udfff]")


def tokenize(
    checkpoint: Checkpoint, texts: Sequence[Text], max_source_len: int | None = None
) -> list[list[int]]:
    """Tokenize each text with the checkpoint's tokenizer (T5 appends EOS).

    A text that begins with BOS, as chat templates write it, gets no second one. Ids are kept as
    given, up to the limit: an encoder-decoder's source should end with EOS if the model was
    trained so.

    Texts that lack the checkpoint's prefix are counted in one warning. Texts over the limit are
    cut, and counted in another. Sources of an encoder-decoder are cut at their end, but before the
    tokenizer's EOS. Prompts of a decoder-only model are cut at their beginning, but behind the
    tokenizer's BOS. Blank sources give no ids and one warning; an empty prompt is the start token.

    Raises:
      ValueError: `texts` is not a list of strings or of ids, an id is not of the vocabulary, or
        there are strings and the checkpoint has no tokenizer.
    """
    check_texts(texts)
    if checkpoint.tokenizer is None and any(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{checkpoint.name} has no tokenizer, which texts and commands need. Copy "
            "tokenizer.json and tokenizer_config.json into the directory; or, in Python, give "
            "lists of token ids."
        )
    limit = checkpoint.max_source_len if max_source_len is None else max_source_len
    whole("max_source_len", limit, "[1, ∞)")

    marks = functools.cache(functools.partial(tokenizers.marks, checkpoint.tokenizer))

    def encode(text: Text) -> list[int]:
        if isinstance(text, str):
            row = tokenizers.encode(checkpoint.tokenizer, text)
            row = row[1:] if row[:1] == row[1:2] == marks()[0][:1] else row
            return _known(row, text, checkpoint)
        return _as_ids(text, checkpoint)

    ids: list[list[int]] = []
    blank = long = bare = 0
    for text in texts:
        if is_blank(checkpoint, text):
            ids.append([])
            blank += 1
            continue
        bare += isinstance(text, str) and not text.startswith(checkpoint.prefix)
        row = encode(text) or [checkpoint.start_id]
        if len(row) > limit:
            encodes = checkpoint.config.is_encoder_decoder
            if isinstance(text, str):
                mark = marks()[1 if encodes else 0]
            else:
                mark = [one for one in row[-1:] if encodes and one in checkpoint.eos_ids]
            row = cut(row, limit, mark, at_end=encodes)
            long += 1
        ids.append(row)
    if blank:
        warnings.warn(f"{blank} empty input(s): their output is empty too.", stacklevel=3)
    if bare:
        warnings.warn(
            f"{bare} of {len(texts)} input(s) do not begin with {checkpoint.prefix!r}, as the "
            f"config.json of {checkpoint.name} says that all should: the outputs may be poor.",
            stacklevel=3,
        )
    if long:
        warnings.warn(
            f"{long} input(s) longer than {limit} tokens were truncated; "
            "max_source_len sets the limit.",
            stacklevel=3,
        )
    return ids


def check_texts(texts: Sequence[Text]) -> None:
    """Raise ValueError unless `texts` is a list of strings or of lists of ids.

    One string would be read as its letters, and one list of ids as texts.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Sized):
        given = shown(texts)
        raise ValueError(f"texts={given} should be a list of strings, such as [{given}].")
    if isinstance(texts, Set | Mapping):
        raise ValueError(f"texts={shown(texts)} has no order: give a list, such as sorted(texts).")
    for index, text in enumerate(texts):
        if isinstance(text, str) and (wrong := SURROGATE.search(text)):
            raise ValueError(
                f"texts[{index}]={shown(text)} holds {wrong[0]!r}, half a character, which no "
                'tokenizer reads: text.encode("utf-8", "replace").decode() has "?" in its place.'
            )
        if not isinstance(text, str) and not _are_ids(text):
            raise ValueError(
                f"texts[{index}]={shown(text)} should be a string, or a list of token ids."
            )


def _are_ids(text: Any) -> bool:
    if isinstance(text, np.ndarray | Array):
        return text.ndim == 1 and (text.dtype.kind in "iu" or text.size == 0)
    return isinstance(text, list | tuple) and all(
        type(one) is not bool and isinstance(one, int | np.integer) for one in text
    )


def _as_ids(ids: Any, checkpoint: Checkpoint) -> list[int]:
    """Check ids; ValueError if one is not of the checkpoint's vocabulary."""
    found = ids.tolist() if isinstance(ids, np.ndarray | Array) else [int(one) for one in ids]
    return _known(found, ids, checkpoint)


def _known(found: list[int], text: Text, checkpoint: Checkpoint) -> list[int]:
    """Check a text's ids; ValueError that shows the text if one is not of the vocabulary."""
    size = checkpoint.model.vocab_size
    if wrong := [one for one in found if not 0 <= one < size]:
        raise ValueError(
            f"{wrong[0]} in {shown(text)} is no token id of {checkpoint.name}: they are 0 … "
            f"{size - 1}."
        )
    return found


def is_blank(checkpoint: Checkpoint, text: Text) -> bool:
    """Whether a text gives no ids: an encoder has nothing to read there, a prompt may be empty."""
    empty = not text.strip() if isinstance(text, str) else len(text) == 0
    return checkpoint.config.is_encoder_decoder and empty


def cut(row: list[int], limit: int, mark: Sequence[int], *, at_end: bool = True) -> list[int]:
    """Cut ids at their end or their beginning, but for the mark there, which stays if it fits.

    Args:
      mark: one of `tokenizers.marks`.
    """
    if at_end:
        return cut(row[::-1], limit, mark[::-1], at_end=False)[::-1]
    kept = len(mark) if list(mark) == row[: len(mark)] and len(mark) < limit else 0
    return row[:kept] + row[len(row) - limit + kept :]


def check_room(target: Checkpoint, texts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError if an output exceeds the model's positions or `MAX_NEW_TOKENS`.

    The positions are those of a prompt and its output, or of a first token and the output of an
    encoder-decoder, whose sources may have a limit of their own.
    """
    check_budget(max_new_tokens)
    positions = target.config.max_positions
    longest = max(map(len, texts), default=0)
    if target.config.is_encoder_decoder:
        limit = getattr(target.config, "max_source_positions", None)
        if limit is not None and longest > limit:
            raise ValueError(
                f"A source of {longest} tokens exceeds the {limit} positions of {target.name}'s "
                "encoder: set max_source_len to cut sources."
            )
        if positions is not None and max_new_tokens >= positions:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} and a first token exceed the {positions} "
                f"positions of {target.name}: lower max_new_tokens."
            )
        return
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"A prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the "
            f"{positions} positions of {target.name}: lower max_new_tokens, or set max_source_len "
            "to cut prompts."
        )


def check_budget(max_new_tokens: int) -> None:
    """Raise ValueError unless an output may have `max_new_tokens` tokens."""
    if whole("max_new_tokens", max_new_tokens, "[1, ∞)") > MAX_NEW_TOKENS:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} must be ≤ {MAX_NEW_TOKENS:,}: the caches have a slot "
            "for each of them in every row."
        )


def pack_for(
    target: Checkpoint, texts: Sequence[Sequence[int]], *, rows: int, width: int | None = None
) -> Inputs:
    """Pack the ids of `tokenize` into the arrays that this model starts from.

    Args:
      rows: B, at least the number of texts.
      width: width of the texts' array; default: the bucket of the longest.
    """
    width = width or _width(max(map(len, texts)))
    start_id = target.start_id if target.config.is_encoder_decoder else None
    return pack(texts, start_id=start_id, rows=rows, width=width)


def common_width(sources: Sequence[Sequence[int]]) -> int:
    """Choose one width for all sources, so that they share their compilations."""
    return _width(max(map(len, sources)))


def _width(longest: int) -> int:
    return bucket(longest, smallest=16 if longest > 1 else 1)
