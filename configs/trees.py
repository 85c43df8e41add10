"""Trees for a pair: acceptance by rank, the best trees by size, and how fast they are.

    python -m experiments.trees --config=configs/trees.py:prose --workdir=runs/trees-prose
    python -m experiments.trees --config=configs/trees.py:own --workdir=runs/trees-own \\
        --config.target=google-t5/t5-3b --config.drafts=google-t5/t5-small --input=prompts.txt

`parse` and `prose` are the embedded families, and take about 10 minutes on 2 idle cores. `own` is
any pair of directories or hub names, with one's own inputs or with those of --config.task.
"""

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose", "own")


def get_config(task: str = "prose") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of trees. `task` is one of `CHOICES`."""
    if task not in CHOICES:
        raise ValueError(f"configs/trees.py:{task}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config("prose" if task == "prose" else "all")
    config.drafts = config.drafts[-1:]
    if task == "own":
        config.target, config.drafts, config.task = "", (), ""
    config.gammas = (2, 3, 5)  # chains
    config.sizes = (4, 8, 16, 32, 64)  # nodes
    config.depth = 8  # at most
    config.draws = ("top", "without")  # how children come, at temperatures above 0
    config.rules = ("token", "block")  # for drawn ones
    config.alpha_inputs = 64  # outputs on which acceptance by rank is measured
    config.timed_inputs = 8
    config.repeats = 7
    return config
