"""Prices for experiments: measured, given by a formula, or read from a row.

By loop: `POLICIES`, which all policies share, and that of each static γ, whose only verify pass has
γ + 1 positions. All are in one unit, seconds where they were measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.reproduce import speedups
from experiments.reproduce.study import Study
from specjax import decoding
from specjax.measure import pricing, report
from specjax.policies import Prices, prices
from specjax.speculative import Speculative

POLICIES = "policies"


def static(gamma: int) -> str:
    """The name of a loop of a static draft length."""
    return f"γ={gamma}"


def measure(
    on: Study, draft: str, temperature: float, loops: Mapping[str, Speculative], repeats: int
) -> dict[str, Prices]:
    """Of plain decoding and of the loops, at batch 1, on the inputs that are timed.

    Args:
      loops: `POLICIES`, and those of static γ.
    """
    config = on.config
    texts = decoding.tokenize(
        on.target, on.texts(config.timed_inputs), config.max_source_len or None
    )
    return pricing.measure(
        loops,
        on.target,
        texts,
        lengths={name: [loop.gamma_max] for name, loop in loops.items() if name != POLICIES},
        plain=speedups.plain_method(on, temperature),
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        repeats=repeats,
        names=(config.target, draft),
    )


def check(of: str, found: Mapping[str, Prices], limit: float) -> None:
    """ValueError where prices explain the calls badly that they were fitted to.

    Args:
      of: what they are prices of, for the error.
      limit: for the error of a typical call, and for how much a longer draft may seem cheaper.
    """
    table = found[POLICIES]
    error, drop = float(table.error), float(table.drop)
    if max(error, drop) > limit:
        raise ValueError(
            f"The prices of {of} fit poorly: a typical call is off by {error:.0%} (the worst by "
            f"{float(table.largest_error):.0%}), and a longer draft was timed as cheaper by up to "
            f"{drop:.0%}, where price_error={limit:g} allows {limit:.0%}. Policies would be told "
            "noise, so nothing is raced. Run again on a machine that does nothing else, with more "
            "repeats or timed_inputs."
        )


def numbers(found: Mapping[str, Prices]) -> dict[str, float]:
    """All prices by name."""
    table = found[POLICIES]
    rounds = table.rounds(table.gamma_max).tolist()
    full = {name: of.rounds(of.gamma_max)[-1].item() for name, of in found.items()}
    return {
        "a token of plain decoding": table.token.item(),
        "a call of plain decoding": table.plain_call.item(),
        "a speculative call": table.call.item(),
        "a draft step": table.draft.item(),
        **{f"a round of {k} drafted tokens": price for k, price in enumerate(rounds)},
        **{f"a round of {name}": price for name, price in full.items() if name != POLICIES},
    }


def compare(
    console: Console, title: str, first: Mapping[str, Prices], second: Mapping[str, Prices]
) -> float:
    """Print two measurements side by side, each in its own tokens of plain decoding; the largest
    difference, as a share. So a machine that is slower throughout changes nothing.
    """
    tokens = [float(found[POLICIES].token) for found in (first, second)]
    both = zip(numbers(first).items(), numbers(second).values(), strict=True)
    lines: list[dict[str, Any]] = []
    for (name, one), two in list(both)[1:]:
        one, two = one / tokens[0], two / tokens[1]
        ratio = two / one if one else float("nan")
        lines.append({"name": name, "first": one, "second": two, "ratio": ratio})
    columns: list[report.Column] = [
        ("tokens of plain decoding", lambda line: line["name"]),
        ("first", lambda line: f"{line['first']:.3f}"),
        ("second", lambda line: f"{line['second']:.3f}"),
        ("second / first", lambda line: f"{line['ratio']:.3f}"),
    ]
    console.print(report.table(columns, lines, title))
    worst = max(lines, key=lambda line: abs(np.log(line["ratio"])))
    console.print(f"Farthest apart: {worst['name']}, {worst['ratio'] - 1:+.1%}.")
    console.print(f"A token took {1e3 * tokens[0]:.4f} ms, and {1e3 * tokens[1]:.4f} ms then.")
    for name, found in (("First", first), ("Second", second)):
        console.print(f"{name}: {pricing.goodness(found[POLICIES])}")
    return abs(worst["ratio"] - 1)


def as_row(found: Mapping[str, Prices]) -> dict[str, Any]:
    """For a file of results."""
    return {name: table.as_row() for name, table in found.items()}


def of_row(row: Mapping[str, Any]) -> dict[str, Prices]:
    """From what `as_row` made."""
    return {name: prices(**table) for name, table in row.items()}


def static_prices(found: Mapping[str, Prices], gamma: int) -> Prices:
    """Of the loop of a constant γ. Between those that were timed the verify pass grows evenly."""
    timed = sorted(
        (of for name, of in found.items() if name != POLICIES), key=lambda p: len(p.verify)
    )
    if own := found.get(static(gamma)):
        return own
    known = [of.gamma_max for of in timed]

    def between(at: int) -> float:
        return float(np.interp(gamma, known, [float(of.verify[at]) for of in timed]))

    first, rest = between(0), between(-1)
    return prices(**{**timed[0].as_row(), "verify": [first, *[rest] * gamma]})


def given(
    c: float, verify: Sequence[float], overhead: float, widths: Sequence[int]
) -> dict[str, Prices]:
    """By the formula γc + v + overhead, in target steps.

    Args:
      verify: the verify pass, by the 0 … γ_max drafted tokens that it has room for.
      widths: those that policies may choose; see `Speculative`.
    """
    gamma_max = len(verify) - 1
    room = [
        min({w - 1 for w in widths if n < w <= gamma_max} | {gamma_max})
        for n in range(gamma_max + 1)
    ]
    own = {
        static(gamma): prices(c, [v + overhead] * (gamma + 1))
        for gamma, v in enumerate(verify)
        if gamma
    }
    return {POLICIES: prices(c, [verify[fits] + overhead for fits in room]), **own}


def widths_of(said: Sequence[str], gamma_max: int) -> list[int]:
    """Of verify passes: for every length its own, the widest alone, or those that are named."""
    if list(said) == ["all"]:
        return list(range(1, gamma_max + 1))
    if list(said) == ["none"]:
        return []
    if not all(width.isdecimal() and int(width) > 0 for width in said):
        raise ValueError(f"--widths={','.join(said)} must be all, none or a list of numbers ≥ 1.")
    return [int(width) for width in said]
