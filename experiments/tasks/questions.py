"""Questions in turns: files of JSON lines in the form of Spec-Bench's question.jsonl.

    {"question_id": 81, "category": "writing", "turns": ["Compose …", "Rewrite …"]}

EAGLE's data folders, DeepSpec's eval_datasets and SPEED-Bench have such rows too. Only `turns` must
be there: a row without `question_id` has the number of its line, and one without `category` the
file's name. Other fields are ignored, except that the first `reference` is kept.
"""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.tasks import hub_datasets
from experiments.tasks.examples import Example
from specjax.cli.inputs import TURNS, turns_of
from specjax.support import files
from specjax.support.ranges import shown

TASK = "spec_bench"
CONVERSATION = "conversation"
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
"""Categories of MT-bench, which are one kind of Spec-Bench: conversation."""
FILE = "question.jsonl"
MAX_BYTES = 1 << 28  # of a file
SOURCE = "https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl"


class Question(NamedTuple):
    """A user's turns. The model's answer to one turn comes before the next."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: str = ""

    @property
    def kind(self) -> str:
        """Spec-Bench's kind of question: conversation for MT-bench's categories, else its own.

        SPEED-Bench has categories of the same names, which are kinds there, and texts for ids.
        """
        chats = self.category in MT_BENCH and not isinstance(self.question_id, str)
        return CONVERSATION if chats else self.category


def load(
    places: str | os.PathLike | Sequence[str | os.PathLike], categories: Sequence[str] = ()
) -> list[Question]:
    """Load questions, in their order.

    Args:
      places: each a file of JSON lines; a directory with question.jsonl or with other files
        *.jsonl; or a data set, as a directory or a name on the hub, which the package datasets
        reads.
      categories: those to keep, by category or `kind`; none: all.

    Raises:
      ValueError: a place is missing, a row is wrong, or there is no question of a category.
    """
    each = [places] if isinstance(places, str | os.PathLike) else places
    found, place = [one for place in each for one in _load(place)], " and ".join(map(str, each))
    if not found:
        raise ValueError(f"{place} has no questions. {TURNS}")
    known = dict.fromkeys(name for one in found for name in (one.kind, one.category))
    if missing := [name for name in categories if name not in known]:
        raise ValueError(
            f"{place} has no questions of the category {', '.join(map(repr, missing))}: it has "
            f"{', '.join(known)}."
        )
    kept = {*(categories or known)}
    return [one for one in found if one.kind in kept or one.category in kept]


def first_turns(questions: Iterable[Question]) -> list[Example]:
    """The first turn of each question, with its reference."""
    return [Example(one.turns[0], one.reference) for one in questions]


def _load(place: str | os.PathLike) -> list[Question]:
    path = pathlib.Path(place)
    if path.is_file():
        objects = files.json_objects(files.read_limited(path, MAX_BYTES), path, TURNS)
        return _questions(objects, path.stem)
    if path.is_dir():
        found = [path / FILE] if (path / FILE).is_file() else sorted(path.glob("*.jsonl"))
        if found:
            return [one for file in found for one in _load(file)]
    elif path.suffix or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(place)):
        raise ValueError(f"No such file of questions: {place}. Spec-Bench's is {SOURCE}.")
    rows = hub_datasets.only_split(place, TASK)
    return _questions(((f"{place}, row {i}", row) for i, row in enumerate(rows, 1)), path.name)


def _questions(objects: Iterable[tuple[str, Mapping[str, Any]]], name: str) -> list[Question]:
    """Check rows, and return them as questions.

    Args:
      objects: places, for errors, and rows.
      name: the category of rows that have none.
    """
    found = []
    for number, (place, row) in enumerate(objects, 1):
        turns = turns_of(row, place)
        question_id, category = row.get("question_id"), row.get("category")
        question_id = number if question_id is None else question_id
        category = name if category is None else category
        if type(question_id) not in (int, str):
            raise ValueError(f"{place}: question_id={shown(question_id)} should be a number.")
        if not isinstance(category, str) or not category:
            raise ValueError(f"{place}: category={shown(category)} should be a text. {TURNS}")
        reference = row.get("reference")
        first = reference[0] if isinstance(reference, list) and reference else reference
        found.append(
            Question(question_id, category, turns, first if isinstance(first, str) else "")
        )
    return found
