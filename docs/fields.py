"""What the API reference reads beside docstrings: a field's comment, and `@pytree`."""

import re

import griffe

PYTREE = "specjax.pytrees.pytree"


class Fields(griffe.Extension):
    """`name: type  # comment` documents a field, and a class under `@pytree` is a dataclass."""

    def on_class_instance(self, *, cls, **_):
        for decorator in cls.decorators:
            if getattr(decorator.value, "canonical_path", "") == PYTREE:
                decorator.value = griffe.ExprName("dataclasses.dataclass")

    def on_attribute_instance(self, *, attr, **_):
        if attr.docstring is None and attr.lineno and not attr.parent.is_function:
            last = attr.lines_collection[attr.filepath][attr.endlineno - 1]
            if found := re.search(r"  # (?!type:|noqa)(.+)$", last):
                attr.docstring = griffe.Docstring(found[1], lineno=attr.lineno, parent=attr)
