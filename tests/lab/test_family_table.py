"""The table of families in docs/checkpoints.md: each cell is a case of a test, or a dash."""

import re
from pathlib import Path

from family_rows import COLUMNS, ROWS

ROOT = Path(__file__).resolve().parents[2]


def table():
    """The table as {row: {column: cell}}."""
    page = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    lines = re.search(r"^\| family \|.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)[0].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows}


def test_every_cell_is_a_case_or_a_dash():
    expected = {
        name: {column: "–" if column in row.lacks else "yes" for column in COLUMNS}
        for name, row in ROWS.items()
    }
    assert table() == expected


def test_every_column_has_its_test():
    """A function of that name, whose cases are the column's cells."""
    for column, place in COLUMNS.items():
        file, name = place.split("::")
        source = (ROOT / "tests" / file).read_text("utf-8")
        cases = re.search(rf"@pytest.mark.parametrize\(([^@]*?)\)\ndef {name}\(", source)
        assert cases, place
        if "in ROWS" not in cases[1]:  # else every variant of every row is a case
            assert "cells(" in cases[1]
            assert f'"{column}"' in cases[1] or ("*WAYS" in cases[1] and f'"{column}": ' in source)
