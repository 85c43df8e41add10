"""The frame of a command: flags, errors in one sentence, output directories."""

import contextlib
import logging
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict
from tqdm import tqdm

from specjax.support import files, interrupts

# The checkout. With specjax installed from a wheel, a directory without its files.
ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(
    main: Callable[[list[str]], Any],
    usage: str | None,
    config: str = "",
    fields: str = "",
    positional: int = 0,
) -> None:
    """Start a command. Errors that a user can correct print one line and no traceback.

    Args:
      main: the command's function; its module has defined the flags.
      usage: the module's docstring, shown by --help.
      config: the default of --config.
      fields: the fields of the config, shown by --help.
      positional: how many arguments without a flag the command takes.
    """
    with framed():
        _run(main, f"{usage}\n{fields}" if fields else usage, config, positional)


def _run(main: Callable[[list[str]], Any], usage: str | None, config: str, positional: int) -> None:
    # The help of config_flags does not mention that the file is run.
    if "config" in flags.FLAGS:
        flags.FLAGS["config"].help += " A Python file, which is run; an argument follows a colon."
    flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
    if {"-h", "--help", "--helpshort"} & set(sys.argv[1:]):
        # A command without flags of its own has no help text for them.
        *_, shown = flags.FLAGS.module_help(main.__module__).partition(":\n")
        print(f"{usage}\nFlags:\n{shown}" if shown.strip() else usage)
        return
    from specjax.support import compilation_cache  # it imports jax; --help must not wait for it

    absl_logging.set_verbosity(absl_logging.WARNING)
    compilation_cache.enable_compilation_cache()
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    logging.getLogger("specjax").setLevel(logging.INFO)
    logging.getLogger("specjax").handlers = [_Notes()]

    Steps.latest = None

    def guarded(argv: list[str]) -> Any:
        if len(argv) > 1 + positional:
            unknown = " ".join(argv[1 + positional :])
            fail(f"Arguments without a flag are not understood: {unknown}. See --help.")
        try:
            check_seed()
            with only_writer_of_workdir():
                return main(argv)
        except (ValueError, OSError, FloatingPointError) as error:
            if flags.FLAGS.debug or of_output(error):
                raise
            fail(str(error))
        except AttributeError as error:
            if flags.FLAGS.debug or not isinstance(error.obj, ConfigDict):
                raise
            fail(
                f"The file of --config sets no {error.name!r}, which this command reads. Begin "
                "with the config that the command has of its own, or one of configs/, and change "
                "its fields."
            )

    try:
        app.run(guarded, argv=arguments(config), flags_parser=parsed)
    except (AttributeError, KeyError, TypeError) as error:
        # Flag parsing raises one of these for a mistyped --config field.
        if "--debug" in sys.argv or flags.FLAGS.is_parsed():
            raise
        # The message is quoted twice: ''gama'\nDid you mean "gamma" instead of "gama"?'
        message = str(error.args[0] if error.args else error).replace("\\n", "\n")
        name, *hint = (line.strip("\\'\"") for line in message.replace("\\'", "'").splitlines())
        fail(f"--config has no field {name!r}. {' '.join(hint)}".rstrip())


