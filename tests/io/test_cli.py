"""The command `specjax`: what it lists, and that it is the code of `python -m experiments.…`."""

import functools
import json
import re
import subprocess
import sys

import pytest

import command_line
from command_line import ROOT
from pairs import TEXTS
from specjax.cli import defaults, main
from specjax.measure import doubts
from specjax.policies import Costs
from specjax.settings import Settings
from specjax.support import command_line as commands
from specjax.tuning import fitting
from specjax.tuning.candidates import Candidates
from specjax.tuning.recommendation import Candidate


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


@pytest.fixture
def inputs(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS[:2]))
    return f"--input={file}"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_it_lists_its_commands(words, command):
    """A line for each, and nothing that is wider than a terminal."""
    outcome = command("specjax", *words)
    assert (outcome.status, outcome.stderr) == (0, "")
    listed = re.findall(r"^  (\w+)  +(\S.*[.])$", outcome.stdout, re.MULTILINE)
    assert [name for name, _ in listed] == list(main.COMMANDS)
    assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_a_command_that_there_is_not(command):
    outcome = command("specjax", "decod", "--help")
    assert (outcome.status, outcome.stdout) == (1, "")
    listed = "decode, select, tune, doctor, audit, convert"
    assert f"no command 'decod': it is one of {listed}" in outcome.stderr


@pytest.mark.parametrize("name", ["decode", "select", "tune", "doctor"])
@pytest.mark.parametrize("flag", ["--help", "--helpshort"])
def test_help(name, flag, command):
    """Fields of the config, and the flags."""
    outcome = command("specjax", name, flag)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert f"specjax {name} --config.target=DIR" in outcome.stdout
    for flag in ("--config", "--input"):
        assert re.search(rf"^  {flag}: \w+", outcome.stdout, re.MULTILINE), outcome.stdout
    fields = getattr(defaults, name.upper())
    for field, (default, meaning) in fields.items():  # one a line
        shown = rf"^  {field}={re.escape(str(default))} +{re.escape(meaning)}$"
        assert re.search(shown, outcome.stdout, re.MULTILINE), field
    config = defaults.get_config("decode" if name == "doctor" else name)
    assert {field: config[field] for field in fields} == {f: fields[f][0] for f in fields}
    assert max(map(len, outcome.stdout.splitlines())) <= 100


def test_a_command_speaks_before_it_imports():
    """The list of commands imports none of them; a command says that it loads first."""
    code = (
        "import sys; from specjax.cli import main; main.main(['--help']); "
        "print('specjax.cli.decode' in sys.modules); main.main(['decode'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=command_line.ROOT, capture_output=True, text=True
    )
    assert found.stdout.splitlines()[-1] == "False"
    assert found.stderr.splitlines()[0] == "loading specjax …"


def test_models_are_named_before_they_are_loaded(capsys):
    """On standard error; those of the checkout by their path in it, and each draft once."""
    root, say_loading = commands.ROOT, commands.say_loading
    say_loading(f"{root}/families/parse/target")
    say_loading("google-t5/t5-base", f"{root}/families/a", "lookup", "lookup", "")
    say_loading("t", "t")
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "loading the target families/parse/target",
        "loading the target google-t5/t5-base and the drafts families/a, lookup",
        "loading the target t and the draft t",
    ]


def test_help_of_convert(command):
    """It has no config: a source, a directory and a dtype."""
    outcome = command("specjax", "convert", "--help")
    assert (outcome.status, outcome.stderr) == (0, "")
    assert re.search(r"^usage: specjax convert .*\n? *SOURCE DIRECTORY", outcome.stdout)
    assert "{float32,bfloat16,float16}" in outcome.stdout


def test_decode_by_both_doors(command, pair, inputs, tmp_path):
    """The same rows with and without the config's file; a rule may lie in the working directory."""
    (tmp_path / "rule_of_mine.py").write_text("from specjax.rules import Block as Mine\n")
    flags = [
        f"--config.target={pair.target.name}", f"--config.draft={pair.draft.name}", inputs,
        "--config.max_new_tokens=8", "--config.temperature=1.0",
    ]  # fmt: skip
    mine = command("specjax", "decode", *flags, "--config.rule=rule_of_mine:Mine", cwd=tmp_path)
    assert mine.status == 0, mine.stderr
    named = command("specjax decode", "--config=configs/decode.py", *flags,
                    "--config.rule=block")  # fmt: skip
    assert mine.stdout == named.stdout
    assert [json.loads(row)["input"] for row in named.stdout.splitlines()] == TEXTS[:2]


