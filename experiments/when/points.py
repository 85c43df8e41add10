"""Traces among the simulated points: what they are like, and whether the simulation knows them."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import by_loop
from experiments.reproduce.pages import Section
from experiments.when import sweep, synthetic
from experiments.when.sweep import ORACLE, Tables
from experiments.when.synthetic import Chances
from specjax.measure import costing, report
from specjax.measure.provenance import Results
from specjax.policies import Costs
from specjax.replay import rollouts
from specjax.replay.rollouts import Rollouts
from specjax.support import files
from specjax.support.named import short

TRACES = "traces"  # what these rows have for a sweep


Traces = list[tuple[dict[str, Any], pathlib.Path]]
"""Traces, each with its file."""


def found(directories: Sequence[str]) -> Traces:
    """Find the traces of directories; ValueError that names one without any."""
    every: Traces = []
    for directory in map(pathlib.Path, directories):
        rows = files.read_rows(directory / "results.jsonl")
        some = [(row, directory / str(row.get("file"))) for row in rows]
        if not some or not all(file.is_file() for _, file in some):
            raise ValueError(
                f"--traces={directory} has no traces: make them by experiments.trace, or name "
                "another directory."
            )
        every += some
    return every


def fill(results: Results, config, facts: Mapping[str, Any], traces: Traces) -> None:
    """A row for each trace that has none."""
    done = {row["trace"] for row in results.done if row["sweep"] == TRACES}
    for trace, file in traces:
        if (name := name_of(trace)) not in done:
            row = measure(trace, file, config)
            results.append({"sweep": TRACES, "trace": name, **facts, **row})


def name_of(trace: Mapping[str, Any]) -> str:
    """Such as "prose, draft, T=0"."""
    return f"{trace['task']}, {short(trace['draft'])}, T={trace['temperature']:g}"


def measure(trace: Mapping[str, Any], file: pathlib.Path, config) -> dict[str, Any]:
    """What the trace is like; what methods do there, and in simulations of it."""
    found = rollouts.load(file)
    tables = {name: Costs(**table) for name, table in trace["costs"].items()}
    chances, mean = synthetic.describe(found), int(np.asarray(found.emitted).mean().round())
    calibrated = dataclasses.replace(chances, slope=1.0, offset=0.0)
    knowing = dataclasses.replace(calibrated, informativeness=1.0)

    def figures(of: Rollouts, costs: Sequence[Tables], draws: int = 1) -> list[dict[str, Any]]:
        return sweep.compare(of, costs, config, sweep.bound(of, costs, config, draws), draws)

    def simulated(like: Chances, *costs: Tables) -> list[dict[str, Any]]:
        sizes = config.outputs, max(mean, 1), found.gamma_max
        return figures(sweep.simulated(like, config, *sizes), costs)

    close = narrow(tables, found.gamma_max)
    draws = 1 if trace["temperature"] == 0 else config.draws
    measured = figures(found, [tables, close], draws)
    twins = simulated(chances, tables, close)
    return {
        **rounded(dataclasses.asdict(chances)),
        "sd_between": round(chances.sd_between, 3),
        "sd_within": round(chances.sd_within, 3),
        "told": round(synthetic.explained_share(found), 4),
        "errors": rounded(synthetic.errors(found, seed=config.seed)),
        **rounded(cost_columns(tables, found.gamma_max)),
        "measured": measured[0],
        "simulated": twins[0],
        "narrow": measured[1],
        "simulated_narrow": twins[1],
        "calibrated": simulated(calibrated, close)[0],
        "knowing": simulated(knowing, close)[0],
        "outputs": len(found.emitted),
        "tokens": mean,
        "gamma_max": found.gamma_max,
        "dtype": trace["dtype"],
        "trace_commit": trace.get("commit"),
    }


def passes(tables: Tables, gamma_max: int) -> list[float]:
    """What else rounds take than draft steps, by the γ of a static loop, from 1."""
    own = [by_loop.static_costs(tables, gamma) for gamma in range(1, gamma_max + 1)]
    return [
        float(table.round_times(gamma)[gamma] - gamma * table.draft)
        for gamma, table in enumerate(own, 1)
    ]


def narrow(tables: Tables, gamma_max: int) -> dict[str, Costs]:
    """The same, were policies' passes as narrow as drafts, and one without a draft a plain step."""
    shared = tables[costing.POLICIES].as_row()
    shared |= {"verify": [shared["token"], *passes(tables, gamma_max)], "rest": 0.0}
    return {**tables, costing.POLICIES: Costs(**shared)}


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """As much as rows need."""
    return {name: round(value, 4) for name, value in numbers.items()}


def cost_columns(tables: Tables, gamma_max: int) -> dict[str, float]:
    """c, and the line first + verify·(γ − 1) through what else rounds of each static γ take, in
    target steps."""
    shared = tables[costing.POLICIES]
    rest = np.array(passes(tables, gamma_max)) / float(shared.token)
    verify, first = np.polyfit(np.arange(gamma_max), rest, 1) if gamma_max > 1 else (0.0, rest[0])
    return {"c": shared.c, "first": float(first), "verify": float(verify)}


