"""A rule's own declarations: whether it keeps the target's distribution."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.rules.base import AcceptanceRule
from specjax.sampling import Sampling

# The functions that decide about tokens. `under` is none: its result is judged in the rule's place.
_DECIDING = frozenset(("target_distribution", "given_noise", "stop", "next_probs"))


def exactness(rule: AcceptanceRule, sampling: Sampling) -> bool | None:
    """Whether outputs keep the target's distribution, as the rule declares; None: undeclared.

    A declaration covers the class that makes it, and subclasses that decide about tokens in the
    same way. One that overrides a function of `_DECIDING` must declare `exact` again.
    """
    rule = rule.under(sampling)
    declares, decides = (_depth(rule, names) for names in (("exact",), _DECIDING))
    return bool(rule.exact) if declares is not None and declares <= (decides or 0) else None


def own_acceptance(rule: AcceptanceRule, sampling: Sampling) -> bool:
    """Whether the class that decides about tokens also defines `acceptance`."""
    rule = rule.under(sampling)
    defines, decides = (_depth(rule, names) for names in (("acceptance",), _DECIDING))
    return defines is not None and defines <= (decides or 0)


def _depth(rule: AcceptanceRule, names: Collection[str]) -> int | None:
    """Index in the method resolution order of the first class with one of these names, or None."""
    classes = enumerate(type(rule).__mro__)
    return next((i for i, cls in classes if not vars(cls).keys().isdisjoint(names)), None)


def label(rule: AcceptanceRule) -> str:
    """The rule as Python code, such as "Lenient(lenience=0.3)"."""
    made: Any = rule
    if not dataclasses.is_dataclass(made):
        return type(rule).__name__
    parts = []
    for field in dataclasses.fields(made):
        value = np.asarray(getattr(rule, field.name))
        shown = value.ndim == 0 and value.dtype.kind in "fiu"
        parts.append(f"{field.name}={value.item():g}" if shown else field.name)
    return f"{type(rule).__name__}({', '.join(parts)})"


def remark(rule: AcceptanceRule, sampling: Sampling) -> str:
    """A caveat for results of a rule that is not exact; "" for one that is."""
    found = exactness(rule, sampling)
    if found is None:
        return f"{label(rule)} does not say whether it is exact: see specjax.rules.exactness"
    return "" if found else f"{label(rule)} is not exact"
