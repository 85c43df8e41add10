"""A target with some inputs, on which drafts are measured one after the other."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import decoding, drafters, formulas, trees
from specjax.autoregressive import Autoregressive
from specjax.checkpoints import Checkpoint, compatibility
from specjax.defaults import BATCH_SIZE, GAMMAS, MINUTES, NEW_TOKENS, REPEATS, TIMED_INPUTS
from specjax.drafters import ngram
from specjax.drafters.base import Drafter
from specjax.drafters.observing import guesses
from specjax.loop import Method
from specjax.measure import doubts, metrics, phases, timing
from specjax.models.memory import nbytes
from specjax.policies import Costs
from specjax.results import Row, summarize
from specjax.sampling import Greedy, Sampling, as_sampling, key_for
from specjax.speculative import Speculative
from specjax.support.named import short
from specjax.support.ranges import has, listed, whole
from specjax.trees import FixedTree
from specjax.trees.shapes import text_of
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import best_tree
from specjax.tuning.pace import Pace, reduced
from specjax.tuning.ranks import acceptance_by_rank
from specjax.tuning.recommendation import (
    Candidate,
    Selection,
    beats_plain,
    cannot_win,
    counts_ngrams,
)
from specjax.types import Text

DEPTH = 8  # of trees, at most

MAX_TIMINGS = 2  # of one candidate, if they contradict themselves
# Inputs and tokens that are timed where time is short, and shares of the time for all else.
MIN_INPUTS, MIN_TOKENS = 4, 32
MAX_SHARE_OF_OUTPUTS = 0.25
LOOPS = 4  # that a candidate compiles, in programs of the size of plain decoding's


def _content(text: Text) -> str | tuple[int, ...]:
    """What makes two inputs the same: a text without blanks around it, or its token ids."""
    return text.strip() if isinstance(text, str) else tuple(text)


def check_numbers(
    gammas: Sequence[int], nodes: Sequence[int], timed_inputs: int, repeats: int
) -> None:
    """Raise ValueError for a number that is out of range."""
    for gamma in listed("gammas", gammas):
        whole("gammas", gamma, "[1, ∞)")
    for size in nodes if isinstance(nodes, Sequence) else listed("nodes", nodes):
        whole("nodes", size, "[1, ∞)")
    whole("timed_inputs", timed_inputs, "[1, ∞)")
    whole("repeats", repeats, "[1, ∞)")


@dataclasses.dataclass
class Trial:
    """A target with some inputs, on which candidates are measured one after the other.

    α is over tokens that the target generates, at batch `batch_size`. Times are at batch 1, on
    `timed_inputs` of the inputs, spread over the list. Every other one chooses among the
    candidates, and the rest measure how fast each is. Drafts that count n-grams count the target's
    outputs for the first half of the different inputs. All candidates are then measured on the
    rest: no input is in both parts, however often it is given.

    Raises:
      ValueError: too few inputs, or gammas that are no whole numbers ≥ 1.
    """

    target: Checkpoint
    texts: Sequence[Text]
    drafts: Sequence[str | Checkpoint | Drafter] = ()
    sampling: Sampling | None = None  # None: greedy
    max_new_tokens: int = NEW_TOKENS
    key: Key[Array, ""] | int | None = None  # needed where tokens are drawn
    max_source_len: int | None = None
    batch_size: int = BATCH_SIZE
    gammas: Sequence[int] = GAMMAS
    nodes: Sequence[int] = ()  # sizes of trees to try too
    timed_inputs: int = TIMED_INPUTS
    repeats: int = REPEATS
    minutes: float = MINUTES  # see `select`; they begin with the trial
    dtype: Any = None  # of the drafts, as `specjax.load` takes it
    check_tokens: bool = True  # False: drafts whose tokens are not the target's are tried too
    say: timing.Say = timing.silent  # reports the next step

    def __post_init__(self):
        check_numbers(self.gammas, self.nodes, self.timed_inputs, self.repeats)
        has("say", self.say, ("__call__",), "a function of a text")
        self._pace = Pace(self.minutes, self.say)
        self._left = max(1, len(self.drafts) * len(self.shapes))  # candidates to measure
        self._leader: Candidate | None = None
        self._sampling = as_sampling(self.sampling)
        self._key = key_for(self._sampling, self.key)
        decoding.check_texts(self.texts)
        kept = [text for text in self.texts if _content(text)]
        different = list({_content(text): text for text in kept}.values())
        counts = any(map(counts_ngrams, self.drafts))
        self._counted = different[: len(different) // 2] if counts else []
        counted = set(map(_content, self._counted))
        self._measured = [text for text in kept if _content(text) not in counted]
        if len(different if counts else kept) < 2:
            kind = "different input(s)" if counts else "input(s)"
            few = len(different if counts else kept)
            raise ValueError(f"{few} {kind} are too few to choose by: give 2 or more.")

    @property
    def shapes(self) -> list[bool]:
        """Whether to try a tree, for each call of `measure`."""
        return [False, True] if self.nodes else [False]

    @functools.cached_property
    def _plain(self) -> Autoregressive:
        return decoding.plain(self.target, self._sampling)

    def _rows(self, method: Method, texts: Sequence[Text], name: str = "") -> list[Row]:
        rows = decoding.stream(
            method,
            self.target,
            texts,
            max_new_tokens=self.max_new_tokens,
            key=self._key,
            batch_size=self.batch_size,
            max_source_len=self.max_source_len,
            names=(self.target.name, name),
        )
        return list(rows)

    def _decode(self, texts: Sequence[Text]) -> list[list[int]]:
        return [row.tokens for row in self._rows(self._plain, texts)]

    @functools.cached_property
    def _sources(self) -> list[list[int]]:
        """Ids of the timed inputs, after a first pass over them and its forecast."""
        texts = decoding.tokenize(self.target, self._measured, self.max_source_len)
        timed = list(timing.spread(texts, self.timed_inputs))
        calls = 2 * len(timed) * self.repeats * self.max_new_tokens  # and the phases, as much again
        tokens = len(self._measured) * self.max_new_tokens + 2 * calls * self._left
        run: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "key": self._key}
        self._pace.first_pass(self._plain, self.target, timed, LOOPS * self._left, tokens, **run)
        return timed

    @functools.cached_property
    def _outputs(self) -> list[list[int]]:
        """Decode the inputs for α, as many as there is time for."""
        self._sources  # noqa: B018 - it gives the forecast, and compiles what decodes few inputs
        count = reduced(
            {"inputs": len(self._measured)},
            {"inputs": MIN_INPUTS},
            lambda inputs: inputs * self.max_new_tokens * self._pace.token,
            self._pace.left(MAX_SHARE_OF_OUTPUTS),
        )["inputs"]
        self._measured = list(timing.spread(self._measured, count))
        self.say(f"decoding {count} inputs for α")
        if count > MIN_INPUTS or count > self.timed_inputs:
            return self._decode(self._measured)
        # The loop for batches of 1 is compiled; another shape takes longer than it saves.
        few = decoding.tokenize(self.target, self._measured, self.max_source_len)
        found = self._in_turns({timing.PLAIN: self._plain}, few, repeats=1, compiled=True)
        return [row.tokens for row in found.outputs(timing.PLAIN)]

    def _in_turns(
        self, methods: Mapping[str, Method], texts: Sequence[Sequence[int]], **how: Any
    ) -> timing.Comparison:
        return timing.side_by_side(
            methods, self.target, texts, max_new_tokens=self.max_new_tokens, key=self._key,
            width=decoding.common_width(self._sources), **how,
        )  # fmt: skip

    @functools.cached_property
    def _counts(self) -> ngram.Counts:
        if not self._counted:
            raise ValueError(
                "n-grams count outputs of inputs that nothing is measured on: name them among the "
                "trial's drafts, so that some are kept for that."
            )
        outputs = self._decode(self._counted)
        return ngram.count(outputs, self.target.model.vocab_size, self.target.start_id)

    def _load(self, draft: str | Checkpoint | Drafter) -> Checkpoint | Drafter:
        if not isinstance(draft, str):
            return draft
        return drafters.load(draft, self.target, dtype=self.dtype, counts=lambda: self._counts)

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
        return decoding.speculative(
            self.target, loaded, gamma=gamma, sampling=self._sampling,
            check_tokens=self.check_tokens,
        )  # fmt: skip

    def _branching(self, loaded: Checkpoint | Drafter, shape: FixedTree) -> TreeSpeculative:
        return decoding.branching(
            self.target, loaded, shape, sampling=self._sampling, check_tokens=self.check_tokens
        )

    def _best_chain(
        self, loaded: Checkpoint | Drafter, tokens: Mapping[int, float], costs: Costs
    ) -> "Choice":
        """Choose γ. Args: expected tokens per target call, by γ."""
        rest = np.nan_to_num(np.asarray(costs.rest))  # unknown where no whole round was timed
        rounds = np.asarray(costs.verify) + rest + np.arange(len(rest)) * float(costs.draft)
        known = [gamma for gamma in self.gammas if gamma < len(rounds)]
        steps = {gamma: float(rounds[gamma] / costs.token) for gamma in known}
        gamma = max(steps, key=lambda gamma: tokens[gamma] / steps[gamma])
        return Choice(self._method(loaded, gamma), gamma, gamma, steps, tokens[gamma])

    def _best_tree(
        self, loaded: Checkpoint | Drafter, longest: Speculative, begin: Callable[[Any], Any]
    ) -> tuple[Costs, "Choice"]:
        contexts, state = begin(longest)
        costs = phases.measure(longest, contexts, state, self.nodes)
        drawn = not self._sampling.greedy
        chances = self._along(acceptance_by_rank, loaded, self._sampling, drawn=drawn).tolist()
        found = best_tree.choose(
            chances, self.nodes, DEPTH, costs.c, lambda tokens: costs.v(tokens - 1)
        )
        best = max(found, key=lambda one: one.speedup)
        method = self._branching(loaded, best.shape)
        depth, size = best.shape.depth, best.shape.nodes
        contexts, state = begin(method)
        taken = phases.measure(method, contexts, state, [depth], [depth])
        steps = {depth: float(taken.round_times(depth)[depth] / taken.token)}
        return costs, Choice(method, depth, size, steps, best.tokens)

    def _measure(
        self, name: str, loaded: Checkpoint | Drafter, longest: Speculative, tree: bool
    ) -> Candidate:
        outputs, timed = self._outputs, self._sources
        begin = functools.partial(
            timing.start, target=self.target, max_new_tokens=self.max_new_tokens, key=self._key
        )
        middle = sorted(range(len(timed)), key=lambda index: len(timed[index]))[len(timed) // 2]
        phased = functools.partial(begin, texts=timed, batch=[middle])
        self.say("measuring α, while the phases of a round compile")
        parts: list[Callable[[], Any]] = [
            functools.partial(self._along, metrics.alpha_of_outputs, loaded, self._sampling),
            functools.partial(self._pace.stopwatch, longest, phased, self.gammas, 1 / self._left)
            if not tree
            else tuple,
        ]
        alpha, time_phases = phases.at_once(lambda part: part(), parts)
        agreement = alpha
        if not self._sampling.greedy:
            agreement = self._along(metrics.alpha_of_outputs, loaded, Greedy())
        expected = {} if tree else self._expected(name, longest, alpha.value)
        batch = range(min(self.batch_size, len(timed)))
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
            self.say("timing the phases of a round")
            if tree:
                costs, chosen = self._best_tree(loaded, longest, phased)
            else:
                chosen = self._best_chain(loaded, expected, costs := time_phases())
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
        v, steps = costs.v(chosen.nodes), chosen.steps[chosen.gamma]
        doubtful = functools.partial(
            doubts.contradictions, chosen.gamma, costs.c, v, steps - chosen.gamma * costs.c - v,
            smaller=candidate.parameters < sum(x.size for x in jax.tree.leaves(self.target.model)),
        )  # fmt: skip
        tried = chosen.method.branches or max(chosen.steps) == max(self.gammas)
        few = f"drafts of more than {max(chosen.steps)} tokens were not tried, for lack of minutes"
        found = dataclasses.replace(
            candidate,
            remarks=candidate.remarks if tried else (*candidate.remarks, few),
            c=costs.c,
            gamma=chosen.gamma,
            tree=text_of(chosen.method.shape) if chosen.method.branches else "",
            nodes=chosen.nodes,
            v=v,
            steps={str(gamma): time for gamma, time in chosen.steps.items()},
            promised=chosen.tokens,
            predicted=chosen.tokens / steps,
            tuned_for=decoding.conditions(
                chosen.method, self.target, loaded, 1, self.max_new_tokens
            ),
        )
        if not found.tree and not doubtful():
            bounds = [metrics.tokens_along(overlaps, g) / took for g, took in chosen.steps.items()]
            bound = max(*bounds, found.predicted)
            if self.minutes and (dropped := cannot_win(bound, self._leader)):
                self.say(f"not timed: {dropped}")
                return dataclasses.replace(found, dropped=dropped)
        raced = self._raced(candidate.name, chosen, found.predicted)
        chooses, rest = raced.halves()
        speedups = rest.speedups()
        longest_drafted = metrics.tokens_by_position(raced.outputs(), [chosen.method.gamma_max])
        tau, load = summarize(raced.outputs()).tokens_per_iteration, doubts.load_average()
        return dataclasses.replace(
            found,
            unended=longest_drafted[chosen.method.gamma_max],
            tau=tau,
            speedup=speedups["speedup_decode"],
            speedup_low=speedups["speedup_decode_low"],
            speedup_high=speedups["speedup_decode_high"],
            speedup_end_to_end=speedups["speedup_end_to_end"],
            choosing=chooses.speedup_end_to_end if len(raced.rows[timing.PLAIN]) > 1 else 0.0,
            doubts=doubtful(measured=raced.speedup, predicted=tau / steps),
            load=None if np.isnan(load) else load,
        )

    def _raced(self, name: str, chosen: "Choice", predicted: float) -> timing.Comparison:
        """Time the chosen loop beside plain decoding, on what there is time for."""
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
            return found
        # A prefill counts by the tokens of whole outputs.
        lengths = np.array([*map(len, self._outputs)])
        share = float(np.minimum(lengths, tokens).sum() / max(1, lengths.sum()))
        both = {
            method: found.decode[method] + share * (whole - found.decode[method])
            for method, whole in found.whole.items()
        }
        return dataclasses.replace(found, whole=both)

    def _expected(self, name: str, longest: Speculative, alpha: float) -> dict[int, float]:
        """Expected tokens per target call, by γ."""
        if guesses(longest.drafter):
            return metrics.tokens_by_position(
                self._rows(longest, self._measured, name), self.gammas
            )
        return {gamma: formulas.expected_tokens(alpha, gamma) for gamma in self.gammas}

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

    def _along(self, measure: Callable, loaded: Checkpoint | Drafter, by: Sampling, **how) -> Any:
        """Call a measure of a draft along the target's outputs."""
        return measure(
            self.target,
            loaded,
            self._measured,
            self._outputs,
            sampling=by,
            batch_size=self.batch_size,
            max_source_len=self.max_source_len,
            check_tokens=self.check_tokens,
            **how,
        )


class Choice(NamedTuple):
    """A chain or a tree, before its loop is timed."""

    method: Any
    gamma: int  # or the depth
    nodes: int
    steps: dict[int, float]  # target steps of a round, by γ or depth
    tokens: float  # expected, per target call