@contextlib.contextmanager
def framed() -> Iterator[None]:
    """Run the body as a command: Ctrl-C, and an output that nobody takes, end it in one line."""
    with interrupts.insistent():
        try:
            try:
                yield
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if "--debug" in sys.argv:
                raise
            say(interrupted())
            if interrupts.came.is_set() and not processes_joined():
                # Python's end would wait for threads that compile, and take away what they use.
                os._exit(interrupts.STATUS)
            sys.exit(interrupts.STATUS)
        except OSError as error:
            if "--debug" in sys.argv or not of_output(error):
                raise
            # Else Python complains when it flushes at exit. A closed output is None.
            with contextlib.suppress(OSError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # the reader has closed it: as Unix tools do
                sys.exit(128 + signal.SIGPIPE)
            fail(
                f"Cannot write standard output, or a temporary file: {error.strerror}. Make room, "
                "and give the same command again."
            )


def of_output(error: Exception) -> bool:
    """Whether standard output, probably, has no reader or no room; errors of files name them."""
    if isinstance(error, BrokenPipeError):
        return True
    return isinstance(error, OSError) and error.errno in files.FULL and error.filename is None


def processes_joined() -> bool:
    """Whether jax connects this process with others, which it has to leave in order."""
    distributed = getattr(sys.modules.get("jax"), "distributed", None)
    return distributed is not None and distributed.is_initialized()


def parsed(argv: list[str]) -> list[str]:
    """Parse flags, with errors in one line, and return the other arguments."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        if "--debug" in argv:
            raise
        # ml_collections puts a traceback into the message; the error itself is two causes below.
        place, inner, _ = str(error).partition(": Error whilst parsing config file")
        if inner and error.__context__ is not None:
            fail(f"{place.removeprefix('flag ')}: {error.__context__.__context__}")
        if isinstance(error, flags.UnrecognizedFlagError):
            config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
            if isinstance(config, ConfigDict) and error.flagname in config:
                fail(
                    f"There is no flag --{error.flagname}: the config has that field, "
                    f"--config.{error.flagname}."
                )
        fail(f"{error} See --help.")
        raise


def check_seed() -> None:
    """Raise ValueError if the config has a seed that JAX does not take."""
    config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    seed = config.get("seed", 0) if isinstance(config, ConfigDict) else 0
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"--config.seed={seed!r} must be a whole number below 2⁶³.")


def arguments(config: str = "") -> list[str]:
    """The process's arguments, with --config as an existing file; default: `config`."""
    argv = [in_checkout(argument) for argument in sys.argv]
    if config and not any(_name(argument) == "config" for argument in argv):
        argv.insert(1, in_checkout(f"--config={config}"))
    return argv


def _name(argument: str) -> str:
    """The name of a flag; "" for any other argument."""
    return argument.partition("=")[0].lstrip("-") if argument.startswith("-") else ""


def in_checkout(argument: str) -> str:
    """Complete --config=FILE to a file of the checkout, unless FILE exists."""
    flag, equals, value = argument.partition("=")
    file, colon, choice = value.partition(":")
    if _name(argument) != "config" or not equals:
        return argument
    if pathlib.Path(file).suffix == ".json":
        fail(f"--config={file}: a config is Python with a function get_config(), not JSON.")
    if pathlib.Path(file).exists():
        return argument
    if not (ROOT / file).is_file():
        place = f", neither here nor below {ROOT}" if (ROOT / "configs").is_dir() else ""
        fail(f"--config={file}: no such file{place}.")
    return f"{flag}={ROOT / file}{colon}{choice}"


@contextlib.contextmanager
def only_writer_of_workdir() -> Iterator[None]:
    """Hold --workdir for this process, if the command has that flag and the user gave it.

    Processes that join at a --coordinator share it: the first holds what it writes.
    """
    path, joined = (
        flags.FLAGS[name].value if name in flags.FLAGS else None
        for name in ("workdir", "coordinator")
    )
    if not path or joined:
        yield
        return
    with files.only_writer(make_workdir(path), within=True):
        yield


class Steps(tqdm):
    """A progress bar over the steps of a command, which Ctrl-C reports."""

    latest: "ClassVar[Steps | None]" = None

    def __init__(self, items: Any = None, *, resumes: bool = True, **options: Any):
        """Start the bar; for other arguments see `tqdm`.

        Args:
          resumes: whether the same command continues where this one was interrupted.
        """
        super().__init__(items, **options)
        self.resumes = resumes
        self._ended = self.n
        Steps.latest = self

    def __iter__(self) -> Iterator[Any]:
        for ended, item in enumerate(super().__iter__(), self._ended + 1):
            yield item
            self._ended = ended

    @property
    def ended(self) -> int:
        """The number of complete steps, earlier runs included."""
        return max(self._ended, self.n)  # `n` lags behind while the bar iterates


def interrupted() -> str:
    """The message after Ctrl-C."""
    steps = Steps.latest
    if steps is None:
        return "interrupted"
    steps.close()  # this ends its line
    after = f"interrupted after {steps.ended} of {steps.total}"
    return f"{after}; the same command goes on" if steps.resumes else after


class _Notes(logging.Handler):
    """Shows what the library logs, such as the dtype that it chose."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say(what: str) -> None:
    """Print what the command does now to standard error: loading and compiling take minutes."""
    print(what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def clocked(write: Callable[[str], Any] = say, quiet: float = 10.0) -> Iterator[Callable[..., Any]]:
    """Yield a `say` whose lines begin with the time since the start, such as "[1:05]".

    Args:
      quiet: seconds without a line after which the last one is repeated: compiling is silent.
    """
    begun, ended = time.monotonic(), threading.Event()
    latest: tuple[str, float] = "", begun

    def tell(what: str, *, again: str = "") -> None:
        nonlocal latest
        latest = what, time.monotonic()
        minutes, seconds = divmod(int(time.monotonic() - begun), 60)
        write(f"[{minutes}:{seconds:02}] {again}{what}")

    def repeat() -> None:
        while not ended.wait(quiet / 10):
            what, at = latest
            if what and time.monotonic() - at >= quiet:
                tell(what, again="still ")

    watching = threading.Thread(target=repeat, daemon=True)
    watching.start()
    try:
        yield tell
    finally:
        ended.set()
        watching.join()


def say_loading(target: str, *drafts: str, say: Callable[[str], Any] = say) -> None:
    """Print which models the command loads, those of the checkout by their path in it."""
    names = [str(name).replace(f"{ROOT}/", "") for name in dict.fromkeys(filter(None, drafts))]
    role = "draft" if len(names) == 1 else "drafts"
    beside = f" and the {role} {', '.join(names)}" if names else ""
    say(f"loading the target {str(target).replace(f'{ROOT}/', '')}{beside}")


def fail(message: str) -> None:
    """Print the error and leave with status 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def make_workdir(path: str, flag: str = "workdir") -> pathlib.Path:
    """Make a directory if need be; ValueError, with the flag, if it cannot be written."""
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


def check_apart(output: pathlib.Path, source: str, flag: str, of: str = "input") -> None:
    """Raise ValueError if the output would overwrite a file that is read, by any name or link.

    Args:
      output: the file to write; it need not exist.
      source: the file that is read, if there is one of that name.
      flag: the flag that named the output.
      of: the flag that named the source.
    """
    if output.exists() and os.path.exists(source) and output.samefile(source):
        raise ValueError(
            f"--{flag} would write to {output}, which is the file of --{of}={source}: name another."
        )
