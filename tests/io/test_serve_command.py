"""`experiments.serve`: the simulation of arrivals by hand, drawn budgets, and the whole command on
a tiny pair; `--follow` and `specjax.stream`."""

import functools
import io
import types

import numpy as np
import pytest
from rich.console import Console

import command_line
import specjax
from experiments.serve import __main__ as serve
from pairs import TEXTS
from specjax import tasks
from specjax.cli import follow
from specjax.decoding import Request
from specjax.results import Progress, Row
from specjax.support import files

ROW = functools.partial(
    Row, text="", target_calls=1, drafted=0, levels=0, accepted=0, accepted_lengths=[], tested=[]
)


class Clocked:
    """Two rows that emit a token a round, which takes a second; an admission takes ten."""

    at_once = 1

    def __init__(self, clock, rows=2):
        self.clock, self.rows, self.held = clock, rows, {}

    live = property(lambda self: len(self.held))
    free = property(lambda self: self.rows - len(self.held))

    def admit(self, requests):
        for request in requests:
            row = next(row for row in range(self.rows) if row not in self.held)
            self.held[row] = [request, 0]
            self.clock[0] += 10

    def run(self, ended, rounds):
        for _ in range(rounds):
            self.clock[0] += 1
            for held in self.held.values():
                held[1] = min(held[1] + 1, held[0].budget)
            if any(count == request.budget for request, count in self.held.values()):
                break

    def read(self):
        emitted = {row: count for row, (_, count) in self.held.items()}
        ended = [row for row, (request, count) in self.held.items() if count == request.budget]
        found = []
        for rows in (ended, [row for row in self.held if row not in ended]):
            labels = {row: (self.held[row][0].index, 0) for row in rows}
            stats = types.SimpleNamespace(emitted=emitted)
            found.append(types.SimpleNamespace(labels=labels, stats=stats))
        for row in ended:
            del self.held[row]
        return found


def test_simulated_arrivals_by_hand(monkeypatch):
    """Inputs 0, 1 and 2 come at 5, 16 and 17, with budgets 4, 2 and 1; two rows, two rounds a time.

    0 is admitted at 5, starts at 15 and has two tokens at 17. 1 and 2 have come by then, and 1
    takes the other row, until 27. At 29 both end. 2 is admitted, and ends at 40."""
    clock = [0.0]
    monkeypatch.setattr(serve.time, "perf_counter", lambda: clock[0])
    requests = [Request(0, 0, [1], 4), Request(1, 0, [1], 2), Request(2, 0, [1], 1)]
    found = serve.simulate(Clocked(clock), requests, [5.0, 16.0, 17.0], every=2)
    assert found == [(5, 17, 29, 4), (16, 29, 29, 2), (17, 40, 40, 1)]
    said = serve.summary(found)
    assert (said["first_50"], said["per_token_50"]) == (13, 6.5)
    assert said["per_token_95"] == pytest.approx(np.percentile([6, 6.5, 23], 95))
    assert said["tokens_per_s"] == pytest.approx(7 / 35)


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
    """Rows of both parts, a report, and a run that goes on."""
    examples = [tasks.Example(text, "") for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, files=(): examples)
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import serve\n\n"
        "def get_config():\n"
        "    config = serve.get_config()\n"
        f"    config.target, config.drafts = {pair.target.name!r}, ({pair.draft.name!r},)\n"
        "    config.temperatures, config.max_new_tokens, config.batch_size = (1.0,), 12, 3\n"
        "    config.timed_inputs, config.repeats, config.rates = 8, 2, (50.0,)\n"
        "    config.gamma, config.admits = 2, (1,)\n"
        "    config.lengths, config.shortest = ('drawn',), 2\n"
        "    return config\n"
    )
    work = tmp_path / "work"
    job = functools.partial(command, "experiments.serve", f"--config={file}", f"--workdir={work}")
    outcome = job()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    parts = [[row for row in rows if row["part"] == name] for name in ("throughput", "latency")]
    kinds = [(row["method"], row["admits"]) for row in parts[0]]
    assert kinds == [("plain", 1), ("plain", 3), ("draft", 1), ("draft", 3)]
    assert all(row["of_batches"] == 1 for row in parts[0] if row["admits"] == 3)
    assert all(row["differ"] == 0 and row["tokens_per_s"] > 0 for row in parts[0])
    assert parts[0][0]["tokens"] <= sum(serve.budgets(8, 2, 12, 0))
    ways = [(row["method"], row["way"]) for row in parts[1]]
    assert ways == [(m, w) for m in ("plain", "draft") for w in ("admitted", "batches")]
    for row in parts[1]:
        assert 0 < row["first_50"] <= row["first_95"]
        assert 0 < row["per_token_50"] <= row["per_token_95"]
    assert {"commit", "load", "dtype", "batch", "device"} <= set(rows[0])
    assert "budgets drawn for each input: latency" in (work / "report.md").read_text()
    assert job().status == 0  # nothing is measured again
    assert len(files.Rows(work / "results.jsonl").done) == len(rows)


def test_what_cannot_be_served(command, tmp_path):
    job = functools.partial(command, "experiments.serve", "--config=configs/serve.py:parse")
    for flag, message in (
        ("lengths=('own','long')", "lengths has 'long': each is one of own, drawn"),
        ("shortest=97", "shortest=97 must lie in [1, max_new_tokens]"),
        ("rates=(2.0,0.0)", "rates has 0.0: inputs per second are above 0"),
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
