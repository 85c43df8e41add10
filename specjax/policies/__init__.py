"""Draft-length policies: how long the next draft may be. `base.py` says what a policy is.

policies.load("svip", threshold=0.3), or policies.load("my_module:my_policy"): code that runs
"""

from specjax.policies.base import Observation, Policy, Round
from specjax.policies.constant import Constant, constant
from specjax.policies.loading import NAMES, check, load, needs_prices, with_any_costs
from specjax.policies.prices import Prices, prices

__all__ = [
    "NAMES",
    "Constant",
    "Observation",
    "Policy",
    "Prices",
    "Round",
    "check",
    "constant",
    "load",
    "needs_prices",
    "prices",
    "with_any_costs",
]
