"""The leaderboard: what the races say, as tables and in words."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import grouped
from specjax.measure import provenance, report
from specjax.measure.costing import POLICIES
from specjax.policies import Costs
from specjax.support.named import short
from specjax.tuning.fitting import goodness

Row = dict[str, Any]

LEGEND = (
    "speedup: times plain decoding, the loops alone, with its 95% interval by bootstrap over "
    "inputs. of best γ: times the best static γ, in the same way. At all temperatures all methods "
    "decode the same outputs and meet the same rejections. fastest: the same by the fastest repeat "
    "of each call, where the median counts elsewhere. Every other repeat chose the best γ and "
    "the best policy, and all figures are of the rest. end to end: with the encoder and prefill. "
    "τ: tokens per target call. target, draft: calls of either model; verified: draft tokens "
    "that the target verified. predicted: the speedup of these very rounds by the mean of the "
    "costs that were measured before the race, which policies were given, and of those behind it; "
    "and what the clock showed beyond it. replay: the same for many more outputs. oracle: the best "
    "length in every round and the best loop for every output, at these costs, which no policy can "
    "exceed in replay. closed: the share of the time between the best static γ and the oracle that "
    "is saved, by the clock and in replay; – where all of it is no more than the noise."
)


def races(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of each draft and temperature, the fastest first."""
    each = grouped(rows, "draft", "temperature")
    return [sorted(race, key=lambda row: -row["speedup_decode"]) for race in each]


def still(race: Iterable[Row]) -> Row:
    """The best static γ."""
    return next(row for row in race if row["method"] == row["best_static"])


def best(race: Iterable[Row]) -> Row:
    """The best policy, by repeats that its figures are not of."""
    return max((row for row in race if not row["static"]), key=lambda row: row["speedup_choosing"])


MAX_UNKNOWN = 0.1  # how far the interval of a policy that is called level may reach below 1
POOR_FIT = 0.05  # error of a typical call; the default of cost_error


def is_level(row: Row) -> bool:
    """As fast as the best static γ, within the interval."""
    return row["of_best_high"] >= 1


def label(row: Row) -> str:
    """Such as "draft-tiny, T=0"."""
    return f"{short(row['draft'])}, T={row['temperature']:g}"


def off(row: Row) -> float:
    """By how much the clock exceeds the prediction, of 1."""
    return row["speedup_decode"] / row["predicted"] - 1


def sections(rows: Sequence[Row], shown: str = "") -> list[Section]:
    """The best of each race; of several races, all policies by race; then every race.

    Args:
      shown: a policy that has a table of its own.
    """
    found = races(rows)
    own = [race for race in found if any(row["method"] == shown for row in race)]
    # A race of a single policy compares none.
    many = [race for race in found if sum(not row["static"] for row in race) > 1]
    several = [one_policy(own, shown)] if own else []
    several += [overall(many)] if len(many) > 1 else []
    return [summary(found), *several, *(one_race(race) for race in found)]


def summary(found: Sequence[Sequence[Row]]) -> Section:
    """A line for each race."""
    lines = []
    for race in found:
        closing = max((r for r in race if not r["static"]), key=lambda row: row["replayed_speedup"])
        lines.append({"best": best(race), "still": still(race), "closing": closing})
    columns: list[report.Column] = [
        ("draft", lambda line: label(line["best"])),
        ("α", lambda line: number(line["best"]["alpha"], 3)),
        ("best γ", lambda line: line["still"]["method"].removeprefix("γ=")),
        ("speedup", lambda line: number(line["still"]["speedup_decode"])),
        ("best policy", lambda line: line["best"]["method"]),
        ("speedup", lambda line: number(line["best"]["speedup_decode"])),
        ("of best γ", lambda line: within(line["best"], "of_best")),
        ("closed", lambda line: percent(line["best"]["closed_timed"])),
        ("oracle in replay", lambda line: number(line["best"]["oracle_speedup"])),
        ("most closed in replay", lambda line: closed(line["closing"])),
    ]
    busy = provenance.busy([row for race in found for row in race])
    sentences = busy or words(lines) + predicted_line(found)
    return Section("The best of each race", columns, lines, sentences)


