"""Weights and caches in 8 bits, of both embedded families: memory, quality, α and time.

    python -m experiments.quantised --config=configs/quantised.py:parse --workdir=runs/int8-parse
    python -m experiments.quantised --config=configs/quantised.py:prose --workdir=runs/int8-prose
    python -m experiments.quantised --config=configs/quantised.py:own --workdir=runs/int8-own \\
        --config.target=google-t5/t5-3b --config.draft=google-t5/t5-small --config.task=wmt14_en_de

The first two take about 5 minutes each on 2 idle cores. `own` is any pair of models of directories
or hub names, on one of the tasks.
"""

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose", "own")


def get_config(task: str = "parse") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of this experiment. `task`: one of `CHOICES`."""
    if task not in CHOICES:
        raise ValueError(f"configs/quantised.py:{task}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config("prose" if task == "prose" else "all")
    if task == "own":
        config.target, config.draft, config.task = "", "", ""
    config.gamma = 4
    config.temperatures = (0.0,)
    config.quality_inputs = 300  # outputs and references that quality is measured on
    config.alpha_inputs = 200
    config.timed_inputs = 8  # one at a time
    config.repeats = 7
    return config
