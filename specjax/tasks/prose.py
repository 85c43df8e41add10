"""English out of Python source: paragraphs of docstrings and comments, for unconditional text."""

import ast
import re
from collections.abc import Iterator

SHORTEST, LONGEST = 40, 400  # characters of a paragraph
OPENING = 3  # words that stand as the prompt, where a continuation is asked for
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MARKUP = re.compile(r">>>|::|\.\. |[{}=|\\\[\]]|--|:param|\w_\w+_|Copyright|License")


def paragraphs(text: str, tree: ast.Module) -> Iterator[str]:
    """The paragraphs of one source file that read like prose, each on one line."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield from _prose(part)
    block: list[str] = []
    for line in (*text.split("\n"), ""):
        line = line.strip()
        if line.startswith("# "):
            block.append(line[2:])
        elif block:
            yield from _prose("\n".join(block))
            block = []


def split_opening(paragraph: str) -> tuple[str, str]:
    """The first words, and the rest with the space before it."""
    words = paragraph.split(" ", OPENING)
    return " ".join(words[:OPENING]), " " + words[OPENING]


def _prose(part: str) -> Iterator[str]:
    """The part on one line, if it is a sentence or several and hardly anything else."""
    line = " ".join(part.split())
    if not SHORTEST <= len(line) <= LONGEST or not line.isascii() or line.count(" ") <= OPENING:
        return
    letters = sum(c.isalpha() or c == " " for c in line)
    sentence = line[0].isupper() and line[-1] in ".!?"
    if sentence and letters >= 0.85 * len(line) and not _MARKUP.search(line):
        yield line
