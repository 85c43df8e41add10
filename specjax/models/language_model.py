"""The model of the jitted loops: one pytree of parameters, and everything else static."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax import devices
from specjax.models.decoder import Decoder
from specjax.models.layers import arrange
from specjax.models.sharding import Placement
from specjax.pytrees import pytree
from specjax.types import Cache, Context, Encoding, Inputs


@pytree
class LanguageModel:
    """Parameters of an NNX module, with the static structure that calls it.

    The parameters are the pytree's only leaves; the module's structure and the vocabulary are part
    of its type, so a jitted function takes a LanguageModel as a plain argument and compiles once
    for all weights of one architecture. Implements the `Model` protocol of `specjax.types`.
    """

    params: Any
    """Plain dicts, nested as the module is: jit flattens them in C++, but an nnx.State in Python
    in every call."""
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    """Number of ids that are tokens; further rows of the output layer are padding."""
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})
    """The mesh of the parameters, and how it splits them; None: one device."""
    taps: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    """The number of layers, 0 … L, before each tap. With N taps a hidden state has (1 + N)·E
    numbers: the final one, then the states as they leave these layers, before any norm. `logits`
    reads the first E, so distributions are the same, bit for bit."""

    @classmethod
    def of(
        cls,
        module: nnx.Module,
        vocab_size: int | None = None,
        *,
        platform: str | None = None,
        placement: Placement | None = None,
    ) -> "LanguageModel":
        """Split a module that has a `vocab_size` and the methods of `Model`.

        Its projections are turned to the layout of a platform. The module stays as it is, and later
        changes of it do not change this model.

        Args:
          module: holds parameters and nothing else.
          vocab_size: the number of real ids. None: every row of the output layer is one.
          platform: "cpu", "gpu" or "tpu". None: that of the parameters' device.
          placement: of parameters on a mesh; `sharding.fit` and `sharding.split` must have made
            the module for it.
        """
        platform = platform or devices.device_of(nnx.state(module)).platform
        module = arrange(nnx.clone(module), platform)
        graphdef, params = nnx.split(module)
        size = module.vocab_size  # type: ignore[attr-defined]
        pure = nnx.to_pure_dict(params)
        return cls(pure, graphdef, size if vocab_size is None else vocab_size, placement)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        count = sum(leaf.size for leaf in leaves)
        dtypes = ", ".join(sorted({leaf.dtype.name for leaf in leaves}))
        return f"LanguageModel({count:,} parameters, {dtypes}, {self.vocab_size} ids)"

    def module(self) -> Any:
        """Build the module again, with the same arrays in variables of its own."""
        return nnx.merge(self.graphdef, self.params, copy=True)

    def encoding(self, inputs: Inputs) -> Encoding | None:
        """Run the encoder alone. None: there is none whose output drafters can share."""
        module = self.module()
        if not hasattr(module, "encoder_params"):
            return None
        return Encoding(*module.read(inputs.source, inputs.source_len))

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """Encode inputs, unless they have an encoding, and make an empty cache."""
        started = self.module().start(inputs, buffer_len)
        return started if self.placement is None else self.placement.begun(*started)

    def __call__(
        self, tokens: Int[Array, "B K"], start: Any, context: Context, cache: Cache
    ) -> tuple[Float[Array, "... E"], Cache]:
        """Run K tokens per row from `start` on, an array or a `Call`; see `Model.__call__`."""
        module = self.module()
        if not self.taps:
            return module(tokens, start, context, cache)
        states, cache = module.states(tokens, start, context, cache)
        taps = (states[layer] for layer in self.taps)
        return jnp.concatenate([module.final_norm(states[-1]), *taps], axis=-1), cache

    def compact(self, cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
        """Copy an accepted path's slots together; see `BranchingModel.compact`."""
        return self.module().compact(cache, start, path)

    @property
    def int8_cache(self) -> bool:
        """Whether caches are in int8; see `Decoder.int8_cache`."""
        return getattr(self.module(), "int8_cache", False)

    @property
    def branches(self) -> bool:
        """Whether the model is a `BranchingModel`."""
        return hasattr(self.module(), "compact")

    @property
    def packs(self) -> bool:
        """Whether the model is a `PackingModel`. Rows of a mesh lie on several devices."""
        return isinstance(self.module(), Decoder) and self.placement is None

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """Logits of hidden states, without padding, which no rule and no filter may see."""
        if self.taps:
            hidden = hidden[..., : hidden.shape[-1] // (1 + len(self.taps))]
        logits = self.module().logits(hidden)
        if self.placement is not None:
            logits = self.placement.gathered(logits)
        return logits[..., : self.vocab_size]
