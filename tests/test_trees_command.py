"""`experiments.trees` on a tiny pair: rows, report, and that a run goes on."""

import functools

import pytest

import command_line
from configs import embedded
from experiments.reproduce import figures, speedups, traces
from experiments.reproduce.study import Study
from pairs import TEXTS
from specjax import tasks
from specjax.measure.provenance import Results
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
        assert min(row["draft_steps"], row["verify_steps"]) > 0
        if row["method"].startswith("tree"):
            assert (row["nodes"], len(row["parents"])) == (2, 2)
            assert row["tau_expected"] >= 1
            assert min(row["on_accelerator"], row["foretold"]) > 0
    assert "Best tree: " in (work / "report.md").read_text()
    assert job().status == 0  # nothing is measured again
    assert len(files.Rows(work / "results.jsonl").done) == len(rows)


@pytest.mark.parametrize(
    ("module", "config", "said"),
    [
        ("experiments.trace", "embedded", "rollouts for replay, which are of chains"),
        ("experiments.adaptive", "adaptive", "lengths of chains"),
    ],
)
def test_what_is_for_chains(command, tmp_path, module, config, said):
    """They say so before anything is loaded, and where trees go."""
    tree = "fixed(branches=(3, 2))"
    flags = f"--config=configs/{config}.py", f"--config.tree={tree}", f"--workdir={tmp_path}"
    outcome = command(module, *flags)
    assert outcome.status == 1
    assert outcome.stderr.count("\n") == 1
    for word in (said, f"--config.tree={tree!r}", "leave it out", "experiments.trees"):
        assert word in outcome.stderr


def test_figure_1_of_trees(pair, tmp_path, monkeypatch):
    """The best draft's, by the config's tree; named, and with its branches."""
    monkeypatch.setattr(
        tasks, "load", lambda task, split, files=(): [tasks.Example(t, t) for t in TEXTS]
    )
    best = {"draft": pair.draft.name, "temperature": 0.0, "gamma": 2}
    monkeypatch.setattr(speedups, "best", lambda on: best)
    config = embedded.get_config()
    config.target, config.drafts = pair.target.name, (pair.draft.name,)
    config.tree, config.max_new_tokens = "fixed(branches=(2, 1))", 12
    config.alpha_inputs = config.timed_inputs = 2
    row = traces.measure(Study(config, Results(tmp_path / "results.jsonl")), {})
    assert row["tokens"] > row["target_calls"] > 0
    assert f"draft, {config.tree}, T=0: {row['tokens']} tokens" in traces.setting(row)
    figures.draw(config, tmp_path, [{**row, "table": "trace"}])
    page = (tmp_path / "trace.html").read_text()
    assert config.tree in page
    assert page.count('<br><span class="beneath">') >= row["target_calls"] - 1
