"""Where adaptivity pays: maps over α and the variance within outputs, and curves for the rest."""

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import plots
from experiments.reproduce.pages import Section
from experiments.when import points, sweep
from experiments.when.sweep import ORACLE
from specjax.measure import report

Row = Mapping[str, Any]
INFORMED = (0.0, 0.5)  # informativeness of the maps' rows
LETTER: dict[str, Any] = {
    "fontsize": 7, "fontweight": "bold", "color": "white", "ha": "center", "va": "center",
    "bbox": {"boxstyle": "circle,pad=0.15", "color": "0.15"},
}  # fmt: skip
# Places in a cell beside its digits, in the order in which letters take them.
CORNERS = ((0.33, 0.31), (-0.33, 0.31), (0.33, -0.31), (-0.33, -0.31), (0, 0.31), (0, -0.31))
LOWEST = -0.2  # of what is closed, as far as it is drawn
CURVE = {"within": 0.5, "between": 0.0}  # where informativeness varies alone


def sections(workdir: pathlib.Path, rows: Sequence[Row], config) -> list[Section]:
    """Both pictures; without the points that one needs, it is left out."""
    simulated = [row for row in rows if row["sweep"] != points.TRACES]
    found = []
    if space := [row for row in simulated if row["sweep"] == "space"]:
        plots.save(workdir / "map.png", draw_maps(space, points.letters(rows)), dpi=85)
        found.append(Section("Over α and the variance within outputs", words=_MAPS,
                             images=("map.png",), measured=space))  # fmt: skip
    if drawn := draw_curves(simulated, config):
        plots.save(workdir / "curves.png", drawn, dpi=85)
        found.append(Section("One thing at a time", words=_CURVES, images=("curves.png",),
                             measured=simulated))  # fmt: skip
    if lines := fits(simulated, config):
        plots.save(workdir / "rule.png", draw_rule(simulated, config, points.letters(rows)), dpi=85)
        found.append(Section("What can be foretold, and what is closed", RULE, lines, _RULE,
                             images=("rule.png",), measured=simulated))  # fmt: skip
    return found


# --- maps -----------------------------------------------------------------------------------------


def draw_maps(space: Sequence[Row], traces: Sequence[tuple[str, Row]]) -> Figure:
    """A column for each cost, a row for each informativeness, and one for the oracle."""
    costs = columns(space)
    informed = [i for i in INFORMED if any(row["informativeness"] == i for row in space)]
    between = min(row["between"] for row in space)
    figure = Figure(
        figsize=(2.9 * len(costs) + 0.6, 2.4 * (len(informed) + 1)), layout="constrained"
    )
    panels = figure.subplots(len(informed) + 1, len(costs), squeeze=False, sharex=True, sharey=True)
    for column, (verify, narrow, c) in enumerate(costs):
        where = {"verify": verify, "narrow": narrow, "c": c, "between": between}
        there = [row for row in space if where.items() <= row.items()]
        for axes, level in zip(panels[:-1, column], informed, strict=True):
            level_rows = at_level(there, level)
            policy = best_policy(level_rows)
            draw_map(axes, level_rows, policy)
            axes.set_title(f"{policy}, informativeness {level:g}", fontsize=8)
        axes = panels[-1, column]
        draw_map(axes, at_level(there, informed[-1]), ORACLE)
        axes.set_title(ORACLE, fontsize=8)
        here = [trace for trace in traces if nearest(trace[1], costs) == (verify, narrow, c)]
        for place in places(here, there):
            for axes in panels[:, column]:
                put(axes, *place)
        cost = f"c = {c:g}, v = 1" + (f" + {verify:g}γ, narrow" if narrow else
                                       f" + {verify:g}γ" if verify else "")  # fmt: skip
        panels[0, column].annotate(cost, (0.5, 1.22), xycoords="axes fraction", ha="center",
                                   fontsize=9, fontweight="bold")  # fmt: skip
    figure.supxlabel("α", fontsize=9)
    figure.supylabel("variance of the chance within outputs, as a share of α(1 − α)", fontsize=9)
    return figure


