"""Table 3: α of every draft over tokens that the target generated."""

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.reproduce import pages, study
from experiments.reproduce.pages import Section
from experiments.reproduce.study import NGRAMS, Study
from specjax.drafters import parameters
from specjax.measure import metrics, report
from specjax.support import command_line
from specjax.support.named import short


def keys(config) -> list[dict[str, Any]]:
    """A cell for each draft and temperature, n-grams first."""
    return study.keys(config, (*config.ngrams, *config.drafts))


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """α with its 95% interval, and on how many tokens."""
    temperature = cell["temperature"]
    outputs, draft = on.outputs(temperature), on.draft(cell["draft"])
    command_line.say(f"measuring α on {len(outputs)} outputs")
    alpha = on.alpha(cell["draft"], temperature, outputs)
    return {
        "alpha": alpha.value,
        "low": alpha.low,
        "high": alpha.high,
        "tokens": alpha.tokens,
        "outputs": len(alpha.overlaps),
        "batch": on.config.batch_size,
        "parameters": parameters(draft, on.target),
        "training_minutes": on.training_minutes(cell["draft"]),
    }


def section(config, rows: Sequence[dict[str, Any]]) -> Section:
    """A line for each draft, a column for each temperature."""
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    lines = [
        {"draft": name} | {row["temperature"]: row for row in rows if row["draft"] == name}
        for name in drafts
    ]
    columns: list[report.Column] = [("draft", lambda line: short(line["draft"]))]
    for temperature in config.temperatures:
        columns += [
            (f"α, T={temperature:g}", _alpha(temperature)),
            ("paper", _papers(config, temperature)),
        ]
    columns.append(("the paper's row", lambda line: pages.paper_name(config, short(line["draft"]))))
    return Section(
        "Table 3: α",
        columns,
        lines,
        words(rows),
        "α: mean of Σ min(target, draft) over prefixes that the target generated, as in the paper, "
        "with its 95% interval by bootstrap over outputs (–: fewer than "
        f"{metrics.MIN_OUTPUTS}). The paper's rows are of other models and "
        "tasks: they stand beside ours by their part in the comparison.",
        measured=rows,
        batch=f"their config has batch_size={config.batch_size}",
    )


def _alpha(temperature: float):
    def cell(line: dict[Any, Any]) -> str:
        row = line[temperature]
        interval = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        return f"{row['alpha']:.3f} ({interval})"

    return cell


def _papers(config, temperature: float):
    return lambda line: pages.number(pages.paper_alpha(config, short(line["draft"]), temperature))


def words(rows: Sequence[dict[str, Any]]) -> str:
    """Whether the order is the paper's, and whether T = 0 lies above T = 1."""
    sentences = []
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    for temperature in temperatures:
        ranked = [row for row in rows if row["temperature"] == temperature]
        # Lookup copies, and has no place in the paper's order.
        ranked = [row for row in ranked if row["draft"] != "lookup"]
        ranked.sort(key=lambda row: (row["parameters"], NGRAMS.index(row["draft"])
                                     if row["draft"] in NGRAMS else 0))  # fmt: skip
        names = " < ".join(short(row["draft"]) for row in ranked)
        falls = [
            f"{short(after['draft'])} ({after['alpha']:.3f}) is not above "
            f"{short(before['draft'])} ({before['alpha']:.3f})"
            for before, after in itertools.pairwise(ranked)
            if after["alpha"] <= before["alpha"]
        ]
        sentences.append(
            f"At T={temperature:g} α grows as in the paper: {names}."
            if not falls
            else f"At T={temperature:g} α does not grow throughout: {'; '.join(falls)}."
        )
    if {0.0, 1.0} <= set(temperatures):
        by = {(row["draft"], row["temperature"]): row["alpha"] for row in rows}
        drafts = list(dict.fromkeys(row["draft"] for row in rows))
        above = [short(name) for name in drafts if by[name, 0.0] > by[name, 1.0]]
        below = [short(name) for name in drafts if by[name, 0.0] <= by[name, 1.0]]
        sentences.append(
            f"T=0 lies above T=1 for {', '.join(above) or 'none'}"
            + (f", and not for {', '.join(below)}." if below else ".")
        )
    tokens = [row["tokens"] for row in rows]
    sentences.append(f"Each α is over {min(tokens):,} to {max(tokens):,} tokens of outputs.")
    return " ".join(sentences)
