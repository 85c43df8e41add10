"""English out of Python source: what docstrings and comments say, for unconditional text.

An example is a stretch of one module's paragraphs in their order, a line each, and long enough that
hundreds of tokens can be asked for.
"""

import ast
import re
from collections.abc import Iterable, Iterator

SHORTEST, LONGEST = 40, 1000  # characters of a paragraph
SHORTEST_STRETCH, LONGEST_STRETCH = 200, 1400  # characters of an example
OPENING = 3  # words that stand as the prompt, where a continuation is asked for
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MARKUP = re.compile(
    r">>>|::|\.\. |[{}=|\\\[\]]|--|:[a-z]+:|Copyright|License"
    r"|\b(?:Args|Arguments|Attributes|Parameters):"
)


def paragraphs(text: str, tree: ast.Module) -> Iterator[str]:
    """The paragraphs of one source file that read like prose, each on one line."""
    parts: list[tuple[int, str]] = []  # (line, paragraph)
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
            parts += [(first.lineno, part) for part in re.split(r"\n\s*\n", docstring)]
    block: list[str] = []
    for number, line in enumerate((*text.split("\n"), ""), start=1):
        line = line.strip()
        if line.startswith("# ") and number not in documented:
            block.append(line[2:])
        elif block:
            parts.append((number, "\n".join(block)))
            block = []
    for _, part in sorted(parts, key=lambda numbered: numbered[0]):
        line = " ".join(part.split())
        if is_prose(line):
            yield line


def stretches(lines: Iterable[str]) -> Iterator[str]:
    """The paragraphs of a module, joined until one more would be too much; the order stays."""
    stretch = ""
    for line in (*lines, ""):
        if line and len(stretch) + 1 + len(line) <= LONGEST_STRETCH:
            stretch = f"{stretch}\n{line}" if stretch else line
            continue
        if len(stretch) >= SHORTEST_STRETCH:
            yield stretch
        stretch = line


def split_opening(stretch: str) -> tuple[str, str]:
    """The first words, and the rest with the space before it."""
    words = stretch.split(" ", OPENING)
    return " ".join(words[:OPENING]), " " + words[OPENING]


def is_prose(line: str) -> bool:
    """Whether a line is a sentence or several, and hardly anything else."""
    if not SHORTEST <= len(line) <= LONGEST or not line.isascii() or line.count(" ") <= OPENING:
        return False
    letters = sum(c.isalpha() or c == " " for c in line)
    sentence = line[0].isupper() and line[-1] in ".!?"
    return sentence and letters >= 0.85 * len(line) and not _MARKUP.search(line)
