"""Lines by room, and what is too long: the numbers of tests/data/sizes.txt only go down.

    python tests/lab/test_sizes.py    # lowers them to what there is

A new file, function or signature beyond a limit fails; so does a room that grows by a line.
"""

import ast
import functools
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "sizes.txt"
MAX_FILE = 450  # lines
MAX_FUNCTION = 70  # lines without its docstring
MAX_ARGUMENTS = 8  # without self


def room(path: Path) -> str:
    """`tests`, `experiments`, `specjax/NAME`; or `specjax` for the modules that lie in it."""
    top, *below = path.relative_to(ROOT).parts
    return f"{top}/{below[0]}" if top == "specjax" and len(below) > 1 else top


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring and its decorators."""
    total, first = (node.end_lineno or 0) - node.lineno + 1, node.body[0]
    if ast.get_docstring(node, clean=False) is None:
        return total
    return total - ((first.end_lineno or 0) - first.lineno + 1)


@functools.cache
def measured() -> Counter[str]:
    """The lines of all rooms; and files, functions and signatures beyond the limits, by name."""
    found: Counter[str] = Counter()
    tops = (ROOT / top for top in ("specjax", "experiments", "tests"))
    for path in (path for top in tops for path in top.rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        found[f"room {room(path)}"] += text.count("\n")
        sizes = [(f"file {name}", text.count("\n"), MAX_FILE)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in given)
                sizes.append((f"function {name}:{node.name}", lines_of(node), MAX_FUNCTION))
                sizes.append((f"arguments {name}:{node.name}", count, MAX_ARGUMENTS))
        for what, size, most in sizes:
            if size > most:
                found[what] = max(size, found[what])
    return found


def limits() -> dict[str, int]:
    """The numbers that are allowed, by name."""
    pairs = (line.rsplit(" ", 1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: int(size) for name, size in pairs}


def test_nothing_grows():
    allowed = limits()
    grown = {name: size for name, size in measured().items() if size > allowed.get(name, 0)}
    assert not grown, f"larger than tests/data/sizes.txt says: {grown}"


def lower(begin: bool = False) -> None:
    """Write the smaller of what was allowed and what there is; `begin`: what there is."""
    found = measured()
    kept = found if begin else {n: min(size, found[n]) for n, size in limits().items() if found[n]}
    FILE.write_text("".join(f"{name} {size}\n" for name, size in sorted(kept.items())), "utf-8")


if __name__ == "__main__":
    lower(begin="--begin" in sys.argv)
