"""Which of several drafters drafts next, by what past rounds showed of each.

A choice gives every drafter a score, and the largest one drafts (`switch.py`). It knows past rounds
and nothing of the next one, so whatever it does, the output's distribution stays the target's.
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
    """Tokens of each of N drafters that were held against the target, and how many passed."""

    passed: Float[Array, "B N"]
    tested: Float[Array, "B N"]


class Choice(Protocol):
    """What a switch needs of a choice. Its state has a row for each row of the batch."""

    watches: ClassVar[bool] = False
    """Whether drafters that are `free` are tested in every round, whoever drafted."""

    carries: ClassVar[bool] = False
    """Whether what it has learned may begin the next batch of a run."""

    def init(self, rows: int, drafters: int) -> Any:
        """The state before the first round; ValueError where it does not fit so many drafters."""
        return ()

    @abstractmethod
    def scores(self, state: Any) -> Float[Array, "*batch N"]:
        """One for each drafter. Of those that have something to propose the largest is chosen, of
        equals the first."""
        ...

    def update(self, state: Any, seen: Evidence, gamma_max: int) -> Any:
        """After a round: what was learned."""
        return state

    def inherit(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
        """See `Policy.inherit`."""
        return averaged(fresh, past, rows) if self.carries else fresh


@pytree
class Fixed(Choice):
    """The first drafter that has something to propose, in the order in which they are given."""

    def scores(self, state):
        return jnp.zeros((1, 1), jnp.float32)


def fixed() -> Fixed:
    """The drafters in their order."""
    return Fixed()


class Judged(NamedTuple):
    """What past rounds have shown: fading sums, and the scores that follow from them."""

    seen: Evidence
    score: Float[Array, "B N"]


class Rated(Choice):
    """The drafter that promises most tokens per time in rounds of γ drafted tokens,

        (1 + α + … + αᵞ)/(1 + γ·cost),

    each with an α of its own. Evidence fades round by round, that of idle drafters too. Before the
    first round all scores are equal, so that the first drafter begins.
    """

    carries = True

    costs: Float[Array, " N"]  # of a draft step, in rounds without drafts: one for each, or for all
    memory: Float[Array, ""]  # of the evidence, how much a round leaves

    @abstractmethod
    def alphas(self, seen: Evidence) -> Float[Array, "B N"]:
        """The chance of acceptance that each drafter is credited with."""
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
    """By recent acceptance: α = (passed + weight·prior)/(tested + weight).

    A drafter is tested in the rounds in which it drafts. While it is idle its α goes back to the
    prior: with a high one it is tried again soon.
    """

    costs: Float[Array, " N"]
    memory: Float[Array, ""]
    prior: Float[Array, ""]  # α without evidence
    weight: Float[Array, ""]  # how many tests the prior is worth

    def alphas(self, seen):
        return (seen.passed + self.weight * self.prior) / (seen.tested + self.weight)


def recent(
    costs: Sequence[float] = (0.0,), memory: float = 0.9, prior: float = 0.9, weight: float = 2.0
) -> Recent:
    """By recent acceptance.

    Args:
      costs: of a draft step of each drafter, in the time of a round that drafts nothing; by default
        acceptance alone decides.
      memory, prior, weight: see `Recent`.
    """
    return Recent(
        *_rated(costs, memory),
        jnp.float32(number("prior", prior, "[0, 1]")),
        jnp.float32(number("weight", weight, "(0, ∞)")),
    )


@pytree
class Bandit(Rated):
    """UCB with all that a round shows (UCB-N, Caron et al. 2012, 1210.4839):

        α = min(1, passed/tested + width·√(2 ln(1 + Σ tested)/tested))

    At every verified position the target's distribution is known, and with it the chance that the
    token of a drafter would have been accepted there. A drafter that is `free` is tested at all of
    them, whoever drafted, and never has to be explored. Of the others only the one that drafted is
    tested; that little is known of one raises its α. With fading sums it is discounted UCB, for
    drafters that are good now and bad later (Garivier and Moulines 2008, 0805.3415).
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
    """UCB over drafters.

    Args:
      costs, memory: see `recent`.
      width: of the confidence radius. With 0 a drafter that was tested is never explored.
    """
    return Bandit(*_rated(costs, memory), jnp.float32(number("width", width, "[0, ∞)")))


def _rated(costs: Sequence[float], memory: float) -> tuple[Array, Array]:
    each = [number("costs", cost, "[0, ∞)") for cost in listed("costs", costs)]
    return jnp.asarray(each, jnp.float32), jnp.float32(number("memory", memory, "[0, 1]"))


def parse(choice: str | Choice) -> Choice:
    """The choice that a name of `NAMES` or an import path stands for, "recent(memory=0.8)".

    A `Choice` is returned as it is. An import path is code that runs.

    Raises:
      ValueError: there is no such choice, or it does not take these settings.
    """
    if not isinstance(choice, str) and hasattr(choice, "scores"):
        return choice
    return named.make("choice", NAMES, choice, Choice)  # type: ignore[arg-type]
