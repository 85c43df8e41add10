"""Ways to decode with one draft: what rounds cost in their loops, and what they promise.

The `loops` of a kind compile while α is measured. `ways` times whole calls of them and returns the
loops that may win: `Lengths` the best length, `BestTree` the best tree, `Decided` a policy's
decisions and the best length beside them.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import devices
from specjax.batching import bucket
from specjax.checkpoints import Checkpoint
from specjax.decoding import building
from specjax.drafters.base import Drafter
from specjax.measure import costing, timing
from specjax.measure.costing import TIMED_TEXTS, TIMED_TOKENS, with_length
from specjax.measure.counting import Always
from specjax.measure.fit import acceptance
from specjax.measure.metrics import rounds_along, tokens_along
from specjax.measure.timing import PLAIN, SPECULATIVE, Comparison
from specjax.passes import widths
from specjax.policies import Costs, Policy, constant
from specjax.policies.base import by_slot
from specjax.settings import Drafting
from specjax.trees.shapes import text_of
from specjax.tuning import best_tree, fitting
from specjax.tuning.inputs import Inputs
from specjax.tuning.ranks import acceptance_by_rank
from specjax.tuning.recommendation import EQUAL_WITHIN

DEPTH = 8  # of the best tree, at most
COST_REPEATS = 3
# Where time is short: tokens of a timed call; of `gammas` only the longest of the first few has a
# loop; the longest draft of a policy's loop; the share of a candidate's time for costs.
MIN_TOKENS, MAX_SHORT_GAMMAS, SHORT_GAMMA, MAX_SHARE_OF_COSTS = 16, 4, 4, 0.25
MIN_GAIN_OF_DECISIONS = 1.02  # over drafts of one length: less is noise

Overlaps = Sequence[np.ndarray]  # as `metrics.Alpha.overlaps`


class Way(NamedTuple):
    """A loop that may win, before it is timed."""

    method: Any
    gamma: int  # or the depth; with a policy the longest draft
    nodes: int
    c: float
    steps: dict[int, float]  # target steps of a round, by γ or depth
    tokens: float = 0.0  # expected, per target call; 0: not known
    predicted: float = 0.0  # speedup; 0: not known
    policy: str = ""
    settings: Mapping[str, Any] = {}  # fields of `Settings` beside γ, tree and words

    @property
    def name(self) -> str:
        """Its name in a race."""
        return self.policy or SPECULATIVE

    @property
    def tree(self) -> str:
        """The tree in words; "" for a chain."""
        return text_of(self.method.shape) if self.method.branches else ""

    @property
    def v(self) -> float:
        """Target steps of a round without its draft steps."""
        return self.steps[self.gamma] - self.gamma * self.c

    def promised(self, overlaps: Overlaps) -> float:
        """Speedup along outputs. With a policy each output has its best length, or no draft."""
        if not (self.policy and len(overlaps)):
            known = len(overlaps)
            return tokens_along(overlaps, self.gamma) / self.steps[self.gamma] if known else 0.0
        least = [
            min(took * (rounds_along(beta, gamma) if gamma else len(beta))
                for gamma, took in self.steps.items())
            for beta in overlaps
        ]  # fmt: skip
        return sum(map(len, overlaps)) / sum(least)


def fastest(raced: Comparison, names: Collection[str], policy: str = "") -> str:
    """The loop of these names that takes the least time for a token.

    Plain decoding stays unless a draft gains `EQUAL_WITHIN`, and drafts of one length unless the
    decisions of `policy` gain `MIN_GAIN_OF_DECISIONS`.
    """
    gains = {policy: MIN_GAIN_OF_DECISIONS, PLAIN: 1 - EQUAL_WITHIN}
    return min(names, key=lambda one: np.median(raced.per_token(one)) * gains.get(one, 1.0))


def best_length(
    loop_of: Callable[[int], Any], steps: Mapping[int, float], tokens: Mapping[int, float], c: float
) -> Way:
    """Choose γ by what rounds cost and bring, and build its loop."""
    gamma = max(steps, key=lambda gamma: tokens[gamma] / steps[gamma])
    brings, took = tokens[gamma], steps[gamma]
    return Way(loop_of(gamma), gamma, gamma, c, dict(steps), brings, brings / took)


@dataclasses.dataclass
class Lengths:
    """Drafts of one length in every round.

    With time enough each has a loop of its own, a few are timed, and the times between are
    interpolated. Where time is short all share one, whose target calls have room for the longest.
    """

    inputs: Inputs
    longest: Any  # the loop with the longest draft
    gammas: Sequence[int]
    share: float  # of the time that is left

    @property
    def chains(self) -> bool:
        """Whether chains may win."""
        return not self.longest.branches

    @functools.cached_property
    def short(self) -> bool:
        """Whether time is short."""
        return self.inputs.job.pace.is_short(self.share)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The draft lengths whose loops are timed: few, since each is compiled."""
        found = sorted({*self.gammas})
        if self.short:
            return found[:MAX_SHORT_GAMMAS][-1:]
        return sorted({found[0], found[len(found) // 2], found[-1]})

    @functools.cached_property
    def loops(self) -> list[Any]:
        """The loops to compile. α is measured in the shapes of the last one."""
        return [with_length(self.longest, length) for length in self.lengths]

    def timed(self, calls: int) -> tuple[Any, Sequence[Sequence[int]], int]:
        """The stopwatch, inputs and tokens of timed calls, by the number of their loops."""
        inputs, rows, share = self.inputs, self.inputs.watch.batch_size, self.share
        pace, longest = inputs.job.pace, min(inputs.job.max_new_tokens, TIMED_TOKENS)
        counts = pace.afford(
            2 * calls, MAX_SHARE_OF_COSTS * share,
            batches=(-(-TIMED_TEXTS // rows), 1), tokens=(longest, MIN_TOKENS),
        )  # fmt: skip
        until = pace.until(MAX_SHARE_OF_COSTS * share)
        watch = dataclasses.replace(inputs.watch, repeats=COST_REPEATS, until=until)
        some = timing.spread(inputs.timed, counts["batches"] * rows)
        return watch, some, counts["tokens"]

    def costs(self) -> Costs:
        """Time whole calls with drafts of these lengths on a few inputs."""
        watch, some, tokens = self.timed(len(self.lengths) + 2)
        method = dataclasses.replace(self.longest, gamma_max=self.lengths[-1])
        return costing.costs_of(watch, method, some, self.lengths, tokens)

    def ways(self, tokens: Mapping[int, float], overlaps: Overlaps) -> list[Way]:
        """Time rounds, and choose the loops to race.

        Args:
          tokens: expected per target call, by γ.
          overlaps: rates along outputs; none where they do not say what later tokens get.
        """
        return [self.best(tokens, self.costs())]

    def best(self, tokens: Mapping[int, float], costs: Costs) -> Way:
        """Choose γ by these costs."""
        gammas = [gamma for gamma in tokens if gamma <= costs.gamma_max]
        shared = self.lengths[0] if len(self.lengths) == 1 else None
        steps = {gamma: gamma * costs.c + costs.v(shared or gamma) for gamma in gammas}

        def loop_of(gamma: int) -> Any:
            loop = with_length(self.longest, shared or gamma)
            return dataclasses.replace(loop, policy=constant(gamma))

        return best_length(loop_of, steps, tokens, costs.c)


@dataclasses.dataclass
class BestTree(Lengths):
    """The best fixed tree of some numbers of nodes, by the acceptance of each rank."""

    sizes: Sequence[int]  # numbers of nodes
    draft: Checkpoint | Drafter
    check_tokens: bool

    short, chains = False, False

    def best(self, tokens: Mapping[int, float], costs: Costs) -> Way:
        """Choose the tree by these costs."""
        job, inputs = self.inputs.job, self.inputs
        chances = acceptance_by_rank(
            job.target, self.draft, inputs.measured, inputs.outputs, sampling=job.chosen,
            drawn=not job.chosen.greedy, batch_size=job.batch_size,
            max_source_len=job.max_source_len, check_tokens=self.check_tokens,
        ).tolist()  # fmt: skip
        found = best_tree.choose(
            chances, self.sizes, DEPTH, costs.c, lambda tokens: costs.v(tokens - 1)
        )
        best = max(found, key=lambda one: one.speedup)
        depth, size = best.shape.depth, best.shape.nodes
        took = depth * costs.c + costs.v(size)
        drafting = Drafting(tree=best.shape, check_tokens=self.check_tokens)
        method = building.build(job.target, self.draft, drafting, sampling=job.chosen)
        return Way(method, depth, size, costs.c, {depth: took}, best.tokens, best.tokens / took)


@dataclasses.dataclass
class Decided(Lengths):
    """A policy's decisions; for chains also drafts of one length.

    One loop has all lengths and gives the policy's costs. Where time is short it also races.
    """

    policy: str

    @functools.cached_property
    def loop(self) -> Any:
        """The timed loop, which has shorter drafts where time is short."""
        cut = self.chains and self.short and self.longest.gamma_max > SHORT_GAMMA
        return dataclasses.replace(self.longest, gamma_max=SHORT_GAMMA) if cut else self.longest

    @functools.cached_property
    def loops(self) -> list[Any]:
        """One program of all lengths. A tree compiles with its calls, and α is a chain's."""
        deciding = fitting.deciding(self.policy, self.loop.gamma_max)
        return [self._always(self.loop.gamma_max, deciding)] if self.chains else []

    def _always(self, length: int, policy: Policy) -> Any:
        """The timed loop with drafts of one length; -1: of the policy's."""
        return dataclasses.replace(self.loop, policy=Always(jnp.int32(length), policy))

    def ways(self, tokens: Mapping[int, float], overlaps: Overlaps) -> list[Way]:
        """Time rounds, and choose the loops to race. Arguments: see `Lengths.ways`."""
        watch, some, longest = self.timed(self.loop.gamma_max + 2)
        table = fitting.costs_of(watch, self.policy, self.loop, some, longest=longest)
        if len(overlaps):
            sums = np.array([[beta.sum(), len(beta)] for beta in overlaps]).T
            known = zip(("alpha", "between", "alpha_error"), acceptance(*sums), strict=True)
            table = Costs(**table.as_row() | dict(known))
        if not self.chains:
            return self._decided(table, overlaps)
        rounds = table.round_times(table.gamma_max).tolist()
        took, loop_of = dict(enumerate(rounds[1:], 1)), partial(with_length, self.loop)
        if self.short:
            loop_of = partial(self._always, policy=self.loops[0].policy.policy)
        elif devices.is_accelerator(watch.target.model):
            # A policy's drafts wait for the host at each token, and those of one length do not.
            alone = costing.costs_of(watch, self.loop, some, [1, table.gamma_max], longest)
            took = dict(enumerate(alone.round_times(table.gamma_max).tolist()[1:], 1))
        else:
            took = table.alone(widths(self.loop, bucket(self.inputs.rows)))
        steps = {gamma: seconds / float(table.token) for gamma, seconds in took.items()}
        return [best_length(loop_of, steps, tokens, table.c), *self._decided(table, overlaps)]

    def _decided(self, table: Costs, overlaps: Overlaps) -> list[Way]:
        """The policy's loop; none if the policy prefers plain decoding."""
        rows, gamma, budget = self.inputs.rows, table.gamma_max, self.inputs.job.max_new_tokens
        loop: Any = fitting.with_costs(self.loop, self.policy, table, rows)
        settings = {"policy": self.policy, "costs": table, "passes": loop.passes}
        if building.plain_if_preferred(loop, budget, rows).drafter is None:
            return []
        rounds = (np.asarray(table.round_times(gamma)) / float(table.token)).tolist()
        how: dict[str, Any] = {"c": table.c, "policy": self.policy, "settings": settings}
        if loop.branches:  # one size of rounds: that of the whole tree
            depth = loop.shape.depth
            return [Way(loop, depth, loop.shape.nodes, steps={depth: rounds[gamma]}, **how)]
        if self.short and not (loop.policy.fixed or by_slot(loop.policy)):
            loop = self._always(-1, loop.policy)
        way = Way(loop, gamma, gamma, steps=dict(enumerate(rounds)), **how)
        return [way._replace(predicted=way.promised(overlaps))]
