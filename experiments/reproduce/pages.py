"""The report: sections with a table, what the table says in words, and figures."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from experiments.reproduce.printed import TABLE_3, TABLES_2_AND_4, AlphaRow, SpeedupRow
from specjax.measure import provenance, report
from specjax.support import files


class Section(NamedTuple):
    """One table of the paper, or a figure."""

    title: str
    columns: Sequence[report.Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    words: str = ""  # what agrees with the paper, what does not, and why
    legend: str = ""  # what the columns are
    images: Sequence[str] = ()  # names of files
    measured: Sequence[Mapping[str, Any]] = ()  # the rows of results that it shows, if not `rows`
    batch: str = ""  # what is known of it for rows which do not say theirs

    @property
    def origin(self) -> str:
        """Where what it shows is from; "" if it shows no rows of results."""
        found = self.measured or [row for row in self.rows if "commit" in row]
        return provenance.origin(found, self.batch) if found else ""

    @property
    def dashes(self) -> str:
        """What – stands for; "" if the table has none."""
        cells = [cell(dict(row)) for row in self.rows for _, cell in self.columns]
        found = any(cell == "–" or "(–)" in cell for cell in cells)
        return "–: not measured, or not defined for this row." if found else ""


def write(
    workdir: pathlib.Path,
    title: str,
    sections: Sequence[Section],
    rows: Sequence[Mapping[str, Any]],
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """report.md; `rows` are all rows of results that it shows, `more` further facts of them."""
    lines = [f"# {title}", ""]
    for warning in warnings_of(rows):
        lines += [f"> {warning}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.rows:
            lines += [report.markdown(section.columns, [dict(r) for r in section.rows]), ""]
        for text in (section.words, section.legend, section.dashes, section.origin):
            lines += [text, ""] if text else []
        for name in section.images:
            lines += [f"![{section.title}]({name})", ""]
    if any("commit" in row for row in rows):
        facts = (*provenance.environment(), "dtype", "seed")
        where = {name: provenance.counted(rows, name) for name in facts} | dict(more)
        where["load average for each processor"] = provenance.loads(rows)
        lines += ["## Where", "", *(f"- {name}: {of}" for name, of in where.items()), ""]
    files.write_text(workdir / "report.md", "\n".join(lines))


def latex(sections: Sequence[Section]) -> str:
    """The tables in LaTeX, for a paper that has the package booktabs."""
    made = []
    for section in (section for section in sections if section.rows):
        lines = [[heading for heading, _ in section.columns]]
        lines += [[cell(dict(row)) for _, cell in section.columns] for row in section.rows]
        head, *body = (" & ".join(map(_escaped, line)) + r" \\" for line in lines)
        made += [
            f"% {section.title}",
            rf"\begin{{tabular}}{{l{'r' * (len(section.columns) - 1)}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""),
        ]
    return "\n".join(made)


LATEX = {sign: rf"\{sign}" for sign in "&%$#_{}"} | {"–": "--", "<": "$<$", ">": "$>$"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"×": r"$\times$", "−": r"$-$", "≤": r"$\le$", "≥": r"$\ge$", "Σ": r"$\Sigma$"}
LATEX |= {"α": r"$\alpha$", "γ": r"$\gamma$", "τ": r"$\tau$", "σ": r"$\sigma$"}


def _escaped(cell: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in cell)


def show(
    console: Console, sections: Sequence[Section], rows: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Print the tables and the words, after the warnings of their rows."""
    for warning in warnings_of(rows):
        console.print(warning.replace("**", ""))
        console.print()
    for section in sections:
        if section.rows:
            lines = [dict(row) for row in section.rows]
            report.show(console, section.columns, lines, section.title)
        for text in filter(None, (section.words, section.dashes)):
            console.print(text)
            console.print()


def warnings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know of all rows: several runs, or inputs that were not held out."""
    if not rows:
        return []
    found = [provenance.warning(rows), *(row.get("not_held_out", "") for row in rows)]
    return [warning for warning in dict.fromkeys(found) if warning]


# --- the paper's own rows ----------------------------------------------------------------------


def paper_alpha(config, draft: str, temperature: float) -> float | None:
    """Table 3's α for the row that the config names beside a draft."""
    found = [row for row in TABLE_3 if _named(config, draft, row)]
    if not found or temperature not in (0, 1):
        return None
    return found[0].alpha_greedy if temperature == 0 else found[0].alpha_sampled


def paper_speedup(config, draft: str, temperature: float) -> SpeedupRow | None:
    """The row of Tables 2 and 4."""
    rows = (row for row in TABLES_2_AND_4 if _named(config, draft, row))
    return next((row for row in rows if row.temperature == temperature), None)


def paper_name(config, draft: str) -> str:
    """Such as "EnDe, T5-small"; empty where the paper has nothing like it."""
    return ", ".join(config.paper.get(draft, ()))


def _named(config, draft: str, row: AlphaRow | SpeedupRow) -> bool:
    return tuple(config.paper.get(draft, ())) == (row.task, row.draft)


def number(value: float | None, digits: int = 2) -> str:
    """A cell."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(ratio: float) -> str:
    """How far a ratio lies from 1."""
    return f"{ratio - 1:+.0%}"
