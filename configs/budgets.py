"""Verify budgets, static γ and `together`: how fast, by the number of rows.

python -m experiments.budgets --config=configs/budgets.py:prose --workdir=runs/budgets_prose
python -m experiments.budgets --config=configs/budgets.py:parse --workdir=runs/budgets_parse
"""

import ml_collections

from configs import embedded

CHOICES = ("prose", "parse")


def get_config(family: str = "prose") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of batches. `family` is one of `CHOICES`."""
    if family not in CHOICES:
        raise ValueError(f"configs/budgets.py:{family}: choose one of {', '.join(CHOICES)}.")
    prose = family == "prose"
    config = embedded.get_config("prose" if prose else "all")
    config.outputs = 128  # recorded; half choose settings, half are replayed
    config.gamma_max = 6 if prose else 8
    config.static = (1, 2, 3, 4, 6) if prose else (1, 2, 3, 5, 8)  # γ
    config.thresholds = (0.2, 0.35, 0.5, 0.65, 0.8)
    config.priors = (0.5, 0.7, 0.9, 0.95)  # of early_stop
    config.batch_sizes = (1, 4, 8, 16, 32)  # rows, by times measured here
    config.knees = (64, 256)  # positions up to which an accelerator's pass takes one step
    config.accelerator_batch_sizes = (16, 32, 64, 128, 256)
    config.accelerator_c = 0.05  # a call of the drafter there, in target steps
    config.draws = 8  # orders of the outputs, and draws of acceptance
    config.cost_repeats = 9
    config.clocked = True  # decode by the clock too
    config.timed_inputs = 32
    config.repeats = 3
    config.max_new_tokens = 120 if prose else 96
    return config
