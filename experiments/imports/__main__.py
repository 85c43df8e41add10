"""What imports what in specjax, lowest first: a room or module stands below all that import it.

    python -m experiments.imports

Prints the table of experiments/imports/README.md, and fails where imports run in a circle. Imports
inside functions count, those for type checkers alone do not.
"""

import ast
import graphlib
import pathlib
from collections.abc import Iterator

from specjax.support import command_line

PACKAGE = command_line.ROOT / "specjax"


def modules() -> dict[str, pathlib.Path]:
    """Every module of specjax, by its dotted name below it; "" is `specjax` itself."""

    def name(path: pathlib.Path) -> str:
        return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)

    return {
        name(path).removesuffix("__init__").removesuffix("."): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(path: pathlib.Path, known: dict[str, pathlib.Path]) -> Iterator[str]:
    """The modules of specjax that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
            continue
        package, _, below = (node.module or "").partition(".")
        if package == "specjax":
            for name in node.names:
                inside = f"{below}.{name.name}".strip(".")
                yield inside if inside in known else below


def graph() -> dict[str, set[str]]:
    """What each module imports."""
    known = modules()
    return {name: set(imported(path, known)) - {name} for name, path in known.items()}


def rooms(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same for rooms, which are the packages, and for the modules beside them."""
    merged: dict[str, set[str]] = {}
    for name, needed in found.items():
        room = name.partition(".")[0]
        merged.setdefault(room, set()).update(other.partition(".")[0] for other in needed)
    return {room: needed - {room} for room, needed in merged.items()}


def table(found: dict[str, set[str]]) -> str:
    """A row for each room: its height above those that import nothing, and what it imports.

    Raises:
      graphlib.CycleError: imports run in a circle.
    """
    order = list(graphlib.TopologicalSorter(found).static_order())
    height: dict[str, int] = {}
    for room in order:
        height[room] = 1 + max((height[other] for other in found[room]), default=0)
    lines = ["| height | module or room | imports |", "|---|---|---|"]
    for room in sorted(order, key=lambda room: (height[room], room)):
        needed = ", ".join(f"`{other}`" for other in sorted(found[room])) or "–"
        lines.append(f"| {height[room]} | `{room or 'specjax'}` | {needed} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """See the module's docstring."""
    del argv
    found = graph()
    try:
        tuple(graphlib.TopologicalSorter(found).static_order())
        print(table(rooms(found)))
    except graphlib.CycleError as error:
        raise ValueError(f"Imports run in a circle: {' -> '.join(error.args[1])}.") from None


if __name__ == "__main__":
    command_line.run(main, __doc__)
