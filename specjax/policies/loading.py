"""A policy by its name, or by the import path of one that lies anywhere."""

from collections.abc import Callable
from typing import Any

from specjax import named
from specjax.policies.base import Policy

NAMES = {
    name: f"specjax.policies.{module}:{name}"
    for module, names in {
        "constant": ["constant"],
        "heuristic": ["heuristic"],
        "confidence": ["confidence"],
        "entropy": ["svip", "adaedl"],
        "averages": ["gammatune", "average"],
        "goodput": ["goodput", "first_descent", "lookahead"],
        "bandits": ["ucb", "exp3", "hedge"],
        "head": ["head"],
    }.items()
    for name in names
}


def load(name: str, **settings: Any) -> Policy:
    """The policy that a name or an import path stands for.

        load("svip", threshold=0.3), or load("svip(threshold=0.3)")
        load("my_module:my_policy", patience=2)

    Args:
      name: one of `NAMES`, or "module:attribute" of a function or class that makes a policy. That
        is code that runs: the module is imported.
      settings: passed to it.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("policy", NAMES, name, **settings)


def maker(name: str) -> Callable[..., Policy]:
    """What `load` calls for a name or import path, whose module is imported, which runs it;
    ValueError where there is none."""
    return named.find("policy", NAMES, name)
