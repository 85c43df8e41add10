"""Inputs of a command: the lines of a file, or a task."""

import pathlib
import sys

from specjax import tasks
from specjax.models.checkpoint import Checkpoint
from specjax.support import files
from specjax.tasks.examples import Example


def read_lines(path: str) -> list[str]:
    """Read the lines of a file or of standard input, without their ends."""
    file = pathlib.Path(path)
    if path != "-" and not file.is_file():
        raise ValueError(f"--input={path}: no such file. Use - for standard input.")
    data = sys.stdin.buffer.read() if path == "-" else file.read_bytes()
    text = files.decode(data, f"--input={path}")
    # Not splitlines(): form feeds and such belong to a line.
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def load_examples(config, split: str = "") -> list[Example]:
    """Load the examples of the config's task, of its own split or another.

    ValueError if there are none.

    Args:
      config: with task, split and data_dir, the data's place if it differs from the task's. Or with
        the user's own texts, which have no target and no other split.
    """
    if "texts" in config and not split:
        return [Example(text, "") for text in config.texts]
    split = split or config.split
    if found := tasks.load(config.task, split, files=_files(config)):
        return found
    raise ValueError(f"Task {config.task!r} has no inputs in split {split!r}.")


def not_held_out(config, target: Checkpoint) -> str:
    """Warn if a config's inputs differ from what was held out in training; else ""."""
    if "texts" in config:
        return ""
    recorded = target.metadata.get("training_data", "")
    return tasks.not_held_out(recorded, config.task, config.split, _files(config))


def _files(config) -> list[str]:
    return [part for part in config.data_dir.split(",") if part]
