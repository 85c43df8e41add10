"""A model that returns the states of some of its layers beside the last one."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.checkpoint import Checkpoint
from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel
from specjax.pytrees import pytree
from specjax.types import Cache, Context, Encoding, Inputs


@pytree
class Tapped:
    """A model whose hidden state has (1 + N)·E numbers: the final one, then the taps.

    Implements the `Model` protocol. `logits` reads the first E, so the distributions are the
    model's, bit for bit; unread taps add no operation to the program. A tap is the state as it
    leaves a layer, before any norm.
    """

    model: LanguageModel
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The number of layers before each tap: 0 … L."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self.model.vocab_size

    def encoding(self, inputs: Inputs) -> Encoding | None:
        """Run the encoder alone; see `LanguageModel.encoding`."""
        return self.model.encoding(inputs)

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """Encode inputs, and make an empty cache; see `LanguageModel.start`."""
        return self.model.start(inputs, buffer_len)

    def __call__(
        self, tokens: Int[Array, "B K"], start: Any, context: Context, cache: Cache
    ) -> tuple[Float[Array, "... F"], Cache]:
        """Run K tokens per row; see `LanguageModel.__call__`; F = (1 + N)·E."""
        module = self.model.module()
        states, cache = module.states(tokens, start, context, cache)
        taps = (states[layer] for layer in self.layers)
        return jnp.concatenate([module.final_norm(states[-1]), *taps], axis=-1), cache

    def compact(self, cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
        """Copy an accepted path's slots together; see `BranchingModel.compact`."""
        return self.model.compact(cache, start, path)

    @property
    def branches(self) -> bool:
        """Whether the model is a `BranchingModel`."""
        return self.model.branches

    @property
    def packs(self) -> bool:
        """Whether the model is a `PackingModel`."""
        return self.model.packs

    def logits(self, hidden: Float[Array, "*batch F"]) -> Float[Array, "*batch V"]:
        """Logits of hidden states, from their first E numbers."""
        return self.model.logits(hidden[..., : hidden.shape[-1] // (1 + len(self.layers))])


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
