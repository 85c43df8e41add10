"""The command `specjax`: what it lists, and that it is the code of `python -m experiments.…`."""

import functools
import json
import re
import subprocess
import sys
import types

import pytest

import clocks
import command_line
from command_line import ROOT
from pairs import TEXTS
from specjax.cli import defaults, main
from specjax.measure import doubts
from specjax.settings import Settings
from specjax.support import command_line as commands
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


@pytest.fixture
def flags(pair, inputs):
    """Flags that name the pair and the inputs."""
    return f"--config.target={pair.target.name}", f"--config.draft={pair.draft.name}", inputs


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


def test_a_command_speaks_before_it_imports(monkeypatch, capsys):
    """The list of commands imports none of them; a command says that it loads first."""
    code = "import sys; from specjax.cli import main; print('specjax.cli.decode' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "False\n"
    asked = []

    def importing(module):
        asked.append((module, capsys.readouterr().err))
        return types.SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(main.importlib, "import_module", importing)
    monkeypatch.delitem(sys.modules, "specjax.cli.decode", raising=False)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    main.main(["--help"])
    main.main(["decode"])
    assert asked == [("specjax.cli.decode", "loading specjax …\n")]


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


def test_decode_by_both_doors(command, flags, tmp_path):
    """The same rows with and without the config's file; a rule may lie in the working directory."""
    (tmp_path / "rule_of_mine.py").write_text("from specjax.rules import Block as Mine\n")
    flags = *flags, "--config.max_new_tokens=8", "--config.temperature=1.0"
    mine = command("specjax", "decode", *flags, "--config.rule=rule_of_mine:Mine", cwd=tmp_path)
    assert mine.status == 0, mine.stderr
    named = command("specjax decode", "--config=configs/decode.py", *flags,
                    "--config.rule=block")  # fmt: skip
    assert mine.stdout == named.stdout
    assert [json.loads(row)["input"] for row in named.stdout.splitlines()] == TEXTS[:2]


@pytest.fixture
def tuned(command, pair, inputs, tmp_path, monkeypatch):
    """specjax tune on the pair, by a clock on which a policy's rounds are the cheap ones: its
    outcome and its file."""

    def run(*flags, rest=1.5):
        file = tmp_path / "made" / "settings.json"
        with monkeypatch.context() as patch:
            clocks.of_rounds(patch, 0.1, rest, decides=-0.5)
            outcome = command(
                "specjax", "tune", f"--config.target={pair.target.name}", inputs,
                f"--config.draft={pair.draft.name}", f"--settings={file}", "--config.minutes=0",
                "--config.max_new_tokens=8", *flags,
            )  # fmt: skip
        assert (outcome.status, outcome.stderr) == (0, "")
        assert outcome.progress[0] == (
            f"[0:00] loading the target {pair.target.name} and the draft {pair.draft.name}"
        )
        return outcome.stdout, file

    return run


def test_tune_then_decode(command, flags, tuned):
    """What tune writes, decode takes: a policy with its costs, and plain decoding."""
    flags = "specjax", "decode", *flags, "--config.max_new_tokens=8"
    plain = command(*flags, "--config.method=autoregressive", "--config.gamma=0")  # not read
    said, file = tuned("--config.policy=goodput", "--config.rule=block", "--config.gamma=3")
    settings = Settings.load(file)
    assert (settings.gamma, settings.policy, settings.rule) == (3, "goodput", "block")
    assert said == f"{settings}\n"
    assert "Use draft with gamma=3 at most, as goodput decides" in said
    found = command(*flags, f"--settings={file}", "--tune=false")
    assert found.status == 0, found.stderr
    tokens = [
        [json.loads(row)["tokens"] for row in one.stdout.splitlines()] for one in (plain, found)
    ]
    assert tokens[0] == tokens[1]
    assert "Accepted of those tested" in found.stderr
    said, file = tuned("--config.gamma=1", rest=9.0)
    assert "Use plain decoding" in said
    none = command(*flags, f"--settings={file}")
    assert none.stdout == plain.stdout


def test_an_output_belongs_to_its_settings(command, flags, tuned, tmp_path):
    """Also to their costs, which decide how long drafts are."""
    flags = "specjax", "decode", *flags, "--config.max_new_tokens=4"
    for speed, status in ((1.5, 0), (1.6, 1)):
        _, file = tuned("--config.policy=goodput", "--config.gamma=3", rest=speed)
        outcome = command(*flags, f"--settings={file}", f"--output={tmp_path / 'out.jsonl'}")
        assert outcome.status == status, outcome.stderr
    assert "belongs to a run that began with other settings" in outcome.stderr
    assert "settings was" in outcome.stderr
    own = tmp_path / "own.json"
    own.write_text(json.dumps(json.loads(file.read_text()) | {"check_tokens": False}))
    assert command(*flags, f"--settings={own}", f"--output={tmp_path / 'o.jsonl'}").status == 0
    began = json.loads((tmp_path / ".o.jsonl.run.json").read_text())
    assert began["settings"]["check_tokens"] is False


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


