"""Whether speculative and plain decoding give equally good outputs: the distribution is the
same."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.reproduce import scores, study
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax.measure import report
from specjax.support.named import short

GAMMA = 4


def keys(config) -> list[dict[str, Any]]:
    """A cell for each draft model and temperature."""
    return study.keys(config, config.drafts)


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """The metric of both methods, and of their difference, with 95% intervals."""
    config, temperature = on.config, cell["temperature"]
    count = min(config.quality_inputs, len(on.examples))
    plain, speculative = (
        # At T = 1 two draws of one distribution: the loops never share a key, so they are
        # independent.
        [row.text for row in on.decode(draft, temperature, count, gamma=GAMMA)]
        for draft in (None, cell["draft"])
    )
    references = [example.target for example in on.examples[:count]]
    agreement = scores.agree(config.metric, speculative, plain, references)
    return {
        "metric": config.metric,
        "inputs": count,
        "identical": agreement.identical,
        "within": agreement.within,
        "plain": as_data(scores.score(config.metric, plain, references)),
        "speculative": as_data(scores.score(config.metric, speculative, references)),
        "difference": as_data(agreement.differences),
        "batch": config.batch_size,
    }


def as_data(found: tuple[scores.Score, ...]) -> list[dict[str, Any]]:
    """As JSON data."""
    return [dataclasses.asdict(score) for score in found]


def section(config, rows: Sequence[dict[str, Any]]) -> Section:
    """A line for each draft, temperature and score."""
    lines = [
        {
            "row": row,
            **dict(zip(("plain", "speculative", "difference"), of, strict=True)),
        }
        for row in rows
        for of in zip(row["plain"], row["speculative"], row["difference"], strict=True)
    ]
    columns: list[report.Column] = [
        ("draft", lambda line: short(line["row"]["draft"])),
        ("T", lambda line: f"{line['row']['temperature']:g}"),
        ("score", lambda line: line["plain"]["name"]),
        ("plain", lambda line: f"{line['plain']['value']:.4g}"),
        ("speculative", lambda line: f"{line['speculative']['value']:.4g}"),
        ("difference (95%)", lambda line: _interval(line["difference"])),
        ("identical", lambda line: _identical(line["row"])),
        ("inputs", lambda line: str(line["row"]["inputs"])),
    ]
    signatures = sorted({score["signature"] for row in rows for score in row["plain"]})
    return Section(
        f"Quality of both methods, γ={GAMMA}",
        columns,
        lines,
        words(rows),
        "identical: share of outputs that are the same text; at T>0 the methods draw different "
        f"samples by design. {'; '.join(signatures)}.",
        measured=rows,
        batch=f"their config has batch_size={config.batch_size}",
    )


def _identical(row: dict[str, Any]) -> str:
    return "–" if row["temperature"] else f"{row['identical']:.1%}"


def _interval(score: dict[str, Any]) -> str:
    return f"{score['value']:+.3g} ({score['low']:+.3g} to {score['high']:+.3g})"


def words(rows: Sequence[dict[str, Any]]) -> str:
    """Whether the methods agree."""
    sentences = []
    greedy = [row["identical"] for row in rows if row["temperature"] == 0]
    if greedy:
        sentences.append(
            "At T=0 both methods give the same outputs."
            if min(greedy) == 1
            else f"At T=0 only {min(greedy):.1%} of the outputs are the same: near-ties, which "
            "round apart in this dtype, or a fault."
        )
    sampled = [row for row in rows if row["temperature"] > 0]
    if sampled:
        apart = [row for row in sampled if not row["within"]]
        sentences.append(
            "At T>0 every difference is within its 95% interval around 0."
            if not apart
            else "At T>0 these differ by more than their 95% interval (one cell of twenty does by "
            "chance): "
            + ", ".join(f"{short(r['draft'])} T={r['temperature']:g}" for r in apart)
            + "."
        )
    return " ".join(sentences)
