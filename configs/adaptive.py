"""The leaderboard of draft-length policies on the embedded families.

    python -m experiments.adaptive --config=configs/adaptive.py:parse --workdir=runs/adaptive-parse
    python -m experiments.adaptive --config=configs/adaptive.py:prose --workdir=runs/adaptive-prose
    python -m experiments.adaptive --config=configs/adaptive.py:quick --workdir=runs/adaptive-quick

Every draft at two temperatures: models, n-grams, prompt lookup and, on prose, an EAGLE head, which
is trained first (configs/train.py:eagle-prose) and left out where runs/ has none. Expect 8 to 18
minutes for each draft and temperature on two idle cores; a run that was cut off goes on.
--config.only names some of the policies. `quick` races all of them with one draft of prose at
temperature 0 and few lengths: a policy of your own joins it by its import path.

Policies are the library's and those of `experiments.adaptive.policies`, by short names. They have
the settings of their authors, but for exp3 and hedge, and for those of `parse`, which were chosen
on the validation split by replay, at temperature 0 with draft-tiny. `lookahead` has its defaults in
both. Races are run on test, on `prose` on both.
"""

import pathlib

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose", "quick")
EAGLE = "runs/eagle-prose/drafter"


def get_config(choice: str = "parse") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py, and those of the races. `choice` is one of `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(f"configs/adaptive.py:{choice}: choose one of {', '.join(CHOICES)}.")
    parse = choice == "parse"
    config = embedded.get_config("all" if parse else "prose")
    config.drafts = (*config.drafts, "bigram", "lookup")
    if choice == "prose" and pathlib.Path(EAGLE).is_dir():
        config.drafts += (EAGLE,)
    config.static = (1, 2, 3, 5, 7, 10)  # γ
    config.gamma_max = 10  # of policies
    # Verify passes that policies can choose, and γ_max + 1. Each is compiled, and finds its code
    # cold where the one before was another (experiments/adaptive/README.md).
    config.widths = (1, 2, 3, 4, 6, 8)
    # Settings by policy; those that take costs or a trained head are given them.
    config.policies = {
        "heuristic": {},
        "confidence": {"threshold": 0.1} if parse else {},
        "svip": {"threshold": 0.8} if parse else {},
        "adaedl": {"bar": 0.2} if parse else {},
        "gammatune": {},
        "average": {},
        "goodput": {"prior": 0.99, "memory": 0.98} if parse else {},
        "first_descent": {"prior": 0.95, "weight": 1.0, "memory": 0.98} if parse else {},
        "lookahead": {},
        "ucb": {"width": 0.1} if parse else {},
        "exp3": {"rate": 4.0},
        "hedge": {"rate": 16.0},
        "tapout": {},
        "head": {"threshold": 0.98},
    }
    config.only = ()  # these alone of the policies; (): all
    config.shown = "lookahead"  # which has a table of its own
    config.timed_inputs = 24  # outputs differ more than repeats do
    config.alpha_inputs = 64  # over which α is measured, and whose outputs are replayed
    config.draws = 8  # replays of each output, where temperature is above 0
    # Inputs that a method decodes in a row. Those of parse are short: a program would find its code
    # cold at each.
    config.turn = 24 if parse else 1
    # Of the race: half choose the best static γ, half compare. Outputs of parse are short.
    config.repeats = 24 if parse else 8
    config.cost_inputs = 8  # on which costs are measured, before each race and behind it
    config.cost_repeats = 5  # of the calls that costs are fitted to
    # How far a typical timed call may be from its cost. A longer draft may seem cheaper by twice
    # as much. Methods of a race are some 5% apart: with worse costs noise would decide. Where they
    # are worse, they are measured again.
    config.cost_error = 0.05
    config.cost_tries = 3
    if choice == "quick":
        config.drafts, config.temperatures = config.drafts[:1], (0.0,)
        config.static, config.widths = (2, 3, 5), (1, 2, 4)
        config.gamma_max = 7
        config.timed_inputs, config.alpha_inputs, config.repeats = 12, 24, 2
    return config
