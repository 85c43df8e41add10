"""What will be decoded, and how much time there is to measure how best to do it."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import TypedDict

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax.autoregressive import Autoregressive
from specjax.checkpoints import Checkpoint
from specjax.decoding import building
from specjax.decoding.texts import check_texts, is_blank, tokenize
from specjax.defaults import BATCH_SIZE, MINUTES, NEW_TOKENS
from specjax.measure import timing
from specjax.measure.stopwatch import Stopwatch
from specjax.sampling import Sampling, as_sampling, key_for
from specjax.support.ranges import has, whole
from specjax.tuning.pace import Pace
from specjax.types import Text


class Fields(TypedDict, total=False):
    """The fields of a `Job` that functions take as keyword arguments."""

    sampling: Sampling | None
    max_new_tokens: int
    key: Key[Array, ""] | int | None
    max_source_len: int | None
    batch_size: int
    minutes: float
    say: timing.Say


@dataclasses.dataclass
class Job:
    """A target and its inputs, as `generate` will take them, and the minutes for measuring.

    Raises:
      ValueError: texts, sampling or key that `generate` refuses, or a number out of range.
    """

    target: Checkpoint
    texts: Sequence[Text]
    sampling: Sampling | None = None  # None: greedy
    max_new_tokens: int = NEW_TOKENS
    key: Key[Array, ""] | int | None = None  # needed where tokens are drawn
    max_source_len: int | None = None
    batch_size: int = BATCH_SIZE
    minutes: float = MINUTES  # 0: no limit. They begin with the job
    say: timing.Say = timing.silent  # reports a forecast and the next step
    samples: int = 1  # outputs of each text

    def __post_init__(self):
        check_texts(self.texts)
        whole("batch_size", self.batch_size, "[1, ∞)")
        whole("max_new_tokens", self.max_new_tokens, "[1, ∞)")
        has("say", self.say, ("__call__",), "a function of a text")
        self.pace = Pace(self.minutes, self.say)
        self.chosen = as_sampling(self.sampling)
        self.draws = key_for(self.chosen, self.key)

    @property
    def rows(self) -> int:
        """Rows that decode at once: no more than there are outputs."""
        return min(self.batch_size, max(1, len(self.texts) * self.samples))

    @functools.cached_property
    def plain(self) -> Autoregressive:
        """The loop of plain decoding."""
        return building.plain(self.target, self.chosen)

    @property
    def apart(self) -> Key[Array, ""]:
        """A key for measurements before a run with the same key."""
        return apart(self.draws)

    def tokenize(self, texts: Sequence[Text]) -> list[list[int]]:
        """Tokenize without warnings: the run will warn about texts that it cuts."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tokenize(self.target, texts, self.max_source_len)

    @functools.cached_property
    def full(self) -> list[Text]:
        """Texts with at least one token: an empty prompt's output is no sample of the others."""
        blank = functools.partial(is_blank, self.target)
        return [text for text in self.texts if len(text) and not blank(text)]

    def watch(self, draft: str = "draft", repeats: int = 3) -> Stopwatch:
        """A stopwatch whose draws are independent of the run's, for all rows of a batch."""
        names = self.target.name, draft
        run = self.target, self.max_new_tokens, self.apart, self.rows, repeats, names
        return Stopwatch(*run, say=self.say)


def apart(key: Key[Array, ""]) -> Key[Array, ""]:
    """Derive a key for measurements before a run with this key: no input has that index.

    Costs must not depend on draws of the run, or its outputs would not be draws from the target.
    """
    return jax.random.fold_in(key, np.uint32(2**32 - 1))
