"""`experiments.batch` on a tiny pair: rows, report, that a run goes on; and what it says."""

import functools

import pytest

import command_line
from experiments.batch import __main__ as batch
from pairs import TEXTS
from specjax import tasks
from specjax.measure.timing import PLAIN
from specjax.support import files


@pytest.mark.slow
def test_batch(pair, tmp_path, monkeypatch, capsys):
    """Four inputs, one by one and as two batches of two; a race that was cut off runs again."""
    examples = [tasks.Example(text, text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    file, work = tmp_path / "small.py", tmp_path / "work"
    file.write_text(
        "from configs import batch\n\n"
        "def get_config():\n"
        "    config = batch.get_config()\n"
        f"    config.target, config.draft = {pair.target.name!r}, {pair.draft.name!r}\n"
        "    config.batch_sizes, config.static, config.gamma_max = (1, 2), (1, 2), 2\n"
        "    config.widths, config.max_new_tokens = (1,), 12\n"
        "    config.timed_inputs, config.repeats = 4, 2\n"
        "    config.cost_inputs, config.cost_repeats = 2, 1\n"
        "    return config\n"
    )
    run = functools.partial(
        command_line.run, monkeypatch, capsys, "experiments.batch",
        f"--config={file}", f"--workdir={work}",
    )  # fmt: skip
    outcome = run()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    methods = ["γ=1", "γ=2", "goodput", "together", PLAIN]
    assert [(row["batch"], row["method"]) for row in rows] == [
        (size, method) for size in (1, 2) for method in methods
    ]
    for row in rows:
        assert row["identical"] is True
        assert row["tokens_per_second"] > 0
        assert row["speedup_decode_low"] <= row["speedup_decode"] <= row["speedup_decode_high"]
        assert len(row["costs"]["verify"]) == 3
        assert {"commit", "device", "load", "dtype"} <= set(row)
    assert {row["tokens"] for row in rows} == {rows[0]["tokens"]}
    assert [row["speedup_decode"] for row in rows if row["method"] == PLAIN] == [1, 1]
    report = (work / "report.md").read_text()
    assert "together: at least" in report
    assert (work / "batch.png").stat().st_size > 0
    text = (work / "results.jsonl").read_text()
    (work / "results.jsonl").write_text("".join(text.splitlines(keepends=True)[:7]))
    assert run().status == 0
    again = files.Rows(work / "results.jsonl").done
    assert again[:5] == rows[:5]
    assert [row["method"] for row in again[5:]] == methods


def rows_of(batch_size, **speedups):
    """Rows of a race whose best static γ is that of two tokens."""
    best = speedups["γ=2"]
    return [
        {
            "temperature": 0.0, "batch": batch_size, "method": method, "draft": "a/draft",
            "static": method.startswith("γ"), "best_static": "γ=2", "identical": True,
            "tokens_per_second": 50.0 * speedup, "drafted": 30, "target_calls": 20,
            **{f"speedup_decode{end}": speedup * by for end, by in SPREAD.items()},
            **{f"of_best{end}": speedup / best * by for end, by in SPREAD.items()},
        }
        for method, speedup in {**speedups, PLAIN: 1.0}.items()
    ]  # fmt: skip


SPREAD = {"": 1.0, "_low": 0.9, "_high": 1.1}


def test_what_is_said():
    """A line for each size, in order; the worst of a policy in words; a line of the picture for
    each method."""
    rows = [
        *rows_of(4, **{"γ=1": 0.9, "γ=2": 1.0, "together": 0.96}),
        *rows_of(1, **{"γ=1": 1.5, "γ=2": 2.0, "together": 1.8}),
    ]
    found = batch.section(rows)
    cells = [[cell(race) for _, cell in found.columns] for race in found.rows]
    assert cells[0] == ["1", "50", "1.50", "2.00", "1.80", "2", "0.90 (0.81–0.99)", "1.50", "yes"]
    assert [row[0] for row in cells] == ["1", "4"]
    assert found.words == (
        "together: at least 0.96 times plain decoding (4 rows), and at least 0.90 of the best "
        "static γ (1 rows)."
    )
    (axes,) = batch.draw(batch.by_temperature(rows)).axes
    assert [line.get_label() for line in axes.lines[:2]] == ["γ=1", "γ=2"]
    assert axes.lines[0].get_xydata().tolist() == [[1, 1.5], [4, 0.9]]
    assert [bars.get_label() for bars in axes.containers] == ["together"]
