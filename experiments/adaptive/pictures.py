"""Gain against α, and draft lengths along one output."""

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.adaptive import board, race
from experiments.adaptive.board import Row
from experiments.pricing import Timings
from experiments.reproduce import gains
from experiments.reproduce.pages import Section
from experiments.reproduce.study import Study
from specjax import decoding, files
from specjax.trace import TracedRound, trace

ACCEPTED, REJECTED = "#1f4e8c", "#e08a2e"


def against_alpha(workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """Every policy beside the best static γ, for all drafts and temperatures."""
    found = sorted(board.races(rows), key=lambda race: race[0]["alpha"])
    _save(workdir / "alpha.png", draw_against_alpha(found))
    return Section(
        "Gain against α",
        words="Each point is a policy with one draft at one temperature; the line joins the best "
        "static γ of each race, with its quartiles. At the dotted line decoding takes as long "
        "without a draft.",
        images=("alpha.png",),
    )


def draw_against_alpha(found: Sequence[Sequence[Row]]) -> Figure:
    """Races by ascending α."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    still = [board.best(rows, static=True) for rows in found]
    gain = [row["gain_decode"] for row in still]
    errors = [
        [row["gain_decode"] - row["gain_decode_low"] for row in still],
        [row["gain_decode_high"] - row["gain_decode"] for row in still],
    ]
    axes.errorbar([row["alpha"] for row in still], gain, errors, color="0.2", linewidth=1.5,
                  capsize=3, label="best static γ")  # fmt: skip
    methods = dict.fromkeys(r["method"] for rows in found for r in rows if not r["static"])
    for i, method in enumerate(methods):
        points = [(r["alpha"], r["gain_decode"]) for rows in found for r in rows
                  if r["method"] == method]  # fmt: skip
        axes.plot(*zip(*points, strict=True), "osDv^P"[i % 6], markersize=4, alpha=0.8,
                  color=colormaps["tab20"](i % 20), label=method)  # fmt: skip
    axes.axhline(1, color="0.5", linewidth=0.8, linestyle=":")
    axes.set(xlabel="α", ylabel="times plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure


def over_time(on: Study, workdir: pathlib.Path, rows: Sequence[Row]) -> Section:
    """What some methods draft, round by round, for the longest output of the timed inputs."""
    config = on.config
    shown = [row for row in rows if row["draft"] == board.races(rows)[-1][0]["draft"]]
    shown = [row for row in shown if row["temperature"] == config.temperatures[0]]
    cell = shown[0]
    told, of = Timings.of_row(cell["told"]), (cell["draft"], cell["temperature"])
    made = {**race.static_loops(on, *of), **race.build(on, *of, told)}
    names = [n for n in (cell["best_static"], *config.drawn) if n in made]
    texts = decoding.tokenize(
        on.target, on.texts(config.timed_inputs), config.max_source_len or None
    )
    longest = max(range(len(texts)), key=lambda i: len(on.outputs(cell["temperature"])[i]))
    runs = {name: trace(made[name], *gains.start(on, made[name], texts, longest)) for name in names}
    _save(workdir / "lengths.png", draw_lengths(runs, config.gamma_max))
    return Section(
        "Draft lengths over time",
        words=f"`{on.examples[longest].input}`, {board.label(cell)}: a bar for each target call, "
        "at the token of the output where it began.",
        images=("lengths.png",),
    )


def draw_lengths(runs: dict[str, list[TracedRound]], gamma_max: int) -> Figure:
    """A row of bars for each method."""
    figure = Figure(figsize=(8, 0.9 + 0.8 * len(runs)), layout="constrained")
    panels: Any = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, rounds) in zip(panels, runs.items(), strict=True):
        accepted = [len(r.accepted) for r in rounds]
        rejected = [len(r.rejected) for r in rounds]
        gained = [len(r.accepted) + len(r.next_token) for r in rounds]
        at = [sum(gained[:i]) for i in range(len(rounds))]
        axes.bar(at, accepted, align="edge", color=ACCEPTED, label="accepted")
        axes.bar(at, rejected, bottom=accepted, align="edge", color=REJECTED, label="rejected")
        axes.set_title(f"{name}: {len(rounds)} target calls", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, gamma_max)
    panels[-1].set_xlabel("tokens of the output so far")
    figure.supylabel("drafted", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside upper right", ncols=2)  # fmt: skip
    return figure


def _save(path: pathlib.Path, figure: Figure) -> None:
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=160)
