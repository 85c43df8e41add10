"""Replay many: what draft-length policies are worth on recorded rollouts, without the models.

    python -m experiments.trace --config=configs/embedded.py --workdir=runs/trace
    python -m experiments.replay --trace=runs/trace --draft=draft-small --temperature=0 \\
        --policies="heuristic,svip(threshold=0.3),svip(threshold=0.5),adaedl,goodput,hedge"
    python -m experiments.replay --trace=runs/trace --draft=draft-small --temperature=0 \\
        --policies=goodput,lookahead,hedge --carry

Every policy is compared with the best constant γ and with the oracle, which no policy can exceed:
it knows what will be accepted, and takes the best length in every round and the best loop for every
output, plain decoding included. Constants run with a verify pass of their own width. Costs are
those that the trace was timed with, or given in target steps: --c, --verify (one number, or one for
each of 0 … γ_max drafted tokens), --overhead and --widths. Policies that weigh tokens against time
get them. With --carry policies have a second line: outputs one after the other, each beginning
with what was learned in those before (`specjax.generate(..., carry_state=True)`). Several
numbers for --c are compared in a table and a picture, at each of the numbers for --temperature.
With --learned there is a policy of logistic regression, fitted to one half of the outputs and
replayed on the other, both ways; and to all kinds of text but the one that it is replayed on.

--trace also takes a file of responses: of vLLM with --per-request-spec-decode-metrics=detailed, or
of `specjax decode` with --format=vllm. It holds counts alone: policies that read beliefs are
refused, and costs are given by --c:

    python -m experiments.replay --trace=responses.jsonl --c=0.1 --policies=heuristic,average

Positions where no draft was tested are drawn (`specjax/replay/counts.py`); --censored sets their
chance of acceptance. Run with 0 and with 1 for bounds of every constant γ.

Policies are the library's and those of `experiments.adaptive.policies`, by name. An import path
among them is code that runs: its module is imported.

Prints tables, and writes replay.jsonl and report.md to the workdir, or else the trace's directory.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import by_loop, command, plots
from experiments.adaptive.policies import path
from experiments.replay import pictures
from experiments.replay.evaluation import evaluate
from experiments.reproduce.pages import Section
from specjax.measure import costing, doubts, formats, provenance, report
from specjax.policies import Costs
from specjax.policies.loading import parse_with_costs
from specjax.replay import counts, rollouts
from specjax.replay.rollouts import Rollouts
from specjax.support import command_line, files, named
from specjax.support.named import short

Line = dict[str, Any]


def main(_) -> None:
    args = flags.FLAGS
    place = pathlib.Path(args.trace)
    workdir = args.workdir or str(place.parent if place.is_file() else place)
    workdir = command_line.make_workdir(workdir)
    if not args.c and args["widths"].present:
        raise ValueError(
            f"--widths={','.join(args.widths)} goes with --c: a trace has the costs of the widths "
            "that it was timed with. Give them to experiments.trace."
        )
    temperatures = list(dict.fromkeys(command.numbers("temperature", args.temperature)))
    if place.is_file() and len(temperatures) > 1:
        raise ValueError(f"--temperature={','.join(args.temperature)}: a file has one; name it.")
    traces = {temperature: read(args, place, temperature) for temperature in temperatures}
    lines = [line for row, found, _ in traces.values() for line in replayed(args, row, found)]
    provenance.write(workdir / "replay.jsonl", lines)
    rows = files.read_rows(workdir / "replay.jsonl")
    sections = tables(rows, {t: remark for t, (*_, remark) in traces.items()})
    if len({row["c"] for row in rows}) > 1:
        plots.save(workdir / "costs.png", pictures.by_cost(rows))
        sections.append(by_cost(rows))
    command.publish(workdir, f"Replay of {short(rows[0]['draft'])}", sections, rows)


Trace = tuple[dict[str, Any], Rollouts, str]  # facts, rollouts, and a remark on both


def read(args, place: pathlib.Path, temperature: float) -> Trace:
    """Read what is replayed at a temperature; ValueError if it lacks what the flags need."""
    if counted := place.is_file():
        row, found, remark = of_counts(args, place, temperature)
    else:
        row, found, remark = of_trace(place, args.draft, temperature)
    if args.learned and (counted or len(found.emitted) < 4):
        raise ValueError("--learned needs beliefs of the drafter, and four outputs or more.")
    if not args.c and not row["costs"]:
        raise ValueError(f"--trace={place} has no costs of its own: give --c, in target steps.")
    if not args.c and (
        wrong := doubts.poor_fit("this trace", Costs(**row["costs"][costing.POLICIES]))
    ):
        remark += f" {wrong} Speedups by them are noise: record it again, or give --c."
    return {"draws": args.draws if counted or temperature else 1, **row}, found, remark.strip()


def replayed(args, row: dict[str, Any], found: Rollouts) -> list[Line]:
    """Lines of all policies at each of the costs."""
    costs = dict.fromkeys(command.numbers("c", args.c) if args.c else [None])
    own = {name: Costs(**table) for name, table in row["costs"].items()}
    each = {c: own if c is None else given(args, c, found.gamma_max) for c in costs}
    kinds = [kind for kind, count in row.get("kinds", {}).items() for _ in range(count)]
    folds = folds_of(len(found.emitted), kinds) if args.learned else {}
    facts = {name: row.get(name) for name in ("draft", "temperature", "outputs", "dtype")}
    facts |= {"batch": 1, "seed": args.seed, "trace_commit": row.get("commit")}
    lines = []
    for c, known in each.items():
        table, key = known[costing.POLICIES], jax.random.key(args.seed)
        chosen = {text: parse_with_costs(path(text), table) for text in named.split(args.policies)}
        made = evaluate(chosen, found, known, key, row["draws"],
                       carry=args.carry, kinds=kinds, folds=folds)  # fmt: skip
        lines += [{**line, **facts, "c": c} for line in made]
    return lines


def tables(rows: Sequence[Line], remarks: Mapping[float, str]) -> list[Section]:
    """Policies at each temperature and cost of a draft, and by kind of text."""
    sections = []
    for t, c in dict.fromkeys((row["temperature"], row["c"]) for row in rows):
        mine = [row for row in rows if (row["temperature"], row["c"]) == (t, c)]
        at = f"T={t:g}" if c is None else f"T={t:g}, c={c:g}"
        title = f"{short(mine[0]['draft'])}, {at}: {mine[0]['outputs']} outputs"
        sections.append(Section(title, COLUMNS, mine, remarks[t], LEGEND))
        if kinds := list(mine[0]["by"]):
            sections.append(by_kind(mine, kinds))
    return sections


def folds_of(outputs: int, kinds: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """Halves of the outputs, and all outputs by kind of text."""
    every = np.arange(outputs)
    halves = {"learned on the other half": [every[every % 4 < 2], every[every % 4 >= 2]]}
    parts = [np.flatnonzero([other == kind for other in kinds]) for kind in dict.fromkeys(kinds)]
    return halves | ({"learned on other kinds": parts} if len(parts) > 1 else {})


def by_kind(rows: Sequence[Line], kinds: Sequence[str]) -> Section:
    """Speedups by kind of text, over plain decoding and over the best γ of that kind."""

    def cell(line: Line, kind: str) -> str:
        one = line["by"][kind]
        return f"{one['speedup']:.2f} ({one['of_chosen']['value']:.2f})"

    columns: list[report.Column] = [COLUMNS[0]]
    columns += [(kind, functools.partial(cell, kind=kind)) for kind in kinds]
    return Section("Speedup by kind of text", columns, rows, legend=BY_KIND)


def by_cost(lines: Sequence[Line]) -> Section:
    """A row for each policy, with what it gains over the best static γ at each cost of a draft."""
    cells = {(line["policy"], line["temperature"], line["c"]): line for line in lines}
    rows = [{"policy": name} for name in dict.fromkeys(line["policy"] for line in lines)
            if not name.startswith("γ=")]  # fmt: skip

    def cell(row: Line, temperature: float, c: float) -> str:
        line = cells.get((row["policy"], temperature, c))
        return interval(line["of_chosen"]) if line else "–"

    columns: list[report.Column] = [COLUMNS[0]]
    columns += [
        (f"T = {t:g}, c = {c:g}", functools.partial(cell, temperature=t, c=c))
        for t, c in dict.fromkeys((line["temperature"], line["c"]) for line in lines)
    ]
    title = "Over the static γ chosen elsewhere, by what a draft step costs"
    return Section(title, columns, rows, images=("costs.png",), measured=lines)


def of_counts(args, file: pathlib.Path, temperature: float) -> tuple[dict[str, Any], Rollouts, str]:
    """Read vLLM's steps: facts for the rows, rollouts, and a remark on what is not known."""
    if not args.c:
        raise ValueError(f"--trace={file} holds no costs: give --c, a draft step in target steps.")
    steps = formats.read_vllm(file)
    found = counts.from_counts(steps, censored=args.censored)
    share = counts.tested_share(steps)
    chance = share if args.censored is None else args.censored
    remark = (
        f"{share:.3f} of the tested tokens were accepted. At {counts.censored_share(steps):.1%} of "
        f"all tokens no draft was tested: one is accepted there with chance {chance:.3f}."
    )
    facts = {"draft": file.name, "temperature": temperature, "dtype": "not recorded"}
    return {**facts, "outputs": len(steps), "costs": {}}, found, remark