MARKS = (
    "† Plain decoding, which it preferred or which was faster in a trial. ‡ Drafts of so many "
    "tokens were faster in a trial."
)


def mark(row: Row) -> str:
    """What decoded in the place of a policy; "" if that did."""
    return " †" if row.get("plain") else f" ‡ {row['fixed']}" if row.get("fixed") else ""


def one_policy(found: Sequence[Sequence[Row]], name: str) -> Section:
    """Beside the best static γ, a line for each race."""
    lines = []
    for race in found:
        own = next(row for row in race if row["method"] == name)
        raced = sorted(int(row["method"].removeprefix("γ=")) for row in race if row["static"])
        beside = {"lengths": raced, "best_speedup": still(race)["speedup_decode"]}
        lines.append({**own, **beside})
    columns: list[report.Column] = [
        ("draft", label),
        ("γ raced", lambda row: " ".join(map(str, row["lengths"]))),
        ("α", lambda row: number(row["alpha"], 3)),
        ("best γ", lambda row: row["best_static"].removeprefix("γ=")),
        ("speedup", lambda row: number(row["best_speedup"])),
        (name, lambda row: within(row, "speedup_decode") + mark(row)),
        ("of best γ", lambda row: within(row, "of_best")),
        ("fastest", lambda row: number(row.get("of_best_fastest"))),
        ("predicted", lambda row: number(row["predicted"])),
        ("closed", lambda row: percent(row["closed_timed"])),
        ("in replay", lambda row: percent(row["closed"])),
        ("oracle", lambda row: number(row["oracle_timed"])),
    ]
    return Section(f"{name} in each race", columns, lines, MARKS)


def overall(found: Sequence[Sequence[Row]]) -> Section:
    """Each policy over the best static γ, by race; the best in the mean first."""
    by = {label(race[0]): {r["method"]: r for r in race if not r["static"]} for race in found}
    lines = []
    for name in dict.fromkeys(name for race in by.values() for name in race):
        raced = {of: race[name] for of, race in by.items() if name in race}
        everywhere = len(raced) == len(by)
        ratios = [row["of_best"] for row in raced.values()]
        mean = float(np.exp(np.mean(np.log(ratios)))) if everywhere else None
        least = min(row["speedup_decode"] for row in raced.values())
        lines.append({"name": name, "by": raced, "mean": mean, "least": least})
    lines.sort(key=lambda line: -(line["mean"] or 0))

    def one(of: str) -> report.Column:
        def cell(line):
            row = line["by"].get(of)
            return "–" if row is None else number(row["of_best"]) + mark(row)

        return of, cell

    columns: list[report.Column] = [
        ("policy", lambda line: line["name"]),
        *map(one, by),
        ("mean", lambda line: "–" if line["mean"] is None else number(line["mean"])),
        ("least, of plain", lambda line: number(line["least"])),
    ]
    return Section(
        "Policies over the best static γ", columns, lines,
        f"{MARKS} mean: geometric. least, of plain: the worst speedup over plain decoding.",
    )  # fmt: skip


def predicted_line(found: Iterable[Sequence[Row]]) -> str:
    """How good the predictions of replay are, of policies."""
    rows = [row for race in found for row in race if not row["static"]]
    near, worst = sum(abs(off(row)) <= 0.1 for row in rows), max(rows, key=lambda r: abs(off(r)))
    return (
        f" The clock is within 10% of what replay predicts for {near} of {len(rows)} policies; the "
        f"farthest is {worst['method']} with {label(worst)}: {off(worst):+.0%}."
    )


def percent(share: float | None) -> str:
    """None where there is no gap to close."""
    return "–" if share is None else f"{share:.0%}"


def closed(row: Row) -> str:
    """Such as "svip: 40%"."""
    return f"{row['method']}: {percent(row['closed'])}"


def within(row: Row, name: str) -> str:
    """A ratio with its interval."""
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f})"


