"""All drafts side by side: what they cost, how often they are right, and what they bring."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reproduce import pages
from experiments.reproduce.pages import Section, number
from specjax.measure import report
from specjax.support.named import short

Line = dict[Any, Any]  # draft, parameters, minutes; by temperature the row of α with its speedup


def section(
    config, alphas: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]]
) -> Section:
    """A line for each draft, fastest first at the first temperature; no rows of its own.

    Args:
      alphas: rows of Table 3.
      timed: rows of Tables 2 and 4.
    """
    speeds = {(row["draft"], row["temperature"]): row for row in timed}
    lines: dict[str, Line] = {}
    for row in alphas:
        line = lines.setdefault(row["draft"], {"draft": row["draft"], **_facts(row)})
        line[row["temperature"]] = {**row, **speeds.get((row["draft"], row["temperature"]), {})}
    first = config.temperatures[0]
    order = sorted(lines.values(), key=lambda line: -line[first].get("speedup_decode", 0.0))
    columns: list[report.Column] = [
        ("draft", lambda line: short(line["draft"])),
        ("parameters", lambda line: f"{line['parameters']:,}" if line["parameters"] else "–"),
        ("minutes", lambda line: number(line["minutes"], 0)),
        ("c", lambda line: number(line[first].get("c"), 3)),
    ]
    for temperature in config.temperatures:
        for heading, field, digits in FIELDS:
            columns.append((f"{heading}, T={temperature:g}", _cell(temperature, field, digits)))
    return Section(
        "All drafts side by side",
        columns,
        order,
        legend="parameters: its own, without what it shares with the target. minutes: of training, "
        "where its run says so. γ: the best by its α and costs. The other columns are those of "
        "the tables below, batch 1; the picture has the rate at which the n-th drafted token is "
        "accepted, given that those before it were.",
        images=("positions.png",),
        measured=[dict(row) for row in timed],
    )


FIELDS = (
    ("α", "alpha", 3),
    ("γ", "gamma", 0),
    ("τ", "tau", 2),
    ("predicted", "predicted", 2),
    ("decode", "speedup_decode", 2),
)


def _facts(row: Mapping[str, Any]) -> Line:
    return {"parameters": row["parameters"], "minutes": row.get("training_minutes")}


def _cell(temperature: float, field: str, digits: int):
    return lambda line: pages.number(line[temperature].get(field), digits)
