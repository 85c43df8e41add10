"""experiments.benchmark.beside: its table, its rows and what it says where a peer is missing."""

import json
import sys

import jax
import pytest

import command_line
from experiments.benchmark import beside, models, worker

COMMAND = "experiments.benchmark.beside"
NODE = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"version": "made up"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({{"ids": asked["ids"][: asked["tokens"]], "seconds": 0.5}}), flush=True)
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A folder of npm packages, and a `node` that answers with the prompt."""

    def make(text: str):
        (tmp_path / "node").write_text(text)
        (tmp_path / "node").chmod(0o755)
        (tmp_path / "node_modules" / beside.LLAMA).mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return f"--packages={tmp_path}"

    return make


def method(peer, gamma, seconds, ids):
    return {
        "peer": peer, "dtype": "int8", "gamma": gamma, "version": f"{peer} 1", "ids": ids,
        "first": [0.2, 0.1], "seconds": seconds,
    }  # fmt: skip


def test_table_takes_the_least_turns_and_the_mean_over_prompts():
    one, other = [4, 5, 6], [4, 5, 7]
    rows = [
        {"target": "t", "kind": kind, "command": "c", "commit": "d", "methods": [
            method("specjax", 0, [0.9, 0.1 + 0.2 * scale], one),
            method("specjax", 3, [0.9, 0.1 + 0.1 * scale], one),
            method("llama.cpp", 0, [0.1 + 0.4 * scale, 0.9], other),
            method("llama.cpp", 3, [0.1 + 0.4 * scale, 0.9], one),
        ]} for kind, scale in (("code", 1), ("chat", 2))
    ]  # fmt: skip
    section = beside.table(rows)
    cells = [[cell(line) for _, cell in section.columns] for line in section.rows]
    names = ["method", "code", "chat", "all", "whole call", "speedup", "as plain", "as the first"]
    assert [name for name, _ in section.columns] == names
    assert cells == [
        ["specjax, int8, plain", "100.0", "200.0", "150.0", "133.3", "1.00", "2 of 2", "2 of 2"],
        ["specjax, int8, γ = 3", "50.0", "100.0", "75.0", "83.3", "2.00", "2 of 2", "2 of 2"],
        ["llama.cpp, int8, plain", "200.0", "400.0", "300.0", "233.3", "0.50", "2 of 2", "0 of 2"],
        ["llama.cpp, int8, γ = 3", "200.0", "400.0", "300.0", "233.3", "0.50", "0 of 2", "2 of 2"],
    ]
    assert section.words == "specjax 1; llama.cpp 1."


def test_rows_and_the_prompts_that_are_missing(monkeypatch, capsys, tmp_path, node):
    given = (node(NODE), "--shapes=tiny", "--peers=llama.cpp:q4", "--tokens=5", "--pause=0")
    given += ("--turns=2", f"--workdir={tmp_path / 'run'}")
    assert command_line.run(monkeypatch, capsys, COMMAND, *given).status == 0
    file = tmp_path / "run" / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == list(range(8))
    (found,) = rows[0]["methods"]
    assert (found["first"], found["seconds"], len(found["ids"])) == ([0.5] * 2, [0.5] * 2, 5)
    assert "llama.cpp, q4, plain" in (tmp_path / "run" / "report.md").read_text()
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
    command_line.run(monkeypatch, capsys, COMMAND, *given)
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == list(range(8))
    other = command_line.run(monkeypatch, capsys, COMMAND, *given, "--turns=3")
    assert "turns was 2 and is 3" in other.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shapes="], "Give --target, and --draft if there is one; or --shapes."),
        (["--peers=vllm:int8"], "--peers=vllm: name specjax, llama.cpp, transformers or ctran"),
        (["--peers=ctranslate2:int8"], "ctranslate2 needs packages: pip install torch ctranslate2"),
        (["--peers=llama.cpp:q4", "--packages=no"], "npm install --prefix no --ignore-scripts"),
        (["--peers=llama.cpp:q4"], "llama.cpp:q4 ended without an answer; see its error above."),
    ],
)
def test_errors_say_what_to_do(monkeypatch, capsys, tmp_path, node, given, message):
    monkeypatch.setattr(beside.importlib.util, "find_spec", lambda name: None)
    given = [node(f"#!{sys.executable}\n"), "--shapes=tiny", f"--workdir={tmp_path}", *given]
    found = command_line.run(monkeypatch, capsys, COMMAND, *given)
    assert (found.status, found.stderr.count("\n")) == (1, 1)
    assert message in found.stderr


def test_node_is_absent(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"llama\.cpp needs node, 20 or newer: install nodejs"):
        beside.check(["llama.cpp:q4"], ".")


def test_worker_decodes_random_weights_in_int8():
    made = models.make("tiny", dtype="int8", weights="random")
    assert {x.dtype.name for x in jax.tree.leaves(made.model)} == {"float32", "int8"}
    narrow, wide = (worker.specjax(dtype, "tiny")([5, 9, 7], 6, 0) for dtype in ("int8", "float32"))
    assert len(narrow) == len(wide) == 6
    assert narrow[0] == wide[0]
