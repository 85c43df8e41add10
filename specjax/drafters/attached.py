"""Drafters that belong to one target: saved, loaded with it, and refused with any other.

A directory holds

    config.json        {"specjax_drafter": kind, "settings": {…}, "target": as `describe` returns}
    model.safetensors  the drafter's own parameters; what it shares with its target is not stored

    attached.save("runs/eagle", drafter, target)
    drafter = attached.load("runs/eagle", target)

A new kind is a class with `settings`, `tensors` and `from_tensors` (`Attached`) and a line in
`KINDS`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save as as_safetensors

from specjax import devices
from specjax.checkpoints import DRAFTER, Checkpoint
from specjax.checkpoints.tensors import float_dtype, read_into
from specjax.checkpoints.weights import SAFETENSORS, find_tensors
from specjax.drafters import medusa, published
from specjax.drafters.base import Drafter
from specjax.models import int8, sharding
from specjax.support import files, named
from specjax.types import Inputs, Model

KINDS = {
    "eagle": "specjax.drafters.eagle:Eagle",
    "medusa": "specjax.drafters.medusa:Medusa",
    "view": "specjax.drafters.views:View",
}
# Kinds of files of 0.2.
OLD_KINDS = dict.fromkeys(("kangaroo", "shallow"), KINDS["view"])
CONFIG = "config.json"
POINTS = 3  # numbers of each parameter in a fingerprint
# bfloat16 keeps 8 bits, and numbers below 6e-5 lose bits in float16.
TOLERANCE = {"rtol": 2.0**-7, "atol": 1e-6}


class Attached(Protocol):
    """The methods beyond `Drafter` with which a drafter is saved and loaded."""

    def settings(self) -> dict[str, Any]:
        """All settings that are no arrays, as JSON values."""
        ...

    def tensors(self) -> dict[str, np.ndarray]:
        """The drafter's parameters, floats or int64, by name; none of the target's."""
        ...

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> Drafter:
        """Make the drafter from its parts. Floats arrive in the dtype that it shall have."""
        ...


def save(
    directory: str | os.PathLike, drafter: Any, target: Checkpoint, *, dtype: Any = np.float16
) -> None:
    """Write a drafter's directory, which appears when it is complete.

    Args:
      directory: made if need be; a drafter in it is replaced.
      drafter: a drafter of one of `KINDS`.
      target: the target that it belongs to.
      dtype: float32, bfloat16 or float16, of the stored parameters.

    Raises:
      ValueError: a drafter of another kind, or another dtype; or the directory holds other files.
    """
    path = f"{type(drafter).__module__}:{type(drafter).__qualname__}"
    kind = next((kind for kind, place in KINDS.items() if place == path), None)
    if kind is None:
        raise ValueError(
            f"{type(drafter).__name__} is no drafter that is saved; those are {', '.join(KINDS)}."
        )
    dtype = float_dtype(dtype)
    stored = {
        name: np.ascontiguousarray(array if array.dtype.kind == "i" else array.astype(dtype))
        for name, array in drafter.tensors().items()
    }
    config = {DRAFTER: kind, "settings": drafter.settings(), "target": describe(target)}
    with files.replacing_within(directory, (CONFIG, SAFETENSORS.single)) as part:
        (part / SAFETENSORS.single).write_bytes(as_safetensors(stored, {"format": "pt"}))
        files.write_json(part / CONFIG, config)


def load(directory: str | os.PathLike, target: Checkpoint, *, dtype: Any = None) -> Drafter:
    """Load a drafter that `save` wrote, or published EAGLE or Medusa heads (`published`).

    Args:
      target: the target that it belongs to. The weights of an outline (`hub.outline`) are not
        compared.
      dtype: float32, bfloat16 or float16, of the drafter's parameters; None: that of
        the target's hidden states, and for matrices that of the target's matrices.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the target has another width, vocabulary or other weights, or a file is damaged.
    """
    place = pathlib.Path(directory)
    wide = np.dtype(target.model.module().dtype) if dtype is None else float_dtype(dtype)
    raw = files.read_json(place / CONFIG)
    if published.is_medusa(place, raw):
        return medusa.load_published(place, target)
    stored = find_tensors(place)
    if DRAFTER in raw:
        check(place, raw.get("target"), target)
        kind, settings = raw[DRAFTER], raw.get("settings")
        known = isinstance(kind, str) and kind in (KINDS | OLD_KINDS)
        if not known or not isinstance(settings, dict):
            raise ValueError(
                f"{place / CONFIG}: {DRAFTER}={kind!r} is no kind of drafter that is loaded here; "
                f"those are {', '.join(KINDS)}."
            )
        names = {name: name for name in stored}
    else:
        settings, names = published.layout(place, raw, stored, target)
        kind = "eagle"
    tensors = {}
    for name, new in names.items():
        tensor = stored[name]
        array = np.empty(tensor.shape, tensor.dtype if tensor.dtype.kind in "iu" else wide)
        read_into(tensor, array)
        tensors[new] = array
    maker: Any = named.find("drafter", KINDS | OLD_KINDS, kind)
    try:
        return maker.from_tensors(settings, tensors, target)
    except KeyError as error:
        raise ValueError(f"{place} cannot be loaded: the setting {error} is missing.") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{place} cannot be loaded: {error}") from error


def is_attached(directory: str | os.PathLike) -> bool:
    """Whether `load` reads this directory, rather than `specjax.load`."""
    place = pathlib.Path(directory)
    if not (place / CONFIG).is_file():
        return False
    raw = files.read_json(place / CONFIG)
    return DRAFTER in raw or published.is_medusa(place, raw) or published.is_head(place, raw)


# --- which target --------------------------------------------------------------------------------


def describe(target: Checkpoint) -> dict[str, Any]:
    """Describe the target for config.json: its name, kind, sizes and fingerprint."""
    path = pathlib.PurePath(target.name)
    return {
        "name": "/".join(path.parts[-2:]) if path.is_absolute() else target.name,
        "model_type": getattr(target.config, "model_type", ""),
        "vocab_size": target.model.vocab_size,
        "width": width(target.model),
        "fingerprint": fingerprint(target.model),
        **({"rounding": steps} if (steps := rounding(target.model)) else {}),
    }


def width(model: Model) -> int:
    """The width E of a model's hidden states. Nothing is computed."""
    one = jnp.zeros((1, 1), jnp.int32)
    inputs = Inputs(one, one[0] + 1, one, one[0] + 1)

    def call(model):
        return model(one, one[0], *model.start(inputs, 1))[0]

    return jax.eval_shape(call, model).shape[-1]


