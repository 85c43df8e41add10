"""Candidates: drafts that are measured on the same inputs, one after the other."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from specjax import drafters, rules, trees
from specjax.checkpoints import Checkpoint, compatibility
from specjax.decoding import building
from specjax.decoding.conditions import conditions
from specjax.defaults import GAMMAS, REPEATS, TIMED_INPUTS
from specjax.drafters.abilities import guesses
from specjax.drafters.base import Drafter
from specjax.measure import doubts, metrics, timing
from specjax.measure.compiling import at_once
from specjax.measure.costing import filled
from specjax.measure.timing import PLAIN
from specjax.models.memory import nbytes
from specjax.policies import with_any_costs
from specjax.results import summarize
from specjax.sampling import Greedy
from specjax.settings import MAX_GAMMA, Drafting, Fields
from specjax.support.named import short
from specjax.support.ranges import listed, truth, whole
from specjax.tuning.fitting import ALPHA_TEXTS
from specjax.tuning.inputs import MIN_INPUTS, Inputs
from specjax.tuning.job import Job
from specjax.tuning.recommendation import (
    Candidate,
    Selection,
    beats_plain,
    cannot_win,
    counts_ngrams,
    recommend,
)
from specjax.tuning.ways import BestTree, Decided, Lengths, Way, fastest

Draft = str | Checkpoint | Drafter

MAX_TIMINGS = 2  # of one candidate, if they contradict themselves
MIN_TOKENS = 32  # of a timed output, where time is short


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


@dataclasses.dataclass
class Candidates:
    """Drafts of one job, measured on its inputs.

    Every other batch of the timed inputs chooses among them, and the rest measure how fast each is.

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
    drafting: Drafting | None = None  # with a policy's name, at the job's batch size; else 1

    def __post_init__(self):
        check_numbers(self.gammas, self.nodes, self.timed_inputs, self.repeats)
        truth("check_tokens", self.check_tokens)
        self._left = max(1, len(self.wanted))  # candidates to measure
        self._leader: Candidate | None = None
        rows = self.job.rows if self.drafting else 1
        most = max(ALPHA_TEXTS, 2 * rows) if self.drafting else None
        timed, counts = max(self.timed_inputs, 2 * rows), any(map(counts_ngrams, self.drafts))
        self.inputs = Inputs(self.job, timed, self.repeats, counts, self._left, rows, most)

    @property
    def wanted(self) -> list[tuple[Draft, bool]]:
        """Each draft, and whether a tree is asked for: the arguments of `measure`."""
        kinds = [False, True] if self.nodes else [False]
        return [(draft, tree) for draft in self.drafts for tree in kinds]

    def chosen(self) -> Selection:
        """Measure all candidates, and choose one or plain decoding.

        The draft's name stays one, unless it was loaded with these counts or another dtype.
        """
        candidates = [self.measure(draft, tree) for draft, tree in self.wanted]
        chosen = recommend(candidates, [draft for draft, _ in self.wanted])
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
            kind = self._kind(loaded, tree)
        except (ValueError, OSError) as error:
            found = Candidate(name, problem=str(error), tree="none" if tree else "")
        else:
            found = self._measure(name, loaded, kind)
            del loaded, kind
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
        how |= {"policy": None, "check_tokens": self.check_tokens}
        return building.build(job.target, loaded, self.drafting, sampling=job.chosen, **how)

    def _kind(self, loaded: Checkpoint | Drafter, tree: bool) -> Lengths:
        """The ways to decode that are asked for; ValueError if the draft cannot do it."""
        share = 1 / self._left
        if self.drafting:
            longest, policy = self._build(loaded), str(self.drafting.policy)
            building.with_policy(longest, with_any_costs(policy, longest.gamma_max))
            gammas = range(1, longest.gamma_max + 1)
            return Decided(self.inputs, longest, gammas, share, policy)
        longest = self._build(loaded, gamma=max(self.nodes if tree else self.gammas))
        if not tree:
            return Lengths(self.inputs, longest, self.gammas, share)
        self._build(loaded, tree=trees.fixed(1))  # whether both can branch
        how = sorted({1, *self.nodes}), share, self.nodes, loaded, self.check_tokens
        return BestTree(self.inputs, longest, *how)

    def _measure(self, name: str, loaded: Checkpoint | Drafter, kind: Lengths) -> Candidate:
        job, outputs, loops = self.job, self.inputs.outputs, kind.loops
        along = loops[-1] if loops else self._build(loaded, gamma=1, tree=None, passes=())
        if not (known := rules.own_acceptance(along.rule, along.sampling)):
            along = dataclasses.replace(along, rule=rules.Token())
        job.say("measuring α, while loops of a few lengths compile")
        begun = time.monotonic()
        parts: list[Callable[[], Any]] = [
            functools.partial(self.inputs.watch.compile, loops, self.inputs.timed),
            functools.partial(self.inputs.alpha, along),  # started by the same program
        ]
        _, alpha = at_once(lambda part: part(), parts)
        job.pace.loop = (time.monotonic() - begun) / max(1, len(loops))
        agreement = alpha
        if not job.chosen.greedy:
            agreement = self.inputs.alpha(dataclasses.replace(along, sampling=Greedy()))
        known = known and not guesses(along.drafter)
        overlaps = alpha.overlaps if known else []
        expected = {}
        if overlaps and kind.chains:
            expected = {gamma: metrics.tokens_along(overlaps, gamma) for gamma in kind.gammas}
        elif kind.chains:
            rows = self.inputs.stream(kind.longest, self.inputs.measured, name)
            expected = metrics.tokens_by_position(rows, kind.gammas)
        candidate = Candidate(
            name=name,
            remarks=self._remarks(name, loaded),
            parameters=drafters.parameters(loaded, job.target),
            memory=self._memory(kind.longest),
            alpha=alpha.value,
            alpha_low=alpha.low,
            alpha_high=alpha.high,
            agreement=agreement.value,
            guesses=guesses(along.drafter),
            expected={str(gamma): tokens for gamma, tokens in expected.items()},
            tokens=alpha.tokens / len(outputs),
            tuned_for=conditions(
                kind.longest, job.target, loaded, self.inputs.rows, job.max_new_tokens
            ),
        )
        for _ in range(MAX_TIMINGS):
            found = self._timings(candidate, kind.ways(expected, overlaps), overlaps)
            if not found.doubts or job.pace.left() == 0:
                break
        return found

    def _memory(self, longest: Any) -> int:
        """Bytes of both models and their caches, at the job's batch size."""
        rows = self.job.batch_size
        watch = dataclasses.replace(self.inputs.watch, batch_size=rows)
        batch = filled(self.inputs.timed, rows)[:rows]
        start = functools.partial(watch.begin, longest, batch, range(rows))
        contexts, state = jax.eval_shape(start)
        return nbytes((longest.target, longest.drafter, contexts, state.cache, state.drafter))

    def _remarks(self, name: str, loaded: Checkpoint | Drafter) -> tuple[str, ...]:
        if isinstance(loaded, Checkpoint):
            job = self.job
            checks = compatibility.compare(job.target, loaded, tokens=self.check_tokens)
            return tuple(str(check) for check in checks if not check.passed and not check.required)
        if counts_ngrams(name):
            seen, left = len(self.inputs.counted), len(self.inputs.measured)
            seen_by = f"counts the target's outputs for {seen} of the inputs, and all candidates"
            return (f"{seen_by} are measured on the {left} others",)
        return ()

    def _timings(
        self, candidate: Candidate, ways: list[Way], overlaps: Sequence[np.ndarray]
    ) -> Candidate:
        """Time the ways that may win beside plain decoding; the fastest one is the candidate."""
        job = self.job
        if not ways:
            return dataclasses.replace(candidate, dropped="its policy prefers plain decoding")
        smaller = candidate.parameters < sum(x.size for x in jax.tree.leaves(job.target.model))
        doubtful = functools.partial(_doubts, smaller=smaller)
        best = max(ways, key=lambda way: way.predicted)
        predictable = job.minutes and not (best.tree or doubtful(best))
        if predictable and (dropped := cannot_win(best.predicted, self._leader)):
            job.say(f"not timed: {dropped}")
            return dataclasses.replace(self._described(candidate, best), dropped=dropped)
        raced, budget = self._raced(candidate.name, ways)
        chooses, rest = raced.halves()
        named = {way.name: way for way in ways}
        best = named[fastest(chooses, named, ways[-1].policy)]
        speedups, rows = rest.speedups(best.name), raced.outputs(best.name)
        unended = tau = summarize(rows).tokens_per_iteration
        predicted, both = best.predicted, dict[str, Any]()
        if not best.policy:
            unended = metrics.tokens_by_position(rows, [best.gamma])[best.gamma]
        if not best.tree and len(overlaps):  # of the same tokens as the timings
            predicted = best.promised([output[:budget] for output in overlaps])
        if not (best.tree or best.policy):  # their rounds differ, and the costs are of whole ones
            tokens, rounds, _ = raced.lasting(best.name)
            both["measured"] = raced.speedups(best.name)["speedup_decode"]
            both["predicted"] = tokens / rounds / best.steps[best.gamma]
        load, several = doubts.load_average(), len(raced.rows[PLAIN]) > 1
        return dataclasses.replace(
            self._described(candidate, best),
            unended=unended,
            tau=tau,
            predicted=predicted,
            speedup=speedups["speedup_decode"],
            speedup_low=speedups["speedup_decode_low"],
            speedup_high=speedups["speedup_decode_high"],
            speedup_end_to_end=speedups["speedup_end_to_end"],
            choosing=chooses.speedups(best.name)["speedup_end_to_end"] if several else 0.0,
            doubts=doubtful(best, **both),
            load=None if np.isnan(load) else load,
        )

    def _described(self, candidate: Candidate, way: Way) -> Candidate:
        """The candidate that decodes this way, with what its costs promise."""
        longest, rule = max(way.steps), self.drafting.rule if self.drafting else None
        wanted = (self.drafting and self.drafting.gamma) or max(self.gammas)
        few = f"drafts of more than {longest} tokens were not tried, for lack of minutes"
        tried = way.tree or longest == wanted
        return dataclasses.replace(
            candidate,
            remarks=candidate.remarks if tried else (*candidate.remarks, few),
            c=way.c,
            gamma=way.gamma,
            tree=way.tree,
            policy=way.policy,
            settings={**way.settings, "rule": rule, "check_tokens": self.check_tokens},
            nodes=way.nodes,
            v=way.v,
            steps={str(gamma): took for gamma, took in way.steps.items() if gamma},
            promised=way.tokens,
            predicted=way.predicted,
        )

    def _raced(self, name: str, ways: Sequence[Way]) -> tuple[timing.Comparison, int]:
        """Time loops beside plain decoding, as there is time; also the most tokens of an output."""
        job, share, rows = self.job, 1 / self._left, self.inputs.rows
        all_timed, known = self.inputs.timed, [way.predicted or 1.0 for way in ways]
        batches = -(-len(all_timed) // rows)
        counts = job.pace.afford(
            1 + sum(1 / speedup for speedup in known), share,
            inputs=(batches, min(batches, max(2, MIN_INPUTS // rows))),
            tokens=(job.max_new_tokens, MIN_TOKENS), repeats=(self.repeats, 2),
        )  # fmt: skip
        timed = timing.spread(all_timed, min(len(all_timed), counts["inputs"] * rows))
        tokens = counts["tokens"]
        if (len(timed), tokens) != (len(all_timed), job.max_new_tokens):
            job.say(f"for lack of minutes only {len(timed)} inputs and {tokens} tokens are timed")
        until, names = job.pace.until(share), (job.target.name, name)
        watch = dataclasses.replace(self.inputs.watch, names=names, until=until)
        methods = {PLAIN: job.plain} | {way.name: way.method for way in ways}
        found = watch.race(methods, timed, [tokens] * len(timed))
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


def _doubts(way: Way, **facts: Any) -> tuple[str, ...]:
    """Contradictions in what its rounds take. Rounds of one token do not separate c and v."""
    c, v = (way.c, way.v) if max(way.steps) > 1 else (0.0, way.steps[way.gamma])
    return doubts.contradictions(way.gamma, c, v, **facts)
