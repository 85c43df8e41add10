"""Parameters of a drafter that stand where its target has some of the same kind.

They are stored by name, such as "layer.attention.qkv.weight", as checkpoints have them: projections
are (out, in), and rows lie in the order of one device. `places` has for each beginning of a name
the path of its like in the target's parameters, such as {"layer": ("decoder", 2)}.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.types import Params

Places = Mapping[str, tuple[str | int, ...]]
T = TypeVar("T")


def stored(own: Params, target: LanguageModel, places: Places) -> dict[str, np.ndarray]:
    """The parameters by name, as checkpoints have them."""
    turned, moved = _turned(target, places), _moved(target, places)
    found = {_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(own)}
    return {
        name: sharding.restored(array.T if name in turned else array, moved.get(name))
        for name, array in found.items()
    }


def filled(
    like: Params, tensors: Mapping[str, np.ndarray], target: Checkpoint, places: Places
) -> Params:
    """The inverse of `stored`, in the layout, the dtypes and on the devices of `like`.

    Raises:
      ValueError: a tensor is missing, or has the shape of another target's.
    """
    turned, moved = _turned(target.model, places), _moved(target.model, places)

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
        placed = target.model.placement is not None
        return jax.device_put(made, leaf.sharding) if placed else made

    return jax.tree.map_with_path(read, like)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _turned(target: LanguageModel, places: Places) -> dict[str, Any]:
    """The names of parameters whose like in the target is transposed."""
    return _by_name(dict.fromkeys(sharding.turned_paths(target.module())), places)


def _moved(target: LanguageModel, places: Places) -> dict[str, np.ndarray]:
    """The rows that a mesh moves (`sharding.moved`), by name."""
    return _by_name(sharding.moved(target), places)


def _by_name(found: Mapping[tuple, T], places: Places) -> dict[str, T]:
    """What the target has at a path, by the name of the drafter's parameter."""
    return {
        ".".join(map(str, (name, *path[len(place) :]))): value
        for name, place in places.items()
        for path, value in found.items()
        if path[: len(place)] == place
    }
