"""Tasks from Python source that every machine has.

- `parse`: a statement of one line, or the header of a compound statement -> its syntax tree in
  prefix form (`experiments.tasks.trees`).
- `prose`: the first words of a stretch of a module's docstrings and comments -> the rest of it
  (`experiments.tasks.prose`).

Validation and test come from modules of the running interpreter's standard library, and for `prose`
from the packages in `PACKAGES` too. Training comes from all other modules of these, and for `prose`
from `MORE_PACKAGES`. The split is by a hash of the module's name, so a module never changes sides.
An input of `parse` or a paragraph of `prose` that a held-out module has is dropped from training
(and what validation has, from test). Within a split, inputs and paragraphs are distinct. Pairs are
ordered by a hash: the first n are a random sample, the same on every machine with the same
sources.

Common lines are the exception: those of keywords alone (`try:`, `return None`) and those that two
or more held-out modules have (`import sys`). No split holds them out, as training would lack them,
and training has `COPIES` of each.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import keyword
import pathlib
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from experiments.tasks import prose, trees
from experiments.tasks.examples import Example

SPLITS = ("train", "validation", "test")
TASKS = ("parse", "prose")

# Import names of the packages that are read beside the standard library. All are dependencies of
# specjax, so a pinned environment has them at known versions.
PACKAGES = (
    "absl", "etils", "flax", "fsspec", "huggingface_hub", "jax", "matplotlib", "ml_collections",
    "numpy", "optax", "orbax", "scipy", "tqdm", "transformers",
)  # fmt: skip

# Further packages of requirements.lock, for extras and tests, that are written in English. Training
# of `prose` reads those that are installed.
MORE_PACKAGES = (
    "IPython", "PIL", "_pytest", "anyio", "attr", "click", "datasets", "dateutil", "filelock",
    "fontTools", "google", "httpcore2", "httpx2", "humanize", "ipykernel", "jaxlib", "jaxtyping",
    "jedi", "joblib", "jsonschema", "jupyter_client", "jupyter_core", "lxml", "markdown_it",
    "mpl_toolkits", "mypy", "mypyc", "nbclient", "nbformat", "nltk", "opt_einsum", "packaging",
    "pandas", "parso", "pathspec", "pexpect", "portalocker", "prometheus_client",
    "prompt_toolkit", "psutil", "pyarrow", "pydantic", "pydantic_core", "pygments",
    "pyparsing", "rich", "sacrebleu", "tornado", "traitlets", "treescope", "typer", "wcwidth",
    "xdist", "yaml", "zmq",
)  # fmt: skip

# Folders and files that people did not write, or second copies: tests, tables, generated data.
_SKIPPED = {
    "test", "tests", "testing", "idle_test", "lib2to3", "site-packages", "dist-packages",
    "__pycache__", "encodings", "pydoc_data", "turtledemo", "__phello__", "_vendor",
}  # fmt: skip
_HELD_OUT_PERCENT = 4  # percent of modules, for validation and for test each

STATEMENTS = (
    ast.Return, ast.Delete, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Assert,
    ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Expr, ast.Pass, ast.Break,
    ast.Continue, *trees.COMPOUND,
)  # fmt: skip
MAX_STATEMENT = 80  # bytes of a statement
MAX_TREE = 240  # characters of a syntax tree
COPIES = 100  # copies of a common line (`try:`) in training


def load(task: str, split: str) -> list[Example]:
    """Load the pairs of one task and split. Training takes about a minute, the others a second.

    Raises:
      ValueError: no such task or split.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r} in Python source: choose from {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: choose from {', '.join(SPLITS)}")
    return list(_load(task, split))


@functools.cache
def _load(task: str, split: str) -> tuple[Example, ...]:
    known: set[str] = set()
    for held_out in SPLITS[1 : {"train": 3, "validation": 1, "test": 2}[split]]:
        known.update(part for pair in _load(task, held_out) for part in _parts(task, pair))
    pairs: dict[str, Example] = {}
    # A bar only where it takes long, as the training split does.
    for _, path in tqdm(
        files(task, split), f"reading {split}", unit="file", delay=2, mininterval=1, leave=False
    ):
        for pair in _new_pairs(task, path, known):
            pairs["".join(_parts(task, pair))] = pair
    if task == "parse":
        common = [line for line in pairs if _is_common(line)]
        if split == "train":
            pairs |= {f"{line}\n{i}": pairs[line] for line in common for i in range(1, COPIES)}
        else:
            for line in common:
                del pairs[line]
    return tuple(
        pairs[key] for key in sorted(pairs, key=lambda k: hashlib.sha256(k.encode()).digest())
    )


def _parts(task: str, pair: Example) -> list[str]:
    """The parts of a pair that occur in one split, and once: the input, or paragraphs."""
    return [pair.input] if task == "parse" else (pair.input + pair.target).split("\n")


def _new_pairs(task: str, path: pathlib.Path, known: set[str]) -> Iterator[Example]:
    """Yield a file's pairs without known parts, and add theirs to `known`."""
    if task == "prose":
        new = [line for line in dict.fromkeys(_paragraphs(path)) if line not in known]
        known.update(new)
        for stretch in prose.stretches(new):
            yield Example(*prose.split_opening(stretch))
        return
    for pair in _parse_pairs(path):
        if pair.input not in known:
            known.add(pair.input)
            yield pair


def _is_common(line: str) -> bool:
    """Whether a line is not particular to its module: keywords alone, or in several modules."""
    if line in _in_several():
        return True
    words = re.findall(r"\w+", line)
    return all(map(keyword.iskeyword, words)) and not set(line) & {"'", '"'}


@functools.cache
def _in_several() -> frozenset[str]:
    """The lines that two or more of the held-out modules have."""
    modules = Counter(
        line
        for name, path in standard_library()
        if split_of(name) != "train"
        for line in {pair.input for pair in _parse_pairs(path)}
    )
    return frozenset(line for line, count in modules.items() if count > 1)


def split_of(module: str) -> str:
    """The split of a module, by a hash of its name: `json.decoder`."""
    percent = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % 100
    if percent < _HELD_OUT_PERCENT:
        return "test"
    return "validation" if percent < 2 * _HELD_OUT_PERCENT else "train"


def files(task: str, split: str) -> list[tuple[str, pathlib.Path]]:
    """List (module, file) of everything that a split of a task reads."""
    whole, parted = installed(PACKAGES), standard_library()
    if task == "prose":
        whole, parted = installed(MORE_PACKAGES), parted + whole
    found = [(name, path) for name, path in parted if split_of(name) == split]
    return found + whole if split == "train" else found


def standard_library() -> list[tuple[str, pathlib.Path]]:
    """List (module, file) of the running interpreter's standard library, sorted by name."""
    return _modules(pathlib.Path(sysconfig.get_path("stdlib")), prefix=())


def installed(packages: Iterable[str]) -> list[tuple[str, pathlib.Path]]:
    """List (module, file) of the packages that are installed, sorted by name."""
    files = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            files += _modules(pathlib.Path(location), prefix=(package,))
    return sorted(files)


def _modules(root: pathlib.Path, prefix: tuple[str, ...]) -> list[tuple[str, pathlib.Path]]:
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.isdisjoint(parts) and not parts[-1].startswith("test_"):
            found.append((".".join(prefix + parts).removesuffix(".__init__"), path))
    return sorted(found)


def _syntax(path: pathlib.Path) -> tuple[str, ast.Module] | None:
    """The text and tree of a source file, or None if this Python cannot read it."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's invalid escapes are no fault of the user
            return text, ast.parse(text)
    except (SyntaxError, ValueError, OSError):
        return None


def _parse_pairs(path: pathlib.Path) -> Iterator[Example]:
    syntax = _syntax(path)
    if syntax is None:
        return
    lines = [line.encode() for line in syntax[0].split("\n")]  # ast counts columns in bytes
    for node in ast.walk(syntax[1]):
        if not isinstance(node, STATEMENTS):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        whole = node.lineno == node.end_lineno
        if not whole and not isinstance(node, trees.COMPOUND):
            continue
        source = lines[node.lineno - 1][node.col_offset : node.end_col_offset if whole else None]
        source = source.rstrip()
        if len(source) > MAX_STATEMENT or not (text := source.decode()).isprintable():
            continue
        tree = _tree(text, node)
        if tree is not None and len(tree) <= MAX_TREE:
            yield Example(text, tree)


def _tree(text: str, node: ast.stmt) -> str | None:
    """The tree of a line: the node's, or its header's; None if the line is neither.

    The line of a compound statement may be only a part of the header, or an `elif`, or have a
    comment.
    """
    if not isinstance(node, trees.COMPOUND):
        return trees.write(node)
    try:
        line = trees.parse(text)
    except SyntaxError:
        return None
    return trees.write(line) if type(line) is type(node) else None


def _paragraphs(path: pathlib.Path) -> Iterator[str]:
    syntax = _syntax(path)
    if syntax is not None:
        yield from prose.paragraphs(*syntax)


def digest(pairs: Iterable[Example]) -> str:
    """The sha256 of pairs in their order, in hexadecimal."""
    total = hashlib.sha256()
    for pair in pairs:
        for text in (pair.input, pair.target):
            total.update(len(text.encode()).to_bytes(8, "big") + text.encode())
    return total.hexdigest()


def versions(task: str) -> dict:
    """Versions of the interpreter and packages that a task's pairs come from, as JSON data."""
    distributions = importlib.metadata.packages_distributions()
    packages = PACKAGES + (MORE_PACKAGES if task == "prose" else ())
    return {
        "python": platform.python_version(),
        "packages": {
            package: importlib.metadata.version(distributions[package][0])
            for package in packages
            if package in distributions
        },
    }
