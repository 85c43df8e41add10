"""The commands: their output, going on after a cut, and every error in one sentence."""

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import ml_collections
import numpy as np
import pytest

import command_line
import specjax
from command_line import ROOT
from experiments import tasks
from experiments.card import __main__ as card
from experiments.reproduce import pages, study
from experiments.tasks import python_source, trees
from experiments.tasks.examples import Example
from pairs import TEXTS
from specjax import policies, rules
from specjax.cli import defaults, outputs
from specjax.cli import pairs as pairs_of_config
from specjax.decoding import building, running
from specjax.settings import Settings
from specjax.support import files, runs
from tiny_models import slow

BUDGET = 24
FIELDS = [
    "input", "sample", "output", "tokens", "target_calls", "verified", "accepted",
    "accepted_lengths", "tested", "acceptance_by_position", "mean_acceptance",
]  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The cache of compilations, for all commands together."""
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
    """specjax decode on the pair; later flags override."""
    return functools.partial(command, "specjax decode", *arguments(pair), f"--input={inputs}")


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
            "verified": ours.verified,
            "accepted": ours.accepted,
            "accepted_lengths": ours.accepted_lengths,
            "tested": ours.tested,
            **ours.acceptance_fields(),
        }
    plain = decode("--config.method=autoregressive", "--config.draft=", "--output=-")
    assert plain.stderr.startswith("8 outputs: ")
    assert [row["tokens"] for row in rows(plain.stdout)] == [row["tokens"] for row in found]
    assert all(row["verified"] == row["accepted"] == 0 for row in rows(plain.stdout))


def test_a_position_that_no_round_tested():
    from specjax.cli.summary import by_position

    said = by_position(np.array([1, 9, 0]), np.array([10, 0]))
    assert said.endswith("draft: 0.90, – (–: none was tested); mean 0.90.")
    said = by_position(np.array([1, 1, 8]), np.array([10, 9]))
    assert said.endswith(f"draft: 0.90, 0.89; mean {17 / 19:.2f}.")


def test_decode_says_what_it_took(decode, pair, tmp_path, inputs):
    """To standard output, unless the rows go there. A run that goes on counts its own outputs."""
    out = tmp_path / "out.jsonl"
    result = specjax.generate(pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET)
    tokens, calls = result.emitted.sum(), result.target_calls.sum()
    counts = rf"{tokens} tokens in {calls} target calls, τ = {tokens / calls:.2f}"
    rates = ", ".join(f"{rate:.2f}" for rate in result.summary.acceptance)
    mean = f"{result.summary.mean_acceptance:.2f}"
    pattern = (
        rf"Accepted of those tested, by position in the draft: {rates}; mean {mean}\.\n"
        rf"8 outputs: {counts}; \d+\.\d s, \d+\.\d of them compiling; "
        r"[\d,]+ tokens a second without compilation\.\n"
    )
    first = decode(f"--output={out}")
    assert re.fullmatch(pattern, first.stdout)
    assert re.fullmatch(pattern, decode().stderr)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:5]))
    assert first.progress[-2:] == [
        f"loading the target {pair.target.name} and the draft {pair.draft.name}",
        "compiling speculative decoding of 8 rows at once",
    ]
    _, last = decode(f"--output={out}").stdout.splitlines()
    assert last.startswith("3 outputs, 5 were there already: ")
    assert decode(f"--output={out}").stdout == "All 8 outputs were there already.\n"
    inputs.write_text("")
    refused(decode(), f"--input={inputs} is empty")


def test_configs_are_found_anywhere(decode, pair, inputs, tmp_path):
    """Those of the checkout, and what they name; a process of its own does it below."""
    assert decode(cwd=tmp_path).status == 0
    refused(decode("--config=configs/decoder.py", cwd=tmp_path), "configs/decoder.py")
    for model in ("draft-small", "gpt-draft", "head"):
        config = importlib.import_module("configs.train").get_config(model)
        for field in {"teacher", "tokenizer", "target", "draft"} & set(config):
            assert Path(config[field]).is_absolute()
            assert Path(config[field]).is_dir()


def test_what_to_type():
    """The card shows a line of each kind that `parse` has; the notebook decodes no others."""
    assert {type(trees.parse(line)) for line in card.FIRST} == set(python_source.STATEMENTS)
    book = json.loads((ROOT / "notebooks" / "02_adaptive_gamma.ipynb").read_text())
    code = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
    (cell,) = [cell for cell in code if "texts = [" in cell]
    for line in next(
        ast.literal_eval(node.value)
        for node in ast.parse(cell).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "texts"
    ):
        assert isinstance(trees.parse(line), python_source.STATEMENTS)


def test_a_card_says_where_its_text_was_not_held_out():
    assert "never trained on" in card.origin({"not_held_out": ""})
    assert card.origin({"not_held_out": "It differs."}) == ". It differs."


def test_reports_say_once_where_their_text_was_not_held_out():
    note = "The test split of parse differs from what was held out."
    rows = [{"commit": "a", "not_held_out": note}, {"commit": "a", "not_held_out": note}]
    assert pages.warnings_of(rows) == [note]
    assert pages.warnings_of([{"commit": "a"}]) == pages.warnings_of([]) == []


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"README.md": "mine"}, "README.md"),
        ({"card.json": "{}"}, "card.json"),
        ({"README.md": "mine", "card.json": '{"checks": 1}'}, "README.md"),
        ({"README.md": "", "card.json": '{"checks": 1, "alpha": 1, "losses": 1}'}, ""),
        ({"LICENSE": ""}, ""),
    ],
)
def test_a_card_replaces_cards_alone(files, refused, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = rf"holds a {refused} that is no family's card\. Name"
    with pytest.raises(ValueError, match=words) if refused else contextlib.nullcontext():
        card.check(tmp_path)


def test_kinds_in_the_card():
    pairs = [
        Example(line, trees.write(trees.parse(line)))
        for line in ("x = 1", "x = 2", "y = 3", "for i in x:")
    ]
    found = card.by_kind(pairs, pairs[1:], [pairs[1].target, "", pairs[3].target])
    assert found == {
        "Assign": {"share": 0.75, "inputs": 2, "exact": 1},
        "For": {"share": 0.25, "inputs": 1, "exact": 1},
    }
    first = [{"input": "pass", "output": "Pass", "tree": "Pass"}]
    first += [{"input": "try:", "output": "(Try", "tree": "(Try)"}]
    text = "\n".join(card.kinds_in_words({"split": "test", "kinds": found, "first": first}))
    assert "| `pass` | Pass | yes |" in text
    assert "| `try:` | Try | no: `(Try` |" in text
    assert "| Assign | 75.0% | 1 of 2 |" in text


def test_decode_by_policy_and_rule(decode, pair):
    """By name, with settings; an import path has its colon."""
    chosen = {"rule": "lenient(lenience=0.3)", "policy": "svip(threshold=0.4)"}
    outcome = decode(*(f"--config.{k}={v}" for k, v in chosen.items()))
    assert outcome.stderr.endswith("LenientArgmax(lenience=0.3) is not exact.\n")
    found = rows(outcome.stdout)
    expected = specjax.generate(
        pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET,
        rule=rules.Lenient(0.3), policy=policies.parse("svip", threshold=0.4),
    )  # fmt: skip
    assert [row["tokens"] for row in found] == expected.tokens
    assert sum(row["verified"] for row in found) == sum(expected.verified)
    whole = rows(decode("--config.policy=specjax.policies:constant(gamma=4)").stdout)
    assert sum(row["verified"] for row in whole) > sum(expected.verified)


def test_decode_compares_both_methods(decode, pair, tmp_path):
    """The comparison goes where the rows do not."""
    compare = functools.partial(decode, "--config.compare=True")
    out = tmp_path / "out.jsonl"
    to_file, to_stdout = compare(f"--output={out}"), compare()
    assert to_file.status == 0, to_file.stderr
    assert to_stdout.stdout == out.read_text()
    counts = specjax.generate(pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET).summary
    for printed in (to_file.stdout, to_stdout.stderr):
        assert "8 of 8 outputs are the same tokens." in printed
        assert re.search(rf"target calls .* {counts.tokens} .* {counts.iterations} ", printed)
        assert re.search(rf"verified .* 0 .* {counts.verified} ", printed)
        assert re.search(r"Speedup \d+\.\d\d, with prefill \d+\.\d\d; expected of c = ", printed)
        assert "loop, estimated: draft" in printed
    refused(compare("--config.method=autoregressive"), "compare=True needs", "speculative")


@pytest.mark.parametrize(
    ("temperature", "rule", "message"),
    [
        (1.0, "token", "the methods draw different samples of one distribution.$"),
        slow((1.0, "lenient(0.3)", r"different samples. Lenient\(lenience=0.3\) is not exact.$")),
        (0.0, "lenient(0.3)", r"outputs are the same tokens. LenientArgmax\(lenience=0.3\) is not"),
    ],
)
def test_what_a_comparison_says_of_tokens(decode, temperature, rule, message):
    """At temperatures above 0 nothing of how many are the same: they differ by design."""
    chosen = f"--config.temperature={temperature}", f"--config.rule={rule}"
    outcome = decode("--config.compare=True", *chosen)
    assert outcome.status == 0, outcome.stderr
    assert re.search(message, outcome.stderr, re.MULTILINE)
    assert ("same tokens" in outcome.stderr) == (temperature == 0)


def test_results_outlive_new_fields():
    """Rows made before a field was there belong to the same config with that field's default."""
    config = ml_collections.ConfigDict({"gamma": 4})
    older = runs.fingerprint(runs.settings(config))
    for name, default in runs.LATER.items():
        config[name] = default
    assert runs.fingerprint(runs.settings(config)) == older
    config.rule = "block"
    assert runs.fingerprint(runs.settings(config)) != older
    others = [importlib.import_module(f"configs.{name}").get_config() for name in ("chat", "train")]
    configs = defaults.decode(), *others
    fields = [(name, of) for of in configs for name in runs.LATER if name in of]
    assert all(of[name] == runs.LATER[name] for name, of in fields)
    assert {name for name, _ in fields} == runs.LATER.keys()


