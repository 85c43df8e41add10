"""Replay many: what draft-length policies are worth on recorded rollouts, without the models.

    python -m experiments.trace --config=configs/embedded.py --workdir=runs/trace
    python -m experiments.replay --trace=runs/trace --draft=draft-small --temperature=0 \\
        --policies=heuristic,svip,adaedl,goodput,hedge \\
        --grid="svip threshold=0.05:0.8:16" --grid="heuristic gamma=1,3,5"

Every policy is compared with the best constant γ and with the oracle, which no policy can exceed:
it knows what will be accepted, and takes the best length in every round and the best loop for every
output, plain decoding included. Constants run with a verify pass of their own width. A grid is the
name of a policy and fields with their values, first:last:count or a list. Prices are those that the
trace was timed with, or given in target steps: --c, --verify (one number, or one for each of
0 … γ_max drafted tokens), --overhead and --widths. Policies that weigh tokens against time are told
them.

An import path among the policies is code that runs: its module is imported.

Prints a table and writes replay.jsonl, report.md and a figure for each grid of one field to the
workdir, or else the trace's directory.
"""

import dataclasses
import itertools
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax import Array
from jaxtyping import Key
from matplotlib.figure import Figure
from rich.console import Console

from experiments.reproduce.study import short
from specjax.measure import pricing, provenance, report
from specjax.policies import Policy, Prices, load, prices
from specjax.policies.loading import takes
from specjax.replay import replay, rollouts
from specjax.replay.replay import Score
from specjax.replay.rollouts import Rollouts
from specjax.support import command_line, files


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy with its settings as they were given."""

    name: str
    settings: dict[str, float]
    policy: Policy

    @property
    def label(self) -> str:
        """Such as "svip threshold=0.3"."""
        return " ".join([self.name, *(f"{k}={v:g}" for k, v in self.settings.items())])


def main(_) -> None:
    args = flags.FLAGS
    directory = pathlib.Path(args.trace)
    workdir = command_line.make_workdir(args.workdir or args.trace)
    row = find_row(directory, args.draft, args.temperature)
    found = rollouts.load(directory / row["file"])
    if args.c is None and args["widths"].present:
        raise ValueError(
            f"--widths={','.join(args.widths)} goes with --c: a trace has the prices of the widths "
            "that it was timed with. Give them to experiments.trace."
        )
    known = {name: prices(**table) for name, table in row["prices"].items()}
    if args.c is not None:
        known = given(args, found.gamma_max)
    table = known[pricing.POLICIES]
    named = [candidate(name, {}, table) for name in args.policies]
    grids = [list(grid(text, table)) for text in args.grid]
    chosen = [*named, *itertools.chain(*grids)]
    key, draws = jax.random.key(args.seed), 1 if row["temperature"] == 0 else args.draws
    begin = time.perf_counter()
    lines = evaluate(chosen, found, known, key, draws)
    seconds = time.perf_counter() - begin
    title = f"{short(row['draft'])}, T={row['temperature']:g}: {row['outputs']} outputs"
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(report.table(COLUMNS, lines, title))
    text = [
        f"# Replay of {title}",
        report.markdown(COLUMNS, lines),
        f"{len(lines)} settings in {seconds:.1f} s, compilation included. {LEGEND}",
    ]
    for alike in grids:
        fields = [name for name in alike[0].settings if len({c.settings[name] for c in alike}) > 1]
        if len(fields) == 1:
            image = f"{short(row['draft'])}-T{row['temperature']:g}-{alike[0].name}-{fields[0]}.png"
            of = {candidate.label for candidate in alike}
            figure = draw([line for line in lines if line["policy"] in of], fields[0], lines)
            with files.replacing(workdir / image) as part:
                figure.savefig(part, format="png", dpi=160)
            text.append(f"![speedup by {fields[0]} of {alike[0].name}]({image})")
    facts = keep(workdir, lines, row, args.seed)
    text += ["\n".join(f"- {name}: {value}" for name, value in facts.items())]
    files.write_text(workdir / "report.md", "\n\n".join(text) + "\n")
    console.print(f"{len(lines)} settings in {seconds:.1f} s: {workdir / 'report.md'}")


def keep(
    workdir: pathlib.Path, lines: Sequence[dict[str, Any]], row: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Write the lines, with the facts of the trace that they are of; return all facts."""
    facts = {name: row.get(name) for name in ("draft", "temperature", "dtype")}
    facts |= {"batch": 1, "seed": seed, "trace_commit": row.get("commit")}
    provenance.write(workdir / "replay.jsonl", [{**line, **facts} for line in lines])
    return {**facts, **provenance.environment()}


