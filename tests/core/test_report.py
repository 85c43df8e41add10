"""Tables of results, for the terminal and for Markdown."""

import io

from rich.console import Console

from specjax.measure import report


def test_a_pipe_gets_whole_tables():
    """A terminal has a width, to which tables are cut; a pipe has none."""
    columns = [(f"heading {i}", lambda row: "a cell") for i in range(9)]
    pipe = Console(file=io.StringIO(), width=40)
    report.show(pipe, columns, [{}], "Nine")
    assert pipe.width == 40
    assert "heading 8" in pipe.file.getvalue()
    terminal = Console(file=io.StringIO(), width=40, force_terminal=True)
    report.show(terminal, columns, [{}], "Nine")
    assert "heading 8" not in terminal.file.getvalue()


def test_the_column_of_acceptance():
    """Rows that lack it have a dash, and a table of such rows no column."""
    rows = [
        {"acceptance_by_position": [0.9, 0.5, None], "mean_acceptance": 0.75},
        {"acceptance_by_position": [], "mean_acceptance": None},
        {},
    ]
    ((heading, cell),) = report.acceptance(rows)
    assert heading == "accepted: mean, by position"
    assert [cell(row) for row in rows] == ["0.75: 0.90 0.50 –", "–", "–"]
    assert report.acceptance(rows[1:]) == []


def test_markdown():
    columns = [("draft", lambda row: "m"), ("speedup", lambda row: f"{row['speedup']:.2f}")]
    assert report.markdown(columns, [{"speedup": 1.4}]) == (
        "| draft | speedup |\n|---|---:|\n| m | 1.40 |"
    )