def test_results_belong_to_any_checkout():
    here, there = (
        ml_collections.ConfigDict({"drafts": (place,), "gamma": 4})
        for place in (f"{ROOT}/families/one", "families/one")
    )
    assert runs.settings(here) == runs.settings(there)


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


def test_lines_are_lines_wherever_they_come_from(decode, inputs):
    """Windows' line ends, a form feed and a missing last end; an empty line keeps its place."""
    data = "a\x0cb\r\n\r\nx = é\u2028y".encode()
    inputs.write_bytes(data)
    from_file, from_stdin = decode(), decode("--input=-", stdin=data)
    assert from_file.stdout == from_stdin.stdout
    found = [json.loads(line) for line in from_file.stdout.split("\n")[:-1]]
    assert [row["input"] for row in found] == ["a\x0cb", "", "x = é\u2028y"]
    assert found[1]["output"] == ""
    assert found[1]["tokens"] == []
    warning, _, counts = from_file.stderr.splitlines()
    assert warning == "warning: 1 empty input(s): their output is empty too."
    assert counts.startswith("3 outputs: ")


def test_long_lines_are_truncated_with_a_warning(decode, inputs):
    inputs.write_text(" ".join(TEXTS) + "\n")
    outcome = decode()
    assert (outcome.status, len(rows(outcome.stdout))) == (0, 1)
    assert re.fullmatch(
        r"warning: 1 input.* longer than 40 tokens were trunc.*\nAccepted .*\n1 outputs: .*\n",
        outcome.stderr,
    )


