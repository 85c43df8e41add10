"""Which batch: tokens per second at 1 to 16 rows, of plain decoding, static γ and policies.

    python -m experiments.batch --config=configs/batch.py --workdir=runs/batch_prose
    python -m experiments.batch --config=configs/batch.py:parse --workdir=runs/batch_parse

One draft at temperature 0. Expect half an hour for each family on two idle cores, most of it
compilation (estimated by the number of calls).
"""

import ml_collections

from configs import embedded

CHOICES = ("prose", "parse")


def get_config(family: str = "prose") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of batches."""
    if family not in CHOICES:
        raise ValueError(f"configs/batch.py:{family}: choose one of {', '.join(CHOICES)}.")
    prose = family == "prose"
    config = embedded.get_config("prose" if prose else "all")
    config.temperatures = (0.0,)
    config.batch_sizes = (1, 2, 4, 8, 16)  # rows
    config.static = (1, 2, 3, 4) if prose else (1, 2, 3, 5, 7)  # γ
    config.gamma_max = max(config.static)  # of policies
    # Verify passes that policies choose from, and γ_max + 1. Where many rows make a wide pass dear,
    # each length needs one of its own.
    config.widths = (1, 2, 3, 4) if prose else (1, 2, 3, 4, 6)
    config.policies = {
        "together": {},
        "goodput": {"memory": 0.98},
    }  # those that take costs get them
    config.max_new_tokens = 120 if prose else 96
    config.timed_inputs = 32
    config.repeats = 4  # half choose the best static γ, half compare
    config.cost_inputs = 8  # or two batches: of one, any costs fit
    config.cost_repeats = 5
    return config
