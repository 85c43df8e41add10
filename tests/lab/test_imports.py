"""Imports run one way, and experiments/imports/README.md says which."""

import re

import pytest

from command_line import ROOT
from experiments.imports import __main__ as imports


def test_no_circle_and_the_page_has_the_table():
    page = (ROOT / "experiments" / "imports" / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- imports -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown is not None
    found = imports.graph()
    assert "sampling" in found["rules.base"]  # the graph is not empty
    assert "models.checkpoint" in found["decoding.texts"]
    assert shown[1].strip() == imports.table(imports.rooms(found))


def test_only_checkpoints_import_formats_of_others():
    """What other libraries write is read behind one wall."""
    inside = {
        name
        for name, needed in imports.graph().items()
        if any(other.startswith("checkpoints.formats") for other in needed)
    }
    assert inside
    assert {name.partition(".")[0] for name in inside} == {"checkpoints"}


def test_a_circle_is_named(monkeypatch):
    """One that an import inside a function closes: rules.base -> speculative."""
    found = imports.graph()
    found["rules.base"].add("speculative")
    monkeypatch.setattr(imports, "graph", lambda: found)
    with pytest.raises(ValueError, match=r"in a circle: .*rules.base"):
        imports.main([])


def test_imports_of_every_form(tmp_path):
    known = dict.fromkeys(
        ("", "files", "models.table", "checkpoints", "checkpoints.t5", "types"), tmp_path
    )
    (tmp_path / "some.py").write_text("""
from typing import TYPE_CHECKING
from specjax import files as f, nothing
from specjax.checkpoints import t5, load
if TYPE_CHECKING:
    from specjax import types
def later():
    from specjax.models import table
""")
    assert set(imports.imported(tmp_path / "some.py", known)) == {
        "files", "", "checkpoints", "checkpoints.t5", "models.table",
    }  # fmt: skip
