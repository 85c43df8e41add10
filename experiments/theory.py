"""Table 1 and Figures 2, 3 and 4 of the paper, from its formulas alone. Takes seconds.

    python -m experiments.theory --workdir=runs/theory

prints Table 1 and writes to the workdir: table1.jsonl, figure2.png, figure3.png, figure4.png, and
report.md, which shows them all.
"""

import dataclasses
import json
import pathlib

import numpy as np
from absl import flags
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments import common
from specjax.paper import formulas
from specjax.paper.printed import TABLE_1
from specjax.support.files import replacing

ALPHAS = np.linspace(0.5, 0.9, 801)
COSTS = (0.01, 0.02, 0.05, 0.10)  # c of Figure 3's curves


@dataclasses.dataclass(frozen=True)
class Computed:
    """A row of Table 1: what the formulas give, and what the paper prints."""

    alpha: float
    gamma: int
    operations: float
    paper_operations: float
    speed: float
    paper_speed: float

    @property
    def agrees(self) -> bool:
        """To the last printed digit."""
        return (round(self.operations, 2), round(self.speed, 2)) == (
            self.paper_operations,
            self.paper_speed,
        )


def table1() -> list[Computed]:
    """Table 1 at c = ĉ = 0."""
    return [
        Computed(
            row.alpha,
            row.gamma,
            formulas.operations_factor(row.alpha, row.gamma, c_hat=0),
            row.operations,
            formulas.walltime_speedup(row.alpha, row.gamma, c=0),
            row.speed,
        )
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


def report(rows: list[Computed]) -> str:
    """Everything in Markdown, next to the figures' files."""
    lines = [
        "# What the paper's formulas give",
        "",
        "## Table 1: operations and speed at c = ĉ = 0",
        "",
        "| α | γ | operations | paper | speed | paper |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
        "",
        _verdict(rows),
    ]
    lowest, highest = ALPHAS[[0, -1]]
    ends = ", ".join(
        f"{formulas.optimal_gamma(lowest, c)} to {formulas.optimal_gamma(highest, c)} at c = {c:g}"
        for c in COSTS
    )
    captions = {
        2: "Tokens per target call against α. The dotted line is plain decoding.",
        3: "The γ of the largest speedup against α. "
        f"From α = {lowest:g} to {highest:g} it goes from {ends}.",
        4: "Speed (solid) and arithmetic operations (dotted) against α. A longer draft buys speed "
        "with operations. As α grows, speed grows and operations fall.",
    }
    for number, text in captions.items():
        image = f"![Figure {number}](figure{number}.png)"
        lines += ["", f"## Figure {number}", "", image, "", text]
    return "\n".join(lines) + "\n"


def write(workdir: pathlib.Path) -> list[Computed]:
    """Compute, draw and write everything; the rows of Table 1.

    A file is replaced when its new content is complete, so a run that is cut off spoils nothing.

    Raises:
      OSError: the workdir cannot be written.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    rows = table1()
    for name, figure in (("figure2", figure2()), ("figure3", figure3()), ("figure4", figure4())):
        with replacing(workdir / f"{name}.png") as part:
            figure.savefig(part, format="png", dpi=160)
    jsonl = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    for name, text in (("table1.jsonl", jsonl), ("report.md", report(rows))):
        with replacing(workdir / name) as part:
            part.write_text(text, encoding="utf-8")
    return rows


def _cells(row: Computed) -> list[str]:
    factors = (row.operations, row.paper_operations, row.speed, row.paper_speed)
    return [f"{row.alpha:g}", str(row.gamma), *(f"{factor:.2f}X" for factor in factors)]


def _verdict(rows: list[Computed]) -> str:
    off = [f"α = {row.alpha:g}, γ = {row.gamma}" for row in rows if not row.agrees]
    if off:
        return f"Rows that differ from the paper's: {'; '.join(off)}."
    return "Every digit is the paper's."


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
    workdir = pathlib.Path(flags.FLAGS.workdir)
    try:
        rows = write(workdir)
    except OSError as error:
        raise SystemExit(
            f"Cannot write to --workdir={workdir}: {error.strerror or error}. "
            "Name a directory that you can write to; it is made if it does not exist."
        ) from error
    table = Table("α", "γ", "operations", "paper", "speed", "paper", title="Table 1 (c = ĉ = 0)")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    console.print(_verdict(rows))
    console.print(f"Figures 2 to 4 and the table: {workdir / 'report.md'}", soft_wrap=True)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Directory for the table and the figures.", required=True)
    common.run(main, __doc__)
