"""Table 5 and the rest of A.5: what lenience does to acceptance, and to the outputs."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.reproduce import study
from experiments.reproduce.pages import Section, number
from experiments.reproduce.printed import GREEDY_LENIENT_ALPHAS, LENIENCES, TABLE_5
from experiments.reproduce.study import Study
from specjax import rules
from specjax.measure import report
from specjax.rules import Lenient
from specjax.support.named import short

GAMMA = 4


def keys(config) -> list[dict[str, Any]]:
    """A cell for each draft, temperature and lenience."""
    return [
        {**key, "lenience": lenience}
        for key in study.keys(config, (*config.ngrams, *config.drafts))
        for lenience in LENIENCES
    ]


def measure(on: Study, cell: dict[str, Any]) -> dict[str, Any]:
    """α by formula over the target's prefixes, as the paper has it, and acceptance in the loop.

    The loop visits prefixes of its own, which a lenient rule drives towards the draft's; so the
    formula is also taken over those. It then differs from acceptance by noise, and by the positions
    after a full acceptance, which the loop does not test.
    """
    draft, temperature, lenience = cell["draft"], cell["temperature"], cell["lenience"]
    rule = Lenient(lenience)
    count = on.config.lenience_inputs
    alpha = on.alpha(draft, temperature, on.outputs(temperature)[:count], rule)
    rows = on.decode(draft, temperature, count, gamma=GAMMA, rule=rule)
    visited = on.alpha(draft, temperature, [row.tokens for row in rows], rule)
    lengths = np.sum([row.accepted_lengths for row in rows], axis=0)
    tested = int(np.sum([row.tested for row in rows]))
    references = [example.target for example in on.examples[:count]]
    exact = [row.text == reference for row, reference in zip(rows, references, strict=True)]
    return {
        "alpha": alpha.value,
        "alpha_visited": visited.value,
        "acceptance": float(lengths @ np.arange(len(lengths))) / max(tested, 1),
        "tested": tested,
        "tau": sum(row.emitted for row in rows) / sum(row.target_calls for row in rows),
        "gamma": GAMMA,
        "exact": float(np.mean(exact)),
        "tokens": visited.tokens,
        "rule": rules.label(rule),
        "keeps_distribution": rules.exactness(rule, on.sampling(temperature)),
        "batch": on.config.batch_size,
    }


def section(config, rows: Sequence[dict[str, Any]]) -> Section:
    """For each draft and temperature a line of each quantity, a column for each lenience."""
    lines: list[dict[str, Any]] = []
    for key in dict.fromkeys((row["draft"], row["temperature"]) for row in rows):
        of = {r["lenience"]: r for r in rows if (r["draft"], r["temperature"]) == key}
        first = f"{short(key[0])}, T={key[1]:g}"
        quantities = {
            "Σ min(target/l, draft)": [number(of[x]["alpha"], 3) for x in LENIENCES],
            "accepted in the loop": [number(of[x]["acceptance"], 3) for x in LENIENCES],
            "τ": [number(of[x]["tau"]) for x in LENIENCES],
            "exact outputs": [f"{of[x]['exact']:.0%}" for x in LENIENCES],
        }
        if not any(row["exact"] for row in rows):  # a task without one right answer
            del quantities["exact outputs"]
        if printed := _paper(config, short(key[0]), key[1]):
            quantities["paper"] = [number(alpha) for alpha in printed]
        for i, (name, cells) in enumerate(quantities.items()):
            lines.append({"draft": "" if i else first, "quantity": name, "cells": cells})
    columns: list[report.Column] = [
        ("draft", lambda line: line["draft"]),
        ("", lambda line: line["quantity"]),
        *((_heading(lenience), _cell(i)) for i, lenience in enumerate(LENIENCES)),
    ]
    return Section(
        f"Table 5: lenience, γ={GAMMA}",
        columns,
        lines,
        words(rows),
        "Only l=1 is exact: with the others outputs follow another distribution than the target's. "
        "Σ min(target/l, draft) is over prefixes of the target's own, as the paper has it (at T=0: "
        "how often target(x) ≥ l · max target for the draft's argmax x). The loop visits other "
        "prefixes, which the rule itself drives towards the draft's. docs/lenience.md has the "
        "distribution.",
        measured=rows,
        batch=f"their config has batch_size={config.batch_size}",
    )


def _heading(lenience: float) -> str:
    return f"l={lenience:g}" + (" (exact)" if Lenient(lenience).exact else "")


def _cell(index: int):
    return lambda line: line["cells"][index]


def _paper(config, draft: str, temperature: float) -> tuple[float, ...]:
    task, name = config.paper.get(draft, ("", ""))
    if task != "EnDe":
        return ()
    if temperature == 0:
        return GREEDY_LENIENT_ALPHAS if name == "T5-small" else ()
    return next((row.alphas for row in TABLE_5 if row.draft == name), ())


def words(rows: Sequence[dict[str, Any]]) -> str:
    """Whether α grows as lenience falls, whether the loop accepts as often, and the cost."""
    falling, grown = [], []
    for key in dict.fromkeys((row["draft"], row["temperature"]) for row in rows):
        alphas = [r["alpha"] for r in rows if (r["draft"], r["temperature"]) == key]
        grown.append(alphas[-1] - alphas[0])
        if any(after < before for before, after in itertools.pairwise(alphas)):
            falling.append(f"{short(key[0])} T={key[1]:g}")
    printed = [row.alphas[-1] - row.alphas[0] for row in TABLE_5]
    sentences = [
        "α never falls as l does, as in the paper."
        if not falling
        else f"α falls somewhere as l does for {', '.join(falling)}.",
        f"From l=1 to l={LENIENCES[-1]:g} it grows by {min(grown):.3f} to {max(grown):.3f}, in the "
        f"paper by {min(printed):.2f} to {max(printed):.2f}: the surer a target is of its tokens, "
        "the fewer others has lenience to let pass.",
    ]
    gaps = [row["acceptance"] - row["alpha_visited"] for row in rows if row["tested"] > 200]
    if gaps:
        sentences.append(
            "Over the prefixes that the loop visited, the formula and the loop's own acceptance "
            f"differ by {min(gaps):+.3f} to {max(gaps):+.3f} (cells with more than 200 tested "
            "tokens): positions after a full acceptance count in the formula alone, and so do "
            "those where a lookup proposes nothing."
        )
    exact = {row["lenience"]: row["exact"] for row in rows if row["temperature"] == 0}
    if exact and any(exact.values()):
        last = short(rows[-1]["draft"])
        sentences.append(
            f"The cost: with {last} at T=0, {exact[max(exact)]:.0%} of the outputs are exact at "
            f"l=1 and {exact[min(exact)]:.0%} at l={min(exact):g}."
        )
    return " ".join(sentences)