@pytest.fixture
def tuned(command, pair, inputs, tmp_path, monkeypatch):
    """specjax tune on the pair, with costs that no clock gave: its outcome and its file."""

    def run(*flags, draft=0.1, **costs):
        table = Costs(draft, [1.0] * 9, token=1.0, **costs)
        monkeypatch.setattr(fitting, "costs_for", lambda *_, **__: table)
        file = tmp_path / "made" / "settings.json"
        outcome = command(
            "specjax", "tune", f"--config.target={pair.target.name}", inputs,
            f"--config.draft={pair.draft.name}", f"--settings={file}", *flags,
        )  # fmt: skip
        assert (outcome.status, outcome.stderr) == (0, "")
        assert outcome.progress == [
            f"[0:00] loading the target {pair.target.name} and the draft {pair.draft.name}"
        ]
        return outcome.stdout, file

    return run


def test_tune_then_decode(command, pair, inputs, tuned):
    """What tune writes, decode takes: a policy with its costs, and plain decoding."""
    flags = [
        "specjax", "decode", f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}", inputs, "--config.max_new_tokens=8",
    ]  # fmt: skip
    plain = command(*flags, "--config.method=autoregressive")
    said, file = tuned("--config.policy=goodput", "--config.rule=block")
    settings = Settings.load(file)
    assert (settings.gamma, settings.policy, settings.rule) == (8, "goodput", "block")
    assert said == f"{settings}\n"
    assert "goodput decides how long drafts are" in said
    found = command(*flags, f"--settings={file}", "--tune=false")
    assert found.status == 0, found.stderr
    tokens = [
        [json.loads(row)["tokens"] for row in one.stdout.splitlines()] for one in (plain, found)
    ]
    assert tokens[0] == tokens[1]
    assert "Accepted of those tested" in found.stderr
    said, file = tuned(draft=9.0)
    assert "No draft is worth its time" in said
    none = command(*flags, f"--settings={file}")
    assert none.stdout == plain.stdout


