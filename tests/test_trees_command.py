"""`experiments.trees` on a tiny pair: rows, report, and that a run goes on."""

import functools

import pytest

import command_line
from pairs import TEXTS
from specjax import tasks
from specjax.support import files

CHOSEN, DRAWN = "tree of 2, top", "tree of 2, without"
SAMPLED = ["chain of 1", CHOSEN, f"{DRAWN}, token", f"{DRAWN}, block"]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("temperature", "methods"),
    [(0.0, ["chain of 1", CHOSEN]), pytest.param(1.0, SAMPLED, marks=pytest.mark.slow)],
)
def test_trees(command, pair, tmp_path, monkeypatch, temperature, methods):
    monkeypatch.setattr(
        tasks, "load", lambda task, split, files=(): [tasks.Example(t, t) for t in TEXTS]
    )
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import trees\n\n"
        "def get_config():\n"
        "    config = trees.get_config('parse')\n"
        f"    config.target, config.drafts = {pair.target.name!r}, ({pair.draft.name!r},)\n"
        f"    config.temperatures, config.max_new_tokens = ({temperature},), 12\n"
        "    config.alpha_inputs, config.timed_inputs, config.repeats = 3, 2, 1\n"
        "    config.gammas, config.sizes, config.depth = (1,), (2,), 2\n"
        "    return config\n"
    )
    work = tmp_path / "work"
    job = functools.partial(command, "experiments.trees", f"--config={file}", f"--workdir={work}")
    outcome = job()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert row["draft"] == pair.draft.name
        assert row["tau"] >= 1
        assert row["speedup_decode"] > 0
        assert row["identical"] is (True if temperature == 0 else None)
        if row["method"].startswith("tree"):
            assert (row["nodes"], len(row["parents"])) == (2, 2)
            assert row["tau_expected"] >= 1
            assert min(row["on_accelerator"], row["foretold"]) > 0
    assert "Best tree: " in (work / "report.md").read_text()
    assert job().status == 0  # nothing is measured again
    assert len(files.Rows(work / "results.jsonl").done) == len(rows)
