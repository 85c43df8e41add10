"""The cells of tables of decoded questions, and sentences on their figures (`tables.table`)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.chat.tables import EVERY, Estimate, Rows
from specjax.measure import report
from specjax.policies import Costs


def cell(value: Any) -> str:
    """A figure with two decimals, and its interval if it has one; "" for None."""
    if value is None:
        return ""
    if not isinstance(value, Estimate):
        return f"{value:.2f}"
    if np.isnan(value.low):
        return f"{value.value:.2f}"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def point(value: Estimate | None) -> str:
    """An estimate without its interval."""
    return "–" if value is None else f"{value.value:.2f}"


def of(name: str, row: Mapping[str, Any]) -> str:
    """The cell of a field."""
    return cell(row[name])


def position(number: int, row: Mapping[str, Any]) -> str:
    """The cell of a position, from 0; "–" where none was reached, "" beyond γ."""
    if number >= len(row["acceptance"]):
        return ""
    return cell(row["acceptance"][number]) or "–"


def main_columns(rows: Rows) -> list[report.Column]:
    """Columns of the table of all figures; those that no row has are left out."""
    named = {
        "τ": "tau",
        "verified": "verified",
        "tested": "tested_per_token",
        "accepted": "accepted",
        "rejected": "rejected",
        "α": "alpha",
        "speedup": "speedup",
        "end to end": "end_to_end",
        "/ best γ": "over_best",
        "predicted": "predicted",
    }
    return [
        ("category", lambda row: row["kind"]),
        ("method", lambda row: row["method"]),
        ("inputs", lambda row: str(row["inputs"])),
        ("prefill, s", partial(of, "prefill")),
        ("ms/token", lambda row: f"{row['ms_per_token']:.1f}"),
        *(
            (title, partial(of, name))
            for title, name in named.items()
            if any(row[name] is not None for row in rows)
        ),
    ]


def position_columns(rows: Rows) -> list[report.Column]:
    """Columns of the table of acceptance by position."""
    longest = max((len(row["acceptance"]) for row in rows), default=0)
    return [
        ("category", lambda row: row["kind"]),
        ("method", lambda row: row["method"]),
        *((str(i + 1), partial(position, i)) for i in range(longest)),
    ]


def short_columns(rows: Rows) -> list[report.Column]:
    """Columns of the terminal's table."""
    more = {"speedup": "speedup", "end to end": "end_to_end"}
    return [
        ("category", lambda row: row["kind"]),
        ("method", lambda row: row["method"]),
        ("ms/token", lambda row: f"{row['ms_per_token']:.1f}"),
        ("τ", lambda row: f"{row['tau']:.2f}"),
        ("α", partial(of, "alpha")),
        *((title, partial(short, name)) for title, name in more.items()),
        ("accepted, by position", lambda row: " ".join(map(point, row["acceptance"]))),
    ]


def short(name: str, row: Mapping[str, Any]) -> str:
    """The cell of an estimate; of one kind of question without its interval."""
    return of(name, row) if row["kind"] == EVERY else point(row[name])


def reasons(rows: Rows) -> list[str]:
    """Say which method was fastest on each kind of question, and why."""
    kinds = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind != EVERY]
    return [reason([row for row in rows if row["kind"] == kind]) for kind in kinds]


def reason(rows: Rows) -> str:
    """Say which method was fastest, and what a round of each draft gives and takes.

    A round takes v steps of the fastest plain decoding if its draft is free, and c more for each
    token that another draft proposes. Of each draft it is the fastest γ or policy.
    """
    best = max(rows, key=speed)
    step = min(row["ms_per_token"] for row in rows if not row["draft"])
    took = {row["method"]: row["ms_per_token"] * row["tau"] / step for row in rows}
    free = {row["gamma"]: took[row["method"]] for row in rows if row["free"]}
    clauses = []
    for draft in dict.fromkeys(row["draft"] for row in rows if row["draft"]):
        row = max((row for row in rows if row["draft"] == draft), key=speed)
        round_, v = took[row["method"]], free.get(row["gamma"])
        calls = row["verified"] * row["tau"]  # of the draft, in a round
        time = f"{'v = ' if row['free'] else ''}{round_:.2f} steps"
        if v and calls and not row["free"]:
            time = f"{calls:.1f}c + v = {time} (c = {max(round_ - v, 0) / calls:.2f})"
        clauses.append(
            f"{row['method']}: {row['tau']:.2f} tokens (α = {row['alpha']:.2f}) for {time}"
        )
    times = f", {speed(best):.2f} times plain decoding" if best["draft"] else ""
    return f"{best['kind']}: {best['method']} is fastest{times}. Rounds of {'; '.join(clauses)}."


def speed(row: Mapping[str, Any]) -> float:
    """A method's speedup, without its interval."""
    return row["speedup"].value


def costs_line(draft: str, costs: Costs, gammas: Sequence[int]) -> str:
    """Say what a round of a draft costs, in steps of plain decoding."""
    passes = ", ".join(f"v({gamma}) = {costs.v(gamma):.2f}" for gamma in gammas)
    return f"{draft}: c = {costs.c:.2f}, {passes}."
