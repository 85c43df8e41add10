"""The embedded family: a T5 v1.1 target and two drafts that turn Python statements into trees.

    python -m experiments.reproduce --config=configs/embedded.py --workdir=runs/embedded

Reproduces, on a laptop and in miniature, what Tables 2 and 4 of the paper measure: for each draft
and temperature α, block efficiency, the cost c of a draft step, v(γ) of a verify pass, the γ that
the formula then picks, and the measured gain beside the predicted one. About 4 minutes on 2 cores.

`configs/embedded.py:full` is the same on more inputs and with more repeats.

`experiments.decode` takes this config too.
"""

import pathlib

import ml_collections

from configs import decode

FAMILY = pathlib.Path(__file__).resolve().parent.parent / "families" / "parse"


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
    """`size` is demo or full."""
    if size not in ("demo", "full"):
        raise ValueError(f"configs/embedded.py:{size}: choose demo or full.")
    full = size == "full"
    config = decode.get_config()
    config.target = str(FAMILY / "target")
    config.drafts = (str(FAMILY / "draft-small"), str(FAMILY / "draft-tiny"))
    config.draft = config.drafts[0]  # for experiments.decode
    config.temperatures = (0.0, 1.0)
    config.max_new_tokens = 96
    config.task = "parse"
    config.split = "test"
    config.alpha_inputs = 1000 if full else 200  # outputs over which α is measured
    config.timed_inputs = 50 if full else 16  # inputs that the timed loops decode, at batch 1
    config.repeats = 9 if full else 5  # of each timing, methods taking turns
    config.gammas = (1, 2, 3, 5, 7, 10)  # among which the formula picks
    return config
