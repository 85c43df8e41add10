"""What rounds cost, from calls of the loops whose draft lengths are known.

A call takes a fixed time and that of its rounds. Timed by itself, a round tells little of what it
takes within a call of four, whose first ones find cold caches. So whole calls are timed, on real
inputs, in loops that draft the same number of tokens in every round; what a call and each kind of
round take is fitted to them (`timing.unit_times`). A policy's rounds, which differ in length, are
then priced by these.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reproduce import gains
from experiments.reproduce.study import Study
from specjax import cost, timing
from specjax.policies import Prices, prices
from specjax.policies.constant import Constant
from specjax.replay import CostModel
from specjax.speculative import Speculative
from specjax.timing import Method, Timed

PLAIN = "plain decoding"


@dataclasses.dataclass(frozen=True)
class Timings:
    """What things take, in tokens of plain decoding."""

    c: float  # a draft step
    static: Mapping[int, float]  # by γ: a round of the loop that always drafts γ tokens
    rounds: Sequence[float]  # by 0 … γ_max drafted tokens: a round of the policies' loop
    call: float = 0.0  # a speculative call beyond its rounds
    plain_call: float = 0.0  # an autoregressive one beyond its tokens

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Timings":
        """From what `as_row` made."""
        static = {int(gamma): value for gamma, value in row["static"].items()}
        return cls(row["c"], static, row["rounds"], row["call"], row["plain_call"])

    def as_row(self) -> dict[str, Any]:
        """For a file of results."""
        static = {str(gamma): value for gamma, value in self.static.items()}
        return {**dataclasses.asdict(self), "static": static, "rounds": list(self.rounds)}

    @property
    def gamma_max(self) -> int:
        """The longest draft of the policies' loop."""
        return len(self.rounds) - 1

    def prices(self) -> Prices:
        """Of the policies' loop."""
        return self._prices(self.rounds)

    def static_prices(self, gamma: int) -> Prices:
        """Of the loop of a constant γ, between those that were timed. A shorter draft, which the
        budget or the drafter may cause, spares draft steps alone."""
        timed = sorted(self.static)
        full = np.interp(gamma, timed, [self.static[at] for at in timed])
        spared = np.maximum(gamma - np.arange(self.gamma_max + 1), 0)
        return self._prices(full - self.c * spared)

    def _prices(self, rounds) -> Prices:
        verify = np.asarray(rounds) - self.c * np.arange(self.gamma_max + 1)
        # Noise may leave less for a round than its draft steps take.
        return prices(self.c, np.maximum(verify, 1e-3).tolist())

    def model(self, table: Prices) -> CostModel:
        """Rounds by this table, and calls."""
        rounds = table.rounds(self.gamma_max).tolist()
        return CostModel(rounds, self.c, self.call, self.plain_call)


def given(c: float, verify: Sequence[float], overhead: float, widths: Sequence[int]) -> Timings:
    """By the formula γc + v + overhead.

    Args:
      verify: the verify pass, by the 0 … γ_max drafted tokens that it has room for.
      widths: those that policies may choose; see `Speculative`.
    """
    gamma_max = len(verify) - 1
    room = [
        min({w - 1 for w in widths if n < w <= gamma_max} | {gamma_max})
        for n in range(gamma_max + 1)
    ]
    return Timings(
        c,
        {gamma: gamma * c + v + overhead for gamma, v in enumerate(verify) if gamma},
        [n * c + verify[fits] + overhead for n, fits in enumerate(room)],
    )


def widths_of(said: Sequence[str], gamma_max: int) -> list[int]:
    """Of verify passes: for every length its own, the widest alone, or those that are named."""
    if list(said) == ["all"]:
        return list(range(1, gamma_max + 1))
    if list(said) == ["none"]:
        return []
    if not all(width.isdecimal() and int(width) > 0 for width in said):
        raise ValueError(f"--widths={','.join(said)} must be all, none or a list of numbers ≥ 1.")
    return [int(width) for width in said]


def always(loop: Speculative) -> dict[str, Speculative]:
    """The policies' loop, drafting 0, 1, … γ_max tokens in every round; compiles once."""
    return {
        f"always {n}": dataclasses.replace(loop, policy=Constant(jnp.int32(n)))
        for n in range(loop.gamma_max + 1)
    }


def fit(timed: Mapping[str, Timed], static: Mapping[str, int], c: float) -> Timings:
    """From calls at batch 1.

    Args:
      timed: `PLAIN`, all of `always`, and those of `static`; others are passed over.
      static: γ of loops with a constant one, by name.
      c: of a draft step, in target steps.
    """
    works: list[dict[Any, float]] = []
    seconds: list[float] = []
    for name, of in timed.items():
        for row, taken in zip(of.rows, of.by_batch(), strict=True):
            work: dict[Any, float]
            if name == PLAIN:
                work = {"plain call": 1, "token": row.emitted}
            elif name in static:
                work = {"call": 1, ("static", static[name]): row.target_calls}
            elif name.startswith("always "):
                length = int(name.removeprefix("always "))
                # The budget may end a draft, and a drafter may have nothing to say.
                drafts = row.drafted / length if length else 0
                work = {"call": 1, length: drafts, 0: row.target_calls - drafts}
            else:
                continue
            works.append(work)
            seconds.append(taken)
    took = timing.unit_times(works, seconds)
    token = took["token"]
    return Timings(
        c,
        {gamma: took["static", gamma] / token for gamma in static.values()},
        [took[length] / token for length in sorted(name for name in took if type(name) is int)],
        took["call"] / token,
        took["plain call"] / token,
    )


def measure(
    on: Study,
    draft: str,
    temperature: float,
    loops: Mapping[str, Method],
    static: Mapping[str, int],
    texts: Sequence[Sequence[int]],
    repeats: int,
) -> Timings:
    """Time the loops on these inputs, by turns, and fit.

    Args:
      loops: `PLAIN` and those that `fit` needs.
    """
    timed = timing.side_by_side(
        loops,
        on.target,
        texts,
        max_new_tokens=on.config.max_new_tokens,
        key=jax.random.key(on.config.seed),
        repeats=repeats,
        names=(on.config.target, draft),
    )
    longest = next(loop for name, loop in loops.items() if name.startswith("always "))
    assert isinstance(longest, Speculative)
    costs = cost.measure(longest, *gains.start(on, longest, texts))
    return fit(timed, static, costs.c)