def test_a_cut_run_goes_on(decode, tmp_path, inputs):
    """From the middle of a line, of a character, and between rows; the bytes are the same."""
    inputs.write_text("\n".join(["é\u2028é", *TEXTS[:7]]), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    again = functools.partial(decode, "--config.temperature=1.0", f"--output={out}")
    assert again().status == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    inside = whole.index("é".encode()) + 1
    for kept in (len(lines[0]) + 5, len(lines[0]), 3, 0, inside, len(whole)):
        out.write_bytes(whole[:kept])
        assert again().status == 0
        assert out.read_bytes() == whole
    out.unlink()
    assert again().status == 0
    assert out.read_bytes() == whole


def test_an_output_of_another_command_is_kept(decode, tmp_path, inputs):
    out = tmp_path / "out.jsonl"
    assert decode(f"--output={out}").status == 0
    before = out.read_bytes()
    other = decode(f"--output={out}", "--config.gamma=3")
    refused(other, out, "settings, gamma was 4 and is 3", "--overwrite")
    assert other.progress == []  # before anything was loaded
    inputs.write_text("another\n")
    refused(decode(f"--output={out}"), "input was '")
    stranger = tmp_path / "mine.txt"
    stranger.write_text("dear diary")
    refused(decode(f"--output={stranger}"), stranger)
    assert (out.read_bytes(), stranger.read_text()) == (before, "dear diary")
    refused(decode(f"--output={out}", "--overwrite", "--config.target=/nowhere"), "/nowhere")
    assert out.read_bytes() == before  # what is replaced is lost only once the models are there
    assert decode(f"--output={out}", "--overwrite").status == 0
    assert [row["input"] for row in rows(out.read_text())] == ["another"]


def test_an_output_keeps_its_models(decode, pair, tmp_path):
    """Another model in the same directory is refused by the name of the file that differs."""
    out, copy = tmp_path / "out.jsonl", tmp_path / "draft"
    shutil.copytree(pair.draft.name, copy)
    again = functools.partial(decode, f"--config.draft={copy}", f"--output={out}")
    assert again().status == 0
    mark = json.loads((tmp_path / ".out.jsonl.run.json").read_text())
    assert mark["settings"]["gamma"] == 4
    assert len(mark["commits"]) == 1
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:5]))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused(again(), "models, draft, model.safetensors was '", "--overwrite")
    assert len(rows(out.read_text())) == 5


def test_an_output_has_one_writer(decode, tmp_path):
    """A second process is refused before it loads anything, and an output that is no file."""
    out = tmp_path / "out.jsonl"
    with files.only_writer(out):
        second = decode(f"--output={out}")
    refused(second, f"{out} is being written by another process", str(os.getpid()))
    assert second.progress == []
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/null"):
        other = decode(f"--output={place}")
        refused(other, f"--output={place} is a device, a pipe or a directory")
        assert other.progress == []


def test_ctrl_c_is_one_line(decode, tmp_path, monkeypatch):
    """Status 130, how many rows are there, and the same command goes on with them."""
    out, append = tmp_path / "out.jsonl", files.Rows.append

    def interrupted(log, row):
        if len(log.done) == 3:
            raise KeyboardInterrupt
        append(log, row)

    with monkeypatch.context() as patch:
        patch.setattr(files.Rows, "append", interrupted)
        cut = decode(f"--output={out}")
    assert (cut.status, cut.stdout) == (130, "")
    assert cut.stderr == "interrupted after 3 of 8; the same command goes on\n"
    assert len(rows(out.read_text())) == 3
    assert "5 outputs, 3 were there already: " in decode(f"--output={out}").stdout


def test_a_comparison_without_a_draft_is_said(decode, monkeypatch):
    """A policy that finds plain decoding faster leaves nothing to compare."""
    dear = policies.lookahead(policies.Costs(9.0, [1.0] * 5))
    with_costs = functools.partial(building.with_policy, policy=dear)
    monkeypatch.setattr(pairs_of_config, "with_costs", lambda method, *more: with_costs(method))
    outcome = decode("--config.policy=lookahead", "--config.compare=True")
    assert outcome.status == 0
    assert outcome.stderr.splitlines()[-1].startswith("Nothing is compared: no draft is used")


