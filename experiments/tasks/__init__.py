"""Named tasks: the inputs and references of train, validation and test, as pairs of text.

parse           a Python statement of one line, or a header -> its syntax tree
prose           three words -> some paragraphs of docstrings and comments: unconditional text
wmt14_en_de     English -> German, of the paper
cnn_dailymail   a news article -> its highlights, of the paper
spec_bench      the first turns of Spec-Bench's questions, or of another file of that form
jsonl           your own pairs, from files
"""

import json
import os
import pathlib
import platform
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from experiments.tasks import hub_datasets, jsonl, python_source, questions
from experiments.tasks.examples import Example

__all__ = [
    "SPLITS",
    "TASKS",
    "Example",
    "load",
    "not_held_out",
    "provenance",
    "stream",
    "warn_of_overlap",
]

SPLITS = python_source.SPLITS
TASKS = (*python_source.TASKS, *hub_datasets.CORPORA, questions.TASK, "jsonl")


def load(
    task: str,
    split: str,
    files: str | PathLike | Sequence[str | PathLike] = (),
    categories: Sequence[str] = (),
) -> list[Example]:
    """Load the pairs of one task and split, always in the same order.

    Args:
      task: one of `TASKS`.
      split: one of `SPLITS`, or several with + between them, one after the other.
      files: of the jsonl task, one for each split, in the order of `SPLITS`, or the directory of
        train.jsonl, validation.jsonl and test.jsonl. Of the paper's corpora, a directory in the
        hub's layout; empty: the hub. Of spec_bench, a file or another place of `questions.load`.
      categories: of spec_bench, the categories to keep; none: all.

    Raises:
      ValueError: no such task, split or category, or a file that is missing or has a wrong line.
    """
    if "+" in split:
        return [one for part in split.split("+") for one in load(task, part, files, categories)]
    return list(stream(task, split, files, categories))


def stream(
    task: str,
    split: str,
    files: str | PathLike | Sequence[str | PathLike] = (),
    categories: Sequence[str] = (),
) -> Sequence[Example]:
    """Open the pairs of one split, as `load` has them; those of the paper's corpora stay in files.

    Raises: as `load`.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}: choose from {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: choose from {', '.join(SPLITS)}")
    if task in python_source.TASKS:
        return python_source.load(task, split)
    places = [files] if isinstance(files, str | PathLike) else list(files)
    places = [place for place in places if os.fspath(place)]
    if task == "jsonl":
        return jsonl.load(_jsonl_file(split, places))
    if task == questions.TASK:
        return questions.first_turns(questions.load(_questions_places(split, places), categories))
    if len(places) > 1:
        raise ValueError(
            f"the task {task} takes one directory in the hub's layout; given: "
            f"{list(map(str, places))}"
        )
    return hub_datasets.stream(task, split, *places)


def _jsonl_file(split: str, places: Sequence[str | PathLike]) -> str | PathLike:
    """The jsonl file of a split."""
    if len(places) == 1 and pathlib.Path(places[0]).is_dir():
        return pathlib.Path(places[0]) / f"{split}.jsonl"
    if len(places) != len(SPLITS):
        raise ValueError(
            f"the jsonl task needs {len(SPLITS)} files, one each for {', '.join(SPLITS)}, or a "
            f"directory of them; given: {list(map(str, places))}"
        )
    return places[SPLITS.index(split)]


def _questions_places(split: str, places: Sequence[str | PathLike]) -> Sequence[str | PathLike]:
    """The places of the questions, which are a test split."""
    if split != "test":
        raise ValueError(
            f"The task {questions.TASK} has questions to test with, and no {split} split: set "
            "split to test."
        )
    if not places:
        raise ValueError(
            f"The task {questions.TASK} needs data_dir, a file of questions such as "
            f"{questions.SOURCE}, or several with commas between them."
        )
    return places


def warn_of_overlap(task: str, data: Mapping[str, Sequence[Example]]) -> None:
    """Warn of inputs of validation or test that are in the training split too, with their number.

    A pair with an empty input, such as plain text, is compared by its target. The splits of Python
    source are made without overlap and are not compared.
    """
    if task in python_source.TASKS:
        return
    others = {
        split: [pair.input or pair.target for pair in pairs]
        for split, pairs in data.items()
        if split != "train"
    }
    # The training split is the largest: it is read once and not held.
    wanted = {text for texts in others.values() for text in texts}
    known = {text for pair in data["train"] if (text := pair.input or pair.target) in wanted}
    counts = {split: sum(text in known for text in texts) for split, texts in others.items()}
    found = [
        f"{count:,} of {len(data[split]):,} inputs of {split}"
        for split, count in counts.items()
        if count
    ]
    if found:
        warnings.warn(
            f"The task {task}: {' and '.join(found)} are in the training split too. Figures on "
            "them are not held out.",
            stacklevel=2,
        )


def not_held_out(
    training_data: str,
    task: str,
    split: str,
    files: str | PathLike | Sequence[str | PathLike] = (),
) -> str:
    """A warning if a split differs from the text that a model's training held out, else "".

    Args:
      training_data: JSON of `provenance`, from a trained model's metadata; "": none.
      task, split, files: the inputs, as in `load`. "" for other tasks than the model's own.
    """
    then = json.loads(training_data or "{}")
    if then.get("task") != task:
        return ""
    parts = split.split("+")
    hashes = then.get("sha256", {})
    other = [
        part for part in parts if hashes.get(part) != python_source.digest(load(task, part, files))
    ]
    if not other:
        return ""
    python = then.get("python")
    versions = f" (Python {python}; here {platform.python_version()})" if python else ""
    return (
        f"The {' and '.join(other)} split{'s' * (len(other) > 1)} of {task} differ"
        f"{'s' * (len(other) == 1)} from what was held out when the target was trained"
        f"{versions}: the target may have been trained on parts of it."
    )


def provenance(task: str, data: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """The provenance of pairs as JSON data: versions of sources, counts and hashes by split."""
    return {
        "task": task,
        "pairs": {split: len(pairs) for split, pairs in data.items()},
        "sha256": {split: python_source.digest(pairs) for split, pairs in data.items()},
        **(python_source.versions(task) if task in python_source.TASKS else {}),
    }
