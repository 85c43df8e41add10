"""Your own pairs: a file with a JSON object on each line, {"input": "…", "target": "…"}."""

import json
import os
import pathlib

from specjax.support import files
from specjax.tasks.examples import Example


def load(path: str | os.PathLike) -> list[Example]:
    """Load the pairs of a file, in its order; empty lines are skipped, other fields ignored.

    Raises:
      ValueError: the file is missing or empty, or a line is wrong; the message names it.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    pairs = []
    text = files.decode(path.read_bytes(), path)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            pairs.append(_example(line, f"{path}, line {number}"))
    if not pairs:
        raise ValueError(f"{path} has no pairs: one JSON object with input and target on each line")
    return pairs


def _example(line: str, place: str) -> Example:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}): {line[:60]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: an object with input and target is needed, not {line[:60]!r}")
    for field in ("input", "target"):
        if not isinstance(row.get(field), str):
            raise ValueError(
                f"{place}: the field {field!r} must be a string, is {row.get(field)!r}"
            )
    return Example(row["input"], row["target"])
