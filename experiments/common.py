"""What every experiment shares: errors in one sentence, directories, inputs, settings."""

import hashlib
import json
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from specjax import tasks
from specjax.tasks.examples import Example

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(main: Callable[[list[str]], Any], usage: str | None) -> None:
    """Start an experiment. What a user can put right is said in one sentence, without a traceback.

    Args:
      usage: the module's docstring, shown by --help.
    """
    # Of config_flags, which says no more than what the config is for.
    if "config" in flags.FLAGS:
        flags.FLAGS["config"].help += " A Python file, which is run; an argument follows a colon."
    flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
    sys.modules["__main__"].__doc__ = usage
    logging.set_verbosity(logging.WARNING)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)

    def guarded(argv: list[str]) -> Any:
        if len(argv) > 1:
            fail(f"Arguments without a flag are not understood: {' '.join(argv[1:])}. See --help.")
        try:
            return main(argv)
        except (ValueError, OSError, FloatingPointError) as error:
            if flags.FLAGS.debug:
                raise
            fail(str(error))

    try:
        app.run(guarded, argv=[in_checkout(argument) for argument in sys.argv])
    except (AttributeError, KeyError, TypeError) as error:
        # A mistyped --config field comes out of flag parsing as one of these.
        if "--debug" in sys.argv or flags.FLAGS.is_parsed():
            raise
        # Quoted twice over by then: ''gama'\nDid you mean "gamma" instead of "gama"?'
        said = str(error.args[0] if error.args else error).replace("\\n", "\n").replace("\\'", "'")
        name, *hint = (line.strip("\\'\"") for line in said.splitlines())
        fail(f"--config has no field {name!r}. {' '.join(hint)}".rstrip())


def in_checkout(argument: str) -> str:
    """A --config=FILE of the checkout is found from any directory, if there is no such file."""
    flag, equals, value = argument.partition("=")
    file, colon, choice = value.partition(":")
    there = ROOT / file
    if flag.lstrip("-") != "config" or pathlib.Path(file).exists():
        return argument
    if not there.is_file():
        fail(f"--config={file}: no such file, neither here nor below {ROOT}.")
    return f"{flag}{equals}{there}{colon}{choice}"


def fail(message: str) -> None:
    """Print the error and leave with status 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def make_workdir(path: str, flag: str = "workdir") -> pathlib.Path:
    """The directory, made if need be; ValueError, which names the flag, if it cannot be written."""
    workdir = pathlib.Path(path)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise ValueError(
            f"Cannot write to {workdir} (--{flag}): {error.strerror or error}. "
            "Name a directory that you can write to; it is made if it does not exist."
        ) from None
    return workdir


def check_apart(output: pathlib.Path, source: str, flag: str) -> None:
    """ValueError if the file of the inputs would be written to, by whatever name or link.

    Args:
      output: the file to write, which need not exist.
      source: the file of --input, or - for standard input.
      flag: that named the output.
    """
    if source != "-" and output.exists() and output.samefile(source):
        raise ValueError(
            f"--{flag} would write to {output}, which is the file of --input={source}: name "
            "another."
        )


def load_examples(config, split: str = "") -> list[Example]:
    """The examples of the config's task, of its own split or another; ValueError if there are none.

    Args:
      config: with task, split and data_dir, where the data lies if not where the task says.
    """
    split = split or config.split
    files = [part for part in config.data_dir.split(",") if part]
    if found := tasks.load(config.task, split, files=files):
        return found
    raise ValueError(f"Task {config.task!r} has no inputs in split {split!r}.")


# Fields that configs were given after results had been kept, with the values that change nothing.
LATER = {"policy": "", "rule": "", "compare": False}


def settings(config) -> dict[str, Any]:
    """A config for `fingerprint`, as JSON.

    Results from before a field was there still belong to it, and so do those of another checkout:
    directories below it go by their path in there.
    """
    found = config.to_dict()
    kept = {k: v for k, v in found.items() if k not in LATER or v != LATER[k]}
    return json.loads(json.dumps(kept, default=str).replace(f"{ROOT}/", ""))


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-able values, to tell whether a file belongs to this run."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def widths(said: Sequence[str], gamma_max: int) -> list[int]:
    """Of verify passes, from a flag: for every length its own, the widest alone, or those named."""
    if list(said) == ["all"]:
        return list(range(1, gamma_max + 1))
    if list(said) == ["none"]:
        return []
    if not all(width.isdecimal() and int(width) > 0 for width in said):
        raise ValueError(f"--widths={','.join(said)} must be all, none or a list of numbers ≥ 1.")
    return [int(width) for width in said]
