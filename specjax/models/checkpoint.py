"""The class `Checkpoint`: a model, its tokenizer and the settings that decoding needs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel

DEFAULT_MAX_SOURCE_LEN = 512  # what T5 was trained on; where no file says otherwise


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with its tokenizer and the settings that decoding needs."""

    name: str
    """The directory, GGUF file or hub name that was loaded, for messages and result rows."""
    model: LanguageModel
    config: Any
    """The family's config: a `T5Config`, a `GPTConfig` or one of `llama.py`."""
    tokenizer: Any = None
    """A transformers tokenizer; None where the checkpoint has none."""
    eos_ids: tuple[int, ...] = (1,)
    """EOS ids: any of these ends a row."""
    max_source_len: int = DEFAULT_MAX_SOURCE_LEN
    """Most tokens of an input; longer ones are truncated."""
    prefix: str = ""
    """Beginning that config.json asks for in every input. It is not added to texts."""
    precision: str = ""
    """The dtype that `load` chose for the parameters, and why; "" where it was given."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Notes stored with the weights, such as the hash of the training data."""

    def __repr__(self) -> str:
        kind = getattr(self.config, "model_type", type(self.config).__name__)
        return f"Checkpoint({self.name!r}, {kind}, {self.model!r})"

    @property
    def start_id(self) -> int:
        """The first token, which is never emitted by the loops as output."""
        return self.config.start_id

    @property
    def pad_id(self) -> int:
        """The id that fills a row beyond its end."""
        return self.config.pad_token_id


def decoder_of(model: object, user: str) -> Decoder:
    """The decoder module of a model or checkpoint of the T5, GPT-2 or Llama layout.

    Raises:
      ValueError: another model, whose layers `user` cannot reach.
    """
    name = getattr(model, "name", type(model).__name__)
    inner = model.model if isinstance(model, Checkpoint) else model
    module = inner.module() if isinstance(inner, LanguageModel) else None
    if not isinstance(module, Decoder):
        raise ValueError(
            f"{name} has no layers and head that {user} can reach: it must be a T5, a GPT-2 or a "
            "model of the Llama layout, as specjax.load gives it. Take another drafter, or this "
            "one as it is."
        )
    return module


def start_field(config: Any) -> str:
    """The field of config.json that names the first token."""
    return "decoder_start_token_id" if config.is_encoder_decoder else "bos_token_id"
