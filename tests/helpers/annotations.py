"""Shapes and dtypes of annotations, checked whenever a function is called.

`tests/conftest.py` installs `checked` for `specjax` by jaxtyping's import hook.
"""

import typing

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function):
    """The function, with those of its annotations checked that are shapes of arrays.

    Other annotations are left to mypy: protocols cannot be checked at run time. `__init__` is left
    out, since jax makes states with placeholders in the place of arrays.
    """
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    return beartype(function) if function.__annotations__ else function


def _has_shape(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(part) for part in typing.get_args(hint))
