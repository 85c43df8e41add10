"""Choices: which of several drafters drafts next, by past rounds.

A choice scores every drafter, and the drafter of the largest score drafts (`switch.py`). Scores
depend on past rounds alone, so the output's distribution stays the target's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from specjax.pytrees import averaged, pytree
from specjax.support import named
from specjax.support.ranges import listed, number

NAMES = {name: f"specjax.drafters.choices:{name}" for name in ("fixed", "recent", "bandit")}


class Evidence(NamedTuple):
    """Counts of each of N drafters: tokens that were tested, and those of them that passed."""

    passed: Float[Array, "B N"]
    tested: Float[Array, "B N"]


class Choice(Protocol):
    """The protocol of choices. A choice's state has a row for each row of the batch."""

    watches: ClassVar[bool] = False
    """Whether `free` drafters are tested in every round, whichever drafted."""

    carries: ClassVar[bool] = False
    """Whether the next batch may start from the last state of the choice."""

    def init(self, rows: int, drafters: int) -> Any:
        """The state before the first round; ValueError for a wrong number of drafters."""
        return ()

    @abstractmethod
    def scores(self, state: Any) -> Float[Array, "*batch N"]:
        """Scores of the drafters. The largest of those that propose wins, of equals the first."""
        ...

    def update(self, state: Any, seen: Evidence, gamma_max: int) -> Any:
        """Update the state after a round."""
        return state

    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
        """A fresh state with the means of the last batch's `rows`, if the choice `carries`."""
        return averaged(fresh, past, rows) if self.carries else fresh


@pytree
class Fixed(Choice):
    """Chooses the first drafter that proposes something, in the given order."""

    def scores(self, state):
        return jnp.zeros((1, 1), jnp.float32)


fixed = Fixed


class Judged(NamedTuple):
    """Evidence of past rounds as fading sums, and the scores computed from it."""

    seen: Evidence
    score: Float[Array, "B N"]


class Rated(Choice):
    """Chooses the drafter of most expected tokens per time in rounds of γ drafted tokens,

        (1 + α + … + αᵞ)/(1 + γ·cost),

    with an α for each. Evidence fades round by round, also for idle drafters. Before the first
    round all scores are equal, so the first drafter begins.
    """

    carries = True

    costs: Float[Array, " N"]  # of a draft step, in rounds without drafts: one for each, or for all
    memory: Float[Array, ""]  # the share of the evidence that a round keeps

    @abstractmethod
    def alphas(self, seen: Evidence) -> Float[Array, "B N"]:
        """The estimated chance of acceptance of each drafter."""
        ...

    def init(self, rows, drafters):
        if len(self.costs) not in (1, drafters):
            raise ValueError(
                f"{len(self.costs)} costs are given: give one for each of the {drafters} drafters, "
                "or one for all."
            )
        none = jnp.zeros((rows, drafters), jnp.float32)
        return Judged(Evidence(none, none), none)

    def scores(self, state):
        return state.score

    def update(self, state, seen, gamma_max):
        before, time = state.seen, 1 + gamma_max * self.costs
        seen = Evidence(*(self.memory * old + new for old, new in zip(before, seen, strict=True)))
        drafted = jnp.arange(gamma_max + 1, dtype=jnp.float32)[None, None, :]
        tokens = jnp.sum(self.alphas(seen)[:, :, None] ** drafted, axis=2)
        return Judged(seen, tokens / time[None, :])


@pytree
class Recent(Rated):
    """Chooses by recent acceptance: α = (passed + weight·prior)/(tested + weight).

    A drafter is tested in the rounds in which it drafts. While it is idle its α returns to the
    prior; with a high prior it is tried again soon.
    """

    costs: Float[Array, " N"]
    memory: Float[Array, ""]
    prior: Float[Array, ""]  # α without evidence
    weight: Float[Array, ""]  # the prior's weight, in tested tokens

    def alphas(self, seen):
        return (seen.passed + self.weight * self.prior) / (seen.tested + self.weight)


def recent(
    costs: Sequence[float] = (0.0,), memory: float = 0.9, prior: float = 0.9, weight: float = 2.0
) -> Recent:
    """Make a choice by recent acceptance.

    Args:
      costs: time of each drafter's draft step, in rounds without drafts; by default acceptance
        alone decides.
      memory, prior, weight: see `Recent`.
    """
    return Recent(
        *_rated(costs, memory),
        jnp.float32(number("prior", prior, "[0, 1]")),
        jnp.float32(number("weight", weight, "(0, ∞)")),
    )


@pytree
class Bandit(Rated):
    """Chooses by UCB with side observations (UCB-N, Caron et al. 2012, 1210.4839):

        α = min(1, passed/tested + width·√(2 ln(1 + Σ tested)/tested))

    At every verified position the target's distribution gives the chance that a drafter's token
    would have been accepted. A `free` drafter is tested at all of them, whichever drafted, and is
    never explored. Other drafters are tested only when they draft; few tests raise their α. With
    fading sums this is discounted UCB, for drafters whose quality changes (Garivier and Moulines
    2008, 0805.3415).
    """

    watches = True

    costs: Float[Array, " N"]
    memory: Float[Array, ""]
    width: Float[Array, ""]

    def alphas(self, seen):
        tested = jnp.maximum(seen.tested, 1e-6)
        total = jnp.sum(seen.tested, axis=1, keepdims=True)
        radius = self.width * jnp.sqrt(2 * jnp.log1p(total) / tested)
        known = seen.passed / tested + radius
        return jnp.where(seen.tested > 0, jnp.minimum(known, 1.0), 1.0)


def bandit(costs: Sequence[float] = (0.0,), memory: float = 0.9, width: float = 0.2) -> Bandit:
    """Make a choice by UCB over drafters.

    Args:
      costs, memory: see `recent`.
      width: factor of the confidence radius. With 0 a tested drafter is never explored.
    """
    return Bandit(*_rated(costs, memory), jnp.float32(number("width", width, "[0, ∞)")))


def _rated(costs: Sequence[float], memory: float) -> tuple[Array, Array]:
    each = [number("costs", cost, "[0, ∞)") for cost in listed("costs", costs)]
    return jnp.asarray(each, jnp.float32), jnp.float32(number("memory", memory, "[0, 1]"))


def parse(choice: str | Choice) -> Choice:
    """Make the choice of a name in `NAMES` or an import path, such as "recent(memory=0.8)".

    A `Choice` is returned as it is. An import path is code that runs.

    Raises:
      ValueError: there is no such choice, or it does not take these settings.
    """
    if not isinstance(choice, str) and hasattr(choice, "scores"):
        return choice
    return named.make("choice", NAMES, choice, Choice)  # type: ignore[arg-type]
