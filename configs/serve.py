"""Rows admitted while others run, beside whole batches: tokens per second.

    python -m experiments.serve --config=configs/serve.py:parse --workdir=runs/serve-parse
    python -m experiments.serve --config=configs/serve.py:prose --workdir=runs/serve-prose

Eight rows, inputs of the embedded families, plain and speculative decoding. Outputs end by
themselves, or at budgets that are drawn beside. Expect some 5 minutes each on 2 idle cores.
"""

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose")


def get_config(task: str = "parse") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of serving. `task` is one of `CHOICES`."""
    if task not in CHOICES:
        raise ValueError(f"configs/serve.py:{task}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config("prose" if task == "prose" else "all")
    config.drafts = config.drafts[:1]
    config.gamma = 2 if task == "prose" else 5  # at this batch
    config.batch_size = 8  # rows
    config.timed_inputs = 64
    config.repeats = 3
    config.admits = (1, 2, 4)  # free rows at which inputs are admitted; whole batches come beside
    # Outputs end by themselves, or at budgets drawn for each input. On prose hardly one ends before
    # its budget.
    config.lengths = ("drawn",) if task == "prose" else ("own", "drawn")
    config.shortest = 8  # drawn budgets: log-uniform from here to max_new_tokens
    return config