def find_row(directory: pathlib.Path, draft: str, temperature: float) -> dict[str, Any]:
    """The trace's row for a draft, by the end of its name, and a temperature."""
    rows = files.Rows(directory / "results.jsonl").done
    for row in rows:
        if (not draft or short(row["draft"]) == draft) and row["temperature"] == temperature:
            return row
    there = ", ".join(f"{short(row['draft'])} T={row['temperature']:g}" for row in rows)
    raise ValueError(
        f"--trace={directory} has no --draft={draft!r} at --temperature={temperature:g}; it has "
        f"{there or 'nothing: make it by experiments.trace'}."
    )


def given(args, gamma_max: int) -> dict[str, Prices]:
    """Costs from the command line."""
    verify = [float(v) for v in args.verify]
    if len(verify) not in (1, gamma_max + 1):
        raise ValueError(
            f"--verify={','.join(args.verify)}: give one number, or {gamma_max + 1} of them."
        )
    widths = command_line.widths(args.widths, gamma_max)
    return pricing.by_formula(
        args.c, np.resize(verify, gamma_max + 1).tolist(), args.overhead, widths
    )


def candidate(name: str, settings: dict[str, float], table: Prices) -> Candidate:
    """A policy, which is told the prices if it takes any."""
    told = {"prices": table} if takes(name, "prices") else {}
    return Candidate(name, settings, load(name, **told, **settings))


def grid(text: str, table: Prices) -> Iterator[Candidate]:
    """All settings of "svip threshold=0.1:0.9:9 scale=0.1,0.15"."""
    name, *fields = text.split()
    values = {}
    for field in fields:
        key, _, said = field.partition("=")
        try:
            values[key] = numbers(said)
        except ValueError:
            raise ValueError(
                f"--grid={text!r}: {field!r} must be field=first:last:count or field=a,b,c."
            ) from None
    for setting in itertools.product(*values.values()):
        yield candidate(name, dict(zip(values, setting, strict=True)), table)


def numbers(said: str) -> list[float]:
    """Of a range or a list; whole ones are ints, for fields that count."""
    if ":" in said:
        first, last, count = said.split(":")
        values = np.linspace(float(first), float(last), int(count)).tolist()
        whole = "." not in first + last and all(v == int(v) for v in values)
    else:
        values = [float(v) for v in said.split(",")]
        whole = "." not in said
    return [int(v) for v in values] if whole else values


def evaluate(
    chosen: Sequence[Candidate],
    found: Rollouts,
    known: Mapping[str, Prices],
    key: Key[Array, ""],
    draws: int,
) -> list[dict[str, Any]]:
    """A line for each constant γ, the oracle and each candidate.

    Args:
      known: prices by loop, as in `specjax.measure.pricing`.
    """
    table, gammas = known[pricing.POLICIES], range(1, found.gamma_max + 1)
    own = [pricing.static_prices(known, gamma) for gamma in gammas]
    constants = [candidate("constant", {"gamma": gamma}, table) for gamma in gammas]
    everyone = [*constants, *chosen]
    replayed = replay.replay([c.policy for c in everyone], found, key, draws=draws)
    lines: list[dict[str, Any]] = []
    for i, c in enumerate(everyone):
        one = jax.tree.map(lambda counts, i=i: counts[i : i + 1], replayed)
        # Constants with a verify pass of γ + 1 positions, as they would run.
        scored = replay.score(one, found, own[i] if i < len(own) else table)
        lines.append({"policy": c.label, "settings": c.settings, **_numbers(scored)})
    bound = replay.oracle(found, key, [table, *own], draws=draws)
    lines.insert(len(own), {"policy": "oracle", "settings": {}, **_numbers(bound)})
    best = max(line["speedup"] for line in lines[: len(own)])
    oracle = float(bound.speedup)
    for line in lines:
        line["of_best_static"] = line["speedup"] / best
        line["regret"] = oracle / line["speedup"] - 1
        room = 1 / best - 1 / oracle
        line["closed"] = (1 / best - 1 / line["speedup"]) / room if room > 0 else None
    return lines


