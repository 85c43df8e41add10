"""Budgets by name, or by import path."""

from typing import Any

from specjax.budgets.base import Budget
from specjax.support import named

NAMES = {
    name: f"specjax.budgets.{module}:{name}"
    for module, names in {
        "simple": ["fixed", "threshold", "by_batch_size", "static"],
        "early_stop": ["early_stop"],
    }.items()
    for name in names
}


def parse(name: str, **settings: Any) -> Budget:
    """Make the budget of a name or an import path.

        parse("fixed", slots=24), or parse("fixed(24)")

    Args:
      name: one of `NAMES`, or "module:attribute" of a function or class that makes a budget. That
        is code that runs: the module is imported.
      settings: its keyword arguments.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("budget", NAMES, name, Budget, **settings)
