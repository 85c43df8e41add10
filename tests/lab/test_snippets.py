"""Every snippet of README, docs and experiments' pages runs: Python page by page, in one namespace
as a reader would type it; commands as far as their flags and configs. Links lead somewhere.

No checkpoint can be downloaded here and none is large: hub names and embedded families stand for
the tests' pair, tasks for a few examples, and what takes long is cut short. Everything else is as
it stands on the page. A block that cannot run at all begins with `NOT_RUN` and the reason.
"""

import ast
import functools
import inspect
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from absl import flags

import command_line
import specjax
from command_line import PAGES, ROOT
from experiments import tasks
from experiments.beam import decoding as beam
from pairs import TEXTS
from specjax.checkpoints import finding
from specjax.measure import batches
from specjax.support import command_line as support
from tiny_models import slow

NOT_RUN = "# Not run in the tests: "
LONG = (ROOT / "docs/trees.md", ROOT / "experiments/reproduce/rules.md")  # `make slow` runs them
TARGETS = ("target", "t5-3b", "t5-xxl")  # last parts of names; all others are drafts
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """What stands between two fences, and the line of the page that it begins on."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], inspect.cleandoc(found[3]))
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


# Python.


@pytest.fixture
def reader(monkeypatch, tmp_path, pair):
    """A working directory of one's own, and the substitutes. What README defines is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def locate(name):
        if str(name).startswith("families/"):
            assert (ROOT / name / "config.json").is_file(), f"{name} is not in the checkout"
        return Path((pair.target if Path(name).name in TARGETS else pair.draft).name)

    examples = [tasks.Example(text, text) for text in TEXTS]
    monkeypatch.setattr(finding, "locate", locate)
    monkeypatch.setattr(specjax, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples[:2])
    choose = functools.wraps(specjax.select)(functools.partial(specjax.select, gammas=(1,)))
    monkeypatch.setattr(specjax, "select", choose)
    monkeypatch.setattr(specjax, "tune", of_few_programs(specjax.tune))
    for module, name, limits in (
        (specjax, "generate", {"max_new_tokens": 8, "num_samples": 2, "gamma": 3}),
        (specjax, "tune", {"max_new_tokens": 8}),
        (specjax, "measure_alpha", {"max_new_tokens": 8}),
        (beam, "beam_search", {"max_new_tokens": 6}),
        (specjax, "select", {"max_new_tokens": 8, "timed_inputs": 1, "repeats": 1}),
        (batches, "pass_times", {"max_new_tokens": 8, "repeats": 1, "gamma": 1}),
    ):
        monkeypatch.setattr(module, name, shortened(getattr(module, name), limits))
    yield {"specjax": specjax, "target": pair.target, "draft": pair.draft, "texts": TEXTS[:2]}
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def of_few_programs(tune):
    """`tune` with one size of pass, and with short drafts unless the page says how long."""

    @functools.wraps(tune)
    def call(*args, passes=(), **options):
        options = options if "tree" in options else {"gamma": 2} | options
        return tune(*args, passes=passes[-1:], **options)

    return call


def shortened(function, limits):
    """The function with numbers cut to what a test can wait for. A policy's γ is its own affair."""

    @functools.wraps(function)
    def call(*args, **options):
        cut = {
            name: min(options.get(name, most), most)
            for name, most in limits.items()
            if name in ("max_new_tokens", "timed_inputs", "repeats")
            or (name in options and not options.get("policy"))
        }
        return function(*args, **options | cut)

    return call


@pytest.mark.filterwarnings("ignore:.*were truncated:UserWarning")  # the pair reads 40 ids
@pytest.mark.parametrize(
    "page",
    [slow(page) if page in LONG else page for page in sorted({b.page for b in PYTHON})],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python(page, reader, tmp_path):
    """Block after block; one that begins with the name of a file becomes that file."""
    for block in PYTHON:
        if block.page != page or block.text.startswith(NOT_RUN):
            continue
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / name[1]).write_text(block.text)
            continue
        # On the lines of the page, so that a traceback says where.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        exec(code, reader)


