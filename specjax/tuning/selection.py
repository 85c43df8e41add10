"""Measure drafts side by side on one's own inputs, and choose one, or none.

chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
print(chosen.words)
specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)
"""

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
from specjax.defaults import BATCH_SIZE, GAMMAS, NEW_TOKENS, REPEATS, TIMED_INPUTS
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
from specjax.support.ranges import has, listed, whole
from specjax.trees import FixedTree
from specjax.trees.shapes import text_of
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import best_tree
from specjax.tuning.members import smaller_members
from specjax.tuning.ranks import acceptance_by_rank
from specjax.tuning.recommendation import Candidate, Selection, counts_ngrams, recommend
from specjax.types import Text

DEPTH = 8  # of trees, at most

MAX_TIMINGS = 2  # of one candidate, if they contradict themselves


def select(
    target: Checkpoint,
    drafts: Sequence[str | Checkpoint | Drafter],
    texts: Sequence[Text],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    max_source_len: int | None = None,
    batch_size: int = BATCH_SIZE,
    gammas: Sequence[int] = GAMMAS,
    nodes: Sequence[int] = (),
    timed_inputs: int = TIMED_INPUTS,
    repeats: int = REPEATS,
    dtype: Any = None,
    check_tokens: bool = True,
    say: timing.Say = timing.silent,
) -> Selection:
    """Measure each candidate on these inputs, and choose one, or plain decoding.

        chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
        print(chosen.words)
        specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)

    Args:
      target: the model whose outputs are to come sooner.
      drafts: what `generate` takes as its draft, names included ("unigram" and "bigram" are counted
        here). Named models are loaded one at a time and freed. None given: the members of the
        target's family that are smaller, see `smaller_members`. Plain decoding is compared with
        all of them.
      texts: inputs of the kind that will be decoded, texts or lists of token ids; some 50 are
        enough.
      sampling, max_new_tokens, key, max_source_len, batch_size, check_tokens: as in `generate`,
        with the values of later use. Timings are at batch 1 all the same.
      gammas: draft lengths to choose from.
      nodes: sizes of trees to try too, such as (8, 16, 32).
      timed_inputs: how many of the texts are timed.
      repeats: repeats of each timing.
      dtype: dtype of named drafts, as `specjax.load` takes it.
      say: is called with each next step, such as "timing … turn 2 of 5".

    Raises:
      ValueError: `drafts` is no list, none is known for this target, a number out of range, too
        few texts, or no key where tokens are drawn.
    """
    if isinstance(drafts, str) or not isinstance(drafts, Sequence):
        raise ValueError(f"drafts={drafts!r} should be a list, such as [{drafts!r}].")
    drafts = list(drafts) or smaller_members(target.name)
    trial = Trial(
        target,
        texts,
        drafts,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        key=key,
        max_source_len=max_source_len,
        batch_size=batch_size,
        gammas=gammas,
        nodes=nodes,
        timed_inputs=timed_inputs,
        repeats=repeats,
        dtype=dtype,
        check_tokens=check_tokens,
        say=say,
    )
    tried = [(draft, tree) for draft in drafts for tree in trial.shapes]
    candidates = [trial.measure(draft, tree) for draft, tree in tried]
    return trial.ready(recommend(candidates, [draft for draft, _ in tried]))


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
    dtype: Any = None  # of the drafts, as `specjax.load` takes it
    check_tokens: bool = True  # False: drafts whose tokens are not the target's are tried too
    say: timing.Say = timing.silent  # reports the next step

    def __post_init__(self):
        check_numbers(self.gammas, self.nodes, self.timed_inputs, self.repeats)
        has("say", self.say, ("__call__",), "a function of a text")
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
    def names(self) -> list[str]:
        """Names of the drafts."""
        return [drafters.name_of(draft) for draft in self.drafts]

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
    def _outputs(self) -> list[list[int]]:
        return self._decode(self._measured)

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
        try:
            loaded = self._load(draft)
            longest = self._method(loaded, max(self.nodes if tree else self.gammas))
            if tree:
                self._branching(loaded, trees.fixed(1))
        except (ValueError, OSError) as error:
            return Candidate(name, problem=str(error), tree="none" if tree else "")
        found = self._measure(name, loaded, longest, tree)
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
        self,
        loaded: Checkpoint | Drafter,
        tokens: Mapping[int, float],
        longest: Speculative,
        begin: Callable[[Any], Any],
    ) -> tuple[Costs, "Choice"]:
        """Choose γ. Args: expected tokens per target call, by γ."""
        ends = {min(self.gammas), max(self.gammas)}
        # Each timed round is a program to compile: the ends are timed, the rest interpolated.
        contexts, state = begin(longest)
        costs = phases.measure(longest, contexts, state, self.gammas, ends)
        rounds = np.asarray(costs.round_times(max(self.gammas))) / float(costs.token)
        steps = {gamma: float(rounds[gamma]) for gamma in self.gammas}
        gamma = max(steps, key=lambda gamma: tokens[gamma] / steps[gamma])
        method = self._method(loaded, gamma)
        return costs, Choice(method, gamma, gamma, steps, tokens[gamma])

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
        self.say(f"decoding {len(self._measured)} inputs for α")
        of_outputs = functools.partial(self._along, metrics.alpha_of_outputs, loaded)
        alpha = of_outputs(self._sampling)
        agreement = alpha if self._sampling.greedy else of_outputs(Greedy())
        texts = decoding.tokenize(self.target, self._measured, self.max_source_len)
        key, timed = self._key, timing.spread(texts, self.timed_inputs)
        begin = functools.partial(
            timing.start, target=self.target, max_new_tokens=self.max_new_tokens, key=key
        )
        middle = sorted(range(len(timed)), key=lambda index: len(timed[index]))[len(timed) // 2]
        phased = functools.partial(begin, texts=timed, batch=[middle])
        parameters = drafters.parameters(loaded, self.target)
        expected = {} if tree else self._expected(name, longest, alpha.value)
        for _ in range(MAX_TIMINGS):
            self.say("timing the phases of a round, which compile first")
            if tree:
                costs, chosen = self._best_tree(loaded, longest, phased)
            else:
                costs, chosen = self._best_chain(loaded, expected, longest, phased)
            raced = timing.side_by_side(
                {timing.PLAIN: self._plain, timing.SPECULATIVE: chosen.method},
                self.target,
                timed,
                max_new_tokens=self.max_new_tokens,
                key=key,
                repeats=self.repeats,
                names=(self.target.name, name),
                say=self.say,
            )
            tau, steps = summarize(raced.outputs()).tokens_per_iteration, chosen.steps[chosen.gamma]
            wrong = doubts.contradictions(
                chosen.gamma,
                costs.c,
                costs.v(chosen.nodes),
                steps - chosen.gamma * costs.c - costs.v(chosen.nodes),
                smaller=parameters < sum(x.size for x in jax.tree.leaves(self.target.model)),
                measured=raced.speedup,
                predicted=tau / steps,
            )
            if not wrong:
                break
        chooses, rest = raced.halves()
        found = rest.speedups()
        longest_drafted = metrics.tokens_by_position(raced.outputs(), [chosen.method.gamma_max])
        load = doubts.load_average()
        batch = range(min(self.batch_size, len(texts)))
        contexts, state = jax.eval_shape(
            lambda: begin(longest, texts=texts, batch=batch, rows=self.batch_size)
        )
        held = longest.target, longest.drafter, contexts, state.cache, state.drafter
        return Candidate(
            name=name,
            remarks=self._remarks(name, loaded),
            parameters=parameters,
            memory=nbytes(held),
            alpha=alpha.value,
            alpha_low=alpha.low,
            alpha_high=alpha.high,
            agreement=agreement.value,
            c=costs.c,
            gamma=chosen.gamma,
            tree=text_of(chosen.method.shape) if tree else "",
            nodes=chosen.nodes,
            v=costs.v(chosen.nodes),
            steps={str(gamma): time for gamma, time in chosen.steps.items()},
            promised=chosen.tokens,
            guesses=guesses(longest.drafter),
            expected={str(gamma): tokens for gamma, tokens in expected.items()},
            unended=longest_drafted[chosen.method.gamma_max],
            tau=tau,
            tokens=alpha.tokens / len(alpha.overlaps),
            predicted=chosen.tokens / chosen.steps[chosen.gamma],
            speedup=found["speedup_decode"],
            speedup_low=found["speedup_decode_low"],
            speedup_high=found["speedup_decode_high"],
            speedup_end_to_end=found["speedup_end_to_end"],
            choosing=chooses.speedup_end_to_end if len(timed) > 1 else 0.0,
            doubts=wrong,
            tuned_for=decoding.conditions(
                chosen.method, self.target, loaded, 1, self.max_new_tokens
            ),
            load=None if np.isnan(load) else load,
        )

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
