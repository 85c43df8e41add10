"""A model as the jitted loops see it: one pytree of parameters, and everything else static."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.models.layers import arrange
from specjax.types import Cache, Context, Inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Parameters of an NNX module together with what is needed to call it.

    The parameters are the pytree's only leaves; the module's structure and the vocabulary are part
    of its type, so a jitted function takes a LanguageModel as a plain argument and compiles once
    for all weights of one architecture. Implements the `Model` protocol of `specjax.types`.
    """

    params: nnx.State
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    """Ids 0 … vocab_size−1 stand for something; rows of the output layer past them are padding."""

    @classmethod
    def of(cls, module: nnx.Module, vocab_size: int | None = None) -> "LanguageModel":
        """Split a module with a `vocab_size` and the methods of `Model`.

        Args:
          module: holds parameters and nothing else.
          vocab_size: the number of real ids. None: every row of the output layer is one.

        The module's projections are turned in place to what suits this machine's backend; this is
        the only place that decides it.
        """
        arrange(module, input_first=jax.default_backend() == "cpu")
        graphdef, params = nnx.split(module)
        return cls(params, graphdef, module.vocab_size if vocab_size is None else vocab_size)

    def module(self) -> Any:
        """The module again; it shares the parameter arrays."""
        return nnx.merge(self.graphdef, self.params)

    def stored_params(self) -> nnx.State:
        """The parameters as checkpoints have them, (out, in)."""
        return nnx.state(arrange(self.module(), input_first=False))

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """See `Model.start`."""
        return self.module().start(inputs, buffer_len)

    def __call__(
        self, tokens: Int[Array, "B K"], start: Int[Array, " B"], context: Context, cache: Cache
    ) -> tuple[Float[Array, "B K E"], Cache]:
        """See `Model.__call__`."""
        return self.module()(tokens, start, context, cache)

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """See `Model.logits`. Padding is cut off here, so no rule and no filter ever sees it."""
        return self.module().logits(hidden)[..., : self.vocab_size]
