"""Distillation as a laboratory: α and τ of a draft by divergence and source of prefixes.

    python -m experiments.distil --config=configs/distil.py:parse --workdir=runs/distil-parse

All runs begin with the same draft, which has learned the data, and have the same number of steps
on batches of the same size. Each is an ordinary run of experiments.train in runs/, whose model is
kept. α and τ are measured on the test split, over outputs that the runs share. The best and the
worst, by α with the first seed, are trained again with the other seeds.

Writes results.jsonl and report.md to the workdir. A run that was cut off goes on with the same
command; other settings need another workdir. --nomeasure: the report of the rows that are there.
"""

import dataclasses
import functools
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments.reproduce.study import Study, check_counts, find, relative
from experiments.train import train
from experiments.train.config import TrainConfig
from experiments.train.loop import fields_of
from experiments.train.workdirs import claim
from specjax.measure import metrics, provenance, report
from specjax.measure.provenance import Results, dtype_of
from specjax.support import command_line, files

START, NO_TEACHER = "start", "no teacher"  # to compare with: before any step, and the data alone
Cell = dict[str, Any]  # divergence, prefixes and seed


def main(_) -> None:
    config = flags.FLAGS.config
    check_counts(config)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    mark = claim(workdir, config)
    lab = Laboratory(config, workdir)
    mark()
    if flags.FLAGS.measure:
        fill(lab)
    show(lab)


def show(lab: "Laboratory") -> None:
    """Print the table and write report.md; ValueError if nothing was measured."""
    config, workdir = lab.config, lab.workdir
    lines = table(config, lab.results.done)
    if not lines:
        raise ValueError(f"{lab.results.path} has no rows: measure first.")
    title = f"{config.task}: divergence × prefixes, {config.train.steps} steps each"
    columns = headings(config)
    parts = [
        f"# {title}",
        report.markdown(columns, lines),
        words(lines),
        legend(config),
        provenance.origin(lab.results.done),
    ]
    files.write_text(workdir / "report.md", "\n\n".join(parts) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 140, markup=False)
    report.show(console, columns, lines, title)
    console.print(words(lines), soft_wrap=True)
    console.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)


class Laboratory:
    """A config, a workdir, and what all runs share."""

    def __init__(self, config, workdir: pathlib.Path):
        self.config, self.workdir = config, workdir
        self.results = Results(workdir / "results.jsonl")
        self.study = Study(config, self.results)
        self.settings = TrainConfig(**fields_of(config.train))

    @functools.cached_property
    def start(self) -> pathlib.Path:
        """The draft that has learned the data, made if need be."""
        directory = self.workdir / "start"
        if not (directory / "final.json").exists():
            changes = {**self.config.start, "teacher": "", "prefixes": "data"}
            train.run(dataclasses.replace(self.settings, **changes), directory)
        return directory

    def train(self, cell: Cell) -> pathlib.Path:
        """The directory of a cell's run, which is made or gone on with."""
        if cell["divergence"] == START:
            return self.start
        directory = self.workdir / "runs" / re.sub(r"\W+", "_", "-".join(map(str, cell.values())))
        if not (directory / "final.json").exists():
            kept = self.workdir / "prefixes" / str(cell["seed"])
            _copy(kept, directory / "prefixes")
            train.run(self.settings_of(cell), directory)
            _copy(directory / "prefixes", kept)
            shutil.rmtree(directory / "prefixes", ignore_errors=True)
            shutil.rmtree(directory / "checkpoints")  # much larger than the model
        return directory

    def settings_of(self, cell: Cell) -> TrainConfig:
        """How a cell is trained."""
        changes = {"grow": str(self.start / "model"), "seed": cell["seed"]}
        if cell["divergence"] == NO_TEACHER:
            return dataclasses.replace(self.settings, teacher="", prefixes="data", **changes)
        return dataclasses.replace(
            self.settings, divergence=cell["divergence"], prefixes=cell["prefixes"], **changes
        )

    def measure(self, cell: Cell) -> None:
        """Rows of a cell that are not there yet, one for each temperature."""
        for temperature in self.config.temperatures:
            key = {**cell, "temperature": temperature}
            if not find(self.results.done, key):
                self.results.append({**key, **self._measured(self.train(cell), temperature)})

    def _measured(self, directory: pathlib.Path, temperature: float) -> dict[str, Any]:
        config, study, draft = self.config, self.study, str(directory / "model")
        # Every other output chooses the best line, and the rest report it: a line that was chosen
        # by the figure that is shown would look better than it is.
        overlaps = study.alpha(draft, temperature, study.outputs(temperature)).overlaps
        chosen, shown = overlaps[::2], overlaps[1::2] or overlaps
        alpha, low, high = metrics.mean_interval(shown)
        known = len(shown) >= metrics.MIN_OUTPUTS
        rows = study.decode(draft, temperature, config.tau_inputs, gamma=config.gamma)
        # Tokens of each call, its output's mean: the ratio of sums, resampled by output.
        calls = [np.full(r.target_calls, r.emitted / r.target_calls) for r in rows if r.emitted]
        tau, tau_low, tau_high = metrics.mean_interval(calls)
        final = files.read_json(directory / "final.json")
        return {
            "choosing": metrics.mean_interval(chosen)[0],
            "alpha": alpha,
            "low": low if known else None,
            "high": high if known else None,
            "outputs": len(shown),
            "tokens": sum(map(len, shown)),
            "tau": tau,
            "tau_low": tau_low,
            "tau_high": tau_high,
            "tau_outputs": len(calls),
            "gamma": config.gamma,
            "steps": final["steps"],
            "seconds": _seconds(directory),
            "held_out_loss": final["held_out_loss"],
            "target": relative(config.target),
            "task": config.task,
            "split": config.split,
            "batch": config.batch_size,
            "dtype": dtype_of(study.target),
        }