def test_rows_keep_their_settings_and_models(tmp_path):
    """What differs is named, with both values; before the first row nothing is held."""
    results = files.Rows(tmp_path / "results.jsonl")
    runs.keep_settings(results, {"gamma": 5}, "b", "rows of another config")
    runs.keep(results, {"target": {"model.safetensors": "1"}})
    runs.keep_settings(results, {"gamma": 7}, "a", "rows of another config")
    runs.keep(results, {"target": {"model.safetensors": "2"}})
    results.append({"run": "a"})
    runs.keep(results, {"target": {"model.safetensors": "2"}, "draft": {}})
    again = files.Rows(results.path)
    runs.keep_settings(again, {"gamma": 7}, "a", "rows of another config")
    with pytest.raises(ValueError, match=r"rows of another config: gamma was 7 and is 5\. Name"):
        runs.keep_settings(again, {"gamma": 5}, "b", "rows of another config")
    with pytest.raises(ValueError, match=r"target, model.safetensors was '2' and is '3'\. Name"):
        runs.keep(again, {"target": {"model.safetensors": "3"}})


def test_the_input_is_never_written_to(decode, command, pair, inputs, tmp_path):
    """By its own name, another spelling of it, or a link."""
    before = inputs.read_bytes()
    (tmp_path / "link").symlink_to(inputs)
    (tmp_path / "place").symlink_to(tmp_path)
    (tmp_path / "hard").hardlink_to(inputs)
    (tmp_path / "sub").mkdir()
    for output in (
        inputs,
        tmp_path / "link",
        tmp_path / "place" / inputs.name,
        tmp_path / "sub" / ".." / inputs.name,
        os.path.relpath(inputs, ROOT),
        tmp_path / "hard",
    ):
        for overwrite in ("--overwrite", "--nooverwrite"):
            refused(decode(f"--output={output}", overwrite), "--output would write to", inputs.name)
        assert inputs.read_bytes() == before
    mark = inputs.rename(tmp_path / ".out.jsonl.run.json")
    clash = decode(f"--input={mark}", f"--output={tmp_path / 'out.jsonl'}", "--overwrite")
    refused(clash, "--output would write to", mark.name)
    rows_file = tmp_path / "results.jsonl"
    texts = mark.read_text().splitlines()
    rows_file.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    before = rows_file.read_bytes()
    choose = functools.partial(command, "specjax select", "--config=configs/select.py")
    clash = choose(
        f"--config.target={pair.target.name}", f"--config.drafts={pair.draft.name}",
        f"--input={rows_file}", f"--workdir={tmp_path}",
    )  # fmt: skip
    refused(clash, "--workdir would write to", "results.jsonl")
    assert rows_file.read_bytes() == before


def test_files_that_are_read_are_never_written_to(decode, pair, tmp_path):
    """The settings, and files of target and draft, also those that a model might have."""
    settings = tmp_path / "settings.json"
    Settings(4).save(settings)
    model = Path(pair.target.name)
    before = {path: path.read_bytes() for path in (settings, *model.iterdir())}
    place, linked = tmp_path / "link", tmp_path / "out.jsonl"
    place.symlink_to(model)
    linked.symlink_to(model / "tokenizer.json")
    nested = f"--config.draft=frequent(draft='{pair.draft.name}')"
    log = "--config.rounds_file="
    for flags, words in (
        ([f"--settings={settings}", f"--output={settings}"], ["--output", "--settings"]),
        ([f"--settings={settings}", f"{log}{settings}"], ["--config.rounds_file", "--settings"]),
        ([f"--output={model / 'config.json'}"], ["--output", "--config.target"]),
        ([f"--output={place / 'chat_template.jinja'}"], ["--output", "--config.target"]),
        ([f"{log}{model / 'model.safetensors'}"], ["--config.rounds_file", "--config.target"]),
        ([f"--output={model / 'model.GGUF'}"], ["--output", "--config.target"]),
        ([f"--output={linked}"], ["--output", "--config.target"]),
        ([nested, f"--output={pair.draft.name}/config.json"], ["--output", "--config.draft"]),
    ):
        refused(decode(*flags, "--overwrite"), "would write to", *words)
    assert {path: path.read_bytes() for path in (settings, *model.iterdir())} == before


def test_an_edited_output_is_refused(decode, tmp_path):
    """Rows that are deleted, swapped, doubled or emptied are seen by what they hold, also in parts
    of several processes; in the marks beside them, what no mark has."""
    out, part = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.part-0.jsonl"
    for form in ([], ["--format=vllm"]):
        again = functools.partial(decode, f"--output={out}", *form)
        assert again("--overwrite").status == 0
        lines = out.read_text().splitlines(keepends=True)
        for row, edited in (
            (1, lines[1:]),
            (3, [*lines[:2], *lines[3:]]),
            (2, [lines[0], lines[2], lines[1], *lines[3:]]),
            (5, [*lines[:4], lines[3], *lines[4:]]),
            (9, [*lines, lines[-1]]),
            (4, [*lines[:3], "{}\n", *lines[4:]]),
        ):
            out.write_text("".join(edited))
            outcome = again()
            refused(outcome, f"--output={out} was edited: row {row} has", "Delete it and the rows")
            assert outcome.progress == []
            assert out.read_text() == "".join(edited)
        out.write_text("".join(lines))
    out.unlink()
    for row, words in (("{}", "row=None should"), ('{"row": 2}', "row 3 has")):
        part.write_text(row + "\n")
        refused(again(), "was edited", words)
    part.unlink()
    mark = tmp_path / ".out.jsonl.run.json"
    whole = json.loads(mark.read_text())
    out.write_text(lines[0])
    for damaged in (*(json.dumps(whole | {"commits": x}) for x in (5, None, [{}])), "[" * 50_000):
        mark.write_text(damaged)
        refused(again(), f"{mark} is damaged")


