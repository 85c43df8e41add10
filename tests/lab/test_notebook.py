"""Notebooks as they are stored; CI executes them."""

import json

import pytest

from specjax.support.command_line import ROOT

BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(book, kind: str) -> list[dict]:
    """The cells of one kind of a notebook."""
    notebook = json.loads(book.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_notebook_opens_elsewhere_and_stores_no_outputs(book):
    code, others = cells(book, "code"), [cells(other, "code")[0]["source"] for other in BOOKS]
    assert f"/blob/main/notebooks/{book.name})" in "".join(cells(book, "markdown")[0]["source"])
    assert "specjax/notebooks" in code[0]["source"][-1]
    assert code[0]["source"] == others[0]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert not any("execution" in cell["metadata"] for cell in code)


def test_every_exercise_has_a_folded_solution():
    words = "".join("".join(cell["source"]) for cell in cells(BOOKS[0], "markdown"))
    text, code = words.split("8. Exercises")[-1], cells(BOOKS[0], "code")
    solutions = [cell for cell in code if "solution" in cell["metadata"].get("tags", [])]
    assert len(solutions) == sum(f"**{number}. " in text for number in range(1, 10)) == 5
    assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
