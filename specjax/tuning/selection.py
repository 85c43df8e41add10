"""Which draft, which γ, or none: candidates measured side by side on one's own inputs.

chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
print(chosen.words)
specjax.generate(target, chosen.draft, texts, settings=chosen.settings)
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import checkpoints, decoding, drafters, formulas, trees
from specjax.autoregressive import Autoregressive
from specjax.checkpoints import Checkpoint, compatibility
from specjax.checkpoints.tensors import read_json
from specjax.checkpoints.weights import find_tensors
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
from specjax.settings import Settings
from specjax.speculative import Speculative
from specjax.support.named import short
from specjax.support.ranges import listed, whole
from specjax.trees import FixedTree
from specjax.trees.shapes import text_of
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import best_tree
from specjax.tuning.ranks import acceptance_by_rank
from specjax.types import Text

# Members of one tokenizer, the smallest first.
FAMILIES = (
    tuple(f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")),
    tuple(f"google/flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(
        tuple(f"google/{kind}-{size}" for size in ("small", "base", "large", "xl", "xxl"))
        for kind in ("t5-v1_1", "mt5", "byt5")
    ),
    tuple(f"google/umt5-{size}" for size in ("small", "base", "xl", "xxl")),
    (
        "distilbert/distilgpt2",
        *(f"openai-community/gpt2{size}" for size in ("", "-medium", "-large", "-xl")),
    ),
    *(
        tuple(f"Qwen/Qwen2.5-{size}B{kind}" for size in ("0.5", "1.5", "3", "7", "14", "32", "72"))
        for kind in ("", "-Instruct")
    ),
    tuple(f"Qwen/Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8", "14", "32")),
    *(
        tuple(
            f"meta-llama/Llama-3.{size}B{kind}" for size in ("2-1", "2-3", "1-8", "1-70", "1-405")
        )
        for kind in ("", "-Instruct")
    ),
)

DEPTH = 8  # of trees, at most

# Thresholds that explain a missing speedup.
LOW_ALPHA = 0.5  # every second drafted token is lost, and all that follow it
SLOW_DRAFT = 0.5  # in target steps
SLOW_VERIFY = 1.5  # in target steps, for a verify pass and the rest of a round
# Share of the promised tokens; below it, outputs end early or later tokens are worse.
MIN_SHARE_OF_PROMISED = 0.85

MAX_TIMINGS = 2  # of one candidate, if they contradict themselves
EQUAL_WITHIN = 0.05  # speedups that differ by less are equal: timings are no better


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A draft and its measurements; numbers stay 0 if it cannot draft at all."""

    name: str
    problem: str = ""
    """Why it cannot draft: it does not fit the target, or cannot be loaded."""
    remarks: tuple[str, ...] = ()
    """Other differences from the target, which no loop reads; what n-grams were counted on."""
    parameters: int = 0
    memory: int = 0
    """Bytes of parameters and caches of both models, at the batch size asked for."""
    alpha: float = 0.0
    alpha_low: float | None = None  # no interval below `metrics.MIN_OUTPUTS` outputs
    alpha_high: float | None = None
    agreement: float = 0.0
    """Rate at which both models have the same likeliest token, over the same prefixes as α."""
    c: float = 0.0
    gamma: int = 0
    """The best γ, by α and the times of whole rounds; of a tree its depth."""
    tree: str = ""
    """The best tree, as `generate` takes it; empty: a chain."""
    nodes: int = 0
    """Drafted tokens of a round: nodes of the tree, or γ."""
    v: float = 0.0
    """Cost of a verify pass over that many `nodes`, in target steps."""
    steps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Target steps of a whole round, by γ."""
    promised: float = 0.0
    """Expected tokens per target call: by α, by the acceptance of each rank, or, for a drafter that
    `guesses`, by that of each position."""
    guesses: bool = False
    """Whether later tokens of a draft are accepted less often than the first. γ then follows from
    the rates of each position."""
    expected: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Expected tokens per target call, by γ; `promised` is that of the best γ."""
    unended: float = 0.0
    """Tokens per target call by the rates of each position in the timed loop, as if no output ended
    inside a draft."""
    tau: float = 0.0
    tokens: float = 0.0
    """Mean tokens of an output."""
    predicted: float = 0.0
    """Speedup of the loop, by Eq. (1) and `steps`."""
    speedup: float = 0.0
    """Measured speedup: plain decoding's time over speculation's, both without prefill."""
    speedup_low: float = 0.0
    speedup_high: float = 0.0
    speedup_end_to_end: float = 0.0
    """Measured speedup with encoder and prefill of both models."""
    choosing: float = 0.0
    """End-to-end speedup on those timed inputs that choose among candidates; 0: there is no rest.
    All other speedups are of the rest, since the winner was lucky on the inputs that chose it."""
    doubts: Sequence[str] = ()
    """Contradictions in its timings: nothing follows from them."""
    load: float | None = None
    """Load average per processor, after it was timed."""

    @property
    def round(self) -> float:
        """A round's target steps beyond its γ draft steps: verification and the rest."""
        return self.steps[str(self.gamma)] - self.gamma * self.c

    @property
    def chosen_by(self) -> float:
        """The speedup that is compared with those of other candidates."""
        return self.choosing or self.speedup_end_to_end


