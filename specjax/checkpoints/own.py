"""Wraps a model of your own, which has no Hugging Face directory, in a `Checkpoint`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

from specjax.checkpoints import DEFAULT_MAX_SOURCE_LEN, Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.support.ranges import whole
from specjax.types import Model


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    """The part of a configuration that decoding reads."""

    vocab_size: int
    """Number of token ids that the model has logits for."""
    start_id: int
    """Id before the first token of an output, or of an empty prompt."""
    pad_token_id: int
    """Id that fills rows up to a common length."""
    is_encoder_decoder: bool
    """True: inputs go to an encoder. False: outputs continue them."""
    max_positions: int | None
    """Most tokens of prompt and output together; None: no limit."""


def wrap(
    model: nnx.Module | Model,
    *,
    eos_ids: Sequence[int] = (),
    start_id: int = 0,
    pad_id: int = 0,
    encoder_decoder: bool = False,
    max_positions: int | None = None,
    max_source_len: int = DEFAULT_MAX_SOURCE_LEN,
    tokenizer: Any = None,
    name: str = "own model",
) -> Checkpoint:
    """Wrap any model in a `Checkpoint`, for `generate` and all else that takes one.

    Args:
      model: a Flax NNX module that holds parameters only, or any pytree; with a `vocab_size` and
        the methods of `specjax.types.Model`.
      eos_ids: any of these ends a row. Empty: rows end by their length.
      start_id: the prompt of every row of an encoder-decoder; else the prompt of an empty text.
      pad_id: fills what lies beyond a row's end; no model sees it.
      encoder_decoder: whether inputs are sources, and not prompts.
      max_positions: the most tokens of a prompt with its output; None: any number.
      max_source_len: longer inputs are truncated.
      tokenizer: a transformers tokenizer. None: inputs are token ids, and outputs have no text.
      name: for messages and rows of results.

    Raises:
      ValueError: the model lacks a part of the protocol, or an id is not of its vocabulary.
    """
    lacking = [
        part for part in ("vocab_size", "start", "__call__", "logits") if not hasattr(model, part)
    ]
    if lacking:
        raise ValueError(
            f"{type(model).__name__} lacks {', '.join(lacking)}: specjax.types.Model says what a "
            "model must have."
        )
    wrapped: Any = LanguageModel.of(model) if isinstance(model, nnx.Module) else model
    last = wrapped.vocab_size - 1
    for field, ids in (("eos_ids", eos_ids), ("start_id", [start_id]), ("pad_id", [pad_id])):
        for one in ids:
            whole(field, one, f"[0, {last}]", "the ids of the model")
    config = OwnConfig(wrapped.vocab_size, start_id, pad_id, encoder_decoder, max_positions)
    return Checkpoint(
        name=name,
        model=wrapped,
        config=config,
        tokenizer=tokenizer,
        eos_ids=tuple(eos_ids),
        max_source_len=max_source_len,
    )
