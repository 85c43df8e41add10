"""`experiments.trees` on tiny pairs: rows, report, and that a run goes on."""

import functools

import pytest

import command_line
import pairs
from configs import embedded
from experiments import tasks
from experiments.reproduce import figures, speedups, traces
from experiments.reproduce.study import Study
from specjax.measure.provenance import Results
from specjax.support import files

CHOSEN, DRAWN = "tree of 2, top", "tree of 2, without"
SAMPLED = ["chain of 1", CHOSEN, f"{DRAWN}, token", f"{DRAWN}, block"]
SLOW = pytest.mark.slow


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.fixture
def own(command, tmp_path):
    """On a pair of one's own."""
    flags = "--config=configs/trees.py:own", f"--workdir={tmp_path / 'work'}"
    return functools.partial(command, "experiments.trees", *flags)


@pytest.fixture
def of_kind(request, tmp_path):
    """Directories of a target and a draft: a T5, or a Qwen, which has the Llama layout."""
    if request.param == "t5":
        made = request.getfixturevalue("pair")
        return made.target.name, made.draft.name
    return tuple(
        str(pairs.write_qwen(tmp_path / name, noise=noise))
        for name, noise in (("target", 0.0), ("draft", 0.05))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_kind", "temperature", "methods"),
    [
        ("t5", 0.0, ["chain of 1", CHOSEN]),
        ("qwen", 0.0, ["chain of 1", CHOSEN]),
        ("t5", 1.0, SAMPLED),
    ],
    indirect=["of_kind"],
)
def test_trees(own, of_kind, tmp_path, temperature, methods):
    """A pair of one's own, and one's own inputs."""
    (tmp_path / "in.txt").write_text("\n".join([*pairs.TEXTS[:3], "", pairs.TEXTS[3]]))
    target, draft = of_kind
    fields = {
        "target": target, "drafts": draft, "temperatures": temperature, "max_new_tokens": 12,
        "alpha_inputs": 3, "timed_inputs": 2, "repeats": 1, "gammas": 1, "sizes": 2, "depth": 2,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    job = functools.partial(own, *flags, f"--input={tmp_path / 'in.txt'}")
    outcome = job()
    assert outcome.status == 0, outcome.stderr
    work = tmp_path / "work"
    rows = files.Rows(work / "results.jsonl").done
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert (row["target"], row["draft"], row["task"]) == (target, draft, "own")
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
    for word in (message, f"--config.tree={tree!r}", "leave it out", "experiments.trees"):
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
    page = (tmp_path / "trace.html").read_text()
    assert config.tree in page
    assert page.count('<br><span class="beneath">') >= row["target_calls"] - 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "No target"),
        (("target",), "No drafts"),
        (("target", "drafts"), "No inputs: give --input=FILE"),
        (("target", "drafts", "input"), "is empty"),
    ],
)
def test_what_a_pair_of_ones_own_needs(own, tmp_path, given, words):
    (tmp_path / "in.txt").write_text("\n")
    flags = {name: f"--config.{name}=here" for name in ("target", "drafts")}
    flags["input"] = f"--input={tmp_path / 'in.txt'}"
    outcome = own(*(flags[name] for name in given))
    assert (outcome.status, words in outcome.stderr) == (1, True)