PLAIN = Candidate(
    "plain decoding",
    tau=1.0,
    predicted=1.0,
    speedup=1.0,
    speedup_low=1.0,
    speedup_high=1.0,
    speedup_end_to_end=1.0,
)
"""The candidate of plain decoding: a draft that is not faster loses to it."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """All candidates, in the order given, and the draft and settings to decode with."""

    candidates: list[Candidate]
    settings: Settings
    """Settings for `generate`, with the chosen draft. γ = 0: plain decoding."""
    draft: str | Checkpoint | Drafter | None = None
    """The chosen draft; None: plain decoding."""

    @property
    def words(self) -> str:
        """The recommendation and its reasons, in sentences."""
        return self.settings.words


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
) -> Selection:
    """Measure each candidate on these inputs, and choose one, or plain decoding.

        chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
        print(chosen.words)
        specjax.generate(target, chosen.draft, texts, settings=chosen.settings)

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
    )
    tried = [(draft, tree) for draft in drafts for tree in trial.shapes]
    candidates = [trial.measure(draft, tree) for draft, tree in tried]
    return trial.ready(recommend(candidates, [draft for draft, _ in tried]))


def smaller_members(target: str) -> list[str]:
    """List models to try as drafts, the smallest first.

    For a directory these are the directories beside it with fewer parameters, for a hub name the
    smaller members of its family.

    Raises:
      ValueError: none is known.
    """
    directory = Path(target)
    if directory.is_dir():
        found = _smaller_beside(directory)
    else:
        # Hub names are often given without their owner, "t5-small".
        families = [[name.split("/")[-1] for name in family] for family in FAMILIES]
        short = target.split("/")[-1]
        found = next(
            (
                list(names[: family.index(short)])
                for names, family in zip(FAMILIES, families, strict=True)
                if short in family
            ),
            [],
        )
    if not found:
        raise ValueError(
            f"No smaller model is known for {target}: name drafts, or try "
            f"{', '.join(drafters.NAMES)}."
        )
    return found


def _smaller_beside(directory: Path) -> list[str]:
    sizes = {}
    for path in directory.resolve().parent.iterdir():
        try:
            kind = read_json(path / "config.json").get("model_type")
            tensors = find_tensors(path).values()
        except (OSError, ValueError):
            continue  # not a model, or an incomplete one
        if isinstance(kind, str) and kind in checkpoints.FAMILIES:
            sizes[path] = kind, sum(int(np.prod(tensor.shape)) for tensor in tensors)
    own = sizes.get(directory.resolve(), ("", 0))
    smaller = [path for path, (kind, size) in sizes.items() if kind == own[0] and size < own[1]]
    smaller.sort(key=lambda path: (sizes[path][1], path.name))
    return [str(directory.parent / path.name) for path in smaller]


def _content(text: Text) -> str | tuple[int, ...]:
    """What makes two inputs the same: a text without blanks around it, or its token ids."""
    return text.strip() if isinstance(text, str) else tuple(text)


def check_numbers(
    gammas: Sequence[int], nodes: Sequence[int], timed_inputs: int, repeats: int
) -> None:
    """Raise ValueError for a number that is out of range."""
    for gamma in listed("gammas", gammas):
        whole("gammas", gamma, "[1, ∞)")
    for size in nodes:
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

    def __post_init__(self):
        check_numbers(self.gammas, self.nodes, self.timed_inputs, self.repeats)
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
        how: dict[str, Any] = {"sampling": self._sampling, "check_tokens": self.check_tokens}
        return decoding.speculative(self.target, loaded, gamma=gamma, **how)

    def _branching(self, loaded: Checkpoint | Drafter, shape: FixedTree) -> TreeSpeculative:
        how: dict[str, Any] = {"sampling": self._sampling, "check_tokens": self.check_tokens}
        return decoding.branching(self.target, loaded, shape, **how)

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
        chances = acceptance_by_rank(
            self.target,
            loaded,
            self._measured,
            self._outputs,
            sampling=self._sampling,
            drawn=not self._sampling.greedy,
            check_tokens=self.check_tokens,
            batch_size=self.batch_size,
            max_source_len=self.max_source_len,
        ).tolist()
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
        alpha = self._alpha(loaded, self._sampling)
        greedy = self._sampling.greedy
        agreement = alpha if greedy else self._alpha(loaded, Greedy())
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
        several = len(timed) > 1
        chooses, rest = (raced.part(batches=slice(at, None, 1 + several)) for at in (0, several))
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
            choosing=chooses.speedup_end_to_end if several else 0.0,
            doubts=wrong,
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

    def _alpha(self, loaded: Checkpoint | Drafter, distribution: Sampling) -> metrics.Alpha:
        return metrics.alpha_of_outputs(
            self.target,
            loaded,
            self._measured,
            self._outputs,
            sampling=distribution,
            batch_size=self.batch_size,
            max_source_len=self.max_source_len,
            check_tokens=self.check_tokens,
        )


