"""Verify budgets: how wrong biased ones are, and how fast the exact ones.

python -m experiments.budgets.bias --config=configs/budgets.py --workdir=runs/budgets
python -m experiments.budgets --config=configs/budgets.py:prose --workdir=runs/budgets_prose
python -m experiments.budgets --config=configs/budgets.py:parse --workdir=runs/budgets_parse
"""

import ml_collections

from configs import embedded

CHOICES = ("bias", "prose", "parse")


def get_config(what: str = "bias") -> ml_collections.ConfigDict:
    """`what` is one of `CHOICES`."""
    if what not in CHOICES:
        raise ValueError(f"configs/budgets.py:{what}: choose one of {', '.join(CHOICES)}.")
    return bias() if what == "bias" else batches(what)


def bias() -> ml_collections.ConfigDict:
    """A config of configs/embedded.py for each family, and what is measured with both."""
    config = ml_collections.ConfigDict()
    config.families = ("prose", "parse")
    config.prose = embedded.get_config("prose")
    config.parse = embedded.get_config("all")
    for family in config.families:
        # Every other output calibrates the chances, and contexts come from the others.
        config[family].alpha_inputs = 128
    config.prose.contexts = 96  # which take as long as those of parse
    config.parse.contexts = 256
    config.batch_sizes = (1, 4, 8)
    config.gammas = (4, 8)
    config.knees = (4, 16)  # positions that take as long as all else in a pass
    config.samples = 512  # drafts of a context; each first token has 2 or more
    config.neighbours = 4  # drafts of the other rows, for each half of a context's drafts
    config.mass = 1e-4  # of the draft's distribution that first tokens may leave out
    config.cuts = (0.3, 0.5, 0.7)
    config.seed = 0
    return config


def batches(family: str) -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of batches."""
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
