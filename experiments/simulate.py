"""What speculative decoding does, without a network: the real loop on models that are tables.

    python -m experiments.simulate --workdir=runs/simulate

Four parts: the distribution of the output is the target's; what the formula promises; what the loop
gives beside it; and where nothing can be gained. Every distribution is known in advance, so every
number has its answer beside it. Prints a table for each part and writes simulate.jsonl, report.md
and a figure for each to the workdir, replacing those of an earlier run. Takes less than a minute.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import Array
from jaxtyping import Float, Key
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from specjax import accept, loop
from specjax import sampling as smp
from specjax.drafters.base import ModelDrafter
from specjax.measure import provenance, report
from specjax.models import table
from specjax.paper import formulas
from specjax.policies import constant
from specjax.speculative import Speculative
from specjax.state import State
from specjax.support import command_line, files
from specjax.types import Inputs, Model

TARGET_PROBS = (0.35, 0.25, 0.15, 0.10, 0.07, 0.04, 0.02, 0.02)
DRAFT_PROBS = (0.20, 0.20, 0.20, 0.15, 0.10, 0.08, 0.05, 0.02)

# (α, γ, c) of the second part.
SETTINGS = (
    (0.5, 3, 0.02),
    (0.7, 5, 0.02),
    (0.75, 7, 0.02),
    (0.8, 7, 0.04),
    (0.82, 7, 0.11),
    (0.9, 10, 0.02),
)
GAMMAS = (3, 5, 7)
ALPHAS = (0.5, 0.7, 0.8, 0.9)
C = 0.02
HARD, EASY = 0.5, 0.9  # overlap in the two kinds of stretches; half of the tokens are in each
STAY = 0.99  # chance that the next token is in the same stretch

SLOW_C = 0.3  # a draft so slow that a low α cannot pay for it
POOR_ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)

BLUE, ORANGE, GREY = "#1f4e8c", "#e08a2e", "#b8c4d4"


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing shown: a table, what it says, and a figure."""

    name: str  # of its rows and of its figure's file
    title: str
    columns: Sequence[report.Column]
    rows: list[dict[str, Any]]
    sentence: str
    figure: Figure
    batch: int = 0  # outputs at once; 0: formulas alone


def decode(
    target: Model,
    draft: Model,
    *,
    gamma: int,
    rows: int,
    budget: int,
    key: Key[Array, ""],
    first: Sequence[int] = (0,),
) -> State:
    """The end of the library's loop: `rows` outputs of `budget` sampled tokens each.

    Nothing ends an output before its budget is spent. The output of row b stands in
    state.tokens[b, 1 : 1 + budget].

    Args:
      first: prompts of one token each; the rows take turns with them.
    """
    prompt = jnp.resize(jnp.asarray(first, jnp.int32), (rows, 1))
    source = jnp.zeros((rows, 0), jnp.int32)
    inputs = Inputs(source, jnp.zeros((rows,), jnp.int32), prompt, jnp.ones((rows,), jnp.int32))
    method = Speculative(
        target=target,
        drafter=ModelDrafter(draft),
        rule=accept.TokenRule(),
        policy=constant(gamma),
        sampling=smp.sampling(),
        eos_ids=jnp.zeros((0,), jnp.int32),
        gamma_max=gamma,
    )
    contexts, state = loop.start(
        method,
        inputs,
        smp.row_keys(key, jnp.arange(rows), jnp.zeros((rows,), jnp.int32)),
        jnp.full((rows,), budget, jnp.int32),
        buffer_len=1 + budget + gamma + 1,
    )
    return loop.decode(method, contexts, state)


def tokens_per_call(state: State) -> tuple[float, float]:
    """τ over all rows, and half of its 95% interval: rows are independent, rounds need not be."""
    calls = np.asarray(state.stats.target_calls, np.float64)
    emitted = np.asarray(state.stats.emitted, np.float64)
    tau = emitted.sum() / calls.sum()
    error = np.std(emitted - tau * calls) / (calls.mean() * np.sqrt(len(calls)))
    return float(tau), float(1.96 * error)


# 1. The distribution


