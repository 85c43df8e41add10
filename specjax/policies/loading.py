"""A policy by its name, or by the import path of one that lies anywhere."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from specjax.policies.base import Policy

NAMES = {
    name: f"specjax.policies.{module}:{name}"
    for module, names in {
        "constant": ["constant"],
        "heuristic": ["heuristic"],
        "confidence": ["confidence"],
        "entropy": ["svip", "adaedl"],
        "averages": ["gammatune", "average"],
        "goodput": ["goodput", "first_descent"],
        "bandits": ["ucb", "exp3", "hedge"],
        "head": ["head"],
    }.items()
    for name in names
}


def load(name: str, **settings: Any) -> Policy:
    """The policy that a name or an import path stands for.

        load("svip", threshold=0.3)
        load("my_module:my_policy", patience=2)

    Args:
      name: one of `NAMES`, or "module:attribute" of a function or class that makes a policy.
      settings: passed to it.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    make = maker(name)
    try:
        inspect.signature(make).bind(**settings)
    except TypeError as error:
        known = f"{NAMES.get(name, name).rpartition(':')[2]}{inspect.signature(make)}"
        raise ValueError(f"Policy {name!r}: {error}; it is {known}.") from error
    return make(**settings)


def maker(name: str) -> Callable[..., Policy]:
    """What `load` calls.

    Raises:
      ValueError: no such name, module or attribute.
    """
    path = NAMES.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(
            f"There is no policy {name!r}: it is one of {', '.join(NAMES)}, or the import path "
            "of your own as module:attribute."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise ValueError(
            f"Policy {name!r}: there is no module {module_name!r} to import; it must lie in the "
            "working directory or on PYTHONPATH."
        ) from error
    make = getattr(module, attribute, None)
    if make is None:
        raise ValueError(f"Policy {name!r}: {module_name} has no attribute {attribute!r}.")
    return make
