"""Shapes and dtypes of annotations, checked whenever a function is called.

`tests/conftest.py` installs `checked` for the rooms of the core by jaxtyping's import hook.
"""

import types
import typing

import jax
import jaxtyping
import numpy as np
from beartype import beartype


def checked(function):
    """The function, with those of its annotations checked that are shapes of arrays.

    Other annotations are left to mypy: protocols cannot be checked at run time. `__init__` is left
    out, since jax makes states with placeholders in the place of arrays.
    """
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__
    function.__annotations__ = {
        name: _of_arrays(hint) for name, hint in hints.items() if _has_shape(hint)
    }
    return beartype(function) if function.__annotations__ else function


def _is_shape(hint) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _has_shape(hint) -> bool:
    """Whether arrays are asked for; `ArrayLike`, a union of several kinds, takes lists as well."""
    if _is_shape(hint):
        return True
    parts = typing.get_args(hint)
    if len({part.array_type for part in parts if _is_shape(part)}) > 1:
        return False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        # What else users may give has an error of its own.
        return all(_is_shape(part) or part is types.NoneType for part in parts)
    return any(_has_shape(part) for part in parts)


def _of_arrays(hint):
    """The hint for numpy's arrays too, which jax takes as well; as it is within another hint."""
    if not _is_shape(hint) or hint.array_type is not jax.Array:
        return hint
    kind = getattr(jaxtyping, hint.__name__.partition("[")[0])
    return hint | kind[np.ndarray, hint.dim_str]
