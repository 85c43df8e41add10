"""What the API reference reads beside docstrings: a field's comment, and `@pytree`."""

import itertools
import re

import griffe

PYTREE = "specjax.pytrees.pytree"


class Fields(griffe.Extension):
    """A comment documents its field, and a class under `@pytree` is a dataclass."""

    def on_class_instance(self, *, cls, **_):
        for decorator in cls.decorators:
            if getattr(decorator.value, "canonical_path", "") == PYTREE:
                decorator.value = griffe.ExprName("dataclasses.dataclass")

    def on_attribute_instance(self, *, attr, **_):
        if attr.docstring is None and attr.lineno and not attr.parent.is_function:
            lines = attr.lines_collection[attr.filepath]
            if text := _comment(lines[: attr.lineno - 1], lines[attr.endlineno - 1]):
                attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def _comment(above, last):
    """What stands behind the field on its last line, else on the lines directly above it."""
    if found := re.search(r"  # (?!type:|noqa)(.+)$", last):
        return found[1]
    lines = (line.strip() for line in reversed(above))
    comments = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line[2:] for line in reversed(list(comments)))
