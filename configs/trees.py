"""Trees on an embedded family: acceptance by rank, the best trees by size, and how fast they are.

    python -m experiments.trees --config=configs/trees.py:prose --workdir=runs/trees-prose

Takes about 10 minutes on 2 idle cores.
"""

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose")


def get_config(task: str = "prose") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of trees. `task` is one of `CHOICES`."""
    if task not in CHOICES:
        raise ValueError(f"configs/trees.py:{task}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config("prose" if task == "prose" else "all")
    config.drafts = config.drafts[-1:]
    config.gammas = (2, 3, 5)  # chains
    config.sizes = (4, 8, 16, 32, 64)  # nodes
    config.depth = 8  # at most
    config.draws = ("top", "without")  # how children come, at temperatures above 0
    config.rules = ("token", "block")  # for drawn ones
    config.alpha_inputs = 64  # outputs on which acceptance by rank is measured
    config.timed_inputs = 8
    config.repeats = 7
    return config
