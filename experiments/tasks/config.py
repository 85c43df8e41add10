"""The pairs that a config names: task, split, data_dir, and of spec_bench target and categories."""

import dataclasses

from experiments import tasks
from experiments.tasks import questions
from experiments.tasks.examples import Example
from specjax.checkpoints import finding, tokenizers
from specjax.cli.inputs import turn_writer
from specjax.models.checkpoint import Checkpoint


def load_examples(config, split: str = "", target: str = "") -> list[Example]:
    """Load the examples of a config's task, of its own split or another.

    Turns of spec_bench are written as prompts.

    Args:
      config: data_dir is the data's place if it differs from the task's. Or with the user's own
        `texts`, which have no target and no other split.
      target: the model whose prompts turns are written as; default: the config's.

    Raises:
      ValueError: there are none, or as `tasks.load`.
    """
    if "texts" in config and not split:
        return [Example(text, "") for text in config.texts]
    split = split or config.split
    found = tasks.load(config.task, split, _files(config), config.get("categories", ()))
    if not found:
        raise ValueError(f"Task {config.task!r} has no inputs in split {split!r}.")
    if config.task != questions.TASK:
        return found
    target = target or config.target
    write = turn_writer(tokenizers.load(finding.locate(target)), target)
    return [dataclasses.replace(one, input=write(one.input)) for one in found]


def not_held_out(config, target: Checkpoint) -> str:
    """Warn if a config's inputs differ from what was held out in training; else ""."""
    if "texts" in config:
        return ""
    recorded = target.metadata.get("training_data", "")
    return tasks.not_held_out(recorded, config.task, config.split, _files(config))


def _files(config) -> list[str]:
    return [part for part in config.data_dir.split(",") if part]
