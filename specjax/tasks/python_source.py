"""Tasks from Python source that every machine has.

- `parse`: a statement of one line -> its syntax tree in prefix form (`specjax.tasks.trees`).
- `prose`: the first words of a paragraph of a docstring or comment -> the rest of the paragraph.

Validation and test come from the standard library of the running interpreter; training from the
rest of it and from the installed packages of `PACKAGES`. The split is by module, by a hash of the
module's name, so a module never changes sides, and an input that occurs in a held-out module is
dropped from training (and a validation input from test). Within a split, pairs are distinct by
input (paragraphs of prose as a whole) and ordered by a hash of it: the first n are a random sample,
the same on every machine with the same sources.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import pathlib
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from specjax.tasks import prose, trees
from specjax.tasks.examples import Example

SPLITS = ("train", "validation", "test")
TASKS = ("parse", "prose")

# Import names of the packages that training reads beside the standard library: all of them
# dependencies of specjax, so a pinned environment has them at known versions.
PACKAGES = (
    "absl", "etils", "flax", "fsspec", "huggingface_hub", "jax", "matplotlib", "ml_collections",
    "numpy", "optax", "orbax", "scipy", "tqdm", "transformers",
)  # fmt: skip

# Not source that people write, or a second copy of something: tests, tables, generated data.
_SKIPPED = {
    "test", "tests", "testing", "idle_test", "lib2to3", "site-packages", "dist-packages",
    "__pycache__", "encodings", "pydoc_data", "turtledemo", "__phello__", "_vendor",
}  # fmt: skip
_HELD_OUT_PERCENT = 4  # of the standard library's modules, for validation and for test each

# What the inputs of a task begin with, in T5's text-to-text manner.
PREFIXES = {"parse": "parse: "}

STATEMENTS = (
    ast.Return, ast.Delete, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Assert,
    ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Expr,
)  # fmt: skip
MAX_STATEMENT = 80  # bytes
MAX_TREE = 240  # characters


def load(task: str, split: str) -> list[Example]:
    """The pairs of one task and split. Test and validation take about a second, train a minute.

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
    seen: set[str] = set()
    for held_out in SPLITS[1 : {"train": 3, "validation": 1, "test": 2}[split]]:
        seen.update(_key(task, pair) for pair in _load(task, held_out))
    files = [(name, path) for name, path in standard_library() if split_of(name) == split]
    if split == "train":
        files += installed_packages()
    pairs: dict[str, Example] = {}
    read = {"parse": _parse_pairs, "prose": _prose_pairs}[task]
    # Only where it takes long, as the training split does.
    for _, path in tqdm(
        files, f"reading {split}", unit="file", delay=2, mininterval=1, leave=False
    ):
        for pair in read(path):
            if (key := _key(task, pair)) not in seen:
                pairs.setdefault(key, pair)
    return tuple(
        pairs[key] for key in sorted(pairs, key=lambda k: hashlib.sha256(k.encode()).digest())
    )


def _key(task: str, pair: Example) -> str:
    """What pairs are told apart by: inputs, but paragraphs may open alike."""
    return pair.input + pair.target if task == "prose" else pair.input


def split_of(module: str) -> str:
    """The split of a module of the standard library, by a hash of its name: `json.decoder`."""
    percent = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % 100
    if percent < _HELD_OUT_PERCENT:
        return "test"
    return "validation" if percent < 2 * _HELD_OUT_PERCENT else "train"


def standard_library() -> list[tuple[str, pathlib.Path]]:
    """(module, file) of the running interpreter's standard library, sorted by name."""
    return _modules(pathlib.Path(sysconfig.get_path("stdlib")), prefix=())


def installed_packages() -> list[tuple[str, pathlib.Path]]:
    """(module, file) of the packages in `PACKAGES` that are installed, sorted by name."""
    files = []
    for package in PACKAGES:
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
    """The text and tree of a source file, or None where this Python cannot read it."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's invalid escapes are not ours to report
            return text, ast.parse(text)
    except (SyntaxError, ValueError, OSError):
        return None


def _parse_pairs(path: pathlib.Path) -> Iterator[Example]:
    syntax = _syntax(path)
    if syntax is None:
        return
    lines = [line.encode() for line in syntax[0].split("\n")]  # columns of ast count bytes
    for node in ast.walk(syntax[1]):
        if not isinstance(node, STATEMENTS) or node.lineno != node.end_lineno:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        source = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
        if len(source) > MAX_STATEMENT:
            continue
        tree = trees.write(node)
        if len(tree) <= MAX_TREE and (text := source.decode()).isprintable():
            yield Example(PREFIXES["parse"] + text, tree)


def _prose_pairs(path: pathlib.Path) -> Iterator[Example]:
    syntax = _syntax(path)
    if syntax is None:
        return
    for paragraph in prose.paragraphs(*syntax):
        yield Example(*prose.split_opening(paragraph))


def digest(pairs: Iterable[Example]) -> str:
    """sha256 of pairs in their order, in hexadecimal."""
    total = hashlib.sha256()
    for pair in pairs:
        for text in (pair.input, pair.target):
            total.update(len(text.encode()).to_bytes(8, "big") + text.encode())
    return total.hexdigest()


def versions() -> dict:
    """Of the interpreter and the packages that the pairs come from, as JSON data."""
    distributions = importlib.metadata.packages_distributions()
    return {
        "python": platform.python_version(),
        "packages": {
            package: importlib.metadata.version(distributions[package][0])
            for package in PACKAGES
            if package in distributions
        },
    }
