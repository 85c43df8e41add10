"""Table 1 and Figures 2, 3 and 4 of the paper, from its formulas alone. Takes seconds.

    python -m experiments.theory --workdir=runs/theory

prints Table 1 and writes to the workdir: figure2.png, figure3.png, figure4.png, and report.md,
which shows them all.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import command, plots
from experiments.reproduce.pages import Section
from experiments.reproduce.printed import TABLE_1
from specjax import formulas
from specjax.measure import report
from specjax.support import command_line

ALPHAS = np.linspace(0.5, 0.9, 801)
COSTS = (0.01, 0.02, 0.05, 0.10)  # c of Figure 3's curves
TITLE = "Table 1: operations and speed at c = ĉ = 0"
COLUMNS: list[report.Column] = [
    ("α", lambda row: f"{row['alpha']:g}"),
    ("γ", lambda row: str(row["gamma"])),
    ("operations", lambda row: f"{row['operations']:.2f}X"),
    ("paper", lambda row: f"{row['paper_operations']:.2f}X"),
    ("speed", lambda row: f"{row['speed']:.2f}X"),
    ("paper", lambda row: f"{row['paper_speed']:.2f}X"),
]


def table1() -> list[dict[str, Any]]:
    """Its rows: what the formulas give, and what the paper prints."""
    return [
        {
            "alpha": row.alpha,
            "gamma": row.gamma,
            "operations": formulas.operations_factor(row.alpha, row.gamma, c_hat=0),
            "paper_operations": row.operations,
            "speed": formulas.walltime_speedup(row.alpha, row.gamma, c=0),
            "paper_speed": row.speed,
        }
        for row in TABLE_1
    ]


def figure2() -> Figure:
    """Expected tokens per target call against α."""
    figure, axes = _axes("Tokens per target call (Eq. 1)", "E[tokens]")
    gammas = (1, 3, 5, 7, np.inf)
    for gamma, color in zip(gammas, _shades(len(gammas)), strict=True):
        tokens = formulas.expected_tokens(ALPHAS, gamma)
        axes.plot(ALPHAS, tokens, color=color)
        _label(axes, tokens[-1], "γ = ∞" if gamma == np.inf else f"γ = {gamma}", color)
    axes.axhline(1, color="0.35", linestyle=":")
    axes.annotate("plain decoding", (0.502, 1), (0, -4), textcoords="offset points", va="top",
                  fontsize=9, color="0.35")  # fmt: skip
    axes.set_ylim(0, 10.2)
    axes.set_yticks(range(0, 11, 2))
    return figure


def figure3() -> Figure:
    """The best γ against α, for four costs of the draft."""
    figure, axes = _axes("The best draft length (§3.5)", "optimal γ")
    for c, color in zip(COSTS, _shades(len(COSTS))[::-1], strict=True):
        gammas = formulas.optimal_gamma(ALPHAS, c)
        axes.plot(ALPHAS, gammas, color=color, drawstyle="steps-post")
        _label(axes, gammas[-1], f"c = {c:g}", color)
    axes.set_ylim(0, 25)
    return figure


def figure4() -> Figure:
    """Speed and arithmetic operations against α, for a draft that costs nothing."""
    figure, axes = _axes(
        "Speed and arithmetic operations (c = ĉ = 0)", "factor over plain decoding"
    )
    gammas = (1, 3, 5, 7, 10)
    for gamma, color in zip(gammas, _shades(len(gammas)), strict=True):
        speed = formulas.walltime_speedup(ALPHAS, gamma, c=0)
        operations = formulas.operations_factor(ALPHAS, gamma, c_hat=0)
        axes.plot(ALPHAS, speed, color=color)
        axes.plot(ALPHAS, operations, color=color, linestyle=":")
        _label(axes, speed[-1], f"γ = {gamma}", color)
    axes.plot([], [], color="0.2", label="speed (Thm 3.8)")
    axes.plot([], [], color="0.2", linestyle=":", label="operations (Thm 3.11)")
    axes.legend(frameon=False, loc="upper left")
    axes.set_ylim(0, 7.2)
    return figure


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Whether every printed digit comes out."""
    off = [
        f"α = {row['alpha']:g}, γ = {row['gamma']}"
        for row in rows
        if any(round(row[name], 2) != row[f"paper_{name}"] for name in ("operations", "speed"))
    ]
    return f"Rows that differ: {'; '.join(off)}." if off else "Every digit is the paper's."


def write(workdir: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """The figures, and a report that shows them and the table."""
    lowest, highest = ALPHAS[[0, -1]]
    ends = ", ".join(
        f"{formulas.optimal_gamma(lowest, c)} to {formulas.optimal_gamma(highest, c)} at c = {c:g}"
        for c in COSTS
    )
    captions = {
        figure2: "Tokens per target call against α. The dotted line is plain decoding.",
        figure3: "The γ of the largest speedup against α. "
        f"From α = {lowest:g} to {highest:g} it goes from {ends}.",
        figure4: "Speed (solid) and arithmetic operations (dotted) against α. A longer draft buys "
        "speed with operations. As α grows, speed grows and operations fall.",
    }
    sections = [Section(TITLE, COLUMNS, rows, verdict(rows))]
    for draw, caption in captions.items():
        name = draw.__name__
        plots.save(workdir / f"{name}.png", draw(), dpi=160)
        title = name.replace("figure", "Figure ")
        sections.append(Section(title, words=caption, images=(f"{name}.png",)))
    command.publish(workdir, "What the paper's formulas give", sections, rows)


def _axes(title: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("α")
    axes.set_ylabel(ylabel)
    axes.set_xlim(ALPHAS[0], ALPHAS[-1])
    axes.set_xticks(np.linspace(0.5, 0.9, 5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _shades(count: int) -> np.ndarray:
    """Colours for an ordered family of curves, light to dark."""
    return colormaps["viridis_r"](np.linspace(0.3, 0.95, count))


def _label(axes: Axes, height: float, text: str, color: np.ndarray) -> None:
    """A curve's name, right of its end."""
    axes.annotate(
        text,
        (ALPHAS[-1], height),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=color,
        annotation_clip=False,
    )


def main(_) -> None:
    write(command_line.make_workdir(flags.FLAGS.workdir), table1())


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Directory for the table and the figures.", required=True)
    command_line.run(main, __doc__)