def test_edited_rounds_are_refused(tmp_path):
    """Two draws of each input, of which one has no rounds."""
    file = tmp_path / "rounds.jsonl"
    config = types.SimpleNamespace(rounds_file=str(file), samples=2)
    args = types.SimpleNamespace(overwrite=False)
    whole = [
        {"input": index, "sample": sample, "round": number}
        for index, sample, count in ((0, 0, 2), (0, 1, 1), (1, 1, 2))
        for number in range(count)
    ]
    files.write_rows(file, whole)
    assert outputs.open_log(config, args, 3).done == whole[:3]
    for number, edited in (
        (1, whole[1:]),
        (3, [*whole[:2], whole[1]]),
        (3, [whole[0], whole[2], whole[1]]),
        (4, [*whole[:3], whole[4]]),
        (2, [whole[0], {}]),
    ):
        files.write_rows(file, edited)
        with pytest.raises(ValueError, match=rf"was edited: line {number} has .* do not follow"):
            outputs.open_log(config, args, 3)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.method=speculativ", ["method='speculativ'", "speculative, autoregressive"]),
        ("--config.dtype=float23", ["dtype='float23'", "'bfloat16'"]),
        ("--config.draft=", ["No draft", "--config.draft=DIR"]),
        ("--config.target=", ["No target", "--config.target=DIR"]),
        ("--config.target=no/such/place", ["No such directory: no/such/place"]),
        ("--config.draft=/no/such", ["No such directory: /no/such"]),
        ("--config.gamma=0", ["gamma=0 must be a whole number"]),
        ("--config.temperature=-1.0", ["temperature=-1.0 must be a number ≥ 0"]),
        ("--config.temperature=nan", ["temperature=nan"]),
        ("--config.top_p=0.0", ["top_p=0.0 must be a number in (0, 1]"]),
        ("--config.top_k=-1", ["top_k=-1"]),
        ("--config.max_new_tokens=0", ["max_new_tokens=0"]),
        ("--config.samples=0", ["samples=0"]),
        ("--config.batch_size=0", ["batch_size=0"]),
        ("--config.gama=3", ['Did you mean "gamma"', "--config"]),
        ("--config.policy=svipp", ["There is no policy 'svipp'", "Did you mean 'svip'?"]),
        ("--config.rule=blok", ["There is no rule 'blok'", "Did you mean 'block'?"]),
        ("--config.max_source_len=-1", ["max_source_len=-1"]),
        (f"--config.draft={ROOT}/families/prose/draft", ["do not fit: input"]),
        ("--target=DIR", ["no flag --target", "--config.target"]),
        ("--output=new/", ["--output=new/ names no file"]),
        ("--output=", ["--output= names no file", "- for standard output"]),
        ("--processes=-1", ["--processes=-1"]),
        ("--config.policy=svip(threshold=)", ["cannot be read", "name(setting=value"]),
        ("--config.rule=lenient", ["missing a required argument: 'lenience'"]),
        ("--input=nowhere.txt", ["--input=nowhere.txt: no such file"]),
        ("stray", ["Arguments without a flag", "stray"]),
    ],
)
def test_errors_in_one_line(decode, flag, words):
    """Before anything is loaded."""
    outcome = decode(flag)
    refused(outcome, *words)
    assert "loading the target" not in "".join(outcome.progress)


def test_errors_of_places(decode, tmp_path, inputs):
    below_a_file = inputs / "out.jsonl"
    refused(decode(f"--output={below_a_file}"), "Cannot write to", inputs, "--output")
    inputs.write_bytes(b"caf\xe9\n")
    refused(decode(), inputs, "is not UTF-8")
    refused(decode("--input=-", stdin=b"caf\xe9\n"), "is not UTF-8")


def test_an_error_half_way_keeps_the_rows(decode, tmp_path, pair, monkeypatch):
    """A model that fails later on: what was written stays, and is gone on from."""
    out = tmp_path / "out.jsonl"
    slow = functools.partial(decode, f"--output={out}", "--config.batch_size=3")
    check, calls = running.check_finite, []

    def fail_later(state, *names):
        calls.append(names)
        if len(calls) == 2:
            state = state.replace(draft_finite=state.draft_finite & False)
        check(state, *names)

    monkeypatch.setattr(running, "check_finite", fail_later)
    refused(slow(), "draft model", pair.draft.name, "not finite")
    assert 1 <= len(rows(out.read_text())) < len(TEXTS)
    assert slow().status == 0
    assert [row["input"] for row in rows(out.read_text())] == TEXTS


def test_a_file_beside_the_output_is_left_alone(decode, tmp_path):
    (tmp_path / "probe").write_text("mine")
    assert decode(f"--output={tmp_path / 'out.jsonl'}").status == 0
    assert (tmp_path / "probe").read_text() == "mine"
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"in.txt", "probe", "out.jsonl", ".out.jsonl.run.json"}


def test_help_of_a_command_without_flags(command):
    outcome = command("experiments.audit", "--help")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("How far from the target")


@pytest.mark.parametrize("name", ["specjax decode", "experiments.reproduce"])
def test_help(command, name):
    """The fields of the config, and the flags."""
    outcome = command(name, "--help")
    assert "--config" in outcome.stdout
    assert "A Python file, which is run" in " ".join(outcome.stdout.split())
    if name == "specjax decode":
        for field in defaults.decode():
            assert re.search(rf"\b{field}\b", outcome.stdout), field
        assert "overwrite" in outcome.stdout
    else:
        assert "--workdir" in outcome.stdout


