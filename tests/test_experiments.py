"""The commands: their output, going on after a cut, and every error in one sentence."""

import functools
import importlib
import itertools
import json
import re

import ml_collections
import pytest

import command_line
import specjax
from command_line import ROOT
from experiments import reproduce
from pairs import TEXTS
from specjax import files

BUDGET = 24
FIELDS = ["input", "sample", "output", "tokens", "target_calls", "drafted", "accepted"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Of compilations, for all commands together."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def command(monkeypatch, capsys, cache):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", cache)
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.fixture
def inputs(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    return file


@pytest.fixture
def decode(command, pair, inputs):
    """experiments.decode on the pair; later flags override."""
    return functools.partial(command, "experiments.decode", *arguments(pair), f"--input={inputs}")


def arguments(pair):
    return [
        "--config=configs/decode.py",
        f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}",
        f"--config.max_new_tokens={BUDGET}",
    ]


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def refused(outcome, *words):
    """Status 1, and one line that has all the words."""
    assert outcome.status == 1
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert str(word) in line


# Decoding one's own input.


def test_decode_writes_what_generate_gives(decode, pair, tmp_path):
    out = tmp_path / "made" / "out.jsonl"
    assert decode(f"--output={out}").status == 0
    found = rows(out.read_text())
    assert [list(row) for row in found] == [FIELDS] * 8
    expected = specjax.generate(pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET).rows
    for row, text, ours in zip(found, TEXTS, expected, strict=True):
        assert row == {
            "input": text,
            "sample": 0,
            "output": ours.text,
            "tokens": ours.tokens,
            "target_calls": ours.target_calls,
            "drafted": ours.drafted,
            "accepted": ours.accepted,
        }
    plain = decode("--config.method=autoregressive", "--config.draft=", "--output=-")
    assert plain.stderr == ""
    assert [row["tokens"] for row in rows(plain.stdout)] == [row["tokens"] for row in found]
    assert all(row["drafted"] == row["accepted"] == 0 for row in rows(plain.stdout))


def test_samples_seeds_and_standard_streams(decode):
    """Text in, text out; two draws of each line in the input's order."""
    hot = functools.partial(decode, "--config.temperature=1.0", "--config.samples=2")
    stdin = "".join(f"{text}\n" for text in TEXTS).encode()
    first = hot("--input=-", stdin=stdin)
    assert first.status == 0
    found = rows(first.stdout)
    assert [(row["input"], row["sample"]) for row in found] == list(
        itertools.product(TEXTS, (0, 1))
    )
    assert len({tuple(row["tokens"]) for row in found}) == 16
    assert hot().stdout == first.stdout
    assert hot("--config.seed=1").stdout != first.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.method=speculativ", ["method='speculativ'", "speculative, autoregressive"]),
        ("--config.dtype=float23", ["dtype='float23'", "'bfloat16'"]),
        ("--config.draft=", ["No draft", "--config.draft=DIR"]),
        ("--config.target=", ["No target", "--config.target=DIR"]),
        ("--config.target=no/such/place", ["No such directory: no/such/place"]),
        ("--config.draft=/no/such", ["No such directory: /no/such"]),
        ("--config.gamma=0", ["gamma=0 must be a whole number ≥ 1"]),
        ("--config.temperature=-1.0", ["temperature=-1.0 must be ≥ 0"]),
        ("--config.temperature=nan", ["temperature=nan"]),
        ("--config.top_p=0.0", ["top_p=0.0 must lie in (0, 1]"]),
        ("--config.top_k=-1", ["top_k=-1"]),
        ("--config.max_new_tokens=0", ["max_new_tokens=0"]),
        ("--config.samples=0", ["samples=0"]),
        ("--config.batch_size=0", ["batch_size=0"]),
        ("--config.gama=3", ['Did you mean "gamma"', "--config"]),
        ("--input=nowhere.txt", ["--input=nowhere.txt: no such file"]),
        ("stray", ["Arguments without a flag", "stray"]),
    ],
)
def test_errors_in_one_line(decode, flag, words):
    refused(decode(flag), *words)


def test_errors_of_places(decode, tmp_path, inputs):
    below_a_file = inputs / "out.jsonl"
    refused(decode(f"--output={below_a_file}"), "Cannot write to", inputs, "--output")
    inputs.write_bytes(b"caf\xe9\n")
    refused(decode(), inputs, "is not UTF-8")
    refused(decode("--input=-", stdin=b"caf\xe9\n"), "is not UTF-8")


@pytest.mark.parametrize("name", ["decode", "reproduce"])
def test_help(command, name):
    """The fields of the config, and the flags."""
    outcome = command(f"experiments.{name}", "--help")
    assert "--config" in outcome.stdout
    if name == "decode":
        for field in importlib.import_module("configs.decode").get_config():
            assert re.search(rf"\b{field}\b", outcome.stdout), field
        assert "overwrite" in outcome.stdout
    else:
        assert "--workdir" in outcome.stdout


# The main job.


def test_two_drafts_of_one_name_are_two(tmp_path):
    """a/draft and b/draft."""
    done = [{"draft": "draft", "draft_path": "a/draft", "temperature": 0.0}]
    assert reproduce.find(done, "a/draft", 0.0)
    assert not reproduce.find(done, "b/draft", 0.0)
    assert not reproduce.find(done, "a/draft", 1.0)


# Configs, and files that grow by rows.


def configs():
    found = []
    for path in sorted((ROOT / "configs").glob("[!_]*.py")):
        module = importlib.import_module(f"configs.{path.stem}")
        choices = getattr(module, "MODELS", ("",)) if path.stem != "embedded" else ("", "full")
        found += [(path.stem, choice) for choice in choices]
    return found


@pytest.mark.parametrize(("name", "argument"), configs())
def test_every_config_loads(name, argument):
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config(*[argument] * bool(argument))
    assert isinstance(config, ml_collections.ConfigDict)
    assert module.__doc__
    config.lock()
    with pytest.raises(AttributeError, match="Did you mean"):
        setattr(config, f"{next(iter(config))}s", 1)


def test_the_embedded_config_serves_decode_too():
    from configs import decode, embedded

    config = embedded.get_config()
    assert set(decode.get_config()) <= set(config)
    assert config.draft in config.drafts
    assert embedded.get_config("full").to_dict() != config.to_dict()
    with pytest.raises(ValueError, match="choose demo or full"):
        embedded.get_config("huge")


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = files.Rows(path)
    assert first.done == []
    for row in ({"a": "x\u2028y\x85z"}, {"a": "é\n"}):
        first.append(row)
    path.write_bytes(path.read_bytes() + '{"a": "é'.encode()[:-1])
    again = files.Rows(path)
    assert again.done == first.done == [{"a": "x\u2028y\x85z"}, {"a": "é\n"}]
    again.append({"a": 1})
    assert files.Rows(path).done[2:] == [{"a": 1}]
    path.write_text("not json\n")
    with pytest.raises(ValueError, match="not a file of rows"):
        files.Rows(path)