def _numbers(scored: Score) -> dict[str, float]:
    return {name: value.item() for name, value in scored._asdict().items()}


COLUMNS: list[report.Column] = [
    ("policy", lambda line: line["policy"]),
    ("τ", lambda line: f"{line['tau']:.2f}"),
    ("drafted", lambda line: f"{line['drafted']:.2f}"),
    ("speedup", lambda line: f"{line['speedup']:.3f}"),
    ("of the best γ", lambda line: f"{line['of_best_static']:.3f}"),
    ("regret", lambda line: f"{line['regret']:.1%}"),
    ("gap closed", lambda line: "–" if line["closed"] is None else f"{line['closed']:.0%}"),
]
LEGEND = (
    "τ: tokens per target call. drafted: tokens per round. speedup: the time of plain decoding, by "
    "that of the policy. of the best γ: the speedup, by that of the best constant. oracle: the "
    "best length in every round and the best loop for every output, known beforehand. regret: time "
    "beyond the oracle's. gap closed: of the time between the best constant and the oracle."
)


def draw(lines: Sequence[dict[str, Any]], field: str, everyone: Sequence[dict[str, Any]]) -> Figure:
    """Speedup by one setting, between the best constant and the oracle."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    settings = [line["settings"][field] for line in lines]
    speedups = [line["speedup"] for line in lines]
    axes.plot(settings, speedups, "o-", color="#1f4e8c", markersize=4)
    constants = [line for line in everyone if line["policy"].startswith("constant")]
    best = max(constants, key=lambda line: line["speedup"])
    oracle = next(line for line in everyone if line["policy"] == "oracle")
    for line, name in ((best, f"best {best['policy']}"), (oracle, "oracle")):
        axes.axhline(line["speedup"], color="0.35", linestyle=":", linewidth=1)
        axes.annotate(name, (1, line["speedup"]), (-4, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", fontsize=9, color="0.35")  # fmt: skip
    axes.set_xlabel(field)
    axes.set_ylabel("speedup over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    flags.DEFINE_list("policies", [], "Policies by name or import path (code that runs).")
    flags.DEFINE_integer("draws", 16, "Draws for each output, at temperatures above 0.")
    flags.DEFINE_string("trace", None, "Directory that experiments.trace wrote.")
    flags.DEFINE_string("draft", "", "Which draft, by the end of its name; the first if empty.")
    flags.DEFINE_float("temperature", 0.0, "Which of the trace's temperatures.")
    flags.DEFINE_multi_string("grid", [], "A policy and fields with values; may be repeated.")
    flags.DEFINE_float("c", None, "A draft step, in the place of what the trace was timed with.")
    flags.DEFINE_list("verify", ["1"], "With --c: verify passes, one number or one for each width.")
    flags.DEFINE_list("widths", ["all"], "With --c: of policies' passes; all, none or numbers.")
    flags.DEFINE_float("overhead", 0.0, "With --c: the rest of a round.")
    flags.DEFINE_integer("seed", 0, "Of draws.")
    flags.DEFINE_string("workdir", "", "Directory for report, rows and figures.")
    flags.mark_flag_as_required("trace")
    command_line.run(main, __doc__)