def _copy(source: pathlib.Path, to: pathlib.Path) -> None:
    """The target's outputs, which are the same in all runs of a seed."""
    to.mkdir(parents=True, exist_ok=True)
    for file in source.glob("target-*.npz"):
        shutil.copy(file, to)


def _seconds(directory: pathlib.Path) -> float:
    """The time of a run's steps, compilation and outputs to learn at included."""
    rows = [row for row in files.read_rows(directory / "metrics.jsonl") if "train_loss" in row]
    steps = np.diff([0, *(row["step"] for row in rows)])
    return float(sum(n * row["seconds_per_step"] for n, row in zip(steps, rows, strict=True)))


def cells(config) -> list[Cell]:
    """Those of the first seed: what is compared with, and each divergence at each source."""
    seed = config.seeds[0]
    pairs = [(START, "data"), (NO_TEACHER, "data")]
    pairs += [(name, source) for name in config.divergences for source in config.prefixes]
    return [{"divergence": name, "prefixes": source, "seed": seed} for name, source in pairs]


def fill(lab: Laboratory) -> None:
    """Train and measure what is missing; the best and the worst with all seeds."""
    for divergence in lab.config.divergences:  # any mistake before the first step
        for source in lab.config.prefixes:
            changes = {"divergence": divergence, "prefixes": source}
            dataclasses.replace(lab.settings, **changes)
    for cell in _follow(cells(lab.config)):
        lab.measure(cell)
    lines = table(lab.config, lab.results.done)
    chosen = [line for line in lines if line["mark"]]
    for cell in _follow(
        [
            {"divergence": line["divergence"], "prefixes": line["prefixes"], "seed": seed}
            for seed in lab.config.seeds[1:]
            for line in chosen
        ]
    ):
        lab.measure(cell)


def _follow(some: Sequence[Cell]) -> Iterator[Cell]:
    for cell in (bar := command_line.Steps(some, unit="run")):
        bar.set_description(" ".join(map(str, cell.values())))
        yield cell


# --- The table ----------------------------------------------------------------------------------


