"""`experiments.trees` on tiny pairs: rows, report, and that a run goes on."""

import functools

import pytest

import command_line
import pairs
from specjax.support import files

CHOSEN, DRAWN = "tree of 2, top", "tree of 2, without"
SAMPLED = ["chain of 1", CHOSEN, f"{DRAWN}, token", f"{DRAWN}, block"]
SLOW = pytest.mark.slow


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    own = ("experiments.trees", "--config=configs/trees.py:own", f"--workdir={tmp_path / 'work'}")
    return functools.partial(command_line.run, monkeypatch, capsys, *own)


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


@pytest.mark.parametrize(
    ("of_kind", "temperature", "methods"),
    [
        ("t5", 0.0, ["chain of 1", CHOSEN]),
        ("qwen", 0.0, ["chain of 1", CHOSEN]),
        pytest.param("t5", 1.0, SAMPLED, marks=SLOW),
    ],
    indirect=["of_kind"],
)
def test_trees(command, of_kind, tmp_path, temperature, methods):
    """A pair of one's own, and one's own inputs."""
    (tmp_path / "in.txt").write_text("\n".join([*pairs.TEXTS[:3], "", pairs.TEXTS[3]]))
    target, draft = of_kind
    fields = {
        "target": target, "drafts": draft, "temperatures": temperature, "max_new_tokens": 12,
        "alpha_inputs": 3, "timed_inputs": 2, "repeats": 1, "gammas": 1, "sizes": 2, "depth": 2,
    }  # fmt: skip
    said = [f"--config.{name}={value}" for name, value in fields.items()]
    job = functools.partial(command, *said, f"--input={tmp_path / 'in.txt'}")
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
        if row["method"].startswith("tree"):
            assert (row["nodes"], len(row["parents"])) == (2, 2)
            assert row["tau_expected"] >= 1
            assert min(row["on_accelerator"], row["foretold"]) > 0
    assert "Best tree: " in (work / "report.md").read_text()
    assert job().status == 0  # nothing is measured again
    assert len(files.Rows(work / "results.jsonl").done) == len(rows)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "No target"),
        (("target",), "No drafts"),
        (("target", "drafts"), "No inputs: give --input=FILE"),
        (("target", "drafts", "input"), "is empty"),
    ],
)
def test_what_a_pair_of_ones_own_needs(command, tmp_path, given, words):
    (tmp_path / "in.txt").write_text("\n")
    flags = {name: f"--config.{name}=here" for name in ("target", "drafts")}
    flags["input"] = f"--input={tmp_path / 'in.txt'}"
    outcome = command(*(flags[name] for name in given))
    assert (outcome.status, words in outcome.stderr) == (1, True)
