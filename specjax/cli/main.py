"""The command `specjax`.

specjax decode --config.target=DIR --config.draft=DIR --input=FILE
"""

import ast
import importlib
import os
import pathlib
import sys

from specjax.support.command_line import fail, framed, say

COMMANDS = ("decode", "select", "tune", "doctor", "audit", "convert")  # modules beside this one


def main(argv: list[str] | None = None) -> None:
    """Run one of `COMMANDS`; without any, or with --help, list them.

    Args:
      argv: arguments after `specjax`; None: those of this process.
    """
    with framed():
        _main(*((sys.argv[1:] if argv is None else argv) or ["--help"]))


def _main(name: str, *rest: str) -> None:
    if name in ("--help", "-h", "help"):
        print(usage())
    elif name in COMMANDS:
        sys.argv = [f"specjax {name}", *rest]  # config_flags reads it
        # Import paths of the user start here, as with `python -m`, but shadow nothing.
        sys.path.append(os.getcwd())
        module = f"specjax.cli.{name}"
        if module not in sys.modules and not {"-h", "--help", "--helpshort"} & {*rest}:
            say("loading specjax …")
        importlib.import_module(module).run()
    else:
        fail(f"There is no command {name!r}: it is one of {', '.join(COMMANDS)}. See --help.")


def usage() -> str:
    """Format a line for each command."""
    lines = [f"  {name:<9}{_summary(name)}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: specjax COMMAND [flags]",
            "",
            *lines,
            "",
            "specjax COMMAND --help has the flags of a command.",
        ]
    )


def _summary(name: str) -> str:
    """Read the first line of a command's docstring; importing the command would take seconds."""
    source = pathlib.Path(__file__).with_name(f"{name}.py")
    return (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").splitlines()[0]
