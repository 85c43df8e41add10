"""The embedded families: `parse`, a T5 v1.1 that turns Python statements into trees, and `prose`,
a GPT-2 that continues English sentences.

    python -m experiments.reproduce --config=configs/embedded.py:demo --workdir=runs/embedded
    python -m experiments.reproduce --config=configs/embedded.py:full --workdir=runs/parse
    python -m experiments.reproduce --config=configs/embedded.py:prose --workdir=runs/prose

Reproduces the paper's tables on a laptop and in miniature. The first is part of `make demo`: one
draft of `parse` at two temperatures, with α (Table 3) and speedup (Tables 2 and 4) on few inputs.
`full` has all tables on more inputs: both drafts, n-grams, lenience (Table 5), quality and
Figure 5. `prose` is the same for the decoder-only family. `specjax decode` takes these configs too.
"""

import pathlib

import ml_collections

from specjax.cli import defaults

FAMILIES = pathlib.Path(__file__).resolve().parent.parent / "families"
CHOICES = ("all", "demo", "full", "prose")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
    """Build the config of a run.

    Args:
      size: one of `CHOICES`; `demo` is the shortest, and `all` has every draft and draft length.
    """
    if size not in CHOICES:
        raise ValueError(f"configs/embedded.py:{size}: choose one of {', '.join(CHOICES)}.")
    full, prose = size in ("full", "prose"), size == "prose"
    config = defaults.decode()
    config.task = "prose" if prose else "parse"
    config.split = "validation+test" if prose else "test"  # prose has few texts
    config.data_dir = ""  # the task knows where its data lies
    family = FAMILIES / config.task
    config.target = str(family / "target")
    models = ("draft",) if prose else ("draft-tiny", "draft-small")
    config.drafts = tuple(str(family / name) for name in models)
    config.draft = config.drafts[-1]  # for `specjax decode`
    config.ngrams = ("unigram", "bigram", "lookup")
    # The paper's rows to print beside ours, by the part that they play: (task, draft).
    config.paper = (
        {name: ("lm1b", name) for name in ("unigram", "bigram")}
        | {"draft": ("lm1b", "GPT-like 6M")}
        if prose
        else {name: ("EnDe", name) for name in ("unigram", "bigram")}
        | {"draft-tiny": ("EnDe", "T5-small"), "draft-small": ("EnDe", "T5-base")}
    )
    config.tables = ("alpha", "speedup")
    config.timeline = full  # Figure 5
    config.temperatures = (0.0, 1.0)
    config.max_new_tokens = 200 if prose else 96
    config.alpha_inputs = 200  # outputs over which α is measured
    config.timed_inputs = 16  # inputs that the timed loops decode, at batch 1
    config.timed_ngrams = ()
    config.repeats = 5  # of each timing, methods taking turns
    config.gammas = (1, 2, 3, 5, 7, 10)  # among which the formula picks; each has to be compiled
    config.nodes = ()  # of trees: `specjax select` tries them too
    config.gamma_by_position = False  # by the rates of each position, not by one α for all
    config.metric = "exact"  # of quality
    config.quality_inputs = 0
    config.lenience_inputs = 0
    if size == "demo":
        config.drafts, config.ngrams = config.drafts[-1:], ()
        config.repeats, config.timed_inputs = 3, 8
        config.alpha_inputs = config.batch_size = 32  # one batch
        config.gammas = (5, 10)
    if full:
        config.tables = ("alpha", "speedup", "lenience", *(() if prose else ("quality",)))
        config.alpha_inputs = 1000
        config.timed_inputs = 16
        config.timed_ngrams = config.ngrams
        config.repeats = 5
        config.quality_inputs = 300
        config.lenience_inputs = 100
        config.batch_size = 16
    return config
