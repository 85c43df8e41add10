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
LEFT_THE_TOP = {  # names of `specjax`, with the modules that have them
    name: module
    for module, names in {
        "autoregressive": ["Autoregressive"],
        "drafters.base": ["ModelDrafter"],
        "drafters.medusa": ["Medusa"],
        "drafters.ngram": ["Bigram", "PromptLookup", "Unigram"],
        "drafters.switch": ["switch"],
        "loop": ["Method"],
        "measure.metrics": ["Alpha"],
        "measure.speedup": ["Comparison"],
        "results": ["Summary"],
        "rounds": ["Round"],
        "sampling": ["Filter"],
        "speculative": ["Speculative"],
        "tuning.recommendation": ["Candidate", "Selection"],
        "types": ["Inputs"],
    }.items()
    for name in names
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
