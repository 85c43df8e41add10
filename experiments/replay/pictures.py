"""What policies gain over the best static γ, by what a draft step costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments import plots


def by_cost(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for each temperature, a curve for each policy; the oracle is dashed."""
    curves: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        if not line["policy"].startswith("γ="):
            of = curves.setdefault(line["temperature"], {}).setdefault(line["policy"], [])
            of.append((line["c"], line["of_chosen"]["value"]))
    figure = Figure(figsize=(1 + 4.2 * len(curves), 4), layout="constrained")
    grid = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for axes, (temperature, mine) in zip(grid, curves.items(), strict=True):
        for i, (name, points) in enumerate(mine.items()):
            style = plots.ORACLE if name == "oracle" else plots.line(i)
            axes.plot(*zip(*sorted(points), strict=True), label=name, **style)
        axes.axhline(1, **plots.PLAIN)
        axes.set(title=f"T = {temperature:g}", xlabel="a draft step, in target steps")
        plots.bare(axes)
    grid[0].set_ylabel("times the best static γ, chosen elsewhere")
    figure.legend(*grid[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=3,
                  loc="outside lower center")  # fmt: skip
    return figure
