"""Arguments and names of earlier versions, which are refused with the way out."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, get_args

P = ParamSpec("P")
R = TypeVar("R")

POSITIONS = "give passes=…, numbers of positions of all rows of the batch together"
ARGUMENTS = {  # old ones, what they are now, and how
    "budget": ("policy", "a verify budget is a policy: give policy=…"),
    "sizes": ("passes", POSITIONS),
    "widths": ("passes", POSITIONS),
    "samples": ("num_samples", "it is num_samples"),
    "rounds": ("log_rounds", "it is log_rounds"),
    "carry": ("carry_state", "it is carry_state"),
}
MOVED = {
    f"policy {name}": f"'experiments.adaptive.policies:{name}', in a checkout of the repository"
    for name in ["average", "exp3", "first_descent", "gammatune", "head", "hedge", "tapout", "ucb"]
}


def refuses(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to refuse arguments that it lacks; old ones with the way out.

    Names behind `**` are those of the annotation `Unpack[…]`.
    """
    parameters = inspect.signature(function).parameters
    rest = [get_args(p.annotation)[0] for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    names = parameters.keys() | {name for fields in rest for name in fields.__optional_keys__}

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in sorted(kwargs.keys() - names):
            now, way_out = ARGUMENTS.get(name, ("", ""))
            if now in names:
                raise ValueError(f"{function.__name__} has no argument {name}: {way_out}.")
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    return called
