"""A job's inputs as candidates are measured on them: their outputs, and which of them are timed."""

import dataclasses
import functools
from collections.abc import Sequence

from specjax.decoding import streaming
from specjax.decoding.texts import check_room, common_width
from specjax.drafters import ngram
from specjax.loop import Method
from specjax.measure import metrics, timing
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN
from specjax.results import Row
from specjax.speculative import Speculative
from specjax.tuning.job import Job
from specjax.types import Text

LOOPS = 4  # that a candidate compiles, in programs of the size of plain decoding's
# Where time is short: inputs that are decoded or timed; the share of it for the target's outputs.
MIN_INPUTS, MAX_SHARE_OF_OUTPUTS = 4, 0.25


def _content(text: Text) -> str | tuple[int, ...]:
    """What makes two inputs the same: a text without blanks around it, or its token ids."""
    return text.strip() if isinstance(text, str) else tuple(text)


@dataclasses.dataclass
class Inputs:
    """Inputs of a job, and what the target makes of them.

    α is over tokens that the target generates, at the job's batch size. Times are of `rows` at
    once, on `timed_inputs` spread over the list. N-grams are counted on the first half of the
    different inputs, and all candidates measured on the rest: no input is in both.

    Raises:
      ValueError: too few inputs.
    """

    job: Job
    timed_inputs: int
    repeats: int
    counts_ngrams: bool = False  # whether a candidate does
    candidates: int = 1  # for the forecast
    rows: int = 1  # timed at once
    most: int | None = None  # inputs for α

    def __post_init__(self):
        kept = [text for text in self.job.texts if _content(text)]
        different = list({_content(text): text for text in kept}.values())
        counts = self.counts_ngrams
        self.counted = different[: len(different) // 2] if counts else []
        counted = set(map(_content, self.counted))
        measured = [text for text in kept if _content(text) not in counted]
        self.measured = list(timing.spread(measured, self.most or len(measured)))
        least = 1 + (counts or self.most is None)
        if (few := len(different if counts else kept)) < least:
            kind = "different input(s)" if counts else "input(s)"
            raise ValueError(f"{few} {kind} are too few to choose by: give {least} or more.")

    def stream(self, method: Method, texts: Sequence[Text], name: str = "") -> list[Row]:
        """Decode texts by a method, of the draft of this name."""
        job = self.job
        rows = streaming.stream(
            method, job.target, texts, max_new_tokens=job.max_new_tokens, key=job.apart,
            batch_size=job.batch_size, max_source_len=job.max_source_len,
            names=(job.target.name, name),
        )  # fmt: skip
        return list(rows)

    @functools.cached_property
    def watch(self) -> Stopwatch:
        """The stopwatch of all candidates. Its draws are independent of the run's."""
        watch = self.job.watch(repeats=self.repeats)
        return dataclasses.replace(watch, batch_size=self.rows, width=common_width(self.ids))

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """Ids of the inputs that may be measured."""
        found = self.job.tokenize(self.measured)
        check_room(self.job.target, found, self.job.max_new_tokens)
        return found

    @functools.cached_property
    def timed(self) -> list[list[int]]:
        """Ids of the timed inputs: whole batches, where there are enough."""
        count = min(self.timed_inputs, len(self.ids))
        return list(timing.spread(self.ids, count - count % min(self.rows, count)))

    @functools.cached_property
    def outputs(self) -> list[list[int]]:
        """Decode the inputs for α, as many as there is time for, after a forecast."""
        job, texts = self.job, self.measured
        calls = 2 * len(self.timed) * self.repeats * job.max_new_tokens  # for costs as much again
        tokens = len(texts) * job.max_new_tokens + 2 * calls * self.candidates
        job.pace.first_pass(self.watch, job.plain, self.timed, LOOPS * self.candidates, tokens)
        most = len(texts), MIN_INPUTS
        count = job.pace.afford(job.max_new_tokens, MAX_SHARE_OF_OUTPUTS, inputs=most)["inputs"]
        self.measured = list(timing.spread(texts, count))
        job.say(f"decoding {count} inputs for α")
        if self.batch != self.rows:
            return [row.tokens for row in self.stream(job.plain, self.measured)]
        watch = dataclasses.replace(self.watch, repeats=1, say=timing.silent)
        raced = watch.race({PLAIN: job.plain}, job.tokenize(self.measured))
        return [row.tokens for row in raced.outputs(PLAIN)]

    @property
    def batch(self) -> int:
        """Rows of what is not timed: with few inputs as many as are timed, which have compiled."""
        few = len(self.measured) <= min(MIN_INPUTS, self.timed_inputs)
        return self.rows if few else self.job.rows

    def alpha(self, loop: Speculative) -> metrics.Alpha:
        """Measure α of a loop along the outputs."""
        job, outputs = self.job, self.outputs
        run = job.target, self.measured, outputs, self.batch, job.max_source_len
        return metrics.alpha_of(loop, *run, job.max_new_tokens)

    @functools.cached_property
    def counts(self) -> ngram.Counts:
        """N-grams of the outputs that nothing is measured on."""
        if not self.counted:
            raise ValueError(
                "n-grams count outputs of inputs that nothing is measured on: name them among the "
                "drafts, so that some are kept for that."
            )
        outputs = [row.tokens for row in self.stream(self.job.plain, self.counted)]
        return ngram.count(outputs, self.job.target.model.vocab_size, self.job.target.start_id)
