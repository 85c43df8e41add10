"""The class `Example`: a pair of text, in T5's text-to-text manner."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Example:
    """A pair: `input`, with the task's prefix if there is one, and the expected `target`."""

    input: str
    target: str
