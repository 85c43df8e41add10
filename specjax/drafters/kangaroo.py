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

from specjax.drafters.base import ByModel
from specjax.drafters.exits import chosen, decoder_of, places
from specjax.models import sharding
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

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`."""
        return {"layers": self.layers}

    def tensors(self) -> dict[str, np.ndarray]:
        """The adapter by name, such as "layer.attention.qkv.weight"; projections are (out, in)."""
        turned, moved = self._turned(), self._moved()
        return {
            name: sharding.restored(np.asarray(leaf.T if name in turned else leaf), moved.get(name))
            for path, leaf in jax.tree.leaves_with_path(self.adapter)
            for name in [_name(path)]
        }

    def _turned(self) -> set[str]:
        """The projections that `layers.arrange` turned, in the layer that the adapter copies."""
        return set(self._copied(dict.fromkeys(sharding.turned_paths(self.target.module()))))

    def _moved(self) -> dict[str, np.ndarray]:
        """The rows that `sharding.moved` moved on a mesh, in the layer that the adapter copies."""
        return self._copied(sharding.moved(self.target))

    def _copied(self, found: Mapping[tuple, Any]) -> dict[str, Any]:
        """The values that paths in the target have, by names in the adapter."""
        prefix = places(self.target.params)[0], self.layers
        return {
            ".".join(map(str, ("layer", *path[2:]))): value
            for path, value in found.items()
            if path[:2] == prefix
        }

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> "Kangaroo":
        """Make a Kangaroo of `target` from `settings` and `tensors`.

        Raises:
          ValueError: a tensor is missing, or has the shape of another target's layer.
        """
        start = kangaroo(target, **settings)
        turned, moved = start._turned(), start._moved()

        def read(path, leaf):
            name = _name(path)
            rows, wanted = moved.get(name), leaf.shape[::-1] if name in turned else leaf.shape
            if rows is not None:
                wanted = rows.max() + 1, *wanted[1:]
            found = getattr(tensors.get(name), "shape", None)
            if found != wanted:
                raise ValueError(
                    f"The adapter's {name} has shape {found}, and {target.name} asks for {wanted}: "
                    "it belongs to another target."
                )
            array = tensors[name] if rows is None else tensors[name][rows]
            found = jnp.asarray(array.T if name in turned else array, leaf.dtype)
            placed = target.model.placement is not None
            return jax.device_put(found, leaf.sharding) if placed else found

        return dataclasses.replace(start, adapter=jax.tree.map_with_path(read, start.adapter))


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
    if any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"Kangaroo's adapter is a layer of {target.name}'s own kind, in floats, and that one "
            "has its weights in int8. Load the target without weights='int8', or take another "
            "drafter."
        )
    adapter = {"layer": params[stack][layers], "norm": params[norm]}
    return Kangaroo(target.model, jax.tree.map(jnp.copy, adapter), layers)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
