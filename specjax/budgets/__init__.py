"""Verify budgets: which drafted tokens of a batch the target verifies. `base.py` has the protocol.

A budget is specjax.budgets.fixed(24), or budgets.parse("fixed(24)"), or
budgets.parse("my_module:my_budget"), which imports and runs code.
"""

from specjax.budgets.base import Budget, Slot
from specjax.budgets.early_stop import early_stop
from specjax.budgets.loading import NAMES, parse
from specjax.budgets.simple import by_batch_size, fixed, static, threshold

__all__ = [
    "NAMES",
    "Budget",
    "Slot",
    "by_batch_size",
    "early_stop",
    "fixed",
    "parse",
    "static",
    "threshold",
]
