"""Which batch: tokens per second by the number of rows, of plain decoding, static γ and policies.

    python -m experiments.batch --config=configs/batch.py --workdir=runs/batch_prose
    python -m experiments.batch --config=configs/batch.py:parse --workdir=runs/batch_parse

For each temperature and batch size of the config: what rounds of a batch cost, which policies
take, and which of them a trial leaves for drafts of one length; then all methods decode the same
inputs in turns. Static γ have a loop of their own, with a verify pass of γ + 1 positions. The best
of them is chosen on every other repeat; all figures are of the other repeats. Writes results.jsonl,
report.md and batch.png to the workdir. A run that was cut off goes on where it was.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from ml_collections import config_flags

from experiments.adaptive import race
from experiments.adaptive.board import within
from experiments.publish import publish
from experiments.reproduce import speedups, study
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results
from specjax.loop import Method
from specjax.measure import fit, provenance, report, stopwatch, timing
from specjax.measure.counting import Undecided
from specjax.measure.stopwatch import static
from specjax.measure.timing import PLAIN, quartiles
from specjax.policies import Costs
from specjax.policies.loading import parse_with_costs, takes
from specjax.results import summarize
from specjax.support import command_line, files
from specjax.support.named import short
from specjax.tuning import fitting, trials

Row = dict[str, Any]


def main(_) -> None:
    config = flags.FLAGS.config
    study.check_chain(config, "experiments.batch compares lengths of chains")
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    rows = fill(on)
    sections = [section(of) for of in by_temperature(rows)]
    sections.append(picture(workdir, rows))
    publish(workdir, f"{config.task}: which batch", sections, rows)


def fill(on: Study) -> list[Row]:
    """Measure every temperature and batch size that is missing; all rows in order."""
    config = on.config
    cells = [
        {"temperature": temperature, "batch": batch}
        for temperature in config.temperatures
        for batch in config.batch_sizes
    ]
    # Rows of a race are written together, plain decoding's last.
    missing = [c for c in cells if not study.find(on.results.done, {**c, "method": PLAIN})]
    on.results.keep(lambda row: not any(cell.items() <= row.items() for cell in missing))
    for cell in (bar := command_line.Steps(missing, unit="race", disable=None)):
        bar.set_description(", ".join(f"{name} {value}" for name, value in cell.items()))
        for row in measure(on, **cell):
            on.results.append({**cell, **row, **identity(on)})
    return [row for cell in cells for row in on.results.done if cell.items() <= row.items()]


def measure(on: Study, temperature: float, batch: int) -> list[Row]:
    """A row for each method."""
    config, draft = on.config, on.config.draft
    texts = speedups.timed_texts(on)
    plain = speedups.plain_method(on, temperature)
    longest = speedups.method(on, draft, temperature, config.gamma_max)
    shared = dataclasses.replace(longest, policy=Undecided(), widths=tuple(config.widths))
    decoded: dict[str, Any] = {
        "max_new_tokens": config.max_new_tokens,
        "key": jax.random.key(config.seed),
        "batch_size": batch,
        "names": (config.target, draft),
    }
    measuring = {**decoded, "key": fitting.apart(decoded["key"])}  # not the draws of the race
    none = Costs(0.0, [1.0] * (config.gamma_max + 1))
    chosen = config.policies.to_dict()
    own = {
        name: dataclasses.replace(shared, policy=parse_with_costs(name, none, **settings))
        for name, settings in chosen.items()
        if takes(name, "costs")
    }
    timed = max(2 * batch, config.cost_inputs)
    known = stopwatch.measure(
        {stopwatch.POLICIES: shared, **own},
        on.target,
        texts[:timed],
        untimed=texts[timed:],
        plain=plain,
        repeats=config.cost_repeats,
        passes_of=dict.fromkeys(own, stopwatch.POLICIES),
        **measuring,
    )
    widths = fit.pruned(shared.widths, known[stopwatch.POLICIES])
    shared = dataclasses.replace(shared, widths=widths)
    methods: dict[str, Method] = {PLAIN: plain}
    for gamma in config.static:
        methods[static(gamma)] = speedups.method(on, draft, temperature, gamma)
    fixed = set()  # policies that are slower than drafts of one length
    # Trials are of other inputs than the race, if there are as many more.
    count = config.timed_inputs + max(trials.MAX_TRIAL_TEXTS, batch)
    others = speedups.ids(on, count)[config.timed_inputs :]
    others = others[: len(others) // batch * batch]
    for name, settings in chosen.items():
        loop = dataclasses.replace(
            shared, policy=parse_with_costs(name, known.get(name, none), **settings)
        )
        methods[name] = trials.faster(loop, on.target, others, **measuring)
        if methods[name].drafter is not None and methods[name] is not loop:
            fixed.add(name)
    found = timing.side_by_side(methods, on.target, texts, repeats=config.repeats, **decoded)
    best, early, timed = race.choose(found, [static(gamma) for gamma in config.static])
    rows = []
    for name, method in methods.items():
        counts = summarize(timed.outputs(name))
        rows.append(
            {
                "method": name,
                "draft": study.relative(draft),
                "static": method.drafter is not None and name not in config.policies,
                "settings": dict(config.policies.get(name, {})),
                "tokens_per_second": float(np.median(1 / timed.per_token(name))),
                **timed.speedups(name),
                "speedup_choosing": early[name],  # on the repeats that nothing else is taken from
                **quartiles("of_best", timed.ratio(name, over=best)),
                "best_static": best,
                "tau": counts.tokens_per_iteration,
                "tokens": counts.tokens,
                "target_calls": counts.iterations,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                **counts.acceptance_fields(),
                "identical": timed.identical(name) if not temperature else None,
                # In seconds: what the policy got, or of the loop that policies share.
                "costs": known.get(name, known[stopwatch.POLICIES]).as_row(),
                "fixed": method.gamma_max if name in fixed else 0,  # drafted in every round
                "gamma_max": config.gamma_max,
                "widths": list(shared.widths),
                "timed_inputs": len(texts),
                "repeats": config.repeats,
                "load": os.getloadavg()[0],
            }
        )
    return [*rows[1:], rows[0]]


# --- what it says --------------------------------------------------------------------------------


def by_temperature(rows: Sequence[Row]) -> list[list[Row]]:
    """In the order in which they were measured."""
    every = dict.fromkeys(row["temperature"] for row in rows)
    return [[row for row in rows if row["temperature"] == one] for one in every]


def races(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The rows of each batch size by method, by ascending size, at one temperature."""
    sizes = sorted({row["batch"] for row in rows})
    return [{row["method"]: row for row in rows if row["batch"] == size} for size in sizes]