class Choice(NamedTuple):
    """A chain or a tree, before its loop is timed."""

    method: Any
    gamma: int  # or the depth
    nodes: int
    steps: dict[int, float]  # target steps of a round, by γ or depth
    tokens: float  # expected, per target call


def counts_ngrams(draft: str | Checkpoint | Drafter) -> bool:
    """Whether a draft is made from counts of the target's own outputs."""
    try:
        return isinstance(draft, str) and drafters.counts_ngrams(draft)
    except ValueError:  # no such drafter, which `Trial.measure` reports
        return False


# --- what follows from the numbers ---------------------------------------------------------------


def recommend(
    candidates: Sequence[Candidate], drafts: Sequence[str | Checkpoint | Drafter] = ()
) -> Selection:
    """Choose the candidate with the fastest outputs; among equals the one with the least memory.

    Plain decoding is a candidate and needs the least memory. A draft is recommended if it beats
    plain decoding by more than timings vary, on the inputs that choose and on the others. Nothing
    follows from timings that contradict themselves, or that were taken on a busy machine.

    Args:
      drafts: the draft of each candidate; default: its name.
    """

    def plain(*words: str) -> Selection:
        return Selection(list(candidates), Settings(0, words=_join(*words)))

    usable = [candidate for candidate in candidates if not candidate.problem]
    if busy := doubts.busy(candidate.load for candidate in usable):
        return plain(f"No draft is recommended. {busy}")
    refused = [
        f"{short(c.name)} cannot {'branch' if c.tree else 'draft'}: {c.problem}"
        for c in candidates
        if c.problem
    ]
    sound = [candidate for candidate in usable if not candidate.doubts]
    if usable and not sound:
        advice = "No draft is recommended: the timings contradict themselves."
        return plain(advice, *map(why_not, usable), *refused)
    faster = [candidate for candidate in sound if beats_plain(candidate)]
    if not faster:
        why = (
            "no draft here makes outputs come sooner by more than timings vary "
            f"({EQUAL_WITHIN:.0%})"
            if usable
            else "no draft can be used"
        )
        advice = f"Use {PLAIN.name}: {why}."
        return plain(advice, *map(why_not, usable), *refused)
    best = max(candidate.chosen_by for candidate in faster)
    equals = [candidate for candidate in faster if candidate.chosen_by > (1 - EQUAL_WITHIN) * best]
    winner = min(equals, key=lambda candidate: (candidate.memory, bool(candidate.tree)))
    words = _praise(winner, equals, usable, refused)
    settings = Settings(winner.gamma, tree=winner.tree or "chain", words=words)
    of_each = drafts or [candidate.name for candidate in candidates]
    pairs = zip(candidates, of_each, strict=True)
    draft = next(draft for candidate, draft in pairs if candidate is winner)
    return Selection(list(candidates), settings, draft)


def beats_plain(candidate: Candidate) -> bool:
    """Whether outputs come sooner beyond the noise.

    By `EQUAL_WITHIN`, on the inputs that choose and on the others, with a loop that is faster in
    three repeats of four. False where timings contradict themselves.
    """
    slower = min(candidate.chosen_by, candidate.speedup_end_to_end)
    sooner = (1 - EQUAL_WITHIN) * slower >= PLAIN.speedup_end_to_end
    return not candidate.doubts and sooner and candidate.speedup_low > PLAIN.speedup


def _praise(winner, equals, usable, refused) -> str:
    sentences = [
        f"Use {short(winner.name)} with {_how(winner)}: outputs come "
        f"{winner.speedup_end_to_end:.2f} times as fast end to end as without a draft. The loop "
        f"alone is "
        f"{winner.speedup:.2f} times as fast (quartiles {winner.speedup_low:.2f} to "
        f"{winner.speedup_high:.2f}; predicted {winner.predicted:.2f}): {winner.tau:.2f} "
        f"tokens for each call of the target, with α = {winner.alpha:.2f} and c = {winner.c:.2f}."
    ]
    others = ", ".join(_called(c) for c in equals if c is not winner)
    if others:
        sentences.append(f"No slower within {EQUAL_WITHIN:.0%}, but larger: {others}.")
    if winner.tree:
        sentences.append(f'tree="{winner.tree}"')
    if counts_ngrams(winner.name):
        sentences += [f"{winner.name} {remark}." for remark in winner.remarks]
    losing = [why_not(c) for c in usable if not beats_plain(c)]
    return _join(*sentences, *losing, *refused)


