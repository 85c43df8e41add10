"""Kangaroo (Liu et al. 2024, 2404.18911): the target's first layers, an adapter, the target's head.

The adapter is one layer of the target's own kind and a norm. Only the adapter is trained
(`training.kangaroo`). It starts as a copy of the layer after the exit and of the final norm. So an
untrained Kangaroo is an `early_exit` of one layer more.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters import own_layers
from specjax.drafters.base import ByModel
from specjax.drafters.exits import chosen, decoder_of, places
from specjax.models import int8
from specjax.models.checkpoint import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.pytrees import pytree
from specjax.types import Params

Adapter = dict[str, Params]  # "layer" and "norm", nested as in the target's parameters


@pytree
class Kangaroo(ByModel):
    """Drafts with the target's first layers and head, and an adapter between them."""

    target: LanguageModel  # for its first layers, its embedding and its head: the same arrays
    adapter: Adapter  # in the layout of the platform
    layers: int = dataclasses.field(metadata={"static": True})  # of the target that run

    @property
    def model(self) -> LanguageModel:
        """The target's first layers, the adapter and the target's head."""
        module = self.target.module()
        module.keep(range(self.layers + 1))
        graphdef, state = nnx.split(module)
        params = nnx.to_pure_dict(state)
        stack, norm = places(params)
        params[stack][self.layers], params[norm] = self.adapter["layer"], self.adapter["norm"]
        return dataclasses.replace(self.target, graphdef=graphdef, params=params)

    @property
    def shared(self) -> tuple[int | None, ...]:
        """The target's layers; the adapter has keys and values of its own."""
        return (*range(self.layers), None)

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`."""
        return {"layers": self.layers}

    def tensors(self) -> dict[str, np.ndarray]:
        """The adapter by name, such as "layer.attention.qkv.weight"; projections are (out, in)."""
        return own_layers.stored(self.adapter, self.target, self._places)

    @property
    def _places(self) -> own_layers.Places:
        stack, norm = places(self.target.params)
        return {"layer": (stack, self.layers), "norm": (norm,)}

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> "Kangaroo":
        """Make a Kangaroo of `target` from `settings` and `tensors`.

        Raises:
          ValueError: a tensor is missing, or has the shape of another target's layer.
        """
        start = kangaroo(target, **settings)
        adapter = own_layers.filled(start.adapter, tensors, target, start._places)
        return dataclasses.replace(start, adapter=adapter)


def kangaroo(target: Checkpoint, layers: int = 2) -> Kangaroo:
    """Make a Kangaroo before training.

    Args:
      target: a T5, a GPT-2 or a model of the Llama layout.
      layers: how many of the target's run before the adapter.

    Raises:
      ValueError: see `early_exit`; `layers` is no number, or the target's weights are in int8.
    """
    count = decoder_of(target, "kangaroo").cache_shape()[0]
    layers = len(chosen(int(layers), count))
    params = target.model.params
    stack, norm = places(params)
    if any(leaf.dtype in int8.DTYPES for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"Kangaroo's adapter is a layer of {target.name}'s own kind, in floats, and that one "
            "has its weights in int8. Load the target with dtype='float32', or take another one."
        )
    adapter = {"layer": params[stack][layers], "norm": params[norm]}
    return Kangaroo(target.model, jax.tree.map(jnp.copy, adapter), layers)