@pytest.mark.parametrize("place", [slow("checkout"), "elsewhere"])
def test_a_process_of_its_own(place, pair, inputs, cache, tmp_path):
    """In the checkout's root with its config; elsewhere with `specjax`
    alone on the path, as `make setup` leaves it. A config of the checkout is found there too."""
    flags = [*arguments(pair)[1:], f"--input={inputs}"]
    if place == "checkout":
        command, cwd = ["specjax", "decode", "--config=configs/decode.py"], ROOT
        path = ROOT
    else:
        command, cwd = ["specjax", "decode", "--config=configs/embedded.py"], tmp_path
        path = tmp_path / "site"
        path.mkdir()
        (path / "specjax").symlink_to(ROOT / "specjax")
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags],
        cwd=cwd,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stderr.splitlines()
    assert first == "loading specjax …"  # before the imports
    assert last.startswith("8 outputs: ")
    expected = specjax.generate(pair.target, pair.draft, TEXTS, max_new_tokens=BUDGET)
    assert [row["tokens"] for row in rows(done.stdout)] == expected.tokens


@pytest.fixture
def config_file(pair, tmp_path):
    """configs/embedded.py:full, shrunk: the pair and a bigram, 3 inputs, γ of 1 or 2."""
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import embedded\n\n"
        "def get_config(seed='0'):\n"
        "    config = embedded.get_config('full')\n"
        f"    config.target = {pair.target.name!r}\n"
        f"    config.drafts = ({pair.draft.name!r},)\n"
        "    config.ngrams, config.timed_ngrams = ('bigram',), ()\n"
        "    config.max_new_tokens = 24\n"
        "    config.alpha_inputs = config.quality_inputs = 3\n"
        "    config.timed_inputs = config.lenience_inputs = 2\n"
        "    config.repeats = 1\n"
        "    config.gammas = (1, 2)\n"
        "    config.seed = int(seed)\n"
        "    return config\n"
    )
    return file


NUMBERS = [
    "gamma", "alpha", "tau", "tau_expected", "verified", "accepted", "c", "v", "target_step_ms",
    "draft_step_ms", "predicted_paper", "speedup_decode", "speedup_decode_low",
    "speedup_decode_high", "speedup_end_to_end", "autoregressive_ms_per_token",
    "speculative_ms_per_token", "tokens", "target_calls", "batch", "timed_inputs", "repeats",
]  # fmt: skip


def check_speedup(row):
    for name in NUMBERS:
        assert isinstance(row[name], (int, float)), name
        assert row[name] >= 0, name
    assert {"overhead", "round_overhead"} <= set(row)  # raw: they may be below 0
    assert row["predicted"] is None or row["predicted"] > 0  # one repeat may be all noise
    assert row["identical"] is (True if row["temperature"] == 0 else None)
    assert row["gamma"] in (1, 2)
    assert list(row["v_by_gamma"]) == ["1", "2"]
    assert row["tau"] == row["tokens"] / row["target_calls"]
    assert len(row["acceptance_by_position"]) == row["gamma"]
    assert (row["batch"], row["timed_inputs"], row["repeats"]) == (1, 2, 1)
    share = row["tau"] / row["tau_expected"]
    speed = row["predicted_paper"] * (row["gamma"] * row["c"] + 1)
    assert row["tau"] / share == pytest.approx(speed)