def of_trace(directory: pathlib.Path, draft: str, temperature: float) -> Trace:
    """Read a draft's rollouts at a temperature, of all kinds of text; a row has the facts of all.

    Args:
      draft: the end of its name; "": the first.
    """
    rows = files.read_rows(directory / "results.jsonl")
    mine = [
        row
        for row in rows
        if (not draft or short(row["draft"]) == draft) and row["temperature"] == temperature
    ]
    if not mine:
        names = [f"{short(row['draft'])} T={row['temperature']:g}" for row in rows]
        there = ", ".join(dict.fromkeys(names))
        raise ValueError(
            f"--trace={directory} has no --draft={draft!r} at --temperature={temperature:g}; it "
            f"has {there or 'nothing: make it by experiments.trace'}."
        )
    mine = [row for row in mine if row["draft"] == mine[0]["draft"]]
    found = join([rollouts.load(directory / row["file"]) for row in mine])
    kinds = {row["category"]: row["outputs"] for row in mine if "category" in row}
    facts = {"kinds": kinds, "costs": {}, **mine[0], "outputs": len(found.emitted)}
    return facts | ({"costs": {}} if len(mine) > 1 else {}), found, ""  # of one kind alone


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """Join rollouts of the same γ_max, in order; outputs of several are numbered anew."""
    longest = max(part.tokens.shape[1] for part in parts)

    def one(*fields: Any) -> jax.Array:
        widths = [((0, 0), (0, longest - x.shape[1]), *((0, 0),) * (x.ndim - 2)) for x in fields]
        return jnp.concatenate([jnp.pad(*both) for both in zip(fields, widths, strict=True)])

    found = Rollouts(**{
        name: one(*columns) if columns[0].ndim > 1 else jnp.concatenate(columns)
        for name, columns in zip(Rollouts._fields, zip(*parts, strict=True), strict=True)
    })  # fmt: skip
    index = jnp.arange(len(found.emitted), dtype=jnp.int32)
    return found if len(parts) == 1 else found._replace(input_index=index)


