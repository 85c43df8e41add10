"""Rules of prose that a program can see, in pages, docstrings and comments.

`python tests/lab/test_prose.py` prints every place that breaks a rule. `make lint` and pre-commit
run it. It imports no package but pytest.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "specjax", "experiments", "configs", "examples", "docs", "tests"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
READMES = [ROOT / "README.md", *sorted((ROOT / "experiments").glob("*/README.md"))]
# Reports under docs/results are made by programs, and name commits.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *GUIDES,
    *sorted((ROOT / "experiments").rglob("*.md")),
    *sorted((ROOT / "families").glob("*/README.md")),
]
# Lines of any length: experiments.card makes cards; READMEs of experiments are not wrapped yet.
UNWRAPPED = {*(ROOT / "families").glob("*/README.md"), *READMES[1:]}
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
MAX_PAGE, MAX_GUIDES, MAX_LINE = 150, 2000, 120

COMMIT = re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40}\b|\bcommits? `?[0-9a-f]{7,40}\b")
# Words that do not say which object does what; the text's own field has others.
WORDS = re.compile(
    r"\b(?:(?:un)?told|tell(?:s|ing)?|heirs?|lessons?|alive|hop(?:es?|ed|ing)|trust(?:s|ed|ing)?"
    r"|said|speaks?)\b",
    re.IGNORECASE,
)
# Docstrings that begin so have no noun of their own.
BEGINNING = re.compile(r"Its own\b|Of\b|The same of\b|As of\b")
FILE = re.compile(
    r"(?<![\w/.-])(?:specjax|experiments|configs|tests|docs|examples|notebooks)/[\w/.-]+"
    r"\.(?:py|md|ipynb|json|png)\b"
)
MODULE = re.compile(r"python -m ((?:specjax|experiments)[a-z_.]*[a-z_])\b(?!\.\w)")
CODE = re.compile(r"(`+).+?\1", re.DOTALL)
URL = re.compile(r"\]\([^)]*\)|https?://\S+")


def of_page(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page that break a rule, and the rule."""
    fenced = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        text = URL.sub("]", line)
        if found := COMMIT.search(text):
            yield number, f"names the commit {found[0]}"
        yield from ((number, what) for what in _lost(text))
        is_table = line.lstrip().startswith("|")
        if len(text) > MAX_LINE and not is_table and path not in UNWRAPPED:
            yield number, f"has {len(text)} characters, links not counted; at most {MAX_LINE}"


def of_source(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module that break a rule, and the rule."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, DOCUMENTED) or not (text := ast.get_docstring(node)):
            continue
        for what in (*_of_docstring(text), *_of_prose(text)):
            yield node.body[0].lineno, f"the docstring {what}"
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            number = token.start[0]
            yield from ((number, f"the comment {what}") for what in _of_prose(token.string))


def _of_docstring(text: str) -> Iterator[str]:
    summary, _, rest = text.partition("\n\n")
    # A colon or an ellipsis, where a list follows; a comma, where a formula ends the sentence.
    if not summary.rstrip().endswith((".", ":", "…")) and not rest.startswith(" "):
        yield "begins without a full stop"
    if found := BEGINNING.match(text):
        yield f"begins with {found[0]!r}: it needs a noun or a verb"


def _lost(text: str) -> Iterator[str]:
    """Files and commands that are not in the checkout."""
    files = {name: name for name in FILE.findall(text)}
    for name in MODULE.findall(text):
        path = name.replace(".", "/")
        files[name] = f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"
    yield from (
        f"names {name}, which does not exist" for name in files if not (ROOT / files[name]).exists()
    )


def _of_prose(text: str) -> Iterator[str]:
    yield from _lost(text)
    text = CODE.sub("``", text)
    for found in WORDS.finditer(text):
        yield f"has the word {found[0]!r}"
    for found in COMMIT.finditer(text):
        yield f"names the commit {found[0]}"


def _sources() -> list[Path]:
    return [path for room in SOURCES for path in sorted((ROOT / room).rglob("*.py"))]


def _places(path: Path) -> list[str]:
    """What breaks a rule in a file, as "file:line: rule"."""
    is_source = path.suffix == ".py"
    found = of_source(path.read_text("utf-8")) if is_source else of_page(path)
    return [f"{path.relative_to(ROOT)}:{number}: {what}" for number, what in found]


@pytest.mark.parametrize("room", SOURCES)
def test_docstrings_and_comments(room):
    paths = [path for path in _sources() if path.is_relative_to(ROOT / room)]
    assert paths
    assert [place for path in paths for place in _places(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page):
    assert _places(page) == []


@pytest.mark.parametrize("page", [*GUIDES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_fits_one_sitting(page):
    assert len(page.read_text("utf-8").splitlines()) <= MAX_PAGE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths(page):
    """Files that a page names without a link are in the checkout, by one of their short paths."""
    roots = ROOT, ROOT / "specjax", ROOT / "tests", page.parent
    for name in re.findall(r"`([\w./-]+/[\w-]+\.(?:py|md|ipynb))`", page.read_text("utf-8")):
        assert any((root / name).exists() for root in roots), name


def test_all_guides_together():
    assert len(GUIDES) > 10
    assert sum(len(page.read_text("utf-8").splitlines()) for page in GUIDES) <= MAX_GUIDES


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""Of a batch."""', "begins with 'Of'"),
        ('"""Its own parameters."""', "begins with 'Its own'"),
        ('"""Drafts up to γ tokens"""', "without a full stop"),
        ('"""The policy is told costs."""', "word 'told'"),
        ("x = 0  # one hopes", "word 'hopes'"),
        ("x = 0  # as before 6617644a", "commit 6617644a"),
        ("x = 0  # see `experiments/gone.py`", "experiments/gone.py, which does not exist"),
        ('"""Run python -m experiments.gone."""', "experiments.gone, which does not exist"),
    ],
)
def test_each_rule(text, rule):
    ((_, what),) = of_source(text + "\n")
    assert rule in what


def test_code_is_no_prose():
    assert list(of_source("x = told  # as `told` has it\n")) == []
    assert list(of_source('"""Reads from `stream.tell()` on, 1234567 bytes or facade."""\n')) == []


def test_lines_of_pages(tmp_path):
    page = tmp_path / "page.md"
    link = f"[here]({'x' * 200})"
    page.write_text(f"{'a ' * 61}\n| {'a ' * 61} |\n{link}\nat commit 1234567\n")
    assert [number for number, _ in of_page(page)] == [1, 4]


if __name__ == "__main__":
    broken = [place for path in [*_sources(), *PAGES] for place in _places(path)]
    print("\n".join(broken) or "prose: all rules hold")
    sys.exit(bool(broken))
