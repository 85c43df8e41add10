"""A model with its tokenizer and all that decoding has to know about both."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models.language_model import LanguageModel

DEFAULT_MAX_SOURCE_LEN = 512  # what T5 was trained on; where no file says otherwise


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with its tokenizer and all that decoding has to know about both."""

    name: str
    """The directory or hub name it came from, for messages and result rows."""
    model: LanguageModel
    config: Any
    """Of the family: a `T5Config`, a `GPTConfig` or one of `llama.py`."""
    tokenizer: Any = None
    """A transformers tokenizer; None where the checkpoint has none."""
    eos_ids: tuple[int, ...] = (1,)
    """Any of these ends a row."""
    max_source_len: int = DEFAULT_MAX_SOURCE_LEN
    """Longer inputs are truncated."""
    prefix: str = ""
    """With which every input should begin, as config.json says. It is not added to texts."""
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
        """Fills what lies beyond a row's end."""
        return self.config.pad_token_id


def start_field(config: Any) -> str:
    """Of config.json: where it names the first token."""
    return "decoder_start_token_id" if config.is_encoder_decoder else "bos_token_id"