def policies(rows: Sequence[Row]) -> list[str]:
    """Methods that are neither static nor plain, in their order."""
    return [*dict.fromkeys(r["method"] for r in rows if not r["static"] and r["method"] != PLAIN)]


def section(rows: Sequence[Row]) -> Section:
    """A line for each batch size."""
    lengths = [*dict.fromkeys(row["method"] for row in rows if row["static"])]
    ours = policies(rows)

    def speedup(name):
        return lambda race: number(race[name]["speedup_decode"])

    def beside(name):
        return lambda race: within(race[name], "of_best")

    columns: list[report.Column] = [
        ("rows", lambda race: str(race[PLAIN]["batch"])),
        ("plain, tokens/s", lambda race: f"{race[PLAIN]['tokens_per_second']:.0f}"),
        *((name, speedup(name)) for name in (*lengths, *ours)),
        ("best γ", lambda race: race[PLAIN]["best_static"].removeprefix("γ=")),
        *((f"{name} / best γ", beside(name)) for name in ours),
        *((f"{name}, drafted", drafted(name)) for name in ours),
        *((f"{name}, accepted", accepted(name)) for name in ours if report.acceptance(rows)),
        ("identical", identical),
    ]
    first = rows[0]
    return Section(
        f"{short(first['draft'])}, T={first['temperature']:g}",
        columns,
        races(rows),
        provenance.busy(rows) or " ".join(words(rows, name) for name in ours),
        "Tokens per second of the loops alone, relative to plain decoding at the same number of "
        "rows: medians of ratios within a repeat, methods in turns. best γ: of the static ones, "
        "each in a loop of its own, on repeats that nothing else is taken from. / best γ: ratio "
        "to it, with quartiles. drafted: tokens a row and round. accepted: of "
        "tested tokens, the mean and by position.",
        measured=rows,
    )


def accepted(name: str):
    """A column with the conditional acceptance of a policy's drafts: its mean, and by position."""
    return lambda race: report.acceptance_cell(race[name])


def drafted(name: str):
    """A column with the drafted tokens of a policy for each target call."""
    return lambda race: number(race[name]["drafted"] / race[name]["target_calls"])


def identical(race: Mapping[str, Row]) -> str:
    """Whether every method gave plain decoding's tokens."""
    verdicts = [row["identical"] for row in race.values()]
    return "–" if None in verdicts else "yes" if all(verdicts) else "NO"


def words(rows: Sequence[Row], name: str) -> str:
    """The worst that a policy comes to, beside plain decoding and the best static γ."""
    mine = [row for row in rows if row["method"] == name]
    plain = min(mine, key=lambda row: row["speedup_decode"])
    best = min(mine, key=lambda row: row["of_best"])
    return (
        f"{name}: at least {plain['speedup_decode']:.2f} times plain decoding "
        f"({plain['batch']} rows), and at least {best['of_best']:.2f} of the best static γ "
        f"({best['batch']} rows)."
    )


def picture(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """Tokens per second relative to plain decoding, by the number of rows."""
    with files.replacing(workdir / "batch.png") as part:
        draw(by_temperature(rows)).savefig(part, format="png", dpi=160)
    return Section(
        "Tokens per second by the number of rows",
        words="A line for each method, with the quartiles of policies. At the dotted line decoding "
        "takes as long without a draft.",
        images=("batch.png",),
    )


def draw(found: Sequence[Sequence[Row]]) -> Figure:
    """A panel for each temperature."""
    figure = Figure(figsize=(1.5 + 4.5 * len(found), 4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, rows in zip(panels, found, strict=True):
        ours, all_races = policies(rows), races(rows)
        sizes = [race[PLAIN]["batch"] for race in all_races]
        lengths = [*dict.fromkeys(row["method"] for row in rows if row["static"])]
        for i, name in enumerate(lengths):
            shade = str(0.8 - 0.6 * i / max(len(lengths) - 1, 1))  # the longer, the darker
            speedup = [race[name]["speedup_decode"] for race in all_races]
            axes.plot(sizes, speedup, color=shade, linewidth=1, label=name)
        for i, name in enumerate(ours):
            mine = [race[name] for race in all_races]
            middle = np.array([row["speedup_decode"] for row in mine])
            low, high = ([row[f"speedup_decode_{end}"] for row in mine] for end in ("low", "high"))
            axes.errorbar(sizes, middle, [middle - low, high - middle], color=f"C{i}", capsize=3,
                          marker="osD^"[i % 4], markersize=4, linewidth=2, label=name)  # fmt: skip
        axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set(title=f"{short(rows[0]['draft'])}, T={rows[0]['temperature']:g}", xlabel="rows")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens per second, of plain decoding's")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside right upper")  # fmt: skip
    return figure


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Sizes, methods, inputs.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results, report and figure.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
