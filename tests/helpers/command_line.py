"""Runs a command as a shell would, within this process: no second wait for imports."""

import io
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
from absl import app, flags

from specjax.support import compilation_cache

PROGRESS = (
    "loading ", "compiling ", "decoding ", "measuring ", "timing ", "comparing ", "converting ",
    "Other programs use this machine", "[0:",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
# What users read: the README, the guides and concepts, and the experiments' own pages.
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]


class Outcome(NamedTuple):
    """What a shell would see."""

    status: int
    stdout: str
    stderr: str  # without `progress`
    progress: list[str]  # lines such as "loading …"


def run(
    monkeypatch, capsys, module: str, *arguments: str, stdin: bytes = b"", cwd: Path = ROOT
) -> Outcome:
    """`python -m module arguments`, with absl's flags and the search path as they were before.

    Args:
      module: dotted; or a command such as "specjax decode".
    """
    module, *command = module.split()
    arguments = (*command, *arguments)
    app.define_help_flags()
    before = set(flags.FLAGS)
    capsys.readouterr()
    package = ROOT / module.replace(".", "/")
    file = str(package / "__main__.py" if package.is_dir() else package.with_suffix(".py"))
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [file, *map(str, arguments)])
        patch.setattr(sys, "path", [*sys.path])
        # The user's own cache is none of a test's: see `test_commands_call_it`.
        patch.setattr(compilation_cache, "enable_compilation_cache", lambda: None)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        # A process of its own would read it when it imports jax.
        cache = jax.config.jax_compilation_cache_dir
        own = os.environ.get("JAX_COMPILATION_CACHE_DIR", cache)
        jax.config.update("jax_compilation_cache_dir", own)
        warnings.resetwarnings()
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)
        status = 0
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as leave:
            status = leave.code or 0
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
            jax.config.update("jax_compilation_cache_dir", cache)
    stdout, stderr = capsys.readouterr()
    lines = stderr.splitlines(keepends=True)
    lines = [line for line in lines if line != "loading specjax …\n"]  # the first command says it
    progress = [line for line in lines if line.startswith(PROGRESS)]
    said = "".join(line for line in lines if line not in progress)
    return Outcome(status, stdout, said, [line.rstrip() for line in progress])
