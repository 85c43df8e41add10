"""What experiments do with trees: those of chains refuse them, Figure 1 draws their rounds."""

import functools

import pytest

import command_line
import pairs
from configs import embedded
from experiments import tasks
from experiments.reproduce import figures, speedups, traces
from experiments.reproduce.study import Study
from specjax.measure.provenance import Results


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        ("experiments.trace", "embedded", "rollouts for replay, which are of chains"),
        ("experiments.adaptive", "adaptive", "lengths of chains"),
    ],
)
def test_what_is_for_chains(command, tmp_path, module, config, message):
    """They say so before anything is loaded, and where trees go."""
    tree = "fixed(3, 2)"
    flags = f"--config=configs/{config}.py", f"--config.tree={tree}", f"--workdir={tmp_path}"
    outcome = command(module, *flags)
    assert outcome.status == 1
    assert outcome.stderr.count("\n") == 1
    for word in (message, f"--config.tree={tree!r}", "leave it out", "specjax select"):
        assert word in outcome.stderr


def test_figure_1_of_trees(pair, tmp_path, monkeypatch):
    """The best draft's, by the config's tree; named, and with its branches."""
    monkeypatch.setattr(
        tasks, "load", lambda task, split, *_: [tasks.Example(t, t) for t in pairs.TEXTS]
    )
    best = {"draft": pair.draft.name, "temperature": 0.0, "gamma": 2}
    monkeypatch.setattr(speedups, "best", lambda on, which: best)
    config = embedded.get_config()
    config.target, config.drafts = pair.target.name, (pair.draft.name,)
    config.tree, config.max_new_tokens = "fixed(2, 1)", 12
    config.alpha_inputs = config.timed_inputs = 2
    row = traces.measure(Study(config, Results(tmp_path / "results.jsonl")), {})
    assert row["tokens"] > row["target_calls"] > 0
    assert f"draft, {config.tree}, T=0: {row['tokens']} tokens" in traces.setting(row)
    figures.draw(config, tmp_path, [{**row, "table": "trace"}])
    beneath = [kind for line in row["lines"] for _, kind in line if kind == "beneath"]
    assert len(beneath) >= row["target_calls"] - 1
    assert (tmp_path / "trace.png").stat().st_size > 0
