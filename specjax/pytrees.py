"""Frozen dataclasses that are pytrees: models, drafters, rules and policies are such values."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey
from jaxtyping import Bool

T = TypeVar("T")
MAX_REPR = 1000  # characters of a field


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree, whose `repr` is one line.

    Fields are data; those with metadata={"static": True} belong to the structure, and so do the
    classes of fields that are dataclasses themselves.

    `jax.tree_util.register_dataclass` does not keep classes apart: with jax 0.10.2 two structures
    compare equal where their static fields do. Only their hashes differ, so jit sometimes runs the
    program of another class with the same shapes, such as another policy. A class registered that
    way is safe as a field of one made here.

    A class may have its own `__init__`, which takes a user's arguments and sets the fields by
    `set_fields`. Transformations of JAX do not call it.
    """
    if "__repr__" not in vars(cls):
        cls.__repr__ = _in_one_line  # type: ignore[method-assign]
    made = dataclasses.dataclass(frozen=True, init="__init__" not in vars(cls))(cls)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    static = [field.name for field in fields if field.metadata.get("static")]
    data = [field.name for field in fields if field.name not in static]
    keys = [GetAttrKey(name) for name in data]
    get_data, get_static = _getter(data), _getter(static)

    def structure(value, children):
        return get_static(value), tuple(type(x) for x in children if dataclasses.is_dataclass(x))

    def flatten(value):
        children = get_data(value)
        return children, structure(value, children)

    def flatten_with_keys(value):
        children = get_data(value)
        return tuple(zip(keys, children, strict=True)), structure(value, children)

    def unflatten(structure, children):
        value = object.__new__(made)
        set_fields(value, **dict(zip(data, children, strict=True)))
        set_fields(value, **dict(zip(static, structure[0], strict=True)))
        return value

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def check_pytree(name: str, value: Any) -> None:
    """Raise ValueError if jit cannot take the value apart.

    Args:
      name: the argument's name, for the message.
    """
    if jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"{name}: {type(value).__name__} is no pytree. Decorate the class with "
            "@specjax.pytrees.pytree."
        )


def set_fields(value: Any, **fields: Any) -> None:
    """Set fields of a frozen value, within its `__init__`."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def _in_one_line(value: Any) -> str:
    """The `repr` of a dataclass, with arrays by their dtypes and shapes."""
    names = (field.name for field in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(f'{n}={_brief(getattr(value, n))}' for n in names)})"


def _brief(value: Any) -> str:
    if isinstance(value, Array | np.ndarray | jax.ShapeDtypeStruct) and value.shape:
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"<{len(jax.tree.leaves(value))} arrays>"
    text = repr(value)
    return f"<{type(value).__name__}>" if "\n" in text or len(text) > MAX_REPR else text


def _getter(names: list[str]) -> Callable[[object], tuple]:
    """A getter of all fields as a tuple; `attrgetter` of a single name would give no tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def averaged(like: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
    """Average some rows of `past`, for every row of `like`; integers are rounded.

    Args:
      like: has the structure of `past`, and any number of rows.
      rows: which of the A rows of `past` count, at least one.
    """

    def mean(new: Array, old: Array) -> Array:
        counts = rows.reshape((-1,) + (1,) * (old.ndim - 1))
        total = jnp.sum(jnp.where(counts, old, 0).astype(jnp.float32), axis=0)
        found = total / jnp.sum(rows, dtype=jnp.float32)
        whole = jnp.issubdtype(new.dtype, jnp.integer)
        return jnp.broadcast_to(jnp.round(found) if whole else found, new.shape).astype(new.dtype)

    return jax.tree.map(mean, like, past)
