"""A shallow decoder on its target's encoder, as in distil-whisper (Gandhi et al. 2023, 2311.00430).

It starts as some of the target's decoder layers. These layers, the norm after them and the position
bias are trained (`training.shallow`). Encoder, embedding and head are the target's own arrays, and
no file holds them twice: config.json says {"encoder": "target"}.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters import own_layers
from specjax.drafters.base import ByModel
from specjax.drafters.exits import chosen, decoder_of
from specjax.models.checkpoint import Checkpoint
from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel
from specjax.models.layers import widen_weights
from specjax.pytrees import pytree
from specjax.types import Params

OWN = ("decoder", "decoder_bias", "decoder_norm")


@pytree
class Shallow(ByModel):
    """Drafts with a shallow decoder behind its target's encoder."""

    target: LanguageModel  # for its encoder, its embedding and its head: the same arrays
    own: dict[str, Params]  # the parameters `OWN`, nested as in the target's
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # that it started as

    @property
    def model(self) -> LanguageModel:
        """The target with this decoder."""
        graphdef, params = _parts(_cut(self.target, self.layers))
        return dataclasses.replace(self.target, graphdef=graphdef, params=params | self.own)

    @property
    def shared(self) -> tuple[None, ...]:
        """All layers project the target's encoding anew."""
        return (None,) * len(self.layers)

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`."""
        return {"encoder": "target", "layers": list(self.layers)}

    def tensors(self) -> dict[str, np.ndarray]:
        """The decoder by name, such as "decoder.0.attention.qkv.weight"; see `own_layers`."""
        return own_layers.stored(self.own, self.target, self._places)

    @property
    def _places(self) -> own_layers.Places:
        layers = {f"decoder.{i}": ("decoder", layer) for i, layer in enumerate(self.layers)}
        return {**layers, **{name: (name,) for name in OWN[1:] if name in self.own}}

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> "Shallow":
        """Make a shallow decoder of `target` from `settings` and `tensors`.

        Raises:
          ValueError: another encoder than the target's, or a tensor is missing or of another shape.
        """
        if settings["encoder"] != "target":
            raise ValueError(f"encoder={settings['encoder']!r} should be 'target'.")
        start = shallow(target, settings["layers"])
        own = own_layers.filled(start.own, tensors, target, start._places)
        return dataclasses.replace(start, own=own)


def shallow(target: Checkpoint, layers: int | Sequence[int]) -> Shallow:
    """Make a shallow decoder before training: an `early_exit` whose decoder is a copy.

    Args:
      target: a T5. Its weights may be in int8; the copy is in floats.
      layers: as in `early_exit`. distil-whisper takes layers spread over the decoder, such as
        (0, 5) of 6.

    Raises:
      ValueError: see `early_exit`; or a target without an encoder to share.
    """
    module = decoder_of(target, "shallow")
    if not hasattr(module, "encoder_params"):
        raise ValueError(
            f"{target.name} has no encoder that a shallow decoder can share: it must be a T5 or "
            "T5Gemma. Take early_exit or Kangaroo, or train a small model of its own."
        )
    kept = tuple(chosen(layers, module.cache_shape()[0]))
    _, params = _parts(_cut(target.model, kept))
    own = jax.tree.map(jnp.copy, {name: params[name] for name in OWN if name in params})
    return Shallow(target.model, own, kept)


def _cut(target: LanguageModel, layers: Sequence[int]) -> Decoder:
    """The target's module with some layers of its decoder, whose weights are floats."""
    module = target.module()
    module.keep(layers)
    widen_weights(module.decoder, module.dtype)
    return module


def _parts(module: Decoder) -> tuple[nnx.GraphDef, dict[str, Params]]:
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)
