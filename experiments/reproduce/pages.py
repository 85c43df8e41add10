"""The report: sections with a table, what the table says in words, and figures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from experiments import common
from specjax import files, report
from specjax.paper import TABLE_3, TABLES_2_AND_4, AlphaRow, GainRow


class Section(NamedTuple):
    """One table of the paper, or a figure."""

    title: str
    columns: Sequence[report.Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    words: str = ""  # what agrees with the paper, what does not, and why
    legend: str = ""  # what the columns are
    images: Sequence[str] = ()  # names of files


def write(
    workdir: pathlib.Path, title: str, sections: Sequence[Section], row: dict[str, Any]
) -> None:
    """report.md; `row` is one with the facts of its environment."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.rows:
            lines += [report.markdown(section.columns, [dict(r) for r in section.rows]), ""]
        for text in (section.words, section.legend):
            lines += [text, ""] if text else []
        for name in section.images:
            lines += [f"![{section.title}]({name})", ""]
    facts = (*common.environment(), "dtype", "seed")
    lines += ["## Where", "", *(f"- {name}: {row[name]}" for name in facts), ""]
    files.write_text(workdir / "report.md", "\n".join(lines))


def show(console: Console, sections: Sequence[Section]) -> None:
    """The tables and the words for a terminal."""
    for section in sections:
        if section.rows:
            rows = [dict(row) for row in section.rows]
            console.print(report.table(section.columns, rows, section.title))
        if section.words:
            console.print(section.words)
            console.print()


# --- the paper's own rows ----------------------------------------------------------------------


def paper_alpha(config, draft: str, temperature: float) -> float | None:
    """Table 3's α for the row that the config names beside a draft."""
    found = [row for row in TABLE_3 if _named(config, draft, row)]
    if not found or temperature not in (0, 1):
        return None
    return found[0].alpha_greedy if temperature == 0 else found[0].alpha_sampled


def paper_gain(config, draft: str, temperature: float) -> GainRow | None:
    """The row of Tables 2 and 4."""
    rows = (row for row in TABLES_2_AND_4 if _named(config, draft, row))
    return next((row for row in rows if row.temperature == temperature), None)


def paper_name(config, draft: str) -> str:
    """Such as "EnDe, T5-small"; empty where the paper has nothing like it."""
    return ", ".join(config.paper.get(draft, ()))


def _named(config, draft: str, row: AlphaRow | GainRow) -> bool:
    return tuple(config.paper.get(draft, ())) == (row.task, row.draft)


def number(value: float | None, digits: int = 2) -> str:
    """A cell."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(ratio: float) -> str:
    """How far a ratio lies from 1."""
    return f"{ratio - 1:+.0%}"
