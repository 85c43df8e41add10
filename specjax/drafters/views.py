"""Views of a target: some of its layers, some parameters of their own, and the target's head.

- An early exit has no parameters of its own. The first layers alone (LayerSkip, Elhoushi et al.
  2024, 2404.16710) work best in a model that was trained with a loss at its exits. For other models
  the layers to skip can be searched (Draft & Verify, Zhang et al. 2023, 2309.08168).
- Kangaroo (Liu et al. 2024, 2404.18911) has the target's first layers, an adapter of one layer of
  the target's own kind, and a norm. The adapter starts as the layer after the exit, so an untrained
  Kangaroo is an early exit of one layer more.
- A shallow decoder (distil-whisper, Gandhi et al. 2023, 2311.00430) has layers, norm and position
  bias of its own behind the target's encoder. It starts as some of the target's layers.

All arrays that a view does not own are the target's. A file holds its own parameters by name, such
as "layers.2.attention.qkv.weight", as checkpoints have them: projections are (out, in), and rows
lie in the order of one device.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters.base import ByModel
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint, decoder_of
from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel
from specjax.models.layers import widen_weights
from specjax.pytrees import pytree
from specjax.support.ranges import listed, whole
from specjax.types import Params

Path = tuple[str | int, ...]


@pytree
class View(ByModel):
    """Drafts with some layers of the target, and some parameters of its own."""

    target: LanguageModel
    """The target, for all that the view does not own: the same arrays."""
    own: dict[str, Params]
    """The view's parameters, nested as in the model, in the layout of the platform."""
    keep: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The target's layers that run; some may be replaced by own ones."""

    @property
    def model(self) -> LanguageModel:
        """The target cut to these layers, with the view's parameters in their places."""
        module = _cut(self.target, self.keep, self.own)
        graphdef, state = nnx.split(module)
        params = _merged(nnx.to_pure_dict(state), self.own)
        return dataclasses.replace(self.target, graphdef=graphdef, params=params)

    @property
    def shared(self) -> tuple[int | None, ...]:
        """The target's layers; own ones have keys and values of their own."""
        own = self.own.get(places(self.target.params)[0], {})
        return tuple(None if i in own else layer for i, layer in enumerate(self.keep))

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`."""
        return {"keep": list(self.keep), "own": list(self._places)}

    def tensors(self) -> dict[str, np.ndarray]:
        """The view's own parameters by name."""
        turned, moved = self._turned, self._moved
        found = {_name(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(self.own)}
        return {
            name: sharding.restored(array.T if name in turned else array, moved.get(name))
            for name, array in found.items()
        }

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> "View":
        """Make a view of `target` from `settings` and `tensors`.

        Raises:
          ValueError: a tensor is missing, or has the shape of another target's.
        """
        if "keep" not in settings:
            settings, tensors = _of_release_2(settings, tensors, target)
        places = [tuple(map(_index, name.split("."))) for name in settings["own"]]
        start = _begun(target, settings["keep"], places)
        return dataclasses.replace(start, own=start._filled(tensors, target))

    def _filled(self, tensors: Mapping[str, np.ndarray], target: Checkpoint) -> dict[str, Params]:
        """The inverse of `tensors`, in the layout, the dtypes and on the devices of `own`."""
        turned, moved = self._turned, self._moved

        def read(path: tuple, leaf: Any) -> Any:
            name = _name(path)
            rows, wanted = moved.get(name), leaf.shape[::-1] if name in turned else leaf.shape
            if rows is not None:
                wanted = rows.max() + 1, *wanted[1:]
            found = getattr(tensors.get(name), "shape", None)
            if found != wanted:
                raise ValueError(
                    f"The drafter's {name} has shape {found}, and {target.name} asks for {wanted}: "
                    "it belongs to another target."
                )
            array = tensors[name] if rows is None else tensors[name][rows]
            made = jnp.asarray(array.T if name in turned else array, leaf.dtype)
            placed = self.target.placement is not None
            return jax.device_put(made, leaf.sharding) if placed else made

        return jax.tree.map_with_path(read, self.own)

    @property
    def _places(self) -> dict[str, Path]:
        """The path in the target's parameters of what stands at each own place."""
        stack = places(self.target.params)[0]
        layers = {f"{stack}.{i}": (stack, self.keep[i]) for i in self.own.get(stack, {})}
        return layers | {name: (name,) for name in self.own if name != stack}

    def _by_name(self, found: Mapping[Path, Any]) -> dict[str, Any]:
        """What the target has at a path, by the name of the view's parameter."""
        return {
            ".".join(map(str, (name, *path[len(place) :]))): value
            for name, place in self._places.items()
            for path, value in found.items()
            if path[: len(place)] == place
        }

    @property
    def _turned(self) -> dict[str, Any]:
        """The names of parameters whose like in the target is transposed."""
        return self._by_name(dict.fromkeys(sharding.turned_paths(self.target.module())))

    @property
    def _moved(self) -> dict[str, np.ndarray]:
        """The rows that a mesh moves (`sharding.moved`), by name."""
        return self._by_name(sharding.moved(self.target))


def early_exit(target: Checkpoint, layers: int | Sequence[int]) -> Checkpoint:
    """Make a draft of some of the target's layers, its final norm and its head.

    The draft shares the target's arrays: no weight is copied, and jitted functions get the same
    buffers twice. Its cache is its own. In a T5 these are layers of the decoder. Beside its target
    the draft reads the target's encoding, and its layers' keys and values of the source.

    Args:
      target: a T5, a GPT-2 or a model of the Llama layout.
      layers: how many, from the first; or which, in ascending order from 0.

    Raises:
      ValueError: missing layers, none or all of them, or a model of another family.
    """
    module = decoder_of(target, "early_exit")
    model = View(target.model, {}, chosen(layers, module.cache_shape()[0])).model
    name, config = f"early_exit(layers={layers})", model.module().config
    return dataclasses.replace(target, name=name, model=model, config=config)


def kangaroo(target: Checkpoint, layers: int = 2) -> View:
    """Make a Kangaroo before training.

    Args:
      target: a T5, a GPT-2 or a model of the Llama layout. Its weights may be in int8; the adapter
        is in floats.
      layers: how many of the target's run before the adapter.

    Raises:
      ValueError: see `early_exit`; or `layers` is no number.
    """
    module = decoder_of(target, "kangaroo")
    layers = len(chosen(int(layers), module.cache_shape()[0]))
    return _begun(target, range(layers + 1), [(module.stack, layers), (module.last,)])


def shallow(target: Checkpoint, layers: int | Sequence[int]) -> View:
    """Make a shallow decoder before training: an `early_exit` whose decoder is a copy.

    Args:
      target: a T5 or T5Gemma. Its weights may be in int8; the copy is in floats.
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
    keep = chosen(layers, module.cache_shape()[0])
    names = [name for name in ("decoder_bias", "decoder_norm") if name in target.model.params]
    own = [("decoder", i) for i in range(len(keep))]
    return _begun(target, keep, [*own, *((name,) for name in names)])


def chosen(layers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The layers that run, of `count`; ValueError as in `early_exit`."""
    some = f"the model has {count} layers, and the draft leaves some of them out"
    if count < 2:
        raise ValueError(f"layers={layers!r}: a model of {count} layer has none to leave out.")
    if np.ndim(layers) == 0:
        return tuple(range(whole("layers", layers, f"[1, {count - 1}]", some)))
    kept = [whole("layers", i, f"[0, {count - 1}]", some) for i in listed("layers", layers)]
    if kept != sorted(set(kept)) or len(kept) == count:
        raise ValueError(
            f"layers={layers!r} must name some of the layers 0 … {count - 1}, each once and in "
            "ascending order."
        )
    return tuple(kept)


def places(params: Params) -> tuple[str, str]:
    """The names of the decoder's layers and of the norm after them, in a family's parameters."""
    return ("decoder", "decoder_norm") if "decoder" in params else ("layers", "norm")


def _begun(target: Checkpoint, keep: Sequence[int], own: Iterable[Path]) -> View:
    """A view whose own parameters are copies of the target's, in floats."""
    picked: dict[Any, Any] = {}
    for name, *layer in own:
        picked[name] = picked.get(name, {}) | dict.fromkeys(layer) if layer else None
    params = nnx.to_pure_dict(nnx.state(_cut(target.model, keep, picked)))
    for name, layers in picked.items():
        picked[name] = {i: params[name][i] for i in layers} if layers else params[name]
    return View(target.model, jax.tree.map(jnp.copy, picked), tuple(keep))


def _cut(target: LanguageModel, keep: Sequence[int], own: Mapping[str, Any]) -> Decoder:
    """The target's module with some layers of its decoder; those that are own are in floats."""
    module = target.module()
    module.keep(keep)
    for i in own.get(module.stack, ()):
        widen_weights(getattr(module, module.stack)[i], module.dtype)
    return module


def _merged(params: Any, own: Any) -> Any:
    """Nested parameters with those of `own` in their places."""
    if not isinstance(own, dict):
        return own
    return params | {name: _merged(params[name], part) for name, part in own.items()}


def _of_release_2(
    settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
    """Settings and tensors of a Kangaroo or a shallow decoder as 0.2 wrote them."""
    if "encoder" in settings:
        if settings["encoder"] != "target":
            raise ValueError(f"encoder={settings['encoder']!r} should be 'target'.")
        start = shallow(target, settings["layers"])
        return start.settings(), tensors
    start = kangaroo(target, **settings)
    names = dict(zip(("layer", "norm"), start._places, strict=True))
    parts = ((name.partition("."), array) for name, array in tensors.items())
    return start.settings(), {f"{names[a]}.{c}": array for (a, _, c), array in parts if a in names}


def _index(part: str) -> str | int:
    return int(part) if part.isdecimal() else part


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