def test_decode_with_a_tree(command, flags):
    """The tokens of a chain in as many calls or fewer, beside plain decoding; nodes and levels are
    counted. And what does not go with a tree."""
    flags = "specjax", "decode", *flags, "--config.max_new_tokens=12"
    of_tree = ["--config.tree=fixed(3, 2)", "--config.compare=True"]
    outcomes = [command(*flags, *more) for more in (["--config.gamma=2"], of_tree)]
    chain, tree = ([json.loads(row) for row in of.stdout.splitlines()] for of in outcomes)
    assert [row["tokens"] for row in tree] == [row["tokens"] for row in chain]
    assert sum(row["target_calls"] for row in tree) <= sum(row["target_calls"] for row in chain)
    said, verified = outcomes[1].stderr, sum(row["verified"] for row in tree)
    calls = sum(row["target_calls"] for row in tree)
    nodes, levels = map(float, re.search(r"([\d.]+) nodes in ([\d.]+) levels;", said).groups())
    assert nodes == round(verified / calls, 1)
    assert 1 < levels <= 2
    assert "nodes in" not in outcomes[0].stderr
    assert re.search(rf"verified .* 0 .* {verified} ", said)
    assert re.search(r"bonus .* – .* \d+ ", said)  # plain decoding has none
    assert levels == round(int(re.search(r"draft calls .* 0 .* (\d+) ", said)[1]) / calls, 1)
    assert "2 of 2 outputs are the same tokens." in said
    assert re.search(r"expected of c = \S+ for a level and v = \S+ for 9 nodes: ", said)
    outcome = command(*flags, of_tree[0], "--config.policy=svip")
    assert outcome.status == 1
    assert "Svip decides token by token" in outcome.stderr


@pytest.mark.slow
def test_costs_of_a_tree_are_measured(command, flags):
    tree = "--config.tree=fixed(3, 2)", "--config.policy=goodput", "--config.max_new_tokens=12"
    outcome = command("specjax", "decode", *flags, *tree)
    assert outcome.status == 0
    assert "goodput: measured " in outcome.stderr


MODULE = """
import ml_collections
def get_config(choice=''):
    if choice:
        raise ValueError('choose a or b.')
    return ml_collections.ConfigDict()
"""
LOOKUP = "decode --config.target=TARGET --config.draft=lookup --settings=HERE/settings.json "
DIRECTORY = "a directory, and only regular files can be replaced"
MISTAKES = [  # the words of a command, and a part of the error, before anything is loaded
    ("decode", "No target"),
    ("decode --config.gama=3", 'Did you mean "gamma"'),
    ("decode --config=configs/none.py", f"neither here nor below {ROOT}"),
    ("decode --config.target=t5 --config.draft=t5 stray", "stray"),
    ("select", "No target"),
    ("select --config.draft=x", 'Did you mean "drafts"'),
    ("doctor --config.target=t5", "No draft"),
    ("decode --config=HERE/c.json", "c.json: a config is Python"),
    ("decode --config=HERE/c.py", "sets no 'method', which this command reads"),
    ("decode --config=HERE/c.py:x", "c.py:x: choose a or b."),
    (f"decode --config.seed={1 << 63}", f"seed={1 << 63} must be a whole number below"),
    ("decode --config.gamma=x", "--config.gamma=x"),
    *(
        (f"{LOOKUP} --config.{field}", f"settings.json and --config.{field} are both given")
        for field in ("gamma=4", "tree=chain", "policy=svip", "rule=block")
    ),
    (f"{LOOKUP} --settings= --tune=false --config.policy=goodput", "specjax tune"),
    (f"{LOOKUP} --settings=nowhere.json", "nowhere.json"),
    *(
        (f"{command} --config.target=TARGET --settings={file}", said)
        for command in ("select --config.drafts=lookup", "tune --config.draft=lookup")
        for file, said in (
            ("HERE", DIRECTORY),
            ("HERE/c.py/settings.json", "Cannot write to"),
            ("/", "names no file"),
        )
    ),
    (
        "tune --config.target=TARGET --config.draft=lookup --settings=HERE/in.txt",
        "--settings would write to",
    ),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_mistakes_are_said_in_one_line(words, said, command, pair, inputs, tmp_path):
    (tmp_path / "c.json").write_text('{"greedy": true}')
    (tmp_path / "c.py").write_text(MODULE)
    Settings(3).save(tmp_path / "settings.json")
    words = words.replace("HERE", str(tmp_path)).replace("TARGET", pair.target.name)
    outcome = command("specjax", *words.split(), inputs)
    assert (outcome.status, outcome.stdout) == (1, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert (tmp_path / "in.txt").read_text() == "\n".join(TEXTS[:2])
