"""Lines by room, and what is too long: these numbers only go down.

Whoever makes something shorter lowers its number here, or deletes its line.
"""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

from command_line import ROOT

MAX_FILE = 450  # lines
MAX_FUNCTION = 70  # lines without its docstring
MAX_ARGUMENTS = 8  # without self
LIMITS: dict[str, dict[str, int]] = {
    "rooms": {},
    "files": {},
    "functions": {},
    "arguments": {},
}


def room(path: Path) -> str:
    """`tests`, `experiments`, `specjax/NAME`; or `specjax` for the modules that lie in it."""
    top, *below = path.relative_to(ROOT).parts
    return f"{top}/{below[0]}" if top == "specjax" and len(below) > 1 else top


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring and its decorators."""
    total, first = (node.end_lineno or 0) - node.lineno + 1, node.body[0]
    if ast.get_docstring(node) is None:
        return total
    return total - ((first.end_lineno or 0) - first.lineno + 1)


@functools.cache
def measured() -> dict[str, Counter[str]]:
    """The lines of all rooms; and files, functions and signatures beyond the limits, by name."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in LIMITS}
    tops = (ROOT / top for top in ("specjax", "experiments", "tests"))
    for path in (path for top in tops for path in top.rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        found["rooms"][room(path)] += text.count("\n")
        sizes = [("files", name, text.count("\n"), MAX_FILE)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in given)
                sizes.append(("functions", f"{name}:{node.name}", lines_of(node), MAX_FUNCTION))
                sizes.append(("arguments", f"{name}:{node.name}", count, MAX_ARGUMENTS))
        for kind, of, size, most in sizes:
            if size > most:
                found[kind][of] = max(size, found[kind][of])
    return found


@pytest.mark.parametrize("kind", LIMITS)
def test_nothing_grows(kind):
    """A room grows by no line, and nothing new is beyond a limit."""
    grown = {of: n for of, n in measured()[kind].items() if n > LIMITS[kind].get(of, 0)}
    assert not grown, f"{kind} that are larger than LIMITS says: {grown}"
