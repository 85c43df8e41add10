"""The shape of the first notebook, as it is stored; CI executes it."""

import ast
import json

from specjax.support.command_line import ROOT

NOTEBOOK = ROOT / "notebooks" / "01_how_it_works.ipynb"


def cells(kind: str) -> list[dict]:
    """The notebook's cells of one kind."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_notebook_compiles():
    code = ["".join(cell["source"]) for cell in cells("code")]
    ast.parse("\n".join(code))
    assert "from specjax import" in code[0]


def test_notebook_shows_its_figures_and_no_errors():
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 6
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert NOTEBOOK.stat().st_size < 400_000


def test_every_exercise_has_a_folded_solution():
    text = "".join("".join(cell["source"]) for cell in cells("markdown")).split("8. Exercises")[-1]
    solutions = [cell for cell in cells("code") if "solution" in cell["metadata"].get("tags", [])]
    assert len(solutions) == sum(f"**{number}. " in text for number in range(1, 10)) == 5
    assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
