"""The picture of acceptance by position and kind of question."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments import plots
from experiments.chat.tables import EVERY, Block, Rows

MIN_TESTED = 20  # tokens that the rule reached; a rate of fewer is not drawn


def finding(rows: Rows) -> str:
    """Say on which kinds of question a draft's first token is accepted most and least often."""
    known = {
        row["kind"]: row["acceptance"][0].value
        for row in rows
        if row["kind"] != EVERY and row["acceptance"] and row["acceptance"][0]
    }
    if len(known) < 2:
        return ""
    high, low = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    return (
        f"{rows[0]['draft']}, T = {rows[0]['temperature']:g}: of rounds with a draft, the first "
        f"token is accepted most often in {high} ({known[high]:.2f}), least in {low} "
        f"({known[low]:.2f})"
    )


def pictured(made: Sequence[tuple[Block, Rows]]) -> list[list[dict[str, Any]]]:
    """The rows of each panel: the longest static γ of each draft, at the first batch size."""
    panels = []
    for block, rows in made:
        if block.batch != made[0][0].batch:
            continue
        for draft in block.drafts:
            if static := block.static(draft):
                panels.append(
                    [
                        {**row, "temperature": block.temperature}
                        for row in rows
                        if row["method"] == static[-1]
                    ]
                )
    return panels


def draw(panels: Sequence[Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw acceptance by position, a panel for each draft and temperature, a line for each kind.

    The band is the interval of all kinds together.
    """
    columns = min(sum(p[0]["temperature"] == panels[0][0]["temperature"] for p in panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns + 1.8, 2.9 * lines + 0.5), layout="constrained")
    axes_of = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    kinds = [*dict.fromkeys(row["kind"] for panel in panels for row in panel)]
    for axes, panel in zip(axes_of, panels, strict=False):
        for row in panel:
            pairs = zip(row["acceptance"], row["tested"], strict=True)
            known = [(i, one) for i, (one, n) in enumerate(pairs, 1) if n >= MIN_TESTED]
            at, rates = [i for i, _ in known], [one for _, one in known]
            look: dict[str, Any] = plots.line(kinds.index(row["kind"]))
            if row["kind"] == EVERY:
                look = {"color": "0.2", "linewidth": 2.2}
                axes.fill_between(at, [one.low for one in rates], [one.high for one in rates],
                                  color="0.2", alpha=0.15, linewidth=0)  # fmt: skip
            axes.plot(at, [one.value for one in rates], label=row["kind"], **look)
        axes.set_title(f"{panel[0]['draft']}, T = {panel[0]['temperature']:g}", fontsize=9)
        longest = len(panel[0]["acceptance"])
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.8, longest + 0.2)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("drafted token")
        plots.bare(axes)
    for axes in axes_of[len(panels) :]:
        axes.set_axis_off()
    axes_of[0].set_ylabel("accepted, if those before were")
    figure.legend(*axes_of[0].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside right center")  # fmt: skip
    wide = int(10 * figure.get_figwidth())  # characters of a line
    figure.suptitle(textwrap.fill(finding(panels[0]), wide), fontsize=10)
    return figure