def test_python_is_run():
    """There is some on these pages; hardly any is left out, and then with a reason."""
    pages = {"README.md", "budgets.md", "drafters.md", "policies.md", "rules.md"}
    assert pages <= {b.page.name for b in PYTHON}
    left_out = [block for block in PYTHON if block.text.startswith(NOT_RUN)]
    assert len(left_out) <= 3, [block.place for block in left_out]
    assert all(len(b.text.split("\n")[0]) > len(NOT_RUN) + 10 for b in left_out)
    for block in BLOCKS:
        code = re.match(r"(import|from) \w+|\w+ = \w+[(.]", block.text)
        assert block.language or not code, f"{block.place} is Python, and does not say so"


# Links.


def anchors(page: Path) -> set[str]:
    """What a link may name behind #: a page's headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Files and headings of the checkout that a page links are there."""
    for target in re.findall(r"\]\(([^)\s]+)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in (ROOT / "experiments").glob("*/__main__.py")),
    ids=lambda folder: folder.name,
)  # fmt: skip
def test_an_experiment_has_a_page(folder):
    """With the question and the command that answers it."""
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"python -m experiments.{folder.name}" in page
    assert "?" in page.partition("```")[0]


# Commands.


def commands(text: str, place: str):
    """(module, words) of each `python -m experiments.…` and `specjax …` in a text, continued lines
    joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    for found in re.finditer(
        r"(?:python -m (experiments(?:\.\w+)+)|(?<![\w/.-])(specjax)(?= \w+ --))([^\n`]*)", joined
    ):
        module = found[1] or found[2]
        rest = re.sub(r"\[(-.*?)\]", r"\1", found[3]).split("    #")[0]
        if "--" in rest:
            words = [word for word in shlex.split(rest) if "…" not in word]
            yield pytest.param(module, words, id=f"{place}:{module} {' '.join(words)}"[:90])


def sources():
    """The pages, and the docstrings of configs and commands: (where, text)."""
    for page in PAGES:
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    folders = "configs/*.py", "experiments/**/*.py", "specjax/cli/*.py"
    for path in sorted(path for folder in folders for path in ROOT.glob(folder)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield str(path.relative_to(ROOT)), docstring


COMMANDS = [command for where, text in sources() for command in commands(text, where)]


@pytest.mark.parametrize(("module", "words"), COMMANDS)
def test_commands(module, words, monkeypatch, capsys, tmp_path):
    """Flags exist and have values of their kind, required ones are there, and configs load; those
    that a page shows too."""
    parsed = []
    for block in PYTHON:
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / name[1]).write_text(block.text)
            words = [word.replace(f"={name[1]}", f"={tmp_path / name[1]}") for word in words]

    def parse(main, usage, config="", fields="", positional=0):
        rest = flags.FLAGS(support.arguments(config))
        assert rest == sys.argv[:1], "words without a flag"
        if "config" in flags.FLAGS and flags.FLAGS["config"].present:
            config = flags.FLAGS.config
            assert config is not None
            assert config.get("task") in (None, "", *tasks.TASKS)
        parsed.append(usage)

    monkeypatch.setattr(support, "run", parse)
    with warnings.catch_warnings():
        command_line.run(monkeypatch, capsys, module, *words)
    assert len(parsed) == 1
    assert parsed[0]


def test_commands_are_found():
    places = {command.id.partition(":")[0] for command in COMMANDS}
    assert {
        "README.md",
        "docs/choosing.md",
        "experiments/adaptive/README.md",
        "configs/train.py",
        "specjax/cli/decode.py",
    } <= places
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.text.startswith('python -c "')],
                         ids=lambda block: block.place)  # fmt: skip
def test_one_liners(block, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(block.text)
    assert words[:2] == ["python", "-c"]
    exec(compile(words[2], block.place, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_broken_snippet_is_found(reader, tmp_path):
    """The drafter of docs/own_drafter.md, without `logits`."""
    block = next(b for b in PYTHON if "class Counting" in b.text)
    broken = re.sub(r"    def logits.*?return hidden[^\n]*\n", "", block.text, flags=re.DOTALL)
    assert broken != block.text
    with pytest.raises(TypeError, match=r"abstract method.* '?logits"):
        exec(broken, reader)
    assert os.getcwd() == str(tmp_path)
