"""When adaptive draft lengths pay: α, its variance between and within outputs, what the drafter's
belief shows of it, c and v.

    python -m experiments.when --config=configs/when.py --workdir=runs/when
    python -m experiments.when --config=configs/when.py:small --workdir=runs/when_small

Simulated rollouts, so nothing is timed and any machine gives the same rows. Five minutes on two
cores; `small` has a corner of the space and takes one. A run that was cut off goes on. Policies
join by name or import path, which is code that runs.
"""

import ml_collections

CHOICES = ("all", "small")


def get_config(choice: str = "all") -> ml_collections.ConfigDict:
    """`choice` is one of `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(f"configs/when.py:{choice}: choose one of {', '.join(CHOICES)}.")
    config = ml_collections.ConfigDict()
    config.outputs, config.tokens = 192, 128  # of each simulated trace; every other output chooses
    config.gamma_max = 16
    config.seed = 0
    config.resamples = 200  # of the outputs that judge, for standard errors
    config.draws = 8  # of chances, for each output of a trace of T > 0
    # Each sweep is the product of its axes; what it does not name is as in `base`. Variances are
    # shares of α(1 − α), the largest there is: experiments/when/synthetic.py.
    config.base = {
        "alpha": 0.7,
        "between": 0.1,
        "within": 0.25,
        "autocorrelation": 0.2,
        "informativeness": 0.5,
        "slope": 1.0,
        "offset": 0.0,
    }
    config.sweeps = {
        "space": {
            "alpha": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
            "between": (0.0, 0.2),
            "within": (0.0, 0.1, 0.25, 0.5, 0.75),
            "informativeness": (0.0, 0.5, 1.0),
        },
        "between": {"between": (0.0, 0.05, 0.1, 0.2, 0.4, 0.6), "informativeness": (0.0, 0.5)},
        "memory": {"autocorrelation": (0.0, 0.3, 0.6, 0.9, 0.97), "informativeness": (0.0,)},
        "beliefs": {"slope": (1.0, 2.5), "offset": (-2.0, -1.0, 0.0, 1.0)},
    }
    # Each with each: a draft step, and what every further position adds to the verify pass, in
    # target steps; and whether policies may choose narrower passes.
    config.c = (0.02, 0.1, 0.3)
    config.verify = (0.0, 0.1)
    config.narrow = (False, True)
    # Settings by policy; the sweep adds costs for those that take them.
    config.policies = {
        "heuristic": {},
        "confidence": {},
        "svip": {},
        "adaedl": {},
        "gammatune": {},
        "average": {"tiers": (1, 3, 5, 7, 10, 16), "first": 5},
        "goodput": {"memory": 0.98},
        "first_descent": {"memory": 0.98},
        "lookahead": {},
        "hedge": {"rate": 8.0},
    }
    config.shown = ("goodput", "first_descent", "lookahead", "hedge", "svip")  # as curves
    if choice == "small":
        config.outputs, config.tokens, config.gamma_max = 64, 64, 8
        config.sweeps = {
            "space": {"alpha": (0.6, 0.8), "within": (0.0, 0.5), "informativeness": (0.0, 1.0)}
        }
        config.c, config.verify, config.narrow = (0.1,), (0.0, 0.1), (False,)
    return config