def columns(space: Sequence[Row]) -> list[tuple[float, bool, float]]:
    """Costs to show: v = 1 with each c, and narrow passes with the middle one."""
    ratios = sorted({row["c"] for row in space})
    middle = ratios[len(ratios) // 2]
    costs = sorted({(row["verify"], row["narrow"], row["c"]) for row in space})
    return [(v, narrow, c) for v, narrow, c in costs if v == 0 or (narrow and c == middle)]


def at_level(rows: Sequence[Row], informativeness: float) -> list[Row]:
    """The rows of this informativeness; where nothing varies, there is one level."""
    return [
        row for row in rows
        if row["informativeness"] == informativeness or row["within"] + row["between"] == 0
    ]  # fmt: skip


def best_policy(rows: Sequence[Row]) -> str:
    """The one policy that is best over all these points, by its mean."""
    names = [name for name in rows[0]["of_static"] if name != ORACLE]
    return max(names, key=lambda name: np.mean([row["of_static"][name][0] for row in rows]))


def draw_map(axes: Axes, rows: Sequence[Row], method: str) -> None:
    """Speedup over the best static γ, in percent; grey where it is within two standard errors."""
    alphas, withins = (sorted({row[name] for row in rows}) for name in ("alpha", "within"))
    grid = np.full((len(withins), len(alphas)), np.nan)
    for row in rows:
        at = withins.index(row["within"]), alphas.index(row["alpha"])
        value, error = row["of_static"][method]
        grid[at] = 100 * (value - 1)
        label = f"{grid[at]:+.0f}" if abs(grid[at]) >= 0.5 else "0"
        colour = "black" if abs(value - 1) > 2 * error else "0.45"
        axes.text(*at[::-1], label, ha="center", va="center", fontsize=7, color=colour)
    most = 100 if method == ORACLE else 20  # pale enough for black digits
    colours, least = ("Greens", 0) if method == ORACLE else ("PuOr_r", -most)
    axes.imshow(grid, origin="lower", aspect="auto", cmap=colours, vmin=least, vmax=most)
    axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas], fontsize=7)
    axes.set_yticks(range(len(withins)), [f"{within:g}" for within in withins], fontsize=7)


def nearest(trace: Row, costs: Sequence[tuple[float, bool, float]]) -> tuple[float, bool, float]:
    """The column that a trace stands in: the nearest v, and among those the nearest c."""
    return min(
        costs,
        key=lambda at: (abs(at[0] - trace["verify"]), abs(np.log(at[2] / max(trace["c"], 1e-3)))),
    )


def places(
    traces: Sequence[tuple[str, Row]], rows: Sequence[Row]
) -> list[tuple[str, float, float]]:
    """Letters of traces and where they stand: in a corner of the nearest cell."""
    found: list[tuple[str, float, float]] = []
    taken: Counter[tuple[int, ...]] = Counter()
    for letter, trace in traces:
        grids = (sorted({row[name] for row in rows}) for name in ("alpha", "within"))
        near = zip(("alpha", "within"), grids, strict=True)
        cell = tuple(int(np.argmin(np.abs(np.array(grid) - trace[name]))) for name, grid in near)
        right, up = CORNERS[taken[cell] % len(CORNERS)]
        taken[cell] += 1
        found.append((letter, cell[0] + right, cell[1] + up))
    return found


def put(axes: Axes, letter: str, x: float, y: float) -> None:
    """Write a trace's letter in a circle."""
    axes.annotate(letter, (x, y), (x, y), **LETTER)


# --- curves ---------------------------------------------------------------------------------------