def _how(candidate: Candidate) -> str:
    if candidate.tree:
        return f"a tree of {candidate.nodes} nodes, {candidate.gamma} deep"
    return f"gamma={candidate.gamma}"


def _size(candidate: Candidate) -> str:
    return f"{candidate.nodes} nodes" if candidate.tree else f"γ = {candidate.gamma}"


def _called(candidate: Candidate) -> str:
    return short(candidate.name) + (f" with {_how(candidate)}" if candidate.tree else "")


def reasons(candidate: Candidate) -> tuple[str, ...]:
    """List why a candidate is not faster: some of "length", "later", "alpha", "c" and "v"."""
    one = candidate
    unended = one.unended or one.promised
    if one.speedup > 1 or (one.predicted > 1 and one.tau < MIN_SHARE_OF_PROMISED * unended):
        return ("length",)
    if one.predicted > 1 and unended < MIN_SHARE_OF_PROMISED * one.promised:
        return ("later",)
    found = {
        "alpha": one.alpha < LOW_ALPHA,
        "c": one.c >= SLOW_DRAFT,
        "v": one.round >= SLOW_VERIFY,
    }
    if any(found.values()):
        return tuple(name for name, holds in found.items() if holds)
    lost = {"alpha": 1 - one.alpha, "c": one.gamma * one.c, "v": one.round - 1}
    return (max(lost, key=lambda name: lost[name]),)


def why_not(candidate: Candidate) -> str:
    """Explain in a sentence or two why a candidate is not faster, and what would change it."""
    one = candidate
    if one.doubts:
        return (
            f"{_called(one)}: its timings contradict themselves, and nothing follows from them "
            f"({'; '.join(one.doubts)}). {doubts.AGAIN}"
        )
    if one.speedup_end_to_end > 1:
        return (
            f"{_called(one)}, {one.speedup_end_to_end:.2f} times as fast end to end: that is no "
            f"more than "
            f"timings vary (quartiles of the loop {one.speedup_low:.2f} to "
            f"{one.speedup_high:.2f}). Look again with more inputs."
        )
    sentences = {
        "length": f"outputs of {one.tokens:.0f} tokens are too short: the loop is "
        f"{one.speedup:.2f} times as fast, with {one.tau:.1f} tokens for each call of the "
        "target, and starting two models takes what that saves",
        "later": f"later tokens of a draft are right less often than the first: "
        f"{one.unended:.1f} tokens for each call of the target, where α alone promises "
        f"{one.promised:.1f}",
        "alpha": f"agreement is too low (α = {one.alpha:.2f})",
        "c": f"the draft is too slow (c = {one.c:.2f}: a draft step takes {one.c:.2f}x as long "
        "as a target step)",
        "v": f"verification is not free (a round of {_size(one)} takes {one.round:.2f} target "
        f"steps beside its draft steps, v = {one.v:.2f})",
    }
    causes = reasons(one)
    why = " and ".join(sentences[cause] for cause in causes)
    ways = [] if {"length", "later"} & set(causes) or one.tree else _ways_out(one)
    way = f" It would pay with {' or '.join(ways)}." if ways else ""
    return f"{_called(one)}, {one.speedup_end_to_end:.2f} times as fast end to end: {why}.{way}"


def _ways_out(one: Candidate) -> list[str]:
    """Values of α and of c at which the predicted speedup would be 1, all else equal."""
    # A verify pass takes one target step at least; less than that is noise.
    rounds = {int(gamma): max(steps, 1 + int(gamma) * one.c) for gamma, steps in one.steps.items()}
    ways = []
    if not one.guesses:  # α does not say how often tokens of later positions are accepted
        alphas = np.linspace(0, 1, 1001)
        speedups = [formulas.expected_tokens(alphas, gamma) / s for gamma, s in rounds.items()]
        enough = alphas[np.max(speedups, axis=0) > 1]
        if len(enough) and enough[0] > one.alpha:
            ways.append(f"α above {enough[0]:.2f}")
    tokens = {int(gamma): tokens for gamma, tokens in one.expected.items()} or {
        gamma: formulas.expected_tokens(one.alpha, gamma) for gamma in rounds
    }
    most = max((tokens[gamma] - steps) / gamma + one.c for gamma, steps in rounds.items())
    if 0.005 < most < one.c:  # it is printed with two digits
        ways.append(f"c below {most:.2f}")
    return ways


def _join(*sentences: str) -> str:
    return "\n".join(sentences)