def table(config, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each divergence and source whose first seed was measured at all temperatures.

    It has all measured rows by temperature, one for each seed, and "best" or "worst" as its mark:
    by the mean over the temperatures of α with the first seed, which all lines have, on outputs
    that report nothing. A row without `choosing` has one α for both.
    """
    lines = []
    for cell in cells(config):
        key = {name: cell[name] for name in ("divergence", "prefixes")}
        by = {
            t: [row for seed in config.seeds if (row := find(rows, {**key, "seed": seed,
                                                                    "temperature": t}))]
            for t in config.temperatures
        }  # fmt: skip
        if all(of and of[0]["seed"] == cell["seed"] for of in by.values()):
            seeds = min(map(len, by.values()))
            score = np.mean([of[0].get("choosing", of[0]["alpha"]) for of in by.values()])
            lines.append({**key, "rows": by, "seeds": seeds, "score": score, "mark": ""})
    ranked = sorted(_compared(lines), key=lambda line: line["score"])
    if len(ranked) > 1:
        ranked[0]["mark"], ranked[-1]["mark"] = "worst", "best"
    return lines


def _compared(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["divergence"] not in (START, NO_TEACHER)]


def headings(config) -> list[report.Column]:
    """Columns: what was trained, α and τ at each temperature, minutes, and the mark."""
    found: list[report.Column] = [
        ("divergence", lambda line: line["divergence"]),
        ("prefixes", lambda line: line["prefixes"]),
        ("seeds", lambda line: str(line["seeds"])),
    ]
    for t in config.temperatures:
        found.append((f"α, T={t:g}", _cell(t, "alpha", "low", "high", 3)))
        found.append((f"τ, T={t:g}", _cell(t, "tau", "tau_low", "tau_high", 2)))
    first = config.temperatures[0]
    found.append(("minutes", lambda line: f"{line['rows'][first][0]['seconds'] / 60:.1f}"))
    found.append(("", lambda line: line["mark"]))
    return found


def _cell(temperature: float, name: str, low: str, high: str, digits: int):
    """The mean over seeds and their range; of one seed the value and its interval."""

    def cell(line: dict[str, Any]) -> str:
        rows = line["rows"][temperature]
        values = [row[name] for row in rows]
        ends = (min(values), max(values)) if len(rows) > 1 else (rows[0][low], rows[0][high])
        mean = f"{np.mean(values):.{digits}f}"
        if ends[0] is None:
            return mean
        return f"{mean} ({' to '.join(f'{end:.{digits}f}' for end in ends)})"

    return cell


def legend(config) -> str:
    """What the figures are."""
    return (
        "α: mean of Σ min(target, draft) over prefixes that the target generated, "
        f"{config.alpha_inputs // 2} outputs of the split {config.split}. τ: tokens per target "
        f"call with γ = {config.gamma}, {config.tau_inputs} inputs. In brackets: with one seed a "
        "95% interval by bootstrap over outputs; with more the smallest and the largest. Seeds are "
        "of the order of batches and of what models write; all runs begin with the same draft. "
        "minutes: of the first seed's steps, with the outputs that the draft wrote for them, and "
        "with compilation where the cache did not have it; what the target wrote counts in the run "
        "that came first. "
        f"best, worst: by the mean of α over the temperatures with seed {config.seeds[0]}, on as "
        "many other outputs of the same split. "
        f"{START}: the common start. {NO_TEACHER}: as many steps on the data alone."
    )


def words(lines: Sequence[dict[str, Any]]) -> str:
    """Best and worst with their seeds, and the means over each divergence and each source."""
    sentences = []
    spread = 0.0
    for line in lines:
        by_seed = _scores(line)
        spread = max(spread, max(by_seed) - min(by_seed))
        if line["mark"]:
            many = f"{line['seeds']} seed{'s' * (line['seeds'] != 1)}"
            sentences.append(
                f"The {line['mark']} is {line['divergence']} at the prefixes {line['prefixes']}: "
                f"mean α {np.mean(by_seed):.3f} over the temperatures and {many} "
                f"({min(by_seed):.3f} to {max(by_seed):.3f})."
            )
    compared = _compared(lines)
    for axis in ("divergence", "prefixes"):
        means = {
            name: np.mean([line["score"] for line in compared if line[axis] == name])
            for name in dict.fromkeys(line[axis] for line in compared)
        }
        ranked = sorted(means.items(), key=lambda item: -item[1])
        sentences.append(
            f"Mean α by {axis}: " + ", ".join(f"{name} {mean:.3f}" for name, mean in ranked) + "."
        )
    if spread:
        sentences.append(f"Seeds of one line differ by up to {spread:.3f}.")
    for line in lines:
        if line["divergence"] in (START, NO_TEACHER):
            sentences.append(f"{line['divergence'].capitalize()}: {line['score']:.3f}.")
    return " ".join(sentences)


def _scores(line: dict[str, Any]) -> list[float]:
    """The mean of α over the temperatures, of each seed."""
    by = line["rows"].values()
    return [float(np.mean([row["alpha"] for row in of])) for of in zip(*by, strict=False)]


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to train and measure.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for runs, results and report.")
    flags.DEFINE_bool("measure", True, "--nomeasure: the report of the rows that are there.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
