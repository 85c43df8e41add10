"""Policies by name, or by import path."""

from typing import Any

from specjax.policies.base import Policy
from specjax.policies.costs import Costs
from specjax.support import named

NAMES = {
    name: f"specjax.policies.{module}:{name}"
    for module, names in {
        "constant": ["constant"],
        "heuristic": ["heuristic"],
        "confidence": ["confidence"],
        "entropy": ["svip", "adaedl"],
        "goodput": ["goodput"],
        "lookahead": ["lookahead"],
        "together": ["together"],
        "nodes": ["nodes", "cut"],
        "verified": ["fixed", "threshold", "by_batch_size"],
        "early_stop": ["early_stop"],
    }.items()
    for name in names
}


def parse(name: str, **settings: Any) -> Policy:
    """Make the policy of a name or an import path.

        parse("svip", threshold=0.3), or parse("svip(threshold=0.3)")
        parse("my_module:my_policy", patience=2)

    Args:
      name: one of `NAMES`, or "module:attribute" of a function or class that makes a policy. That
        is code that runs: the module is imported.
      settings: its keyword arguments.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("policy", NAMES, name, Policy, **settings)


def parse_with_costs(name: str, table: Costs, **settings: Any) -> Policy:
    """Make a policy as `parse` does, with the costs if the policy takes any."""
    return parse(name, **settings, **({"costs": table} if takes(name, "costs") else {}))


def check(name: str) -> None:
    """Raise ValueError if `parse` would refuse the name or settings; needs no costs."""
    with_any_costs(name)


def with_any_costs(name: str, gamma_max: int = 0) -> Policy:
    """Make the policy of a name, with placeholder costs if it needs any."""
    free = {"costs": Costs(0.0, [1.0] * (gamma_max + 1))} if needs_costs(name) else {}
    return parse(name, **free)


def needs_costs(name: str) -> bool:
    """Whether a policy's name lacks `Costs` that it needs.

    Such a policy has a parameter `costs` without a default. `specjax.tune` and `specjax decode`
    measure them.
    """
    return named.lacks("policy", NAMES, name, "costs")


def takes(name: str, setting: str) -> bool:
    """Whether a policy has this setting; ValueError if there is no such policy."""
    return named.takes("policy", NAMES, name, setting)