@pytest.mark.slow
def test_reproduce(command, config_file, pair, tmp_path, monkeypatch):
    """Everything that it writes; the report from rows alone; an unwritable place."""
    examples = [tasks.Example(f"{text} $[b]$", text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    work = tmp_path / "work"
    job = functools.partial(command, "experiments.reproduce", f"--config={config_file}")
    outcome = job(f"--workdir={work}")
    assert outcome.status == 0, outcome.stderr
    # Progress, through a pipe too.
    assert "3 of 28: alpha, draft, T = 1\n" in outcome.stderr
    assert "timing plain decoding and speculative, turn 1 of 1" in outcome.progress
    assert {path.name for path in work.iterdir()} == {
        "results.jsonl", "report.md", "report.tex", "speedups.png", "trace.png",
        "timeline.png", "positions.png", "ngram.npz", "run.json",
    }  # fmt: skip
    found = rows((work / "results.jsonl").read_text())
    by = {name: [row for row in found if row["table"] == name] for name in
          ("alpha", "speedup", "lenience", "quality", "trace", "timeline")}  # fmt: skip
    assert {name: len(of) for name, of in by.items()} == {
        "alpha": 4, "speedup": 2, "lenience": 16, "quality": 2, "trace": 1,
        "timeline": 3,
    }  # fmt: skip
    batches = {name: {row["batch"] for row in of} for name, of in by.items()}
    assert batches == {
        "alpha": {16}, "speedup": {1}, "lenience": {16}, "quality": {16}, "trace": {1},
        "timeline": {1},
    }  # fmt: skip
    for row in by["speedup"]:
        check_speedup(row)
    for row in by["alpha"]:
        assert row["low"] is None  # 3 outputs
        assert row["alpha"] <= 1
    for row in by["lenience"]:
        assert row["keeps_distribution"] is (row["lenience"] == 1)
    wanted = specjax.measure_alpha(
        pair.target, pair.draft, [e.input for e in examples[:3]], max_new_tokens=24, batch_size=16
    )
    assert wanted.value in [row["alpha"] for row in by["alpha"] if row["temperature"] == 0]
    # A lenience of 1 is the exact rule.
    exact = [row for row in by["lenience"] if row["lenience"] == 1 and row["draft"] != "bigram"]
    assert {row["temperature"] for row in exact} == {0.0, 1.0}
    for row in exact:
        same = {"draft": row["draft"], "temperature": row["temperature"]}
        alphas = [r["alpha"] for r in by["lenience"] if same.items() <= r.items()]
        assert min(alphas) == row["alpha"]
        assert max(alphas) > row["alpha"]
    assert [row["identical"] for row in by["quality"] if row["temperature"] == 0] == [1.0]
    report = (work / "report.md").read_text()
    for title in (
        "All drafts side by side",
        "Table 3",
        "Tables 2 and 4",
        "Table 5",
        "Quality",
        "Figure 1",
        "Figure 5",
    ):
        assert f"## {title}" in report
    for name in ("dtype", "commit", "device"):
        assert f"- {name}: " in report
    assert "token for token" in report
    assert "Warning" not in report
    sources = re.findall(r"^(\d+) rows?: commit \S+; dtype float32; batch (\d+); seed 0\..*$",
                         report, re.MULTILINE)  # fmt: skip
    assert sources == [("2", "1"), ("4", "16"), ("2", "1"), ("16", "16"), ("2", "16"),
                       ("1", "1"), ("3", "1")]  # fmt: skip
    (traced,) = by["trace"]
    calls = f"{traced['tokens']} tokens in {traced['target_calls']} target calls"
    title = f"draft, γ={traced['gamma']}, T={traced['temperature']:g}: {calls}"
    assert f"$[b]$\n{title}" in outcome.stdout
    assert title in report
    for row in by["timeline"]:
        assert [event[0] for event in row["events"]].count("start") == 1
        assert len(row["output"]) == len(by["timeline"][0]["output"]) > 0
    for name in re.findall(r"\]\(([\w/.]+)\)", report):
        assert (work / name).stat().st_size > 0, name

    again = (work / "results.jsonl").read_bytes().splitlines(keepends=True)

    # The report again from rows alone, of which some are from another commit and say less.
    made = [json.loads(line) for line in again]
    for row in made:
        if row["table"] == "alpha":
            row["commit"] = "0123456789"
            del row["batch"]
    (work / "results.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made[:-1]))
    monkeypatch.setattr(study.Study, "target", None)
    outcome = job(f"--workdir={work}", "--nomeasure")
    assert outcome.status == 0, outcome.stderr
    assert "Not measured, and left out: timeline." in outcome.stdout
    report = (work / "report.md").read_text()
    assert "> **Warning: the 25 rows of this report are not of one run: commit " in report
    assert "0123456789 (4)" in report.splitlines()[2]
    assert "4 rows: commit 0123456789; dtype float32; batch –; seed 0; where the rows" in report
    assert "their config has batch_size=16." in report
    assert report.count("commit 0123456789") == 1
    (work / "results.jsonl").write_bytes(b"".join(again))

    refused(job(f"--workdir={config_file}/below"), "Cannot write to", "--workdir")
    refused(job(f"--workdir={work}", "--config.tables=('beam',)"), "no 'beam'", "quality")


def test_the_demo_has_two_rows():
    """One draft at two temperatures; γ from two lengths, so few programs are compiled."""
    import experiments.reproduce.__main__ as reproduce
    from configs import embedded

    config = embedded.get_config("demo")
    cells = [(cell["table"], cell.get("temperature")) for cell in reproduce.in_order(config)]
    assert cells == [
        ("alpha", 0), ("speedup", 0), ("alpha", 1), ("speedup", 1), ("trace", None)
    ]  # fmt: skip
    assert len(config.gammas) == 2
    assert config.alpha_inputs <= config.batch_size  # no row is admitted while others run


def test_two_drafts_of_one_name_are_two():
    """a/draft and b/draft."""
    done = [{"draft": "a/draft", "temperature": 0.0, "alpha": 0.5}]
    assert study.find(done, {"draft": "a/draft", "temperature": 0.0})
    assert not study.find(done, {"draft": "b/draft", "temperature": 0.0})
    assert not study.find(done, {"draft": "a/draft", "temperature": 1.0})


# Configs, and files that grow by rows.


def configs():
    found = []
    for path in sorted((ROOT / "configs").glob("[!_]*.py")):
        module = importlib.import_module(f"configs.{path.stem}")
        found += [(path.stem, choice) for choice in getattr(module, "CHOICES", ("",))]
    return found


def test_configs_say_what_they_take():
    """Whatever has an argument lists its values as CHOICES, the default among them."""
    seen = {name for name, _ in configs()}
    assert seen == {path.stem for path in (ROOT / "configs").glob("[!_]*.py")}
    assert {("adaptive", "quick"), ("benchmark_gpu", "paper-base"), ("train", "head")} <= {
        *configs()
    }
    for name in seen:
        module = importlib.import_module(f"configs.{name}")
        defaults = [x.default for x in inspect.signature(module.get_config).parameters.values()]
        assert len(defaults) == hasattr(module, "CHOICES"), name
        assert set(defaults) <= set(getattr(module, "CHOICES", ())), name
        if defaults:
            with pytest.raises(ValueError, match="choose"):
                module.get_config("no such thing")


@pytest.mark.parametrize(("name", "argument"), configs())
def test_every_config_loads(name, argument):
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config(*[argument] * bool(argument))
    assert isinstance(config, ml_collections.ConfigDict)
    assert module.__doc__
    study.check_counts(config)
    config.lock()
    with pytest.raises(AttributeError, match="Did you mean"):
        setattr(config, f"{next(iter(config))}z", 1)


@pytest.mark.parametrize(
    ("name", "config", "flag", "message"),
    [
        ("adaptive", "adaptive", "gammas=('a',)", "gammas='a'"),
        ("benchmark", "benchmark_cpu", "gammas=('a',)", "gammas='a'"),
        ("benchmark", "benchmark_cpu", "repeats=0", "repeats=0"),
        ("reproduce", "embedded", "gammas=('a',)", "gammas='a'"),
        ("reproduce", "embedded", "gammas=()", "gammas=()"),
        ("reproduce", "embedded", "tables=('quality',)", "quality_inputs=0"),
        ("serve", "serve", "admits=(1, 0)", "admits=0"),
        ("trace", "embedded", "batch_size=0", "batch_size=0"),
    ],
)
def test_counts_and_lengths_are_checked_first(command, tmp_path, name, config, flag, message):
    """In one line, before a model is loaded or a row begun."""
    flags = f"--config=configs/{config}.py", f"--config.{flag}", f"--workdir={tmp_path / 'run'}"
    outcome = command(f"experiments.{name}", *flags)
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"error: {message} must be a ")
    assert not (tmp_path / "run" / "results.jsonl").exists()


def test_the_embedded_config_serves_decode_too():
    from configs import embedded

    config = embedded.get_config()
    assert set(defaults.decode()) <= set(config)
    assert config.draft in config.drafts
    assert embedded.get_config("full").to_dict() != config.to_dict()
    with pytest.raises(ValueError, match="choose one of all, demo, full, prose"):
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


def test_the_first_speedup_comes_after_its_alpha():
    """And every cell of every table comes once."""
    import experiments.reproduce.__main__ as reproduce
    from configs import embedded

    config = embedded.get_config("full")
    found = reproduce.in_order(config)
    assert [cell["table"] for cell in found[:4]] == ["alpha", "speedup"] * 2
    assert {**found[0], "table": "speedup"} == found[1]
    every = [one for name in reproduce.wanted(config) for one in reproduce.cells(config, name)]
    assert len(found) == len(every)
    assert all(cell in found for cell in every)


def test_the_last_words_name_the_best_row():
    from experiments.reproduce import speedups

    row = {
        "draft": "families/a/tiny", "temperature": 0.0, "gamma": 7, "speedup_decode": 3.456,
        "speedup_end_to_end": 2.9, "predicted_paper": 5.5, "v": 1.78, "tau": 6.04,
        "tau_expected": 7.1, "cores": 2, "device": "Toaster", "c": 0.04, "overhead": 0.1,
        "predicted": 3.2, "load_per_core": 0.6, "alpha": 0.957,
    }  # fmt: skip
    slower = {**row, "draft": "b", "speedup_decode": 2.0, "predicted": 2.1}
    conclusion = speedups.conclusion([slower, row])
    first, second, _ = conclusion.splitlines()
    assert first.startswith(
        "Gained: tiny, T = 0, γ = 7: 3.46 times as fast as plain decoding, 2.90 with"
    )
    assert first.endswith("6.0 tokens per target call (τ), α = 0.96.")
    assert second == (
        "Limited by the verify pass: its 8 tokens cost 1.78 target steps (the paper assumes 1). "
        "A round costs 0.28 + 1.78 + 0.10 (γc + v + overhead)."
    )
    assert "formula predicts 5.50" in conclusion
    assert "one target step (here 1.78)" in conclusion
    assert conclusion.endswith("(7.1 expected tokens per call; measured 6.0).")

    # Nothing follows from timings that cannot be, or from those of a busy machine.
    impossible = speedups.conclusion([row, {**slower, "overhead": -0.9}])
    assert impossible.startswith("The timings contradict themselves: b, T = 0: overhead -0.90")
    assert "times as fast" not in impossible
    slow = speedups.conclusion([{**row, "c": 1.2, "smaller": True}])
    assert "c = 1.20: a draft with fewer parameters is slower than the target" in slow
    far = speedups.conclusion([{**row, "predicted": 1.9}])
    assert "a speedup of 3.46, where the times of its rounds give 1.90" in far
    busy = speedups.conclusion([{**row, "load_per_core": 5.0}])
    assert busy.startswith("The machine was busy: a load average of up to 5.0")


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({"c": 0.2}, "drafting: 10 draft steps cost 2.00 target steps."),
        ({"v": 2.1}, "the verify pass: its 11 tokens cost 2.10 target steps"),
        ({"v": 0.98, "overhead": 0.4}, "the rest of a round, such as acceptance: it costs 0.40"),
    ],
)
def test_the_last_words_name_the_dearest_part_of_a_round(changes, beginning):
    from experiments.reproduce import speedups

    row = {"gamma": 10, "c": 0.03, "v": 1.2, "overhead": 0.1}
    assert speedups.limit(row | changes).startswith(beginning)


def test_the_last_words_name_a_machine_that_is_in_the_way():
    from experiments.reproduce import speedups

    row = {"v": 1.8, "speedup_decode": 1.5, "gamma": 7, "cores": 1, "device": "Toaster"}
    assert speedups.here(row) == ""
    dear = speedups.here({**row, "v": 4.2})
    assert dear.startswith(" On 1 core of this Toaster a verify pass of 8 tokens takes 4.2 times")
    lost = speedups.here({**row, "speedup_decode": 0.9, "cores": 2})
    assert lost.startswith(" On 2 cores of this Toaster this draft is too slow")
