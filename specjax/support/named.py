"""Values by name, for settings such as `policy` and `rule`.

make("policy", NAMES, "svip(threshold=0.3)"), or "my_module:my_policy(patience=2)"
"""

import ast
import contextlib
import difflib
import importlib
import inspect
import pathlib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specjax.support import renamed


def make(
    kind: str, names: Mapping[str, str], text: str, protocol: type | None = None, /, **settings: Any
) -> Any:
    """Call the function or class that a text names.

    Args:
      kind: the kind of value, for errors.
      names: import paths by name.
      text: one of `names`, or an import path "module:attribute"; settings may follow as in Python,
        "svip(threshold=0.3)", literals only. An import path is code that runs: the module is
        imported, and the attribute called. Accept none from where you would run no program.
      protocol: the class whose functions the value must have.
      settings: further settings.

    Raises:
      ValueError: no such name, module or attribute, settings that it does not take, or a value that
        does not have the functions of `protocol`.
    """
    name, arguments, written = _parse(kind, text)
    settings = written | settings
    maker = find(kind, names, name)
    try:
        inspect.signature(maker).bind(*arguments, **settings)
    except TypeError as error:
        attribute = names.get(name, name).rpartition(":")[2]
        raise ValueError(
            f"{kind.capitalize()} {name!r}: {error}; it is {attribute}{inspect.signature(maker)}."
        ) from error
    with _staying(kind, name):
        made = maker(*arguments, **settings)
    if protocol is not None:
        check(kind, text, made, protocol)
    return made


def check(kind: str, text: str, made: Any, protocol: type) -> None:
    """Raise ValueError unless a text's value is an instance with the functions of a protocol."""
    functions = [name for name, value in vars(protocol).items() if inspect.isfunction(value)]
    # Other names with underscores are Python's own, such as `__annotate_func__` since 3.14.
    public = [name for name in functions if name == "__call__" or not name.startswith("_")]
    missing = [name for name in public if not callable(getattr(made, name, None))]
    if missing or isinstance(made, type):
        reason = f"has no function {missing[0]!r}" if missing else "is a class and no value"
        raise ValueError(
            f"{kind.capitalize()} {text!r} gives {reprlib.repr(made)}, which is no {kind}: it "
            f"{reason}. Name a function or class that makes a {kind}."
        )


def find(kind: str, names: Mapping[str, str], name: str) -> Callable[..., Any]:
    """Find the function or class that a name of `names`, or an import path, refers to.

    An import path is code that runs: its module is imported.

    Raises:
      ValueError: no such name, module or attribute.
    """
    path = names.get(name, name) if isinstance(name, str) else ""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        if (moved := renamed.MOVED.get(f"{kind} {name}")) is not None:
            raise ValueError(f"The {kind} {name!r} is {moved}.")
        raise ValueError(
            f"There is no {kind} {name!r}: it is one of {', '.join(names)}, or the import path "
            f"of your own as module:attribute.{meant(name, names)}"
        )
    try:
        if module_name.startswith("."):
            raise ModuleNotFoundError(name=module_name)
        with _staying(kind, name):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        dotted = module_name.removesuffix(".py").replace("/", ".").strip(".")
        way_out = "must lie in the working directory or on PYTHONPATH"
        if dotted != module_name:
            way_out = f"is written with dots and without .py, {dotted}:{attribute}"
        raise ValueError(
            f"{kind.capitalize()} {name!r}: there is no module {module_name!r} to import; it "
            f"{way_out}."
        ) from error
    maker = getattr(module, attribute, None)
    if maker is None:
        raise ValueError(
            f"{kind.capitalize()} {name!r}: {module_name} has no attribute {attribute!r}."
        )
    try:
        inspect.signature(maker)
    except (TypeError, ValueError):
        raise ValueError(
            f"{kind.capitalize()} {name!r}: {reprlib.repr(maker)} is no function whose settings "
            f"can be read. Name a function or class that makes a {kind}."
        ) from None
    return maker


def meant(name: str, names: Iterable[str]) -> str:
    """Ask for the name that is nearest to a misspelt one, as the end of a message; "" if none."""
    near = difflib.get_close_matches(str(name), names, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


@contextlib.contextmanager
def _staying(kind: str, name: str) -> Iterator[None]:
    """Run a module or function of a user; its `sys.exit` must not end a command as done."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(
            f"{kind.capitalize()} {name!r}: its code leaves the process by {error!r}. A "
            "module that is also a program does so behind if __name__ == '__main__'."
        ) from error


def split(texts: str) -> list[str]:
    """Split a list such as "svip(threshold=0.3), goodput" at commas outside parentheses."""
    parts, depth = [""], 0
    for letter in texts:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def takes(kind: str, names: Mapping[str, str], text: str, setting: str) -> bool:
    """Whether a text's function or class takes a setting. Arguments and errors: `make`."""
    return setting in inspect.signature(find(kind, names, _parse(kind, text)[0])).parameters


def lacks(kind: str, names: Mapping[str, str], text: str, setting: str) -> bool:
    """Whether a text's function or class requires a setting that the text does not give.

    Arguments and errors: `make`.
    """
    takes = inspect.signature(find(kind, names, _parse(kind, text)[0])).parameters
    missing = setting not in settings(kind, names, text)
    return setting in takes and missing and takes[setting].default is inspect.Parameter.empty


def settings(kind: str, names: Mapping[str, str], text: str) -> dict[str, Any]:
    """The settings that a text gives, by name; whether they are taken is left to `make`.

    Arguments and errors: `make`.
    """
    name, arguments, written = _parse(kind, text)
    signature = inspect.signature(find(kind, names, name))
    try:
        return dict(signature.bind_partial(*arguments, **written).arguments)
    except TypeError:
        return written


def name_in(text: str) -> str:
    """The name of "name(setting=value)"."""
    return text.partition("(")[0].strip()


def _parse(kind: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Split "name(1, key=2)" into name, arguments and settings."""
    if not isinstance(text, str):
        raise ValueError(f"{kind}={text!r} must be a text, name(setting=value, …).")
    name, (_, opens, rest) = name_in(text), text.partition("(")
    if not opens:
        return name, [], {}
    try:
        call = ast.parse(f"make({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        arguments = [ast.literal_eval(value) for value in call.args]
        settings = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"{kind}={text!r} cannot be read: write name(setting=value, …), values being numbers, "
            "texts in quotes, True or False."
        ) from None
    return name, arguments, settings


def short(name: str) -> str:
    """The last part of a directory or hub name; for training's output, the run's name."""
    if "(" in name:
        return re.sub(r"[^'\"(]*/", "", name)
    path = pathlib.PurePath(name)
    return path.parent.name if path.name in ("drafter", "model") and path.parent.name else path.name
