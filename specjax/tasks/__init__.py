"""Where inputs and references come from: named tasks, each with train, validation and test pairs.

parse       a Python statement of one line -> its syntax tree
summarize   a function's source -> the first paragraph of its docstring
jsonl       one's own pairs, from files
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from specjax.tasks import jsonl, python_source
from specjax.tasks.examples import Example

__all__ = ["SPLITS", "TASKS", "Example", "load", "provenance"]

SPLITS = python_source.SPLITS
TASKS = (*python_source.TASKS, "jsonl")


def load(task: str, split: str, files: Sequence[str | PathLike] = ()) -> list[Example]:
    """The pairs of one task and split, always in the same order.

    Args:
      task: one of `TASKS`.
      split: one of `SPLITS`.
      files: of the jsonl task, one for each split, in the order of `SPLITS`.

    Raises:
      ValueError: no such task or split, or a file that is missing or has a wrong line.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}: choose from {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: choose from {', '.join(SPLITS)}")
    if task != "jsonl":
        return python_source.load(task, split)
    if len(files) != len(SPLITS):
        raise ValueError(
            f"the jsonl task needs {len(SPLITS)} files, one each for {', '.join(SPLITS)}; "
            f"given: {list(map(str, files))}"
        )
    return jsonl.load(files[SPLITS.index(split)])


def provenance(task: str, data: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """Where pairs came from: versions of their sources, counts and hashes by split. JSON data."""
    return {
        "task": task,
        "pairs": {split: len(pairs) for split, pairs in data.items()},
        "sha256": {split: python_source.digest(pairs) for split, pairs in data.items()},
        **(python_source.versions() if task in python_source.TASKS else {}),
    }
