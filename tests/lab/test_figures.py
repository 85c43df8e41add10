"""Figures on pages are those of the rows that they link.

A figure is marked by a link to rows whose title says which value it is:
`[3.49](results/parse/results.jsonl.xz "speedup: draft-small, T=0, speedup_decode")`.
"""

import functools
import json
import lzma
import re
from pathlib import Path

import pytest

from command_line import PAGES, ROOT
from experiments.chat import tables
from specjax import formulas, policies
from specjax.support import renamed

MARKED = re.compile(r'\[([^\]]+)\]\(([^)\s]*results/[^)\s]+\.jsonl(?:\.xz)?)\s+"(\w+): ([^"]+)"\)')
MARKS = [(page, *mark) for page in PAGES for mark in MARKED.findall(page.read_text("utf-8"))]


@functools.cache
def rows_of(path: Path) -> list[dict]:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line, object_hook=renamed.fields) for line in lines]
    return chat_rows(rows) if "batches" in rows[0] else rows


def chat_rows(rows: list[dict]) -> list[dict]:
    """Figures of static γ at batch 1, with the draft "lookup-4-all": name, γ and kind."""
    single = [row for row in rows if row["batch"] == 1 and not row["policy"]]
    return [
        {
            **{k: v.value if isinstance(v, tables.Estimate) else v for k, v in row.items()},
            "table": "chat",
            "temperature": block.temperature,
            "draft": f"{row['draft']}-{row['gamma']}-{row['kind']}",
        }
        for block in tables.blocks(single)
        for row in tables.table(block)
    ]


def value_in(row: dict, field: str):
    """A field of a row, the quotient "a/b" of two, or "a.b" of the one entry in a list."""
    if "/" in field:
        above, below = field.split("/")
        return row[above] / row[below]
    if "." in field:
        name, inner = field.split(".")
        (entry,) = row[name]
        return entry[inner]
    return row[field]


def measured(rows: list[dict], table: str, asked: str):
    """The value of one row ("draft-tiny, T=0, tau"), or of a table's ("most v")."""
    rows = [row for row in rows if row["table"] == table]
    if cell := re.fullmatch(r"([\w. -]+), T=([\d.]+), (\S+)", asked):
        draft, temperature, field = cell.groups()
        (row,) = (
            row
            for row in rows
            if row["draft"].split("/")[-1] == draft and row["temperature"] == float(temperature)
        )
        return value_in(row, field)
    kind, field = asked.split()
    values = [value_in(row, field) for row in rows]
    below_1 = sum(value < 1 for value in values)
    return {"least": min(values), "most": max(values), "below_1": below_1, "count": len(values)}[
        kind
    ]


def agrees(printed: str, value: float) -> bool:
    """Whether a number is printed with the digits of a value."""
    digits = len(printed.rstrip("%").partition(".")[2])
    scaled = 100 * value if printed.endswith("%") else value
    return f"{scaled:.{digits}f}" == printed.rstrip("%")


@pytest.mark.parametrize(
    ("page", "printed", "place", "table", "asked"),
    [pytest.param(*mark, id=f"{mark[0].name}:{mark[4]}") for mark in MARKS],
)
def test_a_figure_is_that_of_its_row(page, printed, place, table, asked):
    found = measured(rows_of(page.parent / place), table, asked)
    values = found if isinstance(found, list) else [found]
    for text, value in zip(printed.split(", "), values, strict=True):
        assert agrees(text, value), f"{page.name} prints {printed}, the row has {found}"


def test_figures_are_marked():
    pages = [page.name for page, *_ in MARKS]
    assert pages.count("misconceptions.md") > 40
    assert pages.count("performance.md") == 4
    assert pages.count("README.md") >= 21  # α and both speedups of seven rows
    assert {mark[2].split("/")[-2] for mark in MARKS[:21]} == {
        "pair", "spec_bench_lookup", "parse", "prose",
    }  # fmt: skip
    assert MARKS[0][0] == ROOT / "README.md"
    assert not agrees("1.32", 3.493)  # what a page printed that cited an older family
    assert agrees("82.7%", 0.82667)


def test_the_number_of_policies():
    """README's count is of the names that are no fixed length."""
    page = (ROOT / "README.md").read_text("utf-8")
    assert f"[{len(policies.NAMES) - 1} policies](docs/policies.md)" in page


def test_what_misconceptions_computes():
    """Its table over γ and what the wrong formulas give, from the rows that it names."""
    page = (ROOT / "docs" / "misconceptions.md").read_text("utf-8")
    results = ROOT / "docs" / "results"
    prose = rows_of(results / "prose" / "results.jsonl.xz")
    alpha, c, v = (
        measured(prose, "speedup", f"draft, T=1, {name}") for name in ("alpha", "c", "v")
    )

    def line(name: str) -> list[str]:
        (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", page, re.MULTILINE)
        return found.split(" | ")

    gammas = [int(cell) for cell in line("γ")]
    expected = {
        "tokens a call": formulas.expected_tokens(alpha, gammas),
        "speedup": formulas.walltime_speedup(alpha, gammas, c, v),
    }
    for name, values in expected.items():
        assert line(name) == [f"{value:.2f}" for value in values]
    assert line("1 + α tokens a call")[0] == f"{1 + alpha:.2f}"
    parse = rows_of(results / "parse" / "results.jsonl.xz")
    alpha, gamma, c = (
        measured(parse, "speedup", f"draft-tiny, T=1, {name}") for name in ("alpha", "gamma", "c")
    )
    wrong = (alpha * gamma + 1) / (gamma * c + 1)
    assert line("speedup = (αγ + 1) / (γc + 1)")[0] == f"{wrong:.2f}"
    assert line("1 + αγ tokens a call")[0] == f"{1 + alpha * gamma:.2f}"
