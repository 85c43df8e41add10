"""A picture of some rounds of a batch: which drafted tokens were verified, and which were kept."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments import plots
from experiments.reproduce.study import Study
from specjax import decoding, speculative
from specjax.budgets import early_stop
from specjax.dice import dice_for
from specjax.measure import timing
from specjax.policies import Costs

SKIPPED = 2  # rounds in which the chances are calibrated
PANELS = 6
KEPT, REJECTED, IN_VAIN, LEFT_OUT = "kept", "rejected", "verified in vain", "left out"
COLOURS = {KEPT: plots.ACCEPTED, REJECTED: plots.REJECTED, IN_VAIN: "0.6", LEFT_OUT: "1.0"}


class Seen(NamedTuple):
    """One round of a batch."""

    live: Bool[np.ndarray, " B"]
    drawn: Int[np.ndarray, " B"]  # drafted tokens
    verified: Int[np.ndarray, " B"]
    accepted: Int[np.ndarray, " B"]

    def of(self, row: int, slot: int) -> str | None:
        """What became of a drafted token."""
        if not self.live[row] or slot >= self.drawn[row]:
            return None
        if slot >= self.verified[row]:
            return LEFT_OUT
        if slot < self.accepted[row]:
            return KEPT
        return REJECTED if slot == self.accepted[row] else IN_VAIN


def times_in(row: dict[str, Any]) -> Costs:
    """The times that a row of results was replayed with."""
    draft, rest = row["draft_time"], row["rest_time"]
    return Costs(draft, row["passes"], rest=rest, positions=row["sizes"])


def record(on: Study, row: dict[str, Any]) -> list[Seen]:
    """Some rounds of the real loop at the batch size, temperature and times of a row of results."""
    config, times, batch = on.config, times_in(row), row["batch"]
    method = decoding.build(
        on.target,
        on.draft(config.draft),
        gamma=config.gamma_max,
        sampling=on.sampling(row["temperature"]),
        budget=early_stop(times, row["setting"]),
        sizes=times.positions,
    )
    assert isinstance(method, speculative.Speculative)
    texts = decoding.tokenize(on.target, on.texts(batch), config.max_source_len or None)
    key = jax.random.key(config.seed)
    contexts, state = timing.start(
        method, on.target, texts, range(batch), config.max_new_tokens, key, rows=batch
    )
    seen = []
    for _ in range(SKIPPED + PANELS):
        state, found = one_round(method, contexts, state)
        seen.append(Seen(*map(np.asarray, found)))
    return seen[SKIPPED:]


@jax.jit
def one_round(method: Any, contexts: Any, state: Any) -> tuple[Any, tuple[Array, ...]]:
    """A round as `speculative.step` runs it, and the fields of `Seen`."""
    live = ~state.done
    after, round_ = speculative.step(method, contexts, state, dice_for(method))
    drafts = round_.drafts
    return after, (live, drafts.drawn, drafts.length, round_.accepted)


def draw(seen: list[Seen], gamma: int) -> Figure:
    """A panel for each round, a line for each row, a square for each drafted token."""
    rows = len(seen[0].live)
    size = (0.9 + 0.17 * gamma * len(seen), 0.9 + 0.13 * rows)
    figure = Figure(figsize=size, layout="constrained")
    for axes, one in zip(figure.subplots(1, len(seen), sharey=True), seen, strict=True):
        _panel(axes, one, gamma)
    figure.axes[0].set_ylabel("row")
    figure.supxlabel("place in the draft", fontsize=9)
    squares = [Patch(facecolor=c, edgecolor="0.4", label=name) for name, c in COLOURS.items()]
    figure.legend(handles=squares, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, one: Seen, gamma: int) -> None:
    rows = len(one.live)
    for row in range(rows):
        for slot in range(gamma):
            if (what := one.of(row, slot)) is not None:
                axes.add_patch(_square(slot, row, COLOURS[what]))
    verified = int(one.verified[one.live].sum())
    axes.set_title(f"{verified} of {int(one.drawn[one.live].sum())}", fontsize=8)
    axes.set(xlim=(0.4, gamma + 0.6), ylim=(rows + 0.6, 0.4), xticks=[1, gamma], yticks=[1, rows])
    plots.bare(axes)


def _square(slot: int, row: int, colour: str) -> Rectangle:
    return Rectangle((slot + 0.6, row + 0.6), 0.8, 0.8, facecolor=colour, edgecolor="0.4", lw=0.5)
