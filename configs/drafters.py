"""All drafters of an embedded family side by side: α, τ, costs and speedups at batch 1.

    python -m experiments.train --config=configs/train.py:eagle-prose --workdir=runs/eagle-prose
    …
    python -m experiments.reproduce --config=configs/drafters.py:prose --workdir=runs/drafters-prose

Those that belong to the target are trained first, each by its own choice of configs/train.py, into
runs/<choice>; --config.drafts names others. Takes about 15 minutes on 2 idle cores.
"""

import ml_collections

from configs import embedded

CHOICES = ("parse", "prose")
TRAINED = ("eagle", "eagle3", "medusa", "hydra")


def get_config(task: str = "prose") -> ml_collections.ConfigDict:
    """The fields of configs/embedded.py. `task` is one of `CHOICES`."""
    if task not in CHOICES:
        raise ValueError(f"configs/drafters.py:{task}: choose one of {', '.join(CHOICES)}.")
    config = embedded.get_config("prose" if task == "prose" else "all")
    layers = 2 if task == "prose" else 3  # half of the target's
    small = config.draft
    config.drafts = (
        *config.drafts,
        f"frequent(draft={small!r}, share=0.25)",
        f"early_exit(layers={layers})",
        *(f"runs/{kind}-{task}/drafter" for kind in TRAINED),
    )
    config.ngrams = config.timed_ngrams = ("lookup",)
    config.tables = ("alpha", "speedup")
    config.timeline = False
    config.alpha_inputs = 200
    config.gammas = (1, 2, 3, 4, 5, 7, 10)
    config.timed_inputs = 12
    config.gamma_by_position = True
    return config
