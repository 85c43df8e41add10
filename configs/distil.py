"""Distillation as a laboratory: each divergence at each source of prefixes, at equal budget.

    python -m experiments.distil --config=configs/distil.py:parse --workdir=runs/distil-parse
    python -m experiments.distil --config=configs/distil.py:prose --workdir=runs/distil-prose
    python -m experiments.distil --config=configs/distil.py:quick --workdir=runs/distil-quick

`parse` trains draft-small, `prose` its draft, towards the target that is shipped. A first part on
the data is common to all. From there 7 divergences × 4 sources, and the data without a teacher, get
the same number of steps on batches of the same size; the best and the worst get two more seeds.

A run takes 30 to 50 s on two idle cores, and there are 33: some 25 minutes for each family, the
first part included. What was done is kept, run by run. `quick` has 2 × 2 of it, with 20 steps and
few inputs, to see that it works: some 5 minutes, and figures that mean nothing.

Results of both: experiments/distil/README.md.
"""

import ml_collections

from configs import train
from configs.embedded import FAMILIES
from specjax.cli import defaults

CHOICES = ("parse", "prose", "quick")


def get_config(choice: str = "parse") -> ml_collections.ConfigDict:
    """`choice` is one of `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(f"configs/distil.py:{choice}: choose one of {', '.join(CHOICES)}.")
    prose = choice == "prose"
    config = defaults.shared()
    config.task = "prose" if prose else "parse"
    config.split = "validation+test" if prose else "test"  # prose has few texts
    config.data_dir = ""  # the task knows where its data lies
    config.target = str(FAMILIES / config.task / "target")
    config.drafts = ()  # those that are trained here
    config.divergences = (
        "forward_kl", "reverse_kl", "jsd", "tv", "neg_log_beta", "kl_tv(rate=3)",
        "kl_ce(weight=0.1)",
    )  # fmt: skip
    config.prefixes = ("data", "target", "draft", "data=1, draft=1")
    config.seeds = (0, 1, 2)  # all for the best and the worst, the first for the others
    # The draft, and how it learns from the target.
    config.train = train.get_config("gpt-draft" if prose else "draft-small")
    config.train.steps = 150
    config.train.teacher_after = 0
    config.train.warmup_steps = 20
    config.train.learning_rate = 1.5e-3 if prose else 1e-3
    config.train.max_examples = 20_000  # more than 150 steps see, and read sooner
    config.train.prefix_inputs = 128 if prose else 512
    config.train.log_every = 50
    config.train.eval_examples = 128
    config.train.sample_examples = 4
    config.train.eval_every = config.train.checkpoint_every = 1_000_000  # at the end alone
    # What is other in the first part, on the data.
    config.start = {
        "steps": 1500 if prose else 2500,
        "learning_rate": 3e-3 if prose else 2e-3,
        "warmup_steps": 100,
        "max_examples": 100_000,
        "checkpoint_every": 250,
    }
    config.temperatures = (0.0, 1.0)
    config.max_new_tokens = 200 if prose else 96
    config.alpha_inputs = 80  # outputs over which α is measured
    config.tau_inputs = 40  # inputs that are decoded speculatively
    config.gamma = 5
    config.batch_size = 16
    if choice == "quick":
        config.divergences = ("forward_kl", "kl_tv(rate=3)")
        config.prefixes = ("data", "draft")
        config.seeds = (0, 1)
        config.train.steps, config.train.max_examples = 20, 5000
        config.train.prefix_inputs, config.train.refresh_every = 128, 10
        config.start.steps, config.start.max_examples = 100, 5000
        config.alpha_inputs, config.tau_inputs = 20, 10
    return config
