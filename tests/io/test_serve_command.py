"""`experiments.serve`: drawn budgets, and the whole command on a tiny pair; `--follow` and
`specjax.stream`."""

import functools
import io

import numpy as np
import pytest
from rich.console import Console

import command_line
import specjax
from experiments import tasks
from experiments.serve import __main__ as serve
from pairs import TEXTS
from specjax.cli import follow
from specjax.results import Progress, Row
from specjax.support import files

ROW = functools.partial(
    Row, text="", target_calls=1, verified=0, draft_calls=0, accepted=0, accepted_lengths=[],
    tested=[],
)  # fmt: skip


def test_drawn_budgets():
    """As many below the geometric mean as above it, and none outside."""
    drawn = serve.budgets(4000, 8, 200, seed=1)
    assert (drawn.min(), drawn.max()) == (8, 200)
    assert np.median(drawn) == pytest.approx(np.sqrt(8 * 201), rel=0.06)
    assert serve.budgets(9, 5, 5, seed=0).tolist() == [5] * 9


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.mark.slow
def test_serve(command, pair, tmp_path, monkeypatch):
    """Rows, and a report."""
    examples = [tasks.Example(text, "") for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import serve\n\n"
        "def get_config():\n"
        "    config = serve.get_config()\n"
        f"    config.target, config.drafts = {pair.target.name!r}, ({pair.draft.name!r},)\n"
        "    config.temperatures, config.max_new_tokens, config.batch_size = (1.0,), 12, 3\n"
        "    config.timed_inputs, config.repeats = 8, 2\n"
        "    config.gamma, config.admits = 2, (1,)\n"
        "    config.lengths, config.shortest = ('drawn',), 2\n"
        "    return config\n"
    )
    work = tmp_path / "work"
    job = functools.partial(command, "experiments.serve", f"--config={file}", f"--workdir={work}")
    outcome = job()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    kinds = [(row["method"], row["admits"]) for row in rows]
    assert kinds == [("plain", 1), ("plain", 3), ("draft", 1), ("draft", 3)]
    assert all(row["of_batches"] == 1 for row in rows if row["admits"] == 3)
    assert all(row["differ"] == 0 and row["tokens_per_s"] > 0 for row in rows)
    assert rows[0]["tokens"] <= sum(serve.budgets(8, 2, 12, 0))
    assert "budgets drawn for each input: tokens per second" in (work / "report.md").read_text()


def test_what_cannot_be_served(command, tmp_path):
    job = functools.partial(command, "experiments.serve", "--config=configs/serve.py:parse")
    for flag, message in (
        ("lengths=('own','long')", "lengths has 'long': each is one of own, drawn"),
        ("shortest=97", "shortest=97 must lie in [1, max_new_tokens]"),
        ("timed_inputs=8", "timed_inputs=8 must be more than batch_size=8"),
    ):
        outcome = job(f"--workdir={tmp_path / 'work'}", f"--config.{flag}")
        assert outcome.status == 1
        assert message in outcome.stderr


# Rows in a terminal, and in Python.


def test_lines_of_running_rows():
    """Input, draw, tokens so far and the end of the text, as wide as the terminal."""
    rows = [Progress(12, 1, "short", [5] * 3), Progress(3, 0, "word " * 40 + "end", [5] * 41)]
    console = Console(file=io.StringIO(), width=60)
    console.print(follow.lines(rows, ended=7, width=60))
    first, second, last = console.file.getvalue().splitlines()
    assert first.split()[:3] == ["3", "41", "tokens"]
    assert "…" in first
    assert first.rstrip().endswith("word end")
    assert second.split() == ["12.1", "3", "tokens", "short"]
    assert last.split() == ["7", "ended"]


def test_rows_are_shown_as_they_pass():
    """All events go on; in the terminal the last look is gone."""
    events = [Progress(0, 0, "a b", [1]), Progress(1, 0, "c", [2]), ROW(0, 0, tokens=[1, 2])]
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    passed = follow.follow(iter(events), console)
    assert next(passed) == events[0]
    assert list(passed) == events[1:]
    assert "1 ended" in console.file.getvalue()


def test_following_needs_a_terminal(command, tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("x\n")
    flags = ("--config.target=a", "--config.draft=b", f"--input={file}", "--follow")
    outcome = command("specjax", "decode", *flags)
    assert outcome.status == 1
    assert "--follow writes to a terminal" in outcome.stderr


def test_stream(pair):
    """The rows of `generate`, as they end, and how far the others are."""
    options = {"max_new_tokens": 8, "batch_size": 3, "temperature": 1.0, "key": 4}
    events = list(specjax.stream(pair.target, None, TEXTS, every=3, **options))
    rows = [event for event in events if isinstance(event, specjax.Row)]
    parts = [event for event in events if isinstance(event, specjax.Progress)]
    expected = specjax.generate(pair.target, None, TEXTS, **options).rows
    assert sorted(rows, key=lambda row: row.index) == expected
    assert parts
    for part in parts:
        assert expected[part.index].tokens[: len(part.tokens)] == part.tokens
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        specjax.stream(pair.target, None, TEXTS, temprature=1.0)
    with pytest.raises(ValueError, match="every=-1 must be a whole number ≥ 0"):
        next(specjax.stream(pair.target, None, TEXTS, every=-1))