def letters(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Traces and what stands for them in pictures."""
    traces = [row for row in rows if row["sweep"] == TRACES]
    return [(chr(ord("A") + i), row) for i, row in enumerate(traces)]


def sections(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """A table of what traces are like, and one of what methods do there."""
    lines = [{"letter": letter, **row} for letter, row in letters(rows)]
    if not lines:
        return []

    def estimate(name: str, digits: int = 2) -> report.Column:
        return _HEADS.get(
            name, name
        ), lambda row: f"{row[name]:.{digits}f} ± {row['errors'][name]:.{digits}f}"

    name: list[report.Column] = [
        ("", lambda row: row["letter"]),
        ("trace", lambda row: row["trace"]),
    ]
    like = [
        *name,
        *map(estimate, sweep.CHANCES),
        ("explained", lambda row: f"{row['told']:.2f}"),
        ("sd between", lambda row: f"{row['sd_between']:.2f}"),
        ("sd within", lambda row: f"{row['sd_within']:.2f}"),
        ("c", lambda row: f"{row['c']:.3f}"),
        ("v(1)", lambda row: f"{row['first']:.2f}"),
        ("v grows by", lambda row: f"{row['verify']:.3f}"),
    ]
    does: list[report.Column] = [
        *name,
        ("best γ", lambda row: str(row["measured"]["static"])),
        ("its speedup", lambda row: _ratio(row["measured"]["static_speedup"])),
        ("best policy", lambda row: row["measured"]["best"]),
        ("over the best γ", lambda row: _best(row, "measured")),
        ("simulated", lambda row: _best(row, "simulated", "measured")),
        ("oracle over it", lambda row: _ratio(row["measured"]["of_static"][ORACLE])),
        ("simulated", lambda row: _ratio(row["simulated"]["of_static"][ORACLE])),
        ("off by", lambda row: f"{off(row):.1%}"),
    ]
    could: list[report.Column] = [
        *name,
        ("best γ", lambda row: str(row["narrow"]["static"])),
        ("best policy", lambda row: row["narrow"]["best"]),
        ("over the best γ", lambda row: _best(row, "narrow")),
        ("simulated", lambda row: _best(row, "simulated_narrow", "narrow")),
        ("oracle", lambda row: _ratio(row["narrow"]["of_static"][ORACLE])),
        ("foretold", lambda row: f"{sweep.foretold(row):.2f}"),
        ("closed", lambda row: f"{sweep.closed(row['narrow']):.2f}"),
        ("calibrated belief", lambda row: _own(row["calibrated"])),
        ("belief is the chance", lambda row: _own(row["knowing"])),
    ]
    return [
        Section("What traces are like", like, lines, legend=_LIKE),
        Section("What policies do there", does, lines, legend=_DOES),
        Section("What they could do there", could, lines, legend=_COULD),
    ]


def off(row: Mapping[str, Any]) -> float:
    """How far the simulated speedups over the best static γ are from the trace's: the mean."""
    real, twin = (row[side]["of_static"] for side in ("measured", "simulated"))
    return float(np.mean([abs(twin[name][0] / real[name][0] - 1) for name in real]))


def _best(row: Mapping[str, Any], side: str, chosen: str = "") -> str:
    """The speedup of the policy that was best on one side, there or on another side."""
    return _ratio(row[side]["of_static"][row[chosen or side]["best"]])


def _own(found: Mapping[str, Any]) -> str:
    return f"{found['best']} {_ratio(found['of_static'][found['best']])}"


def _ratio(found: Sequence[float]) -> str:
    return f"{found[0]:.2f} ± {found[1]:.2f}"


_HEADS = {"alpha": "α", "autocorrelation": "autocorr.", "informativeness": "informative"}
_LIKE = (
    "Estimates by experiments.when.synthetic.describe, with standard errors by bootstrap over "
    "outputs. between and within: shares of α(1 − α). informative: share of the chance's variance "
    "that the belief explains. slope, offset: of beliefs as quantiles, 1 and 0 where they are "
    "calibrated. explained: share of α(1 − α) that the belief in the drafted token explains. c, "
    "v(1) and by how much v grows with each position are in target steps; v has the overhead of a "
    "round."
)
_DOES = (
    "Replayed at the trace's own costs. The best γ and the best policy are chosen on every other "
    "output, speedups are of the others. simulated: the same in a simulation with the numbers of "
    "the table above, at the same costs; its own best γ. off by: the mean distance of simulated "
    "ratios from those of the trace, over all policies and the oracle."
)
_COULD = (
    "Replayed at the same costs but for policies' verify passes: they are as narrow as the draft, "
    "and a plain step without one. simulated: the same policy in the simulation. foretold: between "
    "+ informativeness · within. closed: of the time between the best static γ and the oracle, "
    "what the best policy saves. calibrated belief: the best policy in the simulation with slope 1 "
    "and offset 0. belief is the chance: and informativeness 1, all that can be known before a "
    "token is drawn. What the oracle has beyond that is luck."
)
