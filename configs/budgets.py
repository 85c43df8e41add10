"""How wrong biased verification budgets are: both embedded families at temperature 1.

python -m experiments.budgets.bias --config=configs/budgets.py --workdir=runs/budgets
"""

import ml_collections

from configs import embedded


def get_config() -> ml_collections.ConfigDict:
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
