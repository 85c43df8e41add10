"""The paper's own corpora, read by `datasets` (an extra) from the Hugging Face hub or a directory.

wmt14_en_de     an English sentence -> its German translation; test is newstest2014
cnn_dailymail   a news article -> its highlights, one on each line

Inputs have the prefixes that T5 was trained with.
"""

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.tasks.examples import Example


class Corpus(NamedTuple):
    """The place of a corpus, and the pair in a row of it."""

    name: str  # the repository on the hub
    folder: str  # the folder of its config, with {split}-*.parquet inside
    prefix: str
    pair: Callable[[Mapping[str, Any]], tuple[str, str]]


CORPORA = {
    "wmt14_en_de": Corpus(
        "wmt/wmt14",
        "de-en",
        "translate English to German: ",
        lambda row: (row["translation"]["en"], row["translation"]["de"]),
    ),
    "cnn_dailymail": Corpus(
        "abisee/cnn_dailymail",
        "3.0.0",
        "summarize: ",
        lambda row: (row["article"], row["highlights"]),
    ),
}


class Rows(Sequence[Example]):
    """The pairs of a corpus, which stay in its files and are made as they are asked for."""

    def __init__(self, corpus: Corpus, rows: Any):
        self.corpus, self.rows = corpus, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            return self._made(self.rows[at])
        columns = self.rows[at]
        values = zip(*columns.values(), strict=True)
        return [self._made(dict(zip(columns, row, strict=True))) for row in values]

    def __iter__(self) -> Iterator[Example]:
        return map(self._made, self.rows)

    def _made(self, row: Mapping[str, Any]) -> Example:
        source, target = self.corpus.pair(row)
        return Example(self.corpus.prefix + source, target)


def stream(task: str, split: str, place: str | os.PathLike = "") -> Rows:
    """Open the pairs of one task and split, in the corpus's order; no other split is read.

    Args:
      task: a key of `CORPORA`.
      split: train, validation or test.
      place: a directory in the hub's layout, such as `hf download --repo-type dataset` makes;
        "": the hub, or its files in the local cache.

    Raises:
      ValueError: `datasets` is not installed, or the corpus is not there or not of this layout.
    """
    corpus = CORPORA[task]
    if str(place) and not pathlib.Path(place).is_dir():
        raise ValueError(f"No such directory: {place}. Leave it empty to read from the hub.")
    files, where = f"{corpus.folder}/{split}-*.parquet", str(place) or corpus.name
    # By files: with a config and a split, `datasets` downloads all splits.
    rows = _loaded(
        task,
        where,
        f"{files} of {where} cannot be read",
        f"Without a network, run `hf download {corpus.name} --repo-type dataset --include "
        f"'{files}' --local-dir DIRECTORY` where there is one, and give the directory.",
        data_files={split: files},
        split=split,
    )
    found = Rows(corpus, rows)
    try:
        found[:1]
    except (KeyError, TypeError):
        raise ValueError(
            f"{files} of {where} has the columns {rows.column_names}, which "
            f"are not those of {corpus.name}. Download it again."
        ) from None
    return found


def only_split(place: str | os.PathLike, task: str) -> Sequence[Mapping[str, Any]]:
    """Load the rows of a data set's test split, or of its only split.

    Args:
      place: a directory that `datasets` reads, or a name on the hub.
      task: the task that needs it, for errors.

    Raises:
      ValueError: `datasets` is not installed, cannot read the data set, or finds several splits.
    """
    splits = _loaded(
        task,
        place,
        f"{place} cannot be read as a data set",
        f"Check the spelling; without a network, run `hf download {place} --repo-type dataset "
        "--local-dir DIRECTORY` where there is one, and give the directory.",
    )
    if "test" not in splits and len(splits) > 1:
        raise ValueError(
            f"{place} has the splits {', '.join(splits)}, and none is named test. Give one of its "
            "files instead."
        )
    return splits["test"] if "test" in splits else next(iter(splits.values()))


def _loaded(task: str, place: Any, what: str, way_out: str, **chosen: Any) -> Any:
    """Load a data set by `datasets`, an extra whose import takes a second.

    Raises:
      ValueError: it is not installed, or cannot read the place; with `what` and `way_out`.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"The task {task!r} needs the package datasets: pip install -e '.[data]'."
        ) from None
    try:
        return datasets.load_dataset(str(place), **chosen)
    except Exception as error:  # many classes: offline, mistyped, damaged, …
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{what} ({type(error).__name__}: {reason}). {way_out}") from error
