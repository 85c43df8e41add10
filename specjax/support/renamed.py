"""Arguments and names of earlier versions, which are refused with the way out."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")

ARGUMENTS = {  # old ones, and what they are now
    "budget": "policy", "sizes": "passes", "widths": "passes",
    "samples": "num_samples", "rounds": "log_rounds", "carry": "carry_state",
}  # fmt: skip
FIELDS = {"drafted": "verified", "levels": "draft_calls"}  # of rows, results and rounds
MOVED = {
    f"policy {name}": f"'experiments.adaptive.policies:{name}', in a checkout of the repository"
    for name in ["average", "exp3", "first_descent", "gammatune", "head", "hedge", "tapout", "ucb"]
}


def refuses(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, whose `**` has an `Unpack[…]`, to refuse arguments that it lacks."""
    parameters = inspect.signature(function).parameters
    rest = [get_args(p.annotation)[0] for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    names = parameters.keys() | {name for fields in rest for name in fields.__optional_keys__}

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in sorted(kwargs.keys() - names):
            if (now := ARGUMENTS.get(name)) in names:
                raise ValueError(f"{function.__name__} has no argument {name}: give {now}=….")
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    return called


def fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a file, whose old fields get their names of today."""
    return {FIELDS.get(name, name): value for name, value in row.items()}


def refused(name: str) -> property:
    """Make a property for an old field, which is refused with the way out."""

    def refuse(self: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} has no {name}: read {FIELDS[name]}.")

    return property(refuse)