def distribution(key: Key[Array, ""], draws: int) -> Part:
    """Draws of the first output token against the target's distribution."""
    target_probs, draft_probs = np.array(TARGET_PROBS), np.array(DRAFT_PROBS)
    # A row with two tokens to give drafts one of them, and checks it.
    state = decode(
        table.fixed(target_probs), table.fixed(draft_probs), gamma=1, rows=draws, budget=2, key=key
    )
    drawn = np.bincount(np.asarray(state.tokens[:, 1]), minlength=len(target_probs)) / draws
    accepted = float(np.asarray(state.stats.accepted).mean())
    alpha = 1 - formulas.d_lk(target_probs, draft_probs)
    residual = np.asarray(
        accept.residual(*(jnp.asarray(x, jnp.float32)[None] for x in (target_probs, draft_probs)))
    )[0].astype(np.float64)
    rows = [
        {
            "token": token,
            "target": target_probs[token],
            "draft": draft_probs[token],
            "overlap": float(np.minimum(target_probs, draft_probs)[token]),
            "residual": float(residual[token]),
            "drawn": float(drawn[token]),
            "error": float(drawn[token] - target_probs[token]),
            "draws": draws,
            "alpha": alpha,
            "accepted": accepted,
        }
        for token in range(len(target_probs))
    ]
    columns: list[report.Column] = [
        ("token", lambda row: str(row["token"])),
        ("target p", lambda row: f"{row['target']:.2f}"),
        ("draft q", lambda row: f"{row['draft']:.2f}"),
        ("min(p, q)", lambda row: f"{row['overlap']:.2f}"),
        ("residual", lambda row: f"{row['residual']:.3f}"),
        ("drawn", lambda row: f"{row['drawn']:.4f}"),
        ("drawn − p", lambda row: f"{row['error']:+.4f}"),
    ]
    largest = float(np.max(np.abs(drawn - target_probs)))
    sentence = (
        f"Σ min(p, q) = {alpha:.3f} is the chance that the draft's token is kept, and "
        f"{accepted:.3f} of {draws:,} were; what is rejected is drawn anew from the residual, and "
        "the tokens that come out follow the target's distribution, with a largest error of "
        f"{largest:.4f}."
    )
    title = "1. The distribution of the output is the target's"
    return Part("distribution", title, columns, rows, sentence, _draw_distribution(rows), draws)


