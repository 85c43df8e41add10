"""English text from Python source, for unconditional generation: docstrings and comments.

An example is a stretch of one module's paragraphs in their order, a line each, long enough for
hundreds of tokens.
"""

import ast
import re
from collections.abc import Iterable, Iterator

SHORTEST, LONGEST = 40, 1000  # characters of a paragraph
SHORTEST_STRETCH, LONGEST_STRETCH = 200, 1400  # characters of an example
OPENING = 3  # words of the prompt that a text continues
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MARKUP = re.compile(
    r">>>|::|\.\. |[{}=|\\\[\]]|--|:[a-z]+:|Copyright|License"
    r"|\b(?:Args|Arguments|Attributes|Parameters):"
)


def paragraphs(text: str, tree: ast.Module) -> Iterator[str]:
    """Yield the paragraphs of one source file that read like prose, each on one line."""
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
    """Join a module's paragraphs in order, each stretch until one more would be too long."""
    stretch = ""
    for line in (*lines, ""):
        if line and len(stretch) + 1 + len(line) <= LONGEST_STRETCH:
            stretch = f"{stretch}\n{line}" if stretch else line
            continue
        if len(stretch) >= SHORTEST_STRETCH:
            yield stretch
        stretch = line


def split_opening(stretch: str) -> tuple[str, str]:
    """Split off the first words; the rest begins with a space."""
    words = stretch.split(" ", OPENING)
    return " ".join(words[:OPENING]), " " + words[OPENING]


def is_prose(line: str) -> bool:
    """Whether a line is one or more sentences and hardly anything else."""
    if not SHORTEST <= len(line) <= LONGEST or not line.isascii() or line.count(" ") <= OPENING:
        return False
    letters = sum(c.isalpha() or c == " " for c in line)
    sentence = line[0].isupper() and line[-1] in ".!?"
    return sentence and letters >= 0.85 * len(line) and not _MARKUP.search(line)
