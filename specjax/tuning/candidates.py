"""Candidates: drafts that are measured on the same inputs, one after the other."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import drafters, trees
from specjax.checkpoints import Checkpoint, compatibility
from specjax.decoding import building
from specjax.decoding.conditions import conditions
from specjax.decoding.texts import common_width
from specjax.drafters.abilities import guesses
from specjax.drafters.base import Drafter
from specjax.measure import doubts, metrics, stopwatch, timing
from specjax.measure.compiling import at_once, compile_at_once
from specjax.measure.stopwatch import TIMED_TEXTS, TIMED_TOKENS
from specjax.models.memory import nbytes
from specjax.policies import Costs
from specjax.results import summarize
from specjax.sampling import Greedy
from specjax.speculative import Speculative
from specjax.support.named import short
from specjax.trees import FixedTree
from specjax.trees.shapes import text_of
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import best_tree
from specjax.tuning.inputs import MIN_INPUTS, Inputs
from specjax.tuning.pace import reduced
from specjax.tuning.ranks import acceptance_by_rank
from specjax.tuning.recommendation import (
    Candidate,
    Selection,
    beats_plain,
    cannot_win,
    counts_ngrams,
)

DEPTH = 8  # of trees, at most

MAX_TIMINGS = 2  # of one candidate, if they contradict themselves
MIN_TOKENS = 32  # of a timed output where time is short
MAX_SHARE_OF_COSTS = 0.25  # of a candidate's time
COST_REPEATS = 3
MAX_SHORT_GAMMAS = 4  # of `gammas`, of which the longest is timed where time is short


@dataclasses.dataclass
class Trial(Inputs):
    """A target with some inputs, on which candidates are measured one after the other."""

    def __post_init__(self):
        super().__post_init__()
        self._leader: Candidate | None = None

    def ready(self, chosen: Selection) -> Selection:
        """Complete the selection with a draft that `generate` can take.

        A name stays one, unless it was loaded with this trial's counts or dtype.
        """
        draft = chosen.draft
        if draft is None or not (counts_ngrams(draft) or self.dtype is not None):
            return chosen
        return dataclasses.replace(chosen, draft=self._load(draft))

    def measure(self, draft: str | Checkpoint | Drafter, tree: bool = False) -> Candidate:
        """Measure one candidate, with its best chain or its best tree.

        `Candidate.problem` is set if a model cannot be loaded, does not fit or cannot branch.
        """
        name = drafters.name_of(draft)
        if isinstance(draft, str):
            self.say(f"loading {short(name)}")
        try:
            loaded = self._load(draft)
            longest = self._method(loaded, max(self.nodes if tree else self.gammas))
            if tree:
                self._branching(loaded, trees.fixed(1))
        except (ValueError, OSError) as error:
            self._left = max(1, self._left - 1)
            return Candidate(name, problem=str(error), tree="none" if tree else "")
        found = self._measure(name, loaded, longest, tree)
        self._left = max(1, self._left - 1)
        if beats_plain(found) and found.chosen_by > getattr(self._leader, "chosen_by", 0.0):
            self._leader = found
        del loaded, longest
        gc.collect()  # before the next one is loaded
        return found

    def _method(self, loaded: Checkpoint | Drafter, gamma: int) -> Speculative:
        return building.build(
            self.target, loaded, gamma=gamma, sampling=self._sampling,
            check_tokens=self.check_tokens,
        )  # fmt: skip

    def _branching(self, loaded: Checkpoint | Drafter, shape: FixedTree) -> TreeSpeculative:
        return building.build(
            self.target, loaded, tree=shape, sampling=self._sampling, check_tokens=self.check_tokens
        )

    def _lengths(self, tree: bool) -> list[int]:
        """The draft lengths to time: few, since each has a loop to compile.

        Where time is short it is one. Shorter drafts are interpolated, and longer ones not tried.
        """
        found = sorted({1, *self.nodes} if tree else {*self.gammas})
        if not tree and self._pace.is_short(1 / self._left):
            return found[:MAX_SHORT_GAMMAS][-1:]
        return sorted({found[0], found[len(found) // 2], found[-1]})

    def _costs(self, loaded: Checkpoint | Drafter, lengths: Sequence[int]) -> Costs:
        """Time whole calls with drafts of these lengths on a few inputs."""
        calls = 2 * TIMED_TEXTS * (len(lengths) + 2)  # two of each length and of plain decoding
        counts = reduced(
            {"inputs": TIMED_TEXTS, "tokens": min(self.max_new_tokens, TIMED_TOKENS)},
            {"inputs": 1, "tokens": MIN_TOKENS // 2},
            lambda inputs, tokens: calls * inputs / TIMED_TEXTS * tokens * self._pace.token,
            self._pace.left(MAX_SHARE_OF_COSTS / self._left),
        )
        return stopwatch.costs_of(
            self._method(loaded, lengths[-1]),
            self.target,
            timing.spread(self._sources, counts["inputs"]),
            lengths,
            longest=counts["tokens"],
            max_new_tokens=self.max_new_tokens,
            key=self._key,
            width=common_width(self._sources),
            repeats=COST_REPEATS,
            until=self._pace.until(MAX_SHARE_OF_COSTS / self._left),
            say=self.say,
        )

    def _compile(self, loaded: Checkpoint | Drafter, lengths: Sequence[int]) -> None:
        """Compile the loops that `_costs` times, on a CPU."""
        longest = self._method(loaded, lengths[-1])
        begin = functools.partial(
            timing.start, target=self.target, texts=self._sources, batch=[0],
            max_new_tokens=self.max_new_tokens, key=self._key,
        )  # fmt: skip
        compile_at_once([stopwatch.of_length(longest, k) for k in lengths], begin)

    def _best_chain(
        self, loaded: Checkpoint | Drafter, tokens: Mapping[int, float], costs: Costs
    ) -> "Choice":
        """Choose γ. Args: expected tokens per target call, by γ."""
        rounds = (costs.round_times(costs.gamma_max) / costs.token).tolist()
        steps = {gamma: rounds[gamma] for gamma in tokens if gamma < len(rounds)}
        gamma = max(steps, key=lambda gamma: tokens[gamma] / steps[gamma])
        return Choice(self._method(loaded, gamma), gamma, gamma, steps, tokens[gamma])

    def _best_tree(self, loaded: Checkpoint | Drafter, costs: Costs) -> "Choice":
        drawn = not self._sampling.greedy
        chances = self._along(acceptance_by_rank, loaded, self._sampling, drawn=drawn).tolist()
        found = best_tree.choose(
            chances, self.nodes, DEPTH, costs.c, lambda tokens: costs.v(tokens - 1)
        )
        best = max(found, key=lambda one: one.speedup)
        depth, size = best.shape.depth, best.shape.nodes
        steps = {depth: depth * costs.c + costs.v(size)}
        return Choice(self._branching(loaded, best.shape), depth, size, steps, best.tokens)

    def _measure(
        self, name: str, loaded: Checkpoint | Drafter, longest: Speculative, tree: bool
    ) -> Candidate:
        outputs, timed = self._outputs, self._sources
        lengths = self._lengths(tree)
        self.say("measuring α, while loops of a few lengths compile")
        parts: list[Callable[[], Any]] = [
            functools.partial(self._along, metrics.alpha_of_outputs, loaded, self._sampling),
            functools.partial(self._compile, loaded, lengths),
        ]
        alpha, _ = at_once(lambda part: part(), parts)
        agreement = alpha
        if not self._sampling.greedy:
            agreement = self._along(metrics.alpha_of_outputs, loaded, Greedy())
        expected = {} if tree else self._expected(name, longest, alpha)
        batch = range(min(self.batch_size, len(timed)))
        begin = functools.partial(
            timing.start, target=self.target, max_new_tokens=self.max_new_tokens, key=self._key
        )
        contexts, state = jax.eval_shape(
            lambda: begin(longest, texts=timed, batch=batch, rows=self.batch_size)
        )
        held = longest.target, longest.drafter, contexts, state.cache, state.drafter
        candidate = Candidate(
            name=name,
            remarks=self._remarks(name, loaded),
            parameters=drafters.parameters(loaded, self.target),
            memory=nbytes(held),
            alpha=alpha.value,
            alpha_low=alpha.low,
            alpha_high=alpha.high,
            agreement=agreement.value,
            guesses=guesses(longest.drafter),
            expected={str(gamma): tokens for gamma, tokens in expected.items()},
            tokens=alpha.tokens / len(outputs),
        )
        for _ in range(MAX_TIMINGS):
            costs = self._costs(loaded, lengths)
            if tree:
                chosen = self._best_tree(loaded, costs)
            else:
                chosen = self._best_chain(loaded, expected, costs)
            found = self._timed(candidate, loaded, costs, chosen, alpha.overlaps)
            if not found.doubts or self._pace.left() == 0:
                break
        return found

    def _timed(
        self,
        candidate: Candidate,
        loaded: Checkpoint | Drafter,
        costs: Costs,
        chosen: "Choice",
        overlaps: Sequence[np.ndarray],
    ) -> Candidate:
        """Time the chosen loop beside plain decoding, if it can win."""
        v, steps, tree = costs.v(chosen.nodes), chosen.steps[chosen.gamma], chosen.method.branches
        doubtful = functools.partial(
            doubts.contradictions, chosen.gamma, costs.c, v,
            smaller=candidate.parameters < sum(x.size for x in jax.tree.leaves(self.target.model)),
        )  # fmt: skip
        tried = tree or max(chosen.steps) == max(self.gammas)
        few = f"drafts of more than {max(chosen.steps)} tokens were not tried, for lack of minutes"
        found = dataclasses.replace(
            candidate,
            remarks=candidate.remarks if tried else (*candidate.remarks, few),
            c=costs.c,
            gamma=chosen.gamma,
            tree=text_of(chosen.method.shape) if tree else "",
            nodes=chosen.nodes,
            v=v,
            steps={str(gamma): time for gamma, time in chosen.steps.items()},
            promised=chosen.tokens,
            predicted=chosen.tokens / steps,
            tuned_for=conditions(chosen.method, self.target, loaded, 1, self.max_new_tokens),
        )
        if not tree and not doubtful():
            bounds = [metrics.tokens_along(overlaps, g) / took for g, took in chosen.steps.items()]
            bound = max(*bounds, found.predicted)
            if self.minutes and (dropped := cannot_win(bound, self._leader)):
                self.say(f"not timed: {dropped}")
                return dataclasses.replace(found, dropped=dropped)
        raced, tokens = self._raced(candidate.name, chosen, found.predicted)
        predicted = found.predicted
        if not tree and not candidate.guesses:  # of the same tokens as the timings
            timed = [output[:tokens] for output in overlaps]
            predicted = metrics.tokens_along(timed, chosen.gamma) / steps
        chooses, rest = raced.halves()
        speedups = rest.speedups()
        longest_drafted = metrics.tokens_by_position(raced.outputs(), [chosen.method.gamma_max])
        tau, load = summarize(raced.outputs()).tokens_per_iteration, doubts.load_average()
        # A level of a tree takes longer than a draft step, which is all that its costs know.
        both: dict[str, Any] = {} if tree else {"measured": raced.speedup, "predicted": tau / steps}
        return dataclasses.replace(
            found,
            unended=longest_drafted[chosen.method.gamma_max],
            tau=tau,
            predicted=predicted,
            speedup=speedups["speedup_decode"],
            speedup_low=speedups["speedup_decode_low"],
            speedup_high=speedups["speedup_decode_high"],
            speedup_end_to_end=speedups["speedup_end_to_end"],
            choosing=chooses.speedup_end_to_end if len(raced.rows[timing.PLAIN]) > 1 else 0.0,
            doubts=doubtful(**both),
            load=None if np.isnan(load) else load,
        )

    def _raced(
        self, name: str, chosen: "Choice", predicted: float
    ) -> tuple[timing.Comparison, int]:
        """Time the chosen loop beside plain decoding, on what there is time for.

        Returns:
          the timings, and the most tokens of an output.
        """
        time_of_both = self._pace.token * (1 + 1 / predicted)
        counts = reduced(
            {"inputs": len(self._sources), "tokens": self.max_new_tokens, "repeats": self.repeats},
            {"inputs": MIN_INPUTS, "tokens": MIN_TOKENS, "repeats": 2},
            lambda inputs, tokens, repeats: (1 + inputs * repeats) * tokens * time_of_both,
            self._pace.left(1 / self._left),
        )
        timed = timing.spread(self._sources, counts["inputs"])
        tokens = counts["tokens"]
        if (len(timed), tokens) != (len(self._sources), self.max_new_tokens):
            self.say(f"for lack of minutes only {len(timed)} inputs and {tokens} tokens are timed")
        found = self._in_turns(
            {timing.PLAIN: self._plain, timing.SPECULATIVE: chosen.method},
            timed,
            budgets=[tokens] * len(timed),
            repeats=self.repeats,
            names=(self.target.name, name),
            until=self._pace.until(1 / self._left),
            say=self.say,
        )
        if tokens == self.max_new_tokens:
            return found, tokens
        # A prefill counts by the tokens of whole outputs.
        lengths = np.array([*map(len, self._outputs)])
        share = float(np.minimum(lengths, tokens).sum() / max(1, lengths.sum()))
        both = {
            method: found.decode[method] + share * (whole - found.decode[method])
            for method, whole in found.whole.items()
        }
        return dataclasses.replace(found, whole=both), tokens

    def _expected(self, name: str, longest: Speculative, alpha: metrics.Alpha) -> dict[int, float]:
        """Expected tokens per target call along whole outputs, by γ."""
        if guesses(longest.drafter):
            return metrics.tokens_by_position(
                self._rows(longest, self._measured, name), self.gammas
            )
        return {gamma: metrics.tokens_along(alpha.overlaps, gamma) for gamma in self.gammas}

    def _remarks(self, name: str, loaded: Checkpoint | Drafter) -> tuple[str, ...]:
        if isinstance(loaded, Checkpoint):
            checks = compatibility.compare(self.target, loaded, tokens=self.check_tokens)
            return tuple(str(check) for check in checks if not check.passed and not check.required)
        if counts_ngrams(name):
            seen, left = len(self._counted), len(self._measured)
            return (
                f"counts the target's outputs for {seen} of the inputs, and all candidates are "
                f"measured on the {left} others",
            )
        return ()


class Choice(NamedTuple):
    """A chain or a tree, before its loop is timed."""

    method: Any
    gamma: int  # or the depth
    nodes: int
    steps: dict[int, float]  # target steps of a round, by γ or depth
    tokens: float  # expected, per target call