def fingerprint(model: Model) -> list[str] | None:
    """A few numbers of every parameter, evenly spaced along its diagonal from corner to corner.

    They do not depend on whether a matrix is turned (`layers.arrange`), and hardly on the dtype.
    Few numbers are read, whatever the size. A matrix in int8 counts as the floats that it
    represents. None for an outline, which has no numbers.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return None
    rows = [
        points.astype(np.float64) * (1.0 if scales is None else scales.astype(np.float64))
        for points, scales in _points(model)
    ]
    return [" ".join(f"{x:.6g}" for x in row) for row in rows]


def rounding(model: Model) -> list[float]:
    """The largest rounding error of int8 in each row of a fingerprint.

    It is half a scale, or 0 for floats. Empty if nothing is in int8, and for an outline.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return []
    found = [0.0 if s is None else float(s.max()) / 2 for _, s in _points(model)]
    return found if any(found) else []


def _points(model: Model) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """The fingerprint's numbers of each parameter, in order, with the scales of those in int8."""
    found: dict[str, tuple[Any, Any]] = {}
    moved = sharding.moved(model)
    turned = sharding.turned_paths(model.module()) if moved else set()  # type: ignore[attr-defined]
    for path, leaf in jax.tree.leaves_with_path(model):
        name = jax.tree_util.keystr(path)
        narrow = name.replace(
            "_scale']", "']"
        )  # the parameter of these scales; it stands before them
        keys = tuple(getattr(entry, "key", None) for entry in path[1:])
        rows, axis = moved.get(keys), -1 if keys in turned else 0
        if narrow != name and narrow in found and found[narrow][0].dtype == np.int8:
            found[narrow] = found[narrow][0], _diagonal(leaf, rows, axis)
        elif leaf.dtype in int8.DTYPES or jnp.issubdtype(leaf.dtype, jnp.floating):
            found[name] = int8.signed(_diagonal(leaf, rows, axis)), None
    return jax.device_get(list(found.values()))


