"""Lines of the output of `specjax decode`: its own, or in the format of others."""

import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specjax.cli import inputs
from specjax.measure import formats
from specjax.results import Progress, Row
from specjax.support import compilation_cache, files
from specjax.support.named import short
from specjax.support.ranges import shown


class Lines:
    """Makes the line of each row in the config's format."""

    def __init__(self, config, source: str, texts: Sequence[str]):
        """Read the inputs' further fields where the format has them.

        Args:
          config: of the command; with `format` if its output is another's.
          source: file of the inputs, of which `texts` were read.

        Raises:
          ValueError: a field is of the wrong kind, or the config decodes several rows at once.
        """
        self.format, self.texts = config.get("format", ""), texts
        self.samples = config.samples
        draft = short(config.draft) if config.method == "speculative" else "plain"
        self.model = f"{short(config.target)}-{draft}"
        self.questions: list[dict[str, Any]] = []
        self._seconds: dict[tuple[int, int], float] = {}  # by input and sample
        if self.format == "spec_bench":
            if (config.batch_size, config.samples) != (1, 1):
                raise ValueError(
                    "--format=spec_bench times one output at a time: give --config.batch_size=1 "
                    "--config.samples=1."
                )
            self.questions = _questions(source, len(texts))

    def label(self, number: int) -> dict[str, Any]:
        """The fields that name a row in its line; empty beyond the last row."""
        index, sample = divmod(number, self.samples)
        if index >= len(self.texts):
            return {}
        if self.format == "vllm":
            return {"id": formats.vllm_id(index, sample)}
        if self.format == "spec_bench":
            return {"question_id": self.questions[index]["question_id"]}
        return {"input": self.texts[index], "sample": sample}

    def timed(self, events: Iterable[Row | Progress]) -> Iterator[Row | Progress]:
        """Pass events on, and note the seconds of each row from the end of the one before.

        Compilation is left out.
        """
        source, seconds = iter(events), 0.0
        while True:
            watch, begin = compilation_cache.Watch(), time.perf_counter()
            event = next(source, None)
            elapsed = time.perf_counter() - begin
            seconds += elapsed - watch.seconds()
            if event is None:
                return
            if isinstance(event, Row):
                self._seconds[event.index, event.sample] = max(seconds, 1e-9)
                seconds = 0.0
            yield event

    def of(self, row: Row) -> dict[str, Any]:
        """Make the line of a row."""
        seconds = self._seconds.pop((row.index, row.sample), 0.0)
        if self.format == "vllm":
            return formats.vllm_response(row, self.model)
        if self.format == "spec_bench":
            asked = self.questions[row.index]
            return formats.spec_bench(
                [[(row, seconds)]], **asked, model_id=self.model, tstamp=time.time()
            )
        return {
            **self.label(row.index * self.samples + row.sample),
            "output": row.text,
            "tokens": row.tokens,
            "target_calls": row.target_calls,
            "verified": row.verified,
            "accepted": row.accepted,
            "accepted_lengths": row.accepted_lengths,
            "tested": row.tested,
            **row.acceptance_fields(),
        }


def _questions(source: str, count: int) -> list[dict[str, Any]]:
    """Read the question_id and category of each input: without them its number, and empty."""
    name = f"--input={source}"
    given: list[tuple[str, dict[str, Any]]] = [("", {})] * count
    if source.endswith(".jsonl"):
        data = files.read_limited(pathlib.Path(source), inputs.MAX_BYTES)
        given = list(files.json_objects(data, name, inputs.WAY_OUT))
    found = []
    for number, (place, line) in enumerate(given, start=1):
        asked, category = line.get("question_id", number), line.get("category", "")
        if type(asked) not in (int, str) or not isinstance(category, str):
            raise ValueError(
                f"{place}: question_id={shown(asked)} and category={shown(category)} should be a "
                "number or text, and a text."
            )
        found.append({"question_id": asked, "category": category})
    return found
