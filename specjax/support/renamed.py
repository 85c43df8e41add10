"""Arguments and names of earlier versions, which are refused with the way out."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

POSITIONS = "give passes=…, numbers of positions of all rows of the batch together."
DRAFTING = {
    "budget": "a verify budget is a policy: give policy=….",
    "sizes": POSITIONS,
    "widths": POSITIONS,
    "samples": "`generate` has num_samples.",
    "rounds": "`generate` has log_rounds.",
    "carry": "`generate` has carry_state.",
}
MOVED = {
    f"policy {name}": f"'experiments.adaptive.policies:{name}', in a checkout of the repository"
    for name in ["average", "exp3", "first_descent", "gammatune", "head", "hedge", "tapout", "ucb"]
}


def refuses(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise ValueError for arguments that it no longer has."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in DRAFTING.keys() & kwargs.keys():
            raise ValueError(f"{function.__name__} has no argument {name}: {DRAFTING[name]}")
        return function(*args, **kwargs)

    return called