def _diagonal(leaf: Array, rows: np.ndarray | None, axis: int) -> Any:
    """`POINTS` numbers of an array, evenly spaced from corner to corner.

    Args:
      rows: on a mesh, the checkpoint's row at each place along `axis`; the points are the
        checkpoint's.
    """
    share = np.linspace(0, 1, POINTS)
    at = [np.rint(share * (size - 1)).astype(int) for size in leaf.shape]
    if rows is not None:
        wanted = np.rint(share * rows.max()).astype(int)
        at[axis] = np.array([np.flatnonzero(rows == row)[0] for row in wanted])
    # On a CPU the array is read in place; from other devices only these numbers are copied.
    here = np.asarray(leaf) if devices.device_of(leaf).platform == "cpu" else leaf
    return here[tuple(at)] if at else here[None].repeat(POINTS)


def check_target(drafter: Drafter, target: Checkpoint) -> None:
    """Raise ValueError if a drafter shares the arrays of another target than this.

    The same target, loaded again, passes. Drafters without a field `target` fit any.
    """
    for one in getattr(drafter, "drafters", ()):  # of a switch
        check_target(one, target)
    model = getattr(drafter, "target", None)
    mine, its = jax.tree.leaves(target.model), jax.tree.leaves(model)
    same = len(mine) == len(its) and all(x is y for x, y in zip(mine, its, strict=True))
    if model is not None and not same:
        its_own = dataclasses.replace(target, name="it was loaded with", model=model)
        check(type(drafter).__name__, describe(its_own), target)


def check(place: str | pathlib.Path, described: Any, target: Checkpoint) -> None:
    """Raise ValueError, with both names, if a drafter was made for another target than this."""
    if not isinstance(described, dict):
        raise ValueError(f"{place} does not say which target the drafter belongs to.")
    sizes = {
        "model_type": getattr(target.config, "model_type", ""),
        "vocab_size": target.model.vocab_size,
        "width": width(target.model),
    }
    words = {"model_type": "the model type", "vocab_size": "a vocabulary of", "width": "the width"}
    for field, value in sizes.items():
        if described.get(field) != value:
            raise _other(
                place, described, target, f"{words[field]} {value!r}", described.get(field)
            )
    stored, found = described.get("fingerprint"), fingerprint(target.model)
    if stored is None or found is None:
        return
    try:
        theirs, ours = (
            np.array([row.split() for row in rows]).astype(np.float64) for rows in (stored, found)
        )
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{place}: the fingerprint of the target is damaged.") from None
    same = theirs.shape == ours.shape
    if same:  # a drafter of the floats fits the same weights in int8, and the other way round
        room = TOLERANCE["atol"] + TOLERANCE["rtol"] * np.abs(ours)
        for steps in (described.get("rounding"), rounding(target.model)):
            room += np.reshape(steps, (-1, 1)) if steps else 0.0
        same = bool(np.all(np.abs(theirs - ours) <= room))
    if not same:
        raise _other(place, described, target, "other weights", None)


def _other(place, described, target, mine: str, theirs: Any) -> ValueError:
    instead = "" if theirs is None else f", where its own has {theirs!r}"
    return ValueError(
        f"The drafter {place} belongs to the target {described.get('name')!r}, and "
        f"{target.name!r} has {mine}{instead}. Decode with its own target, or train a drafter for "
        "this one (experiments.train, configs/train.py:eagle-parse)."
    )
