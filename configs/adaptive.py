"""The leaderboard of draft-length policies on the embedded family `parse`.

    python -m experiments.adaptive --config=configs/adaptive.py --workdir=runs/adaptive
    python -m experiments.adaptive --config=configs/adaptive.py:wide --workdir=runs/adaptive_wide

Three drafts at two temperatures: a bigram, with which no static length is faster, and the
two models. Expect an hour on two idle cores, 10 minutes for each draft and temperature, of which
prices take 3 (estimated by the number of calls); a run that was cut off goes on. `wide` takes the
two models and a few policies, whose verify pass always has its full width: 15 minutes. Settings
other than a policy's own were chosen on the validation split by replay, at temperature 0 with
draft-tiny; races are run on test.
"""

import ml_collections

from configs import embedded

CHOICES = ("all", "wide")


def get_config(choice: str = "all") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of the races."""
    if choice not in CHOICES:
        raise ValueError(f"configs/adaptive.py:{choice}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config()
    config.drafts = ("bigram", *config.drafts)
    config.static = (1, 2, 3, 5, 7, 10)  # γ
    config.gamma_max = 10  # of policies
    # Verify passes that policies can choose, and γ_max + 1: no draft, a short one, a long one.
    # Choosing takes time too (docs/adaptive.md).
    config.widths = (1, 4)
    # Settings by policy; those that take prices or a trained head are given them.
    config.policies = {
        "heuristic": {"gamma": 10},
        "confidence": {"threshold": 0.1},
        "svip": {"threshold": 0.8},
        "adaedl": {"bar": 0.2},
        "gammatune": {"gamma": 10},
        "average": {"tiers": (1, 3, 5, 7, 10), "first": 10},
        "goodput": {"prior": 0.99, "memory": 0.98},
        "first_descent": {"prior": 0.95, "weight": 1.0, "memory": 0.98},
        "lookahead": {"memory": 0.98},
        "ucb": {"width": 0.1},
        "exp3": {"rate": 4.0},
        "hedge": {"rate": 16.0},
        "head": {"threshold": 0.98},
    }
    config.timed_inputs = 24
    config.alpha_inputs = 64  # outputs over which α is measured, and which are replayed
    config.draws = 8  # replays of each output, where temperature is above 0
    config.repeats = 8  # of the race: half choose the best static γ, half compare
    config.price_repeats = 25  # of the calls that prices are fitted to
    # How far a typical timed call may be from its price, and how much cheaper a longer draft may
    # seem. Methods of a race are some 5% apart: with worse prices noise would decide.
    config.price_error = 0.05
    if choice == "wide":
        config.drafts = config.drafts[1:]
        config.static, config.widths = (3, 5, 7, 10), ()
        kept = ("confidence", "svip", "adaedl", "average", "goodput", "lookahead", "head")
        config.policies = {name: config.policies[name] for name in kept}
        config.timed_inputs, config.repeats, config.price_repeats = 16, 6, 15
    return config