def words(lines: Sequence[dict[str, Row]]) -> str:
    """Whether a policy is level with the best γ, and where it pays."""
    behind = [label(line["best"]) for line in lines if not is_level(line["best"])]
    ahead = [label(line["best"]) for line in lines if line["best"]["of_best_low"] > 1]
    slow = [label(line["still"]) for line in lines if line["still"]["speedup_decode"] < 1]
    unknown = [
        f"{label(line['best'])} ({within(line['best'], 'of_best')})"
        for line in lines
        if is_level(line["best"]) and line["best"]["of_best_low"] < 1 - MAX_UNKNOWN
    ]
    poor = [row for line in lines for row in line.values() if row.get("cost_error", 0) > POOR_FIT]
    shares = [line["closing"] for line in lines if line["closing"]["closed"] is not None]
    closing = max(shares, key=lambda row: row["closed"], default=None)
    sentences = [
        f"The best policy is behind the best static γ for {', '.join(behind)}."
        if behind
        else ""
        if unknown
        else "The best policy is at least level with the best static γ everywhere, within the "
        "intervals.",
        "Too little was measured to compare the best policy with the best static γ for "
        f"{', '.join(unknown)}."
        if unknown
        else "",
        f"Costs were taken that fit poorly, off by {max(r['cost_error'] for r in poor):.0%} for "
        "a typical call: policies that weigh them decided by noise."
        if poor
        else "",
        f"It is ahead by more than the interval for {', '.join(ahead)}." if ahead else "",
        f"The largest share of the gap to the oracle that is closed in replay: {closed(closing)} "
        f"({label(closing)})."
        if closing
        else "",
        f"No static γ is worth its time for {', '.join(slow)}." if slow else "",
    ]
    return " ".join(filter(None, sentences))


def one_race(race: Sequence[Row]) -> Section:
    """All methods of a draft at a temperature."""
    columns: list[report.Column] = [
        ("method", lambda row: row["method"]),
        ("speedup", lambda row: within(row, "speedup_decode")),
        ("of best γ", lambda row: within(row, "of_best")),
        ("fastest", lambda row: number(row.get("speedup_fastest"))),
        ("of best γ", lambda row: number(row.get("of_best_fastest"))),
        ("end to end", lambda row: number(row["speedup_end_to_end"])),
        ("τ", lambda row: number(row["tau"])),
        *report.acceptance(race),
        ("target", lambda row: str(row["target_calls"])),
        ("draft", lambda row: str(row["draft_calls"])),
        ("verified", lambda row: str(row["verified"])),
        ("predicted", lambda row: f"{row['predicted']:.2f} ({off(row):+.0%})"),
        ("replay", lambda row: number(row["replayed_speedup"])),
        ("closed", lambda row: percent(row["closed_timed"])),
        ("in replay", lambda row: percent(row["closed"])),
    ]
    first = race[0]
    table = Costs(**first["costs"][POLICIES])
    lost = [r["method"] for r in race if not r["static"] and r["of_best_high"] < 1]
    lost = [] if provenance.busy(race) else lost
    differ = [row["method"] for row in race if row["identical"] is False]
    sentences = [
        f"α = {first['alpha']:.3f}; {first['tokens']} tokens in {first['timed_inputs']} outputs; "
        f"the oracle's speedup in replay is {first['oracle_speedup']:.2f}.",
        rounds_of(table),
        goodness(table),
        drifted(race),
        f"Slower than γ={first['best_static'].removeprefix('γ=')}, by more than the interval: "
        f"{', '.join(lost)}."
        if lost
        else "",
        f"Outputs DIFFER from plain decoding: {', '.join(differ)}; look for near-ties."
        if differ
        else "",
    ]
    return Section(label(first), columns, race, " ".join(filter(None, sentences)), LEGEND)


def rounds_of(table: Costs) -> str:
    """What rounds of policies take. How much of a round is a draft step is known less well."""
    many = table.gamma_max
    times = table.round_times(many)
    took = {k: float(times[k] / table.token) for k in sorted({1, -(-many // 2), many})}
    each = "; ".join(f"{k} drafted: {time:.2f}" for k, time in took.items())
    return f"What a round takes, in tokens of plain decoding: {each}."


def drifted(race: Sequence[Row]) -> str:
    """Whether costs were of another minute; "" of races of before that was measured."""
    drifts = [row["cost_drift"] for row in race if "cost_drift" in row]
    return (
        f"From before the race to behind it a method's longest round changed by "
        f"{np.median(drifts):+.1%}, in tokens of plain decoding (median)."
        if drifts
        else ""
    )
