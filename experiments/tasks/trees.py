"""Python syntax trees as text, in prefix form, and back.

    return self.default(line)   <->   (Return (Call (Attribute (Name self) default) [(Name line)]))

The grammar (`write` produces exactly this, with single spaces; `read` accepts it):

    tree  := Class | "(" Class (" " field)* ")"     bare if it never has fields: Pass, Add, Eq
    field := tree | list | atom
    list  := "[" (field (" " field)*)? "]"
    atom  := identifier | integer | constant | "~"    ~ stands for an absent optional field

- `Class` is the name of a node class of `ast`, and its fields come in the order of `Class._fields`.
- Left out: `ctx`, `kind` and `type_comment` (they follow from the place or carry no meaning here),
  and trailing fields that are empty (None, [] or 0), as the arguments and keywords of `f()`:
  `(Call (Name f))`. An empty field before one that is not empty is `~`, `[]` or `0`.
- The value of a `Constant` is its `repr`, and an ellipsis is `...`.
- The header of a compound statement has an empty body, which only the text of a header can have:
  `for i in x:` is `(For (Name i) (Name x))`, and `try:` is `(Try)`.

So a tree has one spelling, and reading undoes writing.
"""

import ast
import re

_LEFT_OUT = {"ctx", "kind", "type_comment"}
# Fields in which a bare word is a node; in all others it is not.
_BARE_FIELDS = {"op", "ops", "body", "orelse", "finalbody"}
_ABSENT = "~"

