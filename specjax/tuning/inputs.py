"""A target and the inputs on which drafts are measured."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax import drafters
from specjax.autoregressive import Autoregressive
from specjax.checkpoints import Checkpoint
from specjax.decoding import building, streaming
from specjax.decoding.texts import check_texts, common_width, tokenize
from specjax.defaults import BATCH_SIZE, GAMMAS, MINUTES, NEW_TOKENS, REPEATS, TIMED_INPUTS
from specjax.drafters import ngram
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import timing
from specjax.results import Row
from specjax.sampling import Sampling, as_sampling, key_for
from specjax.support.ranges import has, listed, whole
from specjax.tuning.pace import Pace, reduced
from specjax.tuning.recommendation import counts_ngrams
from specjax.types import Text

MIN_INPUTS = 4  # that are decoded or timed where time is short
MAX_SHARE_OF_OUTPUTS = 0.25  # of the time, for outputs of the target
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
class Inputs:
    """A target with some inputs, and what it makes of them.

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
        self._sampling = as_sampling(self.sampling)
        self._key = key_for(self._sampling, self.key)
        check_texts(self.texts)
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
        return building.plain(self.target, self._sampling)

    def _rows(self, method: Method, texts: Sequence[Text], name: str = "") -> list[Row]:
        rows = streaming.stream(
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
        texts = tokenize(self.target, self._measured, self.max_source_len)
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
        few = tokenize(self.target, self._measured, self.max_source_len)
        found = self._in_turns({timing.PLAIN: self._plain}, few, repeats=1, compiled=True)
        return [row.tokens for row in found.outputs(timing.PLAIN)]

    def _in_turns(
        self, methods: Mapping[str, Method], texts: Sequence[Sequence[int]], **how: Any
    ) -> timing.Comparison:
        return timing.side_by_side(
            methods, self.target, texts, max_new_tokens=self.max_new_tokens, key=self._key,
            width=common_width(self._sources), **how,
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