def test_an_output_belongs_to_its_settings(command, pair, inputs, tuned, tmp_path):
    """Also to their costs, which decide how long drafts are."""
    flags = [
        "specjax", "decode", f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}", inputs, "--config.max_new_tokens=4",
        f"--output={tmp_path / 'out.jsonl'}",
    ]  # fmt: skip
    for speed, status in ((0.1, 0), (0.2, 1)):
        _, file = tuned("--config.policy=goodput", draft=speed)
        outcome = command(*flags, f"--settings={file}")
        assert outcome.status == status, outcome.stderr
    assert "belongs to a run that began with other settings" in outcome.stderr
    assert "settings was" in outcome.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--config.gamma=4"], ["--settings=", "--config.gamma=4 are both given"]),
        (["--config.tree=chain"], ["--settings=", "--config.tree=chain are both given"]),
        (["--config.policy=svip"], ["--settings=", "--config.policy=svip are both given"]),
        (["--config.rule=block"], ["--settings=", "--config.rule=block are both given"]),
        (
            ["--settings=", "--tune=false", "--config.policy=goodput"],
            ["weighs costs", "specjax tune"],
        ),
        (["--settings=nowhere.json"], ["nowhere.json"]),
    ],
)
def test_what_does_not_go_with_settings(command, pair, inputs, tmp_path, more, words):
    Settings(3).save(tmp_path / "settings.json")
    outcome = command(
        "specjax", "decode", f"--config.target={pair.target.name}", inputs,
        "--config.draft=lookup", f"--settings={tmp_path / 'settings.json'}", *more,
    )  # fmt: skip
    assert (outcome.status, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error: ")
    for word in words:
        assert word in outcome.stderr


@pytest.mark.parametrize("speedup", [2.0, 0.5])
def test_select_then_decode(command, pair, inputs, tmp_path, monkeypatch, speedup):
    """What select writes, decode takes. A busy machine is named before anything is loaded."""
    totals = dict.fromkeys(("speedup", "speedup_low", "speedup_end_to_end"), speedup)
    known = {"gamma": 3, "c": 0.9, "alpha": 0.5, "v": 1.2, "predicted": 0.9, "steps": {"3": 4.0}}
    found = Candidate("lookup", **known, **totals)
    monkeypatch.setattr(Candidates, "measure", lambda *_: found)
    monkeypatch.setattr(doubts, "used_by_others", lambda: 0.5)
    file = tmp_path / "made" / "settings.json"
    target = f"--config.target={pair.target.name}"
    chosen = command(
        "specjax", "select", target, inputs, "--config.drafts=lookup", f"--settings={file}"
    )
    assert (chosen.status, chosen.stderr) == (0, "")
    busy, loading = chosen.progress
    assert busy.startswith("Other programs use this machine: 50% of its processors.")
    assert loading == f"[0:00] loading the target {pair.target.name}"
    assert Settings.load(file).gamma == (3 if speedup > 1 else 0)
    flags = ["specjax", "decode", target, inputs, "--config.max_new_tokens=8"]
    plain = command(*flags, "--config.method=autoregressive")
    tuned = command(*flags, "--config.draft=lookup", f"--settings={file}", "--config.batch_size=1")
    assert tuned.status == 0, tuned.stderr
    rows = [
        [json.loads(row)["tokens"] for row in one.stdout.splitlines()] for one in (plain, tuned)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", ["select", "tune"])
def test_settings_that_cannot_be_written(command, pair, inputs, tmp_path, name):
    """A directory, a file below a file, and a directory's name: one line, before any loading."""
    (tmp_path / "file").write_text("x")
    drafts = {"select": "--config.drafts=lookup", "tune": "--config.draft=lookup"}[name]
    for file, words in (
        (f"{tmp_path}", "a directory, and only regular files can be replaced"),
        (f"{tmp_path}/file/settings.json", "Cannot write to"),
        ("/", "names no file"),
    ):
        outcome = command(
            "specjax", name, f"--config.target={pair.target.name}", drafts, inputs,
            f"--settings={file}",
        )  # fmt: skip
        assert (outcome.status, outcome.stdout, outcome.progress) == (1, "", [])
        (line,) = outcome.stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line


def test_settings_do_not_replace_the_input(command, pair, tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("x = 1")
    outcome = command(
        "specjax", "tune", f"--config.target={pair.target.name}", "--config.draft=lookup",
        f"--input={file}", f"--settings={file}",
    )  # fmt: skip
    assert outcome.status == 1
    assert "--settings would write to" in outcome.stderr
    assert file.read_text() == "x = 1"


def test_decode_with_a_tree(command, pair, inputs):
    """The tokens of a chain in as many calls or fewer, beside plain decoding; nodes and levels are
    counted. And what does not go with a tree."""
    flags = [
        "specjax", "decode", f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}", inputs, "--config.max_new_tokens=12",
    ]  # fmt: skip
    of_tree = ["--config.tree=fixed(3, 2)", "--config.compare=True"]
    outcomes = [command(*flags, *more) for more in (["--config.gamma=2"], of_tree)]
    chain, tree = ([json.loads(row) for row in of.stdout.splitlines()] for of in outcomes)
    assert [row["tokens"] for row in tree] == [row["tokens"] for row in chain]
    assert sum(row["target_calls"] for row in tree) <= sum(row["target_calls"] for row in chain)
    said, drafted = outcomes[1].stderr, sum(row["drafted"] for row in tree)
    calls = sum(row["target_calls"] for row in tree)
    nodes, levels = map(float, re.search(r"([\d.]+) nodes in ([\d.]+) levels;", said).groups())
    assert nodes == round(drafted / calls, 1)
    assert 1 < levels <= 2
    assert "nodes in" not in outcomes[0].stderr
    assert re.search(rf"drafted .* 0 .* {drafted} ", said)
    assert re.search(r"bonus .* – .* \d+ ", said)  # plain decoding has none
    assert levels == round(int(re.search(r"in levels .* 0 .* (\d+) ", said)[1]) / calls, 1)
    assert "2 of 2 outputs are the same tokens." in said
    assert re.search(r"expected of c = \S+ for a level and v = \S+ for 9 nodes: ", said)
    outcome = command(*flags, of_tree[0], "--config.policy=svip")
    assert outcome.status == 1
    assert "Svip decides token by token" in outcome.stderr
    outcome = command(*flags, of_tree[0], "--config.policy=goodput")
    assert outcome.status == 0
    assert "goodput: measured " in outcome.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode"], "No target"),
        (["decode", "--config.gama=3"], 'Did you mean "gamma"'),
        (["decode", "--config=configs/none.py"], f"neither here nor below {ROOT}"),
        (["decode", "--config.target=t5", "--config.draft=t5", "stray"], "stray"),
        (["select"], "No target"),
        (["select", "--config.draft=x"], 'Did you mean "drafts"'),
        (["doctor", "--config.target=t5"], "No draft"),
        (["decode", "--config={0}/c.json"], "c.json: a config is Python"),
        (["decode", "--config={0}/c.py"], "sets no 'method', which this command reads"),
        (["decode", "--config={0}/c.py:x"], "c.py:x: choose a or b."),
        (["decode", f"--config.seed={1 << 63}"], f"seed={1 << 63} must be a whole number below"),
        (["decode", "--config.gamma=x"], "--config.gamma=x"),
    ],
)
def test_mistakes_are_said_in_one_line(words, said, command, inputs, tmp_path):
    (tmp_path / "c.json").write_text('{"greedy": true}')
    (tmp_path / "c.py").write_text(
        "import ml_collections\n"
        "def get_config(choice=''):\n"
        "    if choice:\n"
        "        raise ValueError('choose a or b.')\n"
        "    return ml_collections.ConfigDict()\n"
    )
    outcome = command("specjax", *(word.replace("{0}", str(tmp_path)) for word in words), inputs)
    assert (outcome.status, outcome.stdout) == (1, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
