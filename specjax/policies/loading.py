"""A policy by its name, or by the import path of one that lies anywhere."""

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
        "averages": ["gammatune", "average"],
        "goodput": ["goodput", "first_descent"],
        "lookahead": ["lookahead"],
        "together": ["together"],
        "bandits": ["ucb", "exp3", "hedge"],
        "acceptance_head": ["head"],
        "nodes": ["nodes", "cut"],
    }.items()
    for name in names
}


def parse(name: str, **settings: Any) -> Policy:
    """The policy that a name or an import path stands for.

        parse("svip", threshold=0.3), or parse("svip(threshold=0.3)")
        parse("my_module:my_policy", patience=2)

    Args:
      name: one of `NAMES`, or "module:attribute" of a function or class that makes a policy. That
        is code that runs: the module is imported.
      settings: passed to it.

    Raises:
      ValueError: no such name, module or attribute, or settings that it does not take.
    """
    return named.make("policy", NAMES, name, Policy, **settings)


def parse_with_costs(name: str, table: Costs, **settings: Any) -> Policy:
    """As `parse`, with the costs if the policy takes any."""
    return parse(name, **settings, **({"costs": table} if takes(name, "costs") else {}))


def check(name: str) -> None:
    """ValueError where `parse` would refuse the name or its settings, before any cost is known."""
    with_any_costs(name)


def with_any_costs(name: str, gamma_max: int = 0) -> Policy:
    """The policy of a name, with costs that nobody measured where it needs some."""
    free = {"costs": Costs(0.0, [1.0] * (gamma_max + 1))} if needs_costs(name) else {}
    return parse(name, **free)


def needs_costs(name: str) -> bool:
    """Whether a policy cannot be made without `Costs`, and is given none.

    A policy says so by a parameter `costs` that has no default. `specjax.tune` and
    `specjax decode` measure them.
    """
    return named.lacks("policy", NAMES, name, "costs")


def takes(name: str, setting: str) -> bool:
    """Whether a policy has this setting; ValueError where there is no such policy."""
    return named.takes("policy", NAMES, name, setting)
