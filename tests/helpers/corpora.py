"""Tiny corpora in the layout that WMT14 and CNN/DailyMail have on the Hugging Face hub."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

GERMAN = {
    "The house is small.": "Das Haus ist klein.",
    "Birds can fly, fish cannot.": "Vögel können fliegen, Fische nicht.",
    "Who has seen the old river?": "Wer hat den alten Fluss gesehen?",
    "We went home early today.": "Wir gingen heute früh nach Hause.",
    "Nobody knew what to say.": "Niemand wusste, was zu sagen war.",
    "The train left at nine.": "Der Zug fuhr um neun ab.",
    "Rain fell on both days.": "An beiden Tagen fiel Regen.",
    "She opened the third door.": "Sie öffnete die dritte Tür.",
}
HIGHLIGHTS = {
    "A bridge closed on Monday. Engineers found a crack in it.": "Bridge closed .\nIt cracked .",
    "The mayor spoke for an hour. Few people came to listen.": "Mayor spoke .\nFew listened .",
    "Two boats met in the fog. No one was hurt.": "Boats met in fog .\nNone hurt .",
    "Costs rose again in May. Bread costs more than ever.": "Costs rose .\nBread is dear .",
}
CARD = """---
configs:
- config_name: {other}
  data_files:
  - split: test
    path: {other}/test-*
- config_name: {folder}
  data_files:
  - split: train
    path: {folder}/train-*
  - split: test
    path: {folder}/test-*
---
"""


def write(root: Path) -> None:
    """wmt/wmt14 and abisee/cnn_dailymail under `root`.

    Each has a card with several configs and a training file that cannot be read.
    """
    pairs = [{"de": german, "en": english} for english, german in GERMAN.items()]
    _write(root / "wmt" / "wmt14", "de-en", "cs-en", {"translation": pairs})
    columns = {
        "article": list(HIGHLIGHTS),
        "highlights": list(HIGHLIGHTS.values()),
        "id": list("abcd"),
    }
    _write(root / "abisee" / "cnn_dailymail", "3.0.0", "1.0.0", columns)


def _write(directory: Path, folder: str, other: str, columns: dict[str, list]) -> None:
    (directory / folder).mkdir(parents=True)
    (directory / "README.md").write_text(CARD.format(folder=folder, other=other))
    (directory / folder / "train-00000-of-00003.parquet").write_bytes(b"not a table")
    half = len(columns[next(iter(columns))]) // 2
    for part, rows in enumerate((slice(half), slice(half, None))):
        table = pa.table({name: values[rows] for name, values in columns.items()})
        pq.write_table(table, directory / folder / f"test-{part:05}-of-00002.parquet")
