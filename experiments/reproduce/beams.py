"""A.4: how many drafted steps of beam search are kept for u ≥ w, and what they cost."""

from collections.abc import Sequence
from typing import Any

from experiments.beam import __main__ as beam
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study, relative
from specjax import drafters
from specjax.measure import report
from specjax.support.named import short


def keys(config) -> list[dict[str, Any]]:
    """A cell for each draft model and width u."""
    return [
        {"draft": relative(draft), "width": beam.WIDTH, "draft_width": width, "gamma": 4}
        for draft in config.drafts
        if drafters.maker(draft) is None
        for width in beam.DRAFT_WIDTHS
    ]


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """The row that `experiments.beam` has for it."""
    config = on.config.copy_and_resolve_references()
    config.drafts = (on.path(cell["draft"]),)
    size = cell["width"], cell["draft_width"], cell["gamma"]
    (row,) = beam.family(config, config.beam_inputs, [size])
    return {name: value for name, value in row.items() if name not in cell}


def section(config, rows: Sequence[dict[str, Any]]) -> Section:
    """The table of `experiments.beam`."""
    named: list[report.Column] = [("draft", lambda row: short(row["draft"])), *beam.COLUMNS[1:]]
    kept = [row["kept"] / max(row["drafted"], 1) for row in rows]
    same = sum(row["identical"] for row in rows), sum(row["inputs"] for row in rows)
    sentences = [
        f"Of the drafted steps {min(kept):.0%} to {max(kept):.0%} are kept, for "
        f"{min(map(beam.ratio, rows)):.1f} to {max(map(beam.ratio, rows)):.1f} times the prefixes "
        "that plain beam search scores for each step.",
        "All hypotheses are those of plain beam search."
        if same[0] == same[1]
        else f"For {same[1] - same[0]} of {same[1]} inputs a hypothesis DIFFERS from plain beam "
        "search: look for near-ties.",
        "The paper has no figures for it.",
    ]
    title = f"A.4: speculative beam search, w={beam.WIDTH}"
    return Section(title, named, rows, " ".join(sentences), batch=f"beam search took {beam.BATCH}")
