"""Verify budgets: `experiments.budgets` on a tiny pair, and what its tables say."""

import functools

import pytest

import command_line
import pairs
from experiments import tasks
from experiments.budgets import __main__ as comparison
from specjax.support import files


def test_the_table_by_batch_size():
    """The best γ of smaller batches, at the same temperature and times."""
    rows = [
        {"method": method, "temperature": t, "times": times, "batch": batch, "setting": setting}
        for method, t, times, batch, setting in [
            (comparison.STATIC, 1.0, "knee 64", 4, 3),
            (comparison.STATIC, 1.0, "knee 64", 16, 1),
            (comparison.STATIC, 0.0, "knee 64", 4, 5),
            (comparison.STATIC, 1.0, "measured", 4, 6),
            (comparison.EARLY, 1.0, "knee 64", 4, 0.9),
        ]
    ]
    assert comparison.table(rows, 1.0, "knee 64", 16) == {4: 3}
    assert comparison.table(rows, 1.0, "knee 64", 32) == {4: 3, 16: 1}


def test_the_clock_shows_both_summaries_and_the_repeats():
    """Rows that lack the range of the repeats have the ratio of the rates alone."""

    def row(method, rate, of_plain, **more):
        clock = {"rate": rate, "of_plain": of_plain, "replayed": rate, "identical": None, **more}
        return {"temperature": 1.0, "batch": 32, "method": method, "clock": clock}

    def cells(*rows):
        section = comparison.by_the_clock(rows)
        return {heading: cell(rows[-1]) for heading, cell in section.columns}

    plain = row(comparison.PLAIN, 100.0, 1.0, of_plain_range=[1.0, 1.0])
    ranged = cells(plain, row("early_stop", 71.0, 0.85, of_plain_range=[0.6, 0.9]))
    assert (ranged["of plain"], ranged["by rates"]) == ("0.85", "0.71")
    assert ranged["repeats"] == "0.60 to 0.90"
    assert "repeats" not in cells(plain, row("early_stop", 71.0, 0.85))


@pytest.mark.slow
def test_the_comparison(tmp_path, pair, monkeypatch, capsys):
    """A tiny pair at two batch sizes: rows and report."""
    examples = [tasks.Example(text, text) for text in pairs.TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    count = min(len(examples), 8)
    file, work = tmp_path / "small.py", tmp_path / "work"
    file.write_text(
        "from configs import budgets\n\n"
        "def get_config():\n"
        "    config = budgets.get_config('parse')\n"
        f"    config.target, config.draft = {pair.target.name!r}, {pair.draft.name!r}\n"
        f"    config.outputs = config.alpha_inputs = {count}\n"
        "    config.gamma_max, config.static, config.thresholds = 2, (1, 2), (0.5,)\n"
        "    config.batch_sizes, config.accelerator_batch_sizes, config.knees = (2,), (4,), (64,)\n"
        "    config.max_new_tokens, config.temperatures, config.draws = 12, (0.0,), 2\n"
        "    config.timed_inputs, config.cost_repeats, config.repeats = 4, 1, 1\n"
        "    return config\n"
    )
    run = functools.partial(
        command_line.run, monkeypatch, capsys, "experiments.budgets",
        f"--config={file}", f"--workdir={work}",
    )  # fmt: skip
    outcome = run()
    assert outcome.status == 0, outcome.stderr
    rows = files.read_rows(work / "results.jsonl")
    assert [row["method"] for row in rows] == [*comparison.METHODS] * 2
    assert [row["times"] for row in rows[::8]] == ["measured", "knee 64"]
    for row in rows:
        assert row["rate"] > 0
        if row["method"] == row["better"]:
            assert row["of_better"] == pytest.approx(1)
    clocked = {row["method"]: row["clock"] for row in rows if "clock" in row}
    assert clocked[comparison.EARLY]["identical"]
    assert clocked["together"]["identical"]
    report = (work / "report.md").read_text()
    assert "By the clock" in report
    assert "early_stop: " in report
    assert (work / "budgets.png").stat().st_size > 0
