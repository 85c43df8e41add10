"""Candidates: drafts that are measured on the same inputs, one after the other."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from specjax import drafters, trees
from specjax.checkpoints import Checkpoint, compatibility
from specjax.decoding import building
from specjax.decoding.conditions import conditions
from specjax.defaults import GAMMAS, REPEATS, TIMED_INPUTS
from specjax.drafters.abilities import guesses
from specjax.drafters.base import Drafter
from specjax.measure import costing, doubts, metrics, timing
from specjax.measure.compiling import at_once
from specjax.measure.costing import TIMED_TEXTS, TIMED_TOKENS, filled, with_length
from specjax.measure.timing import PLAIN, SPECULATIVE
from specjax.models.memory import nbytes
from specjax.policies import Costs, constant
from specjax.results import summarize
from specjax.sampling import Greedy
from specjax.settings import MAX_GAMMA, Fields
from specjax.speculative import Speculative
from specjax.support.named import short
from specjax.support.ranges import listed, truth, whole
from specjax.trees.shapes import text_of
from specjax.tuning import best_tree
from specjax.tuning.inputs import MIN_INPUTS, Inputs
from specjax.tuning.job import Job
from specjax.tuning.ranks import acceptance_by_rank
from specjax.tuning.recommendation import (
    Candidate,
    Selection,
    beats_plain,
    cannot_win,
    counts_ngrams,
)

Draft = str | Checkpoint | Drafter

DEPTH = 8  # of trees, at most
MAX_TIMINGS = 2  # of one candidate, if they contradict themselves
COST_REPEATS = 3
# Where time is short: tokens of a timed output; of `gammas` only the longest of the first few has a
# loop; the share of a candidate's time for costs.
MIN_TOKENS, MAX_SHORT_GAMMAS, MAX_SHARE_OF_COSTS = 32, 4, 0.25


def check_numbers(
    gammas: Sequence[int], nodes: Sequence[int], timed_inputs: int, repeats: int
) -> None:
    """Raise ValueError for a number that is out of range."""
    for gamma in listed("gammas", gammas):
        whole("gammas", gamma, f"[1, {MAX_GAMMA}]")
    for size in nodes if isinstance(nodes, Sequence) else listed("nodes", nodes):
        whole("nodes", size, "[1, ∞)")
    whole("timed_inputs", timed_inputs, "[1, ∞)")
    whole("repeats", repeats, "[1, ∞)")


class Choice(NamedTuple):
    """A chain or a tree, before its loop is timed."""

    method: Any
    gamma: int  # or the depth
    nodes: int
    v: float  # target steps of a round without its draft steps
    steps: dict[int, float]  # target steps of a round, by γ or depth
    tokens: float  # expected, per target call

    @property
    def tree(self) -> str:
        """The tree in words; "" for a chain."""
        return text_of(self.method.shape) if self.method.branches else ""


@dataclasses.dataclass
class Candidates:
    """Drafts of one job, measured on its inputs.

    Every other timed input chooses among them, and the rest measure how fast each is.

    Raises:
      ValueError: too few inputs, or a number out of range.
    """

    job: Job
    drafts: Sequence[Draft] = ()
    gammas: Sequence[int] = GAMMAS
    nodes: Sequence[int] = ()  # sizes of trees to try too
    timed_inputs: int = TIMED_INPUTS
    repeats: int = REPEATS
    dtype: Any = None  # of named drafts, as `specjax.load` takes it
    check_tokens: bool = True  # False: drafts whose tokens are not the target's are tried too

    def __post_init__(self):
        check_numbers(self.gammas, self.nodes, self.timed_inputs, self.repeats)
        truth("check_tokens", self.check_tokens)
        self._left = max(1, len(self.wanted))  # candidates to measure
        self._leader: Candidate | None = None
        counts, repeats = any(map(counts_ngrams, self.drafts)), self.repeats
        self.inputs = Inputs(self.job, self.timed_inputs, repeats, counts, self._left)

    @property
    def wanted(self) -> list[tuple[Draft, bool]]:
        """Each draft, and whether a tree is asked for: the arguments of `measure`."""
        return [
            (draft, tree)
            for draft in self.drafts
            for tree in ([False, True] if self.nodes else [False])
        ]

    def ready(self, chosen: Selection) -> Selection:
        """Complete the selection with a draft that `generate` can take.

        A name stays one, unless it was loaded with these counts or another dtype.
        """
        draft = chosen.draft
        if draft is None or not (counts_ngrams(draft) or self.dtype is not None):
            return chosen
        return dataclasses.replace(chosen, draft=self._load(draft))

    def measure(self, draft: Draft, tree: bool = False) -> Candidate:
        """Measure one candidate, with its best chain or its best tree.

        `Candidate.problem` is set if a model cannot be loaded, does not fit or cannot branch.
        """
        name = drafters.name_of(draft)
        if isinstance(draft, str):
            self.job.say(f"loading {short(name)}")
        try:
            loaded = self._load(draft)
            longest = self._build(loaded, gamma=max(self.nodes if tree else self.gammas))
            if tree:
                self._build(loaded, tree=trees.fixed(1))  # whether both can branch
        except (ValueError, OSError) as error:
            found = Candidate(name, problem=str(error), tree="none" if tree else "")
        else:
            found = self._measure(name, loaded, longest, tree)
            del loaded, longest
            gc.collect()  # before the next one is loaded
        self._left = max(1, self._left - 1)
        if beats_plain(found) and found.chosen_by > getattr(self._leader, "chosen_by", 0.0):
            self._leader = found
        return found

    def _load(self, draft: Draft) -> Checkpoint | Drafter:
        if not isinstance(draft, str):
            return draft
        target = self.job.target
        return drafters.load(draft, target, dtype=self.dtype, counts=lambda: self.inputs.counts)

    def _build(self, loaded: Checkpoint | Drafter, **how: Unpack[Fields]) -> Any:
        job = self.job
        how["check_tokens"] = self.check_tokens
        return building.build(job.target, loaded, sampling=job.chosen, **how)

    def _measure(
        self, name: str, loaded: Checkpoint | Drafter, longest: Speculative, tree: bool
    ) -> Candidate:
        job, outputs = self.job, self.inputs.outputs
        lengths = self._lengths(tree)
        loops = [with_length(longest, length) for length in lengths]
        job.say("measuring α, while loops of a few lengths compile")
        begun = time.monotonic()
        parts: list[Callable[[], Any]] = [
            functools.partial(self.inputs.watch.compile, loops, self.inputs.timed),
            functools.partial(self.inputs.alpha, loops[-1]),  # started by the same program
        ]
        _, alpha = at_once(lambda part: part(), parts)
        job.pace.loop = (time.monotonic() - begun) / len(loops)
        agreement = alpha
        if not job.chosen.greedy:
            agreement = self.inputs.alpha(dataclasses.replace(loops[-1], sampling=Greedy()))
        expected = {} if tree else self._expected(name, longest, alpha)
        candidate = Candidate(
            name=name,
            remarks=self._remarks(name, loaded),
            parameters=drafters.parameters(loaded, job.target),
            memory=self._memory(longest),
            alpha=alpha.value,
            alpha_low=alpha.low,
            alpha_high=alpha.high,
            agreement=agreement.value,
            guesses=guesses(longest.drafter),
            expected={str(gamma): tokens for gamma, tokens in expected.items()},
            tokens=alpha.tokens / len(outputs),
        )
        for _ in range(MAX_TIMINGS):
            costs = self._costs(longest, lengths)
            if tree:
                chosen = self._best_tree(loaded, costs)
            else:
                chosen = self._best_chain(longest, lengths, expected, costs)
            found = self._timings(candidate, loaded, costs, chosen, alpha.overlaps)
            if not found.doubts or job.pace.left() == 0:
                break
        return found

    def _memory(self, longest: Speculative) -> int:
        """Bytes of both models and their caches, at the job's batch size."""
        rows = self.job.batch_size
        watch = dataclasses.replace(self.inputs.watch, batch_size=rows)
        batch = filled(self.inputs.timed, rows)[:rows]
        start = functools.partial(watch.begin, longest, batch, range(rows))
        contexts, state = jax.eval_shape(start)
        return nbytes((longest.target, longest.drafter, contexts, state.cache, state.drafter))

    def _expected(self, name: str, longest: Speculative, alpha: metrics.Alpha) -> dict[int, float]:
        """Expected tokens per target call along whole outputs, by γ."""
        if guesses(longest.drafter):
            rows = self.inputs.rows(longest, self.inputs.measured, name)
            return metrics.tokens_by_position(rows, self.gammas)
        return {gamma: metrics.tokens_along(alpha.overlaps, gamma) for gamma in self.gammas}

    def _remarks(self, name: str, loaded: Checkpoint | Drafter) -> tuple[str, ...]:
        if isinstance(loaded, Checkpoint):
            job = self.job
            checks = compatibility.compare(job.target, loaded, tokens=self.check_tokens)
            return tuple(str(check) for check in checks if not check.passed and not check.required)
        if counts_ngrams(name):
            seen, left = len(self.inputs.counted), len(self.inputs.measured)
            return (
                f"counts the target's outputs for {seen} of the inputs, and all candidates are "
                f"measured on the {left} others",
            )
        return ()

    def _lengths(self, tree: bool) -> list[int]:
        """The draft lengths whose loops are timed: few, since each is compiled.

        Where time is short it is one, in which shorter drafts are timed too, and longer ones are
        not tried.
        """
        found = sorted({1, *self.nodes} if tree else {*self.gammas})
        if not tree and self.job.pace.is_short(1 / self._left):
            return found[:MAX_SHORT_GAMMAS][-1:]
        return sorted({found[0], found[len(found) // 2], found[-1]})

    def _costs(self, longest: Speculative, lengths: Sequence[int]) -> Costs:
        """Time whole calls with drafts of these lengths on a few inputs."""
        pace, share = self.job.pace, MAX_SHARE_OF_COSTS / self._left
        calls = 2 * (len(lengths) + 2)  # of an input: two of each length and of plain decoding
        tokens = min(self.job.max_new_tokens, TIMED_TOKENS), MIN_TOKENS // 2
        counts = pace.afford(calls, share, inputs=(TIMED_TEXTS, 1), tokens=tokens)
        until, watch = pace.until(share), self.inputs.watch
        watch = dataclasses.replace(watch, repeats=COST_REPEATS, until=until)
        timed = timing.spread(self.inputs.timed, counts["inputs"])
        method = dataclasses.replace(longest, gamma_max=lengths[-1])
        return costing.costs_of(watch, method, timed, lengths, counts["tokens"])

    def _best_chain(
        self,
        longest: Speculative,
        lengths: Sequence[int],
        tokens: Mapping[int, float],
        costs: Costs,
    ) -> Choice:
        """Choose γ.

        With several timed lengths, each γ has a loop of its own, whose times are interpolated.
        With one, all γ share its loop, whose target calls have room for that length.

        Args:
          tokens: expected per target call, by γ.
        """
        gammas = [gamma for gamma in tokens if gamma <= costs.gamma_max]
        passes = {gamma: costs.v(gamma) for gamma in gammas}
        if len(lengths) == 1:
            passes = dict.fromkeys(gammas, costs.v(lengths[0]))
        steps = {gamma: gamma * costs.c + passes[gamma] for gamma in gammas}
        gamma = max(steps, key=lambda gamma: tokens[gamma] / steps[gamma])
        method = with_length(longest, lengths[0] if len(lengths) == 1 else gamma)
        method = dataclasses.replace(method, policy=constant(gamma))
        return Choice(method, gamma, gamma, passes[gamma], steps, tokens[gamma])

    def _best_tree(self, loaded: Checkpoint | Drafter, costs: Costs) -> Choice:
        job = self.job
        chances = acceptance_by_rank(
            job.target, loaded, self.inputs.measured, self.inputs.outputs, sampling=job.chosen,
            drawn=not job.chosen.greedy, batch_size=job.batch_size,
            max_source_len=job.max_source_len, check_tokens=self.check_tokens,
        ).tolist()  # fmt: skip
        found = best_tree.choose(
            chances, self.nodes, DEPTH, costs.c, lambda tokens: costs.v(tokens - 1)
        )
        best = max(found, key=lambda one: one.speedup)
        depth, size = best.shape.depth, best.shape.nodes
        steps = {depth: depth * costs.c + costs.v(size)}
        method = self._build(loaded, tree=best.shape)
        return Choice(method, depth, size, costs.v(size), steps, best.tokens)

    def _timings(
        self,
        candidate: Candidate,
        loaded: Checkpoint | Drafter,
        costs: Costs,
        chosen: Choice,
        overlaps: Sequence[np.ndarray],
    ) -> Candidate:
        """Time the chosen loop beside plain decoding, if it can win."""
        job, steps, tree = self.job, chosen.steps[chosen.gamma], chosen.method.branches
        doubtful = functools.partial(
            doubts.contradictions, chosen.gamma, costs.c, chosen.v,
            smaller=candidate.parameters < sum(x.size for x in jax.tree.leaves(job.target.model)),
        )  # fmt: skip
        tried = tree or max(chosen.steps) == max(self.gammas)
        few = f"drafts of more than {max(chosen.steps)} tokens were not tried, for lack of minutes"
        found = dataclasses.replace(
            candidate,
            remarks=candidate.remarks if tried else (*candidate.remarks, few),
            c=costs.c,
            gamma=chosen.gamma,
            tree=chosen.tree,
            nodes=chosen.nodes,
            v=chosen.v,
            steps={str(gamma): took for gamma, took in chosen.steps.items()},
            promised=chosen.tokens,
            predicted=chosen.tokens / steps,
            tuned_for=conditions(chosen.method, job.target, loaded, 1, job.max_new_tokens),
        )
        if not tree and not doubtful():
            bounds = [metrics.tokens_along(overlaps, g) / took for g, took in chosen.steps.items()]
            bound = max(*bounds, found.predicted)
            if job.minutes and (dropped := cannot_win(bound, self._leader)):
                job.say(f"not timed: {dropped}")
                return dataclasses.replace(found, dropped=dropped)
        raced, budget = self._raced(candidate.name, chosen, found.predicted)
        predicted = found.predicted
        if not tree and not candidate.guesses:  # of the same tokens as the timings
            timed = [output[:budget] for output in overlaps]
            predicted = metrics.tokens_along(timed, chosen.gamma) / steps
        chooses, rest = raced.halves()
        speedups = rest.speedups()
        unended = metrics.tokens_by_position(raced.outputs(), [chosen.gamma])[chosen.gamma]
        tau, load = summarize(raced.outputs()).tokens_per_iteration, doubts.load_average()
        # A level of a tree takes longer than a draft step, which is all that its costs know.
        both: dict[str, Any] = {} if tree else {"measured": raced.speedup, "predicted": tau / steps}
        return dataclasses.replace(
            found,
            unended=unended,
            tau=tau,
            predicted=predicted,
            speedup=speedups["speedup_decode"],
            speedup_low=speedups["speedup_decode_low"],
            speedup_high=speedups["speedup_decode_high"],
            speedup_end_to_end=speedups["speedup_end_to_end"],
            choosing=chooses.speedup_end_to_end if len(raced.rows[PLAIN]) > 1 else 0.0,
            doubts=doubtful(**both),
            load=None if np.isnan(load) else load,
        )

    def _raced(self, name: str, chosen: Choice, predicted: float) -> tuple[timing.Comparison, int]:
        """Time the chosen loop beside plain decoding, on what there is time for.

        Returns:
          the timings, and the most tokens of an output.
        """
        job, share, all_timed = self.job, 1 / self._left, self.inputs.timed
        counts = job.pace.afford(
            1 + 1 / predicted, share,
            inputs=(len(all_timed), MIN_INPUTS), tokens=(job.max_new_tokens, MIN_TOKENS),
            repeats=(self.repeats, 2),
        )  # fmt: skip
        timed = timing.spread(all_timed, counts["inputs"])
        tokens = counts["tokens"]
        if (len(timed), tokens) != (len(all_timed), job.max_new_tokens):
            job.say(f"for lack of minutes only {len(timed)} inputs and {tokens} tokens are timed")
        until, names = job.pace.until(share), (job.target.name, name)
        watch = dataclasses.replace(self.inputs.watch, names=names, until=until)
        ways = {PLAIN: job.plain, SPECULATIVE: chosen.method}
        found = watch.race(ways, timed, [tokens] * len(timed))
        if tokens == job.max_new_tokens:
            return found, tokens
        # A prefill counts by the tokens of whole outputs.
        lengths = np.array([*map(len, self.inputs.outputs)])
        part = float(np.minimum(lengths, tokens).sum() / max(1, lengths.sum()))
        both = {
            method: found.decode[method] + part * (whole - found.decode[method])
            for method, whole in found.whole.items()
        }
        return dataclasses.replace(found, whole=both), tokens