def draw_curves(rows: Sequence[Row], config) -> Figure | None:
    """A panel for each thing that varies alone, at the middle c and v = 1; None where none does."""
    ratios = sorted(config.c)
    cost = {"c": ratios[len(ratios) // 2], "verify": 0.0, "narrow": False}

    def of(sweep: str, **where: float) -> list[Row]:
        fixed: dict[str, Any] = {"sweep": sweep, "alpha": config.base.alpha, **cost, **where}
        return [row for row in rows if fixed.items() <= row.items()]

    panels: list[tuple[str, str, list[Row]]] = [
        ("informativeness", f"within = {CURVE['within']:g}", of("space", **CURVE)),
        ("between", "informativeness 0", of("between", informativeness=0.0)),
        ("autocorrelation", "informativeness 0", of("memory")),
        ("offset", "of beliefs, slope 1", of("beliefs", slope=1.0)),
        ("offset", "of beliefs, slope 2.5", of("beliefs", slope=2.5)),
    ]
    panels = [panel for panel in panels if len(panel[2]) > 1]
    if not panels:
        return None
    figure = Figure(figsize=(2.2 * len(panels) + 0.4, 3.2), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, title, found) in zip(every, panels, strict=True):
        draw_curve(axes, name, found, config.shown)
        axes.set_title(title, fontsize=8)
    figure.supylabel("speedup over the best static γ", fontsize=9)
    handles = every[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=8, ncols=7, loc="outside lower center")
    return figure


def draw_curve(axes: Axes, name: str, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Each method's speedup over the best static γ against what varies, with two errors."""
    rows = sorted(rows, key=lambda row: row[name])
    where = [row[name] for row in rows]
    for i, method in enumerate([*methods, ORACLE]):
        values, errors = np.array([row["of_static"][method] for row in rows]).T
        style: dict[str, Any] = {"color": "0.4", "linestyle": ":"}
        if method != ORACLE:
            style = plots.line(i)
        axes.errorbar(where, values, 2 * errors, label=method, **style)
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_xlabel(name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


# --- the rule -------------------------------------------------------------------------------------


def inside(rows: Sequence[Row], config) -> list[Row]:
    """Points of calibrated beliefs whose best static γ might have been longer; policies' passes
    are no wider than static ones."""
    return [
        row for row in rows
        if row["sweep"] == "space" and row["static"] < config.gamma_max
        and (row["verify"] == 0 or row["narrow"])
    ]  # fmt: skip


def fits(rows: Sequence[Row], config) -> list[dict[str, Any]]:
    """For each cost: closed = slope · foretold, by least squares through 0."""
    lines = []
    every = inside(rows, config)
    for verify, c in sorted({(row["verify"], row["c"]) for row in every}):
        here = [row for row in every if (row["verify"], row["c"]) == (verify, c)]
        x, y = (np.array([of(row) for row in here]) for of in (sweep.foretold, sweep.closed))
        if np.ptp(x) > 0:
            slope = x @ y / (x @ x)
            lines.append({
                "c": c, "verify": verify, "points": len(here), "slope": slope,
                "correlation": np.corrcoef(x, y)[0, 1],
                "off": np.sqrt(np.mean((y - slope * x) ** 2)),
            })  # fmt: skip
    return lines


def draw_rule(rows: Sequence[Row], config, traces: Sequence[tuple[str, Row]]) -> Figure:
    """Closed against foretold, by α."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    every = inside(rows, config)
    alphas = sorted({row["alpha"] for row in every})
    for i, alpha in enumerate(alphas):
        here = [row for row in every if row["alpha"] == alpha]
        x, y = zip(*((sweep.foretold(row), sweep.closed(row)) for row in here), strict=True)
        axes.scatter(x, y, s=9, color=colormaps["viridis"](i / max(len(alphas) - 1, 1)), alpha=0.7,
                     linewidth=0, label=f"α = {alpha:g}")  # fmt: skip
    axes.plot([0, 1], [0, 1], color="0.5", linewidth=0.8, linestyle=":")
    for letter, row in traces:
        where = sweep.foretold(row), max(sweep.closed(row["narrow"]), LOWEST)
        axes.annotate(letter, where, **LETTER)
    axes.set_ylim(LOWEST - 0.05, 1.05)
    axes.set_xlabel("foretold: between + informativeness · within", fontsize=9)
    axes.set_ylabel("closed: of the time between\nthe best static γ and the oracle", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


_MAPS = (
    "Speedup over the best static γ, in percent: of the one policy that is best over its panel, "
    "and of the oracle. Grey: within two standard errors of nothing. Letters are traces, in the "
    "column of the nearest v and c and in the nearest cell. The map's beliefs are calibrated, "
    "theirs may not be."
)
_CURVES = (
    "Speedup over the best static γ at α = .7, with two standard errors. The dotted line is the "
    "oracle. Everything else is as in the config's base."
)
_RULE = (
    "Every point of the space whose best static γ is below the longest, with passes that are no "
    "wider for policies than for static γ: the share of the gap that the best policy of the point "
    "closes, against what can be foretold. The dotted line has slope 1. Letters are traces, "
    "replayed in narrow passes."
)
RULE: list[report.Column] = [
    ("c", lambda row: f"{row['c']:g}"),
    ("v grows by", lambda row: f"{row['verify']:g}"),
    ("points", lambda row: str(row["points"])),
    ("closed / foretold", lambda row: f"{row['slope']:.2f}"),
    ("correlation", lambda row: f"{row['correlation']:.2f}"),
    ("off by, rms", lambda row: f"{row['off']:.2f}"),
]
