"""Arguments and names of earlier versions, which are refused with the way out."""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

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
# Modules of `specjax` whose names were at its top.
WERE_AT_THE_TOP = (
    "autoregressive", "drafters.base", "drafters.medusa", "drafters.ngram", "drafters.switch",
    "loop", "measure.metrics", "measure.speedup", "results", "rounds", "sampling", "speculative",
    "tuning.recommendation", "types",
)  # fmt: skip


def moved(package: str, name: str, modules: Iterable[str]) -> NoReturn:
    """Raise ImportError with the module of a package that has a name, or AttributeError."""
    submodule = importlib.util.find_spec(f"{package}.{name}")  # one that is about to be imported
    for module in () if submodule or name.startswith("_") else modules:
        place = importlib.import_module(f"{package}.{module}")
        if getattr(vars(place).get(name), "__module__", "") == place.__name__:
            raise ImportError(f"{package}.{name} is {place.__name__}.{name} now.")
    raise AttributeError(f"{package} has no {name}.")


MOVED = {
    f"policy {name}": f"'experiments.adaptive.policies:{name}', in a checkout of the repository"
    for name in ["average", "exp3", "first_descent", "gammatune", "head", "hedge", "tapout", "ucb"]
}


def refuses(function: Callable[P, R], ways: dict[str, str] | None = None) -> Callable[P, R]:
    """Decorate a function to raise ValueError for arguments that it no longer has."""
    ways = DRAFTING if ways is None else ways

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in ways.keys() & kwargs.keys():
            raise ValueError(f"{function.__name__} has no argument {name}: {ways[name]}")
        return function(*args, **kwargs)

    return called
