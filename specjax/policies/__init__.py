"""Policies: how long the next draft may be, and what of it is verified. `base.py` has the protocol.

A policy is specjax.policies.svip(threshold=0.3), or policies.parse("svip(threshold=0.3)"), or
policies.parse("my_module:my_policy"), which imports and runs code.
"""

from typing import NoReturn

from specjax.policies.base import Observation, Policy, Round, Slot
from specjax.policies.both import both
from specjax.policies.confidence import confidence
from specjax.policies.constant import Constant, constant
from specjax.policies.costs import Costs
from specjax.policies.early_stop import early_stop
from specjax.policies.entropy import adaedl, svip
from specjax.policies.goodput import goodput
from specjax.policies.heuristic import heuristic
from specjax.policies.loading import (
    NAMES,
    check,
    needs_costs,
    parse,
    parse_with_costs,
    with_any_costs,
)
from specjax.policies.lookahead import lookahead
from specjax.policies.nodes import cut, nodes
from specjax.policies.together import together
from specjax.policies.verified import by_batch_size, fixed, threshold
from specjax.support import renamed

__all__ = [
    "NAMES",
    "Constant",
    "Costs",
    "Observation",
    "Policy",
    "Round",
    "Slot",
    "adaedl",
    "both",
    "by_batch_size",
    "check",
    "confidence",
    "constant",
    "costs",
    "cut",
    "early_stop",
    "fixed",
    "goodput",
    "heuristic",
    "lookahead",
    "needs_costs",
    "nodes",
    "parse",
    "parse_with_costs",
    "svip",
    "threshold",
    "together",
    "with_any_costs",
]


def __getattr__(name: str) -> NoReturn:
    moved = renamed.MOVED.get(f"policy {name}", "no policy")
    raise AttributeError(f"specjax.policies.{name} is {moved}.")
