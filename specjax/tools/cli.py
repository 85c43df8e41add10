"""The command `specjax`.

specjax decode --config.target=DIR --config.draft=DIR --input=FILE
"""

import os
import sys

from specjax.support.command_line import fail
from specjax.tools.commands import convert, decode, doctor, select

COMMANDS = {"decode": decode, "select": select, "doctor": doctor, "convert": convert}


def main(argv: list[str] | None = None) -> None:
    """Run one of `COMMANDS`; without any, or with --help, list them.

    Args:
      argv: what follows `specjax`; None: of this process.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("--help", "-h", "help"):
        print(usage())
    elif name in COMMANDS:
        sys.argv = [f"specjax {name}", *rest]  # where config_flags looks
        # As `python -m` has it, import paths of the user's own begin here; they shadow nothing.
        sys.path.append(os.getcwd())
        COMMANDS[name].run()
    else:
        fail(f"There is no command {name!r}: it is one of {', '.join(COMMANDS)}. See --help.")


def usage() -> str:
    """A line for each command."""
    lines = [
        f"  {name:<9}{(module.__doc__ or '').splitlines()[0]}" for name, module in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: specjax COMMAND [flags]",
            "",
            *lines,
            "",
            "specjax COMMAND --help has the flags of a command.",
        ]
    )
