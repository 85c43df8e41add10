"""Your own pairs: a file with a JSON object on each line, {"input": "…", "target": "…"}."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.tasks.examples import Example
from specjax.support import files

WAY_OUT = "Give an object with input and target on each line."
MAX_BYTES = 1 << 31  # of a file; its pairs are held in memory


def load(path: str | os.PathLike) -> list[Example]:
    """Load the pairs of a file, in its order; empty lines are skipped, other fields ignored.

    Raises:
      ValueError: the file is missing, empty or too large, or a line is wrong; the message names it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    objects = files.json_objects(files.read_limited(path, MAX_BYTES), path, WAY_OUT)
    pairs = [_example(row, place) for place, row in objects]
    if not pairs:
        raise ValueError(f"{path} has no pairs. {WAY_OUT}")
    return pairs


def _example(row: Mapping[str, Any], place: str) -> Example:
    for field in ("input", "target"):
        if not isinstance(row.get(field), str):
            raise ValueError(
                f"{place}: the field {field!r} must be a string, is {row.get(field)!r}"
            )
    return Example(row["input"], row["target"])
