"""The answers of a run as Spec-Bench's evaluation writes them, for its own scripts.

They are of single rows: a batch's seconds are no question's own.
"""

import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.chat.groups import Asked
from specjax.measure import formats
from specjax.measure.formats import Answer
from specjax.measure.timing import PLAIN
from specjax.support import files

Rows = Sequence[Mapping[str, Any]]


def write(workdir: pathlib.Path, asked: Sequence[Asked], rows: Rows) -> list[pathlib.Path]:
    """Write spec_bench/METHOD-T.jsonl for each method and temperature, a line for each question."""
    alone = [row for row in rows if row["batch"] == 1]
    cells = dict.fromkeys((row["method"], row["temperature"]) for row in alone)
    written = []
    for name, temperature in cells:
        lines = of_method(asked, [row for row in alone if row["temperature"] == temperature], name)
        place = workdir / "spec_bench" / f"{file_name(name)}-T{temperature:g}.jsonl"
        place.parent.mkdir(exist_ok=True)
        files.write_rows(place, lines)
        written.append(place)
    return written


def file_name(method: str) -> str:
    """The method's name in a file's: "lookup-gamma-4" of "lookup, γ = 4"."""
    return re.sub(r"[^\w.]+", "-", method.replace("γ", "gamma")).strip("-")


def of_method(asked: Sequence[Asked], rows: Rows, method: str) -> list[dict[str, Any]]:
    """Spec-Bench's rows of a method, from rows of one temperature and batch size 1.

    They are in the order of the questions; those that are not decoded yet are left out.
    """
    cells = {
        (row["method"], row["category"], *batch["questions"]): (row, batch["turns"])
        for row in rows
        for batch in row["batches"]
    }
    lines = []
    for question in (one.question for one in asked):
        place = question.kind, question.question_id
        if (method, *place) not in cells:
            continue
        row, turns = cells[method, *place]
        _, plain = cells[PLAIN, *place]
        lines.append(
            formats.spec_bench(
                [list(map(_answer, turns, plain))],
                question_id=question.question_id,
                category=question.category,
                model_id=f"{row['target']}, {method}",
                tstamp=time.time(),
            )
        )
    return lines


def _answer(turn: Mapping[str, Any], plain: Mapping[str, Any]) -> tuple[Answer, float]:
    """A turn's answer, with the least of its seconds over repeats.

    Args:
      plain: plain decoding's turn, which has the text of equal answers.
    """
    (output,), (first,) = turn["outputs"], plain["outputs"]
    text = output.get("text", first["text"])
    found = Answer(text, output["tokens"], output["target_calls"], output["accepted_lengths"])
    return found, min(map(sum, zip(turn["decode"], turn["prefill"], strict=True)))
