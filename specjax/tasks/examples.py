"""What a task is made of: pairs of text, in T5's text-to-text manner."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Example:
    """One pair. `input` carries the task's prefix, if it has one; `target` should come out."""

    input: str
    target: str