COMPOUND = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.FunctionDef,
    ast.AsyncFunctionDef, ast.ClassDef, ast.Try,
)  # fmt: skip
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "decorator_list")  # not of a header

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<mark>[()\[\]])
      | (?P<string>[bB]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
      | (?P<word>[^\s()\[\]'"]+)
    )""",
    re.VERBOSE | re.DOTALL,
)


def write(node: ast.AST) -> str:
    """The text of a tree: `(Assign [(Name x)] (Constant 1))` for the statement `x = 1`."""
    if isinstance(node, ast.Constant):
        return f"(Constant {'...' if node.value is ... else repr(node.value)})"
    name = type(node).__name__
    if not node._fields:
        return name
    values = [getattr(node, field, None) for field in node._fields if field not in _LEFT_OUT]
    while values and values[-1] in (None, [], 0):
        values.pop()
    return f"({' '.join([name, *map(_write_field, values)])})"


def _write_field(value) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, list):
        return f"[{' '.join(map(_write_field, value))}]"
    if isinstance(value, ast.AST):
        return write(value)
    return str(value)  # identifier, or small integer such as ImportFrom.level


def read(text: str) -> ast.AST:
    """Read the tree of a text, with locations, so that Python can print or compile it.

    Raises:
      ValueError: the text is not in the grammar above; the message says where.
    """
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position : position + 20]
            raise ValueError(f"not a token at character {position}: {rest!r}")
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        position = match.end()
    try:
        value, end = _read_field(tokens, 0, field="body")
    except IndexError:
        raise ValueError("the tree ends before its brackets are closed") from None
    if end != len(tokens):
        raise ValueError(f"something follows the tree: {tokens[end][1]!r}")
    if not isinstance(value, ast.AST):
        raise ValueError(f"a tree must be a node, not {value!r}")
    return ast.fix_missing_locations(value)


def _read_field(tokens: list, at: int, field: str) -> tuple[object, int]:
    """Read one field that starts at token `at`; return its value and the next field's start."""
    kind, token = tokens[at]
    if token == "[" and kind == "mark":
        items, at = [], at + 1
        while tokens[at] != ("mark", "]"):
            item, at = _read_field(tokens, at, field)
            items.append(item)
        return items, at + 1
    if token == "(" and kind == "mark":
        return _read_node(tokens, at + 1)
    if kind != "word":
        raise ValueError(f"unexpected {token!r} in field {field!r}")
    if token == _ABSENT:
        return None, at + 1
    if field in _BARE_FIELDS:
        if (cls := _node_class(token))._fields:
            raise ValueError(f"{token} has fields, so it needs its brackets")
        return cls(), at + 1
    if re.fullmatch(r"-?\d+", token):
        return int(token), at + 1
    return token, at + 1


def _read_node(tokens: list, at: int) -> tuple[ast.AST, int]:
    cls = _node_class(tokens[at][1])
    at += 1
    names = [name for name in cls._fields if name not in _LEFT_OUT]
    values: list[object] = []
    while tokens[at] != ("mark", ")"):
        if len(values) == len(names):
            raise ValueError(f"{cls.__name__} has {len(names)} fields, and more are given")
        if cls is ast.Constant:
            value, at = _constant(*tokens[at]), at + 1
        else:
            value, at = _read_field(tokens, at, names[len(values)])
        values.append(value)
    fields = dict(zip(names, values, strict=False))
    for name in names[len(values) :]:
        fields[name] = _EMPTY.get((cls.__name__, name), None if name not in _LISTS else [])
    if "ctx" in cls._fields:
        fields["ctx"] = ast.Load()
    return cls(**fields), at + 1


# Values of omitted trailing fields: an empty list, a zero, or (all others) None.
_LISTS = {
    "args", "keywords", "elts", "values", "names", "targets", "ops", "comparators", "generators",
    "ifs", "posonlyargs", "kwonlyargs", "kw_defaults", "defaults", "bases", "items", "body",
    "orelse", "handlers", "finalbody", "decorator_list", "type_params",
}  # fmt: skip
_EMPTY: dict[tuple[str, str], int | list] = {
    ("ImportFrom", "level"): 0, ("AnnAssign", "simple"): 0, ("comprehension", "is_async"): 0,
}  # fmt: skip
_EMPTY[("Dict", "keys")] = []


def _constant(kind: str, token: str):
    if token == "...":
        return ...
    try:
        return ast.literal_eval(token)
    except (ValueError, SyntaxError):
        raise ValueError(f"not a constant: {token!r}") from None


def _node_class(name: str) -> type[ast.AST]:
    cls = getattr(ast, name, None)
    if not (isinstance(cls, type) and issubclass(cls, ast.AST)):
        raise ValueError(f"no node class of ast is called {name!r}")
    return cls


def parse(line: str) -> ast.stmt:
    """Parse one line: a whole statement, or a header (`for i in x:`), whose body is empty.

    Raises:
      SyntaxError: the line is neither, or is several statements.
    """
    if line.endswith(":"):
        # The body may be missing: a comment in the line swallows it.
        end = "\nfinally: pass" if line.startswith("try") else ""
        return _header(_only(f"{line} pass{end}"))
    return _only(line)


def _only(source: str) -> ast.stmt:
    body = ast.parse(source).body
    if len(body) != 1:
        raise SyntaxError(f"{len(body)} statements instead of one: {source!r}")
    return body[0]


def _header(statement: ast.stmt) -> ast.stmt:
    """Strip a statement to its header, in place."""
    for block in _BLOCKS:
        if hasattr(statement, block):
            setattr(statement, block, [])
    return statement


def is_well_formed(text: str) -> bool:
    """Whether a text is the tree of some statement or header, in this grammar's one spelling.

    It must read as a tree; Python must be able to print that tree as source, a header with a body;
    and the source must parse to a tree that is written as the same text.
    """
    try:
        tree = read(text)
        if not isinstance(tree, COMPOUND) or tree.body:
            return write(_only(ast.unparse(tree))) == text
        tree.body = [ast.Pass()]
        if isinstance(tree, ast.Try):
            tree.finalbody = [ast.Pass()]
        return write(_header(_only(ast.unparse(tree)))) == text
    except Exception:  # `unparse` checks nothing, and a wrong tree raises many classes of errors
        return False


def kind(text: str) -> str:
    """The class of a tree, from its text: `For` of `(For (Name i) (Name x))`, `Pass` of `Pass`."""
    return re.split(r"[ ()]", text.removeprefix("("), maxsplit=1)[0]
