"""A model that shows the states of some of its layers beside the last one."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.language_model import LanguageModel
from specjax.models.layers import Decoder
from specjax.pytrees import pytree
from specjax.types import Cache, Context, Inputs, Layout


@pytree
class Tapped:
    """The same model, with a hidden state of (1 + N)·E numbers: the final one, then the taps.

    Implements the `Model` protocol. `logits` reads the first E, so the distributions are the
    model's, bit for bit, and where nobody reads the taps the program has not one operation more. A
    tap is the state as it leaves a layer, before any norm.
    """

    model: LanguageModel
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """After how many layers each tap is taken: 0 … L."""

    @property
    def vocab_size(self) -> int:
        """See `Model.vocab_size`."""
        return self.model.vocab_size

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """See `Model.start`."""
        return self.model.start(inputs, buffer_len)

    def __call__(
        self,
        tokens: Int[Array, "B K"],
        start: Int[Array, " #B"],
        context: Context,
        cache: Cache,
        layout: Layout | None = None,
    ) -> tuple[Float[Array, "B K F"], Cache]:
        """See `Model.__call__`; F = (1 + N)·E."""
        module = self.model.module()
        states, cache = module.states(tokens, start, context, cache, layout)
        taps = (states[layer] for layer in self.layers)
        return jnp.concatenate([module.final_norm(states[-1]), *taps], axis=-1), cache

    def compact(self, cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
        """See `BranchingModel.compact`."""
        return self.model.compact(cache, start, path)

    @property
    def branches(self) -> bool:
        """See `LanguageModel.branches`."""
        return self.model.branches

    def logits(self, hidden: Float[Array, "*batch F"]) -> Float[Array, "*batch V"]:
        """See `Model.logits`."""
        return self.model.logits(hidden[..., : hidden.shape[-1] // (1 + len(self.layers))])


def decoder_of(model: object, user: str) -> Decoder:
    """The module of a T5, a GPT-2 or a model of the Llama layout.

    Raises:
      ValueError: a model of one's own, of which `user` could not reach the layers.
    """
    module = model.module() if isinstance(model, LanguageModel) else None
    if not isinstance(module, Decoder):
        raise ValueError(
            f"{user} needs a target of the T5, GPT-2 or Llama layout, whose embedding, layers and "
            f"head it can reach; {type(model).__name__} is none. Take another drafter."
        )
    return module