def given(args, c: float, gamma_max: int) -> dict[str, Costs]:
    """Costs from the command line."""
    verify = command.numbers("verify", args.verify)
    if len(verify) not in (1, gamma_max + 1):
        raise ValueError(
            f"--verify={','.join(args.verify)}: give one number, or {gamma_max + 1} of them."
        )
    widths = command.widths(args.widths, gamma_max)
    return by_loop.by_formula(c, np.resize(verify, gamma_max + 1).tolist(), args.overhead, widths)


def interval(of: Mapping[str, float]) -> str:
    """A figure with its interval, if it has one; "–" of a single output."""
    ends = f" ({of['low']:.3f}–{of['high']:.3f})" if of["low"] == of["low"] else ""
    return f"{of['value']:.3f}{ends}".replace("nan", "–")


COLUMNS: list[report.Column] = [
    ("policy", lambda line: line["policy"]),
    ("τ", lambda line: f"{line['tau']:.2f}"),
    ("verified", lambda line: f"{line['verified']:.2f}"),
    ("speedup", lambda line: f"{line['speedup']:.3f}"),
    ("of the best γ", lambda line: f"{line['of_best_static']:.3f}"),
    ("of γ chosen elsewhere", lambda line: interval(line["of_chosen"])),
    ("regret", lambda line: f"{line['regret']:.1%}"),
    ("gap closed", lambda line: "–" if line["closed"] is None else f"{line['closed']:.0%}"),
]
BY_KIND = (
    "In brackets: over the best γ of the kind, or plain decoding, chosen on every other output for "
    "those between."
)
LEGEND = (
    "τ: tokens per target call. verified: tokens per round. speedup: the time of plain decoding, "
    "by that of the policy. of the best γ: the speedup, by that of the best constant. of γ chosen "
    "elsewhere: by that of the constant, or plain decoding, that is best on every other output, "
    "for the outputs between; with a 95% interval over outputs. oracle: the best length in every "
    "round and the best loop for every output, known beforehand. regret: time "
    "beyond the oracle's. gap closed: of the time between the best constant and the oracle."
)


if __name__ == "__main__":
    flags.DEFINE_string(
        "policies", "", "By name, with settings if need be, or import path (code that runs)."
    )
    flags.DEFINE_integer("draws", 16, "Draws for each output, at temperatures above 0.")
    flags.DEFINE_string(
        "trace", None, "Directory of experiments.trace, or a file as vLLM writes it."
    )
    flags.DEFINE_string("draft", "", "Which draft, by the end of its name; the first if empty.")
    flags.DEFINE_list("temperature", ["0"], "Which of the trace's temperatures.")
    flags.DEFINE_list("c", [], "A draft step, in the place of what the trace was timed with.")
    flags.DEFINE_float("censored", None, "Of a file: acceptance where no draft was tested, 0 … 1.")
    flags.DEFINE_list("verify", ["1"], "With --c: verify passes, one number or one for each width.")
    flags.DEFINE_list("widths", ["all"], "With --c: of policies' passes; all, none or numbers.")
    flags.DEFINE_float("overhead", 0.0, "With --c: the rest of a round.")
    flags.DEFINE_bool("carry", False, "Policies also with what they learned on earlier outputs.")
    flags.DEFINE_bool("learned", False, "A policy fitted to other outputs, and to other kinds too.")
    flags.DEFINE_integer("seed", 0, "Of draws.")
    flags.DEFINE_string("workdir", "", "Directory for report and rows.")
    flags.mark_flag_as_required("trace")
    command_line.run(main, __doc__)
