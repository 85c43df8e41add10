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
WERE_AT_THE_TOP = {  # names of `specjax`, with their modules
    "Alpha": "measure.metrics", "Autoregressive": "autoregressive", "Bigram": "drafters.ngram",
    "Candidate": "tuning.recommendation", "Comparison": "measure.speedup", "Filter": "sampling",
    "Inputs": "types", "Medusa": "drafters.medusa", "Method": "loop",
    "ModelDrafter": "drafters.base", "PromptLookup": "drafters.ngram", "Round": "rounds",
    "Selection": "tuning.recommendation", "Speculative": "speculative", "Summary": "results",
    "Unigram": "drafters.ngram", "switch": "drafters.switch",
}  # fmt: skip


def refuses(function: Callable[P, R], ways: dict[str, str] | None = None) -> Callable[P, R]:
    """Decorate a function to raise ValueError for arguments that it no longer has."""
    ways = DRAFTING if ways is None else ways

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in ways.keys() & kwargs.keys():
            raise ValueError(f"{function.__name__} has no argument {name}: {ways[name]}")
        return function(*args, **kwargs)

    return called
