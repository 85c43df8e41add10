"""Which drafter: a switch beside each of its drafters, on a stream of inputs of two kinds.

    python -m experiments.switch --config=configs/switch.py --workdir=runs/switch

The target continues openings (free) and text that it has just read (copied), in turns. A target of
this size copies and repeats itself at temperature 0, and hardly at 1. Expect some four minutes on
two idle cores. Results: experiments/switch/README.md.
"""

import ml_collections

from configs import embedded


def get_config() -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py:prose, and those of switches."""
    config = embedded.get_config("prose")
    config.drafts = ("lookup(min_ngram=2)", config.draft)  # in this order within a switch
    config.choices = ("fixed", "recent", "bandit")
    config.gammas = (3, 5)  # each drafter and each switch with each of them
    config.copied_words = 80  # of a text that is to be written again
    config.timed_inputs = 8  # of each kind
    config.max_new_tokens = 120
    config.cost_repeats = 5
    config.repeats = 4  # every other one chooses, the rest judges
    config.draws = 16  # of the oracle's chances, at temperatures above 0
    return config