def _draw_distribution(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("token", "probability")
    places = np.arange(len(rows))
    for shift, field, label, colour in (
        (-0.27, "draft", "draft q", GREY),
        (0.0, "target", "target p", BLUE),
        (0.27, "drawn", "drawn by the loop", ORANGE),
    ):
        heights = [row[field] for row in rows]
        axes.bar(places + shift, heights, 0.25, color=colour, label=label)
    axes.set_xticks(places)
    axes.legend(frameon=False)
    return figure


# 2. The prediction


def predicted() -> Part:
    """The speedup of Thm 3.8, and the draft length that would be best."""
    rows = []
    for alpha, gamma, c in SETTINGS:
        best = formulas.optimal_gamma(alpha, c)
        rows.append(
            {
                "alpha": alpha,
                "gamma": gamma,
                "c": c,
                "tokens": formulas.expected_tokens(alpha, gamma),
                "cost": gamma * c + 1,
                "speedup": formulas.walltime_speedup(alpha, gamma, c),
                "best_gamma": best,
                "best_speedup": formulas.walltime_speedup(alpha, best, c),
            }
        )
    columns: list[report.Column] = [
        ("α", lambda row: f"{row['alpha']:.2f}"),
        ("γ", lambda row: str(row["gamma"])),
        ("c", lambda row: f"{row['c']:.2f}"),
        ("tokens per target call", lambda row: f"{row['tokens']:.2f}"),
        ("cost γc + 1", lambda row: f"{row['cost']:.2f}"),
        ("speedup", lambda row: f"{row['speedup']:.2f}"),
        ("best γ", lambda row: str(row["best_gamma"])),
        ("its speedup", lambda row: f"{row['best_speedup']:.2f}"),
    ]
    least, most = rows[0], rows[-1]
    sentence = (
        "The speedup is tokens per target call over the time of a round in target steps (Thm 3.8), "
        f"and α counts for more than γ: from α = {least['alpha']:g} to {most['alpha']:g} the best "
        f"speedup at c = {most['c']:g} goes from {least['best_speedup']:.2f} to "
        f"{most['best_speedup']:.2f}."
    )
    title = "2. What the formula promises"
    return Part("speedup", title, columns, rows, sentence, _draw_speedup(rows))


def _draw_speedup(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("γ, drafted tokens per target call", "speedup over plain decoding")
    gammas = np.arange(16)
    for row, colour in zip(rows[::-1], _shades(len(rows))[::-1], strict=True):
        speedups = formulas.walltime_speedup(row["alpha"], gammas, row["c"])
        axes.plot(gammas, speedups, color=colour, label=f"α = {row['alpha']:g}, c = {row['c']:g}")
        axes.plot(row["gamma"], row["speedup"], "o", color=colour)
    axes.axhline(1, color="0.35", linestyle=":")
    axes.set_xlim(0, 15)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.set_ylim(0.8, 6.6)
    return figure


# 3. The simulation


def simulated(key: Key[Array, ""], rows: int, budget: int) -> Part:
    """Tokens per call and speedup of the loop beside the formula's, α known by construction."""
    found = []
    for number, (kind, alpha, target, draft, first) in enumerate(_pairs()):
        for gamma in GAMMAS:
            tau, error = tokens_per_call(
                decode(
                    target,
                    draft,
                    gamma=gamma,
                    rows=rows,
                    budget=budget,
                    key=jax.random.fold_in(jax.random.fold_in(key, number), gamma),
                    first=first,
                )
            )
            found.append(
                {
                    "acceptance": kind,
                    "alpha": alpha,
                    "gamma": gamma,
                    "c": C,
                    "tokens": formulas.expected_tokens(alpha, gamma),
                    "simulated_tokens": tau,
                    "half_interval": error,
                    "speedup": formulas.walltime_speedup(alpha, gamma, C),
                    "simulated_speedup": formulas.walltime_speedup_from_tau(tau, gamma, C),
                    "rows": rows,
                    "budget": budget,
                }
            )
    columns: list[report.Column] = [
        ("acceptance", lambda row: row["acceptance"]),
        ("α", lambda row: f"{row['alpha']:.2f}"),
        ("γ", lambda row: str(row["gamma"])),
        ("tokens per call", lambda row: f"{row['tokens']:.3f}"),
        ("simulated", lambda row: f"{row['simulated_tokens']:.3f}"),
        ("± 95%", lambda row: f"{row['half_interval']:.3f}"),
        ("speedup", lambda row: f"{row['speedup']:.2f}"),
        ("simulated", lambda row: f"{row['simulated_speedup']:.2f}"),
        ("off by", lambda row: f"{row['simulated_speedup'] / row['speedup'] - 1:+.1%}"),
    ]
    off = {
        kind: max(
            (
                row["simulated_speedup"] / row["speedup"] - 1
                for row in found
                if row["acceptance"] == kind
            ),
            key=abs,
        )
        for kind in ("independent", "in stretches")
    }
    sentence = (
        f"Where every token is accepted with the same chance, the loop gives the formula's speedup "
        f"within {abs(off['independent']):.1%}; where hard (β = {HARD:g}) and easy stretches "
        f"(β = {EASY:g}) have the same mean, it differs by up to {off['in stretches']:+.1%}, since "
        "hard stretches take more calls than their share of tokens."
    )
    title = f"3. What the loop gives (c = {C:g}; {rows} outputs of {budget} tokens each)"
    return Part("simulated", title, columns, found, sentence, _draw_simulated(found), rows)


def _pairs() -> Iterator[tuple[str, float, Model, Model, Sequence[int]]]:
    """Models whose α is known: a name, α, target, draft and the tokens that outputs begin with.

    The target has eight tokens and a ninth that it never says. Its distribution depends on the last
    token.
    """
    size, half = 9, 4
    wheel = np.stack([np.roll(TARGET_PROBS, i) for i in range(size)])
    distributions = np.pad(wheel, ((0, 0), (0, 1)))
    for alpha in ALPHAS:
        draft_probs = table.draft_of_alpha(distributions, np.full(size, alpha))
        yield (
            "independent",
            alpha,
            table.by_last_token(distributions),
            table.by_last_token(draft_probs),
            [0],
        )
    # Tokens 0 to 3 are hard to foresee for the draft, 4 to 7 are easy, and they come in stretches.
    hard = np.arange(size) < half
    same = hard[:, None] == hard[None, :]
    distributions = np.where(same, STAY / half, (1 - STAY) / half)
    distributions[:, -1] = 0
    distributions[-1, :-1] = 1 / (size - 1)
    draft_probs = table.draft_of_alpha(distributions, np.where(hard, HARD, EASY))
    yield (
        "in stretches",
        (HARD + EASY) / 2,
        table.by_last_token(distributions),
        table.by_last_token(draft_probs),
        [0, half],
    )


def _draw_simulated(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes("γ, drafted tokens per target call", "speedup over plain decoding")
    gammas = np.arange(10)
    colours = _shades(len(ALPHAS))
    for alpha, colour in zip(ALPHAS, colours, strict=True):
        speedups = formulas.walltime_speedup(alpha, gammas, C)
        axes.plot(gammas, speedups, color=colour)
        _label(axes, 9, speedups[-1], f"α = {alpha:g}", colour)
    for row in rows:
        free = row["acceptance"] == "independent"
        colour = colours[ALPHAS.index(row["alpha"])]
        axes.plot(
            row["gamma"],
            row["simulated_speedup"],
            "o" if free else "D",
            color=colour,
            markerfacecolor=colour if free else "white",
        )
    axes.plot([], [], color="0.3", label="formula")
    axes.plot([], [], "o", color="0.3", label="loop, independent")
    axes.plot([], [], "D", color="0.3", markerfacecolor="white", label="loop, in stretches")
    axes.set_xlim(0, 9)
    axes.set_ylim(0.8, None)
    axes.legend(frameon=False, loc="upper left")
    return figure


# 4. No speedup


def no_speedup(key: Key[Array, ""], rows: int, budget: int) -> Part:
    """A draft too slow for its α: nothing is faster where α ≤ c (Cor 3.9)."""
    found = []
    for number, alpha in enumerate(POOR_ALPHAS):
        distributions = np.append(TARGET_PROBS, 0.0)
        target, draft = (
            table.fixed(distributions),
            table.fixed(table.draft_of_alpha(distributions, alpha)),
        )
        state = decode(
            target, draft, gamma=1, rows=rows, budget=budget, key=jax.random.fold_in(key, number)
        )
        tau, _ = tokens_per_call(state)
        best = formulas.optimal_gamma(alpha, SLOW_C)
        found.append(
            {
                "alpha": alpha,
                "c": SLOW_C,
                "speedup_1": formulas.walltime_speedup(alpha, 1, SLOW_C),
                "simulated_speedup_1": formulas.walltime_speedup_from_tau(tau, 1, SLOW_C),
                "speedup_3": formulas.walltime_speedup(alpha, 3, SLOW_C),
                "speedup_7": formulas.walltime_speedup(alpha, 7, SLOW_C),
                "best_gamma": best,
                "best_speedup": formulas.walltime_speedup(alpha, best, SLOW_C),
                "rows": rows,
                "budget": budget,
            }
        )
    columns: list[report.Column] = [
        ("α", lambda row: f"{row['alpha']:.2f}"),
        ("c", lambda row: f"{row['c']:.2f}"),
        ("speedup, γ = 1", lambda row: f"{row['speedup_1']:.2f}"),
        ("simulated", lambda row: f"{row['simulated_speedup_1']:.2f}"),
        ("γ = 3", lambda row: f"{row['speedup_3']:.2f}"),
        ("γ = 7", lambda row: f"{row['speedup_7']:.2f}"),
        ("best γ", lambda row: str(row["best_gamma"] or "none")),
        ("its speedup", lambda row: f"{row['best_speedup']:.2f}"),
    ]
    sentence = (
        f"A draft step takes {SLOW_C:g} of a target step: up to α = {SLOW_C:g} no γ is faster, "
        "and the best is plain decoding; above it, one drafted token already speedups (1 + "
        "α)/(1 + c)."
    )
    title = "4. Where there is no speedup: α ≤ c"
    return Part("no_speedup", title, columns, found, sentence, _draw_no_speedup(), rows)


def _draw_no_speedup() -> Figure:
    figure, axes = _axes("c, a draft step in target steps", "α")
    c, alpha = np.linspace(0.005, 0.995, 100), np.linspace(0.005, 0.995, 100)
    grid_c, grid_alpha = np.meshgrid(c, alpha)
    best = formulas.optimal_gamma(grid_alpha, grid_c, max_gamma=60)
    speedup = formulas.walltime_speedup(grid_alpha, best, grid_c)
    levels = [1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0]
    axes.grid(False)
    axes.contourf(
        c, alpha, np.where(best > 0, speedup, np.nan), levels,
        colors=colormaps["viridis_r"](np.linspace(0.02, 0.85, len(levels) - 1)), extend="max",
    )  # fmt: skip
    lines = axes.contour(c, alpha, speedup, levels[1:], colors="white", linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"{level:g}×", fontsize=8)
    axes.plot([0, 1], [0, 1], color="0.2", linewidth=1.2)
    axes.text(0.62, 0.3, "α ≤ c: no γ is faster", ha="center", color="0.3")
    axes.set_title("speedup at the best γ", loc="left", fontsize=10)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


# Output


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _shades(count: int) -> Float[np.ndarray, "N 4"]:
    """Colours for an ordered family of curves, light to dark."""
    return colormaps["viridis_r"](np.linspace(0.3, 0.95, count))


def _label(axes: Axes, x: float, y: float, text: str, colour: np.ndarray) -> None:
    """A curve's name, right of its end."""
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", va="center", color=colour,
                  fontsize=9, annotation_clip=False)  # fmt: skip


def write(workdir: pathlib.Path, parts: Sequence[Part], seed: int) -> None:
    """Rows, figures and report; each file replaced when it is complete."""
    facts = {"seed": seed, **provenance.environment()}
    for part in parts:
        with files.replacing(workdir / f"{part.name}.png") as file:
            part.figure.savefig(file, format="png", dpi=160)
    lines = ["# Speculative decoding on models that are tables", ""]
    for part in parts:
        image = f"![{part.title}]({part.name}.png)"
        columns = report.markdown(part.columns, part.rows)
        lines += [f"## {part.title}", "", part.sentence, "", columns, "", image, ""]
    lines += ["## Where", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    facts = {"seed": seed, "dtype": "float32"}
    rows = [
        {"part": part.name, **row, "batch": part.batch, **facts}
        for part in parts
        for row in part.rows
    ]
    provenance.write(workdir / "simulate.jsonl", rows)
    files.write_text(workdir / "report.md", "\n".join(lines))


def main(_) -> None:
    options = flags.FLAGS
    workdir = command_line.make_workdir(options.workdir)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(100, console.width))
    keys = jax.random.split(jax.random.key(options.seed), 3)
    parts = []
    for make in (
        lambda: distribution(keys[0], options.draws),
        predicted,
        lambda: simulated(keys[1], options.outputs, options.tokens),
        lambda: no_speedup(keys[2], options.outputs, options.tokens),
    ):
        part = make()
        parts.append(part)
        console.print(report.table(part.columns, part.rows, part.title))
        console.print(f"{part.sentence}\n", highlight=False)
    write(workdir, parts, options.seed)
    console.print(f"Report and figures: {workdir / 'report.md'}", soft_wrap=True)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Directory for the report, rows and figures; made if "
                        "it does not exist.", required=True)  # fmt: skip
    flags.DEFINE_integer("seed", 0, "Of all draws: the same seed gives the same tables.")
    flags.DEFINE_integer("draws", 100_000, "Tokens drawn in part 1; the error falls with their "
                         "root.", lower_bound=1)  # fmt: skip
    flags.DEFINE_integer("outputs", 200, "Outputs per setting in parts 3 and 4, one batch.",
                         lower_bound=2)  # fmt: skip
    flags.DEFINE_integer("tokens", 1000, "Tokens of each output in parts 3 and 4; short outputs "
                         "feel their cut last round.", lower_bound=2)  # fmt: skip
    command_line.run(main, __doc__)
