"""Plans of large pairs, which need shapes alone: no checkpoint is read.

    python -m experiments.plan --config=configs/plan.py:llama-70b --mesh=model=8

t5-11b: the paper's setup in bfloat16 (configs/paper.py:t5-11b_en-de has it in float32). llama-70b:
prompts of up to 1,024 tokens and outputs of up to 256, with drafts of 1B and 8B. A plan of
llama-70b takes a few minutes for each mesh and draft, and little memory.
"""

import ml_collections

from configs import paper
from specjax.cli import defaults

CHOICES = ("t5-11b", "llama-70b")


def get_config(name: str = "llama-70b") -> ml_collections.ConfigDict:
    """`name` is one of `CHOICES`."""
    if name not in CHOICES:
        raise ValueError(f"configs/plan.py:{name}: choose one of {', '.join(CHOICES)}.")
    if name == "t5-11b":
        config = paper.get_config("t5-11b_en-de")
        config.gamma = 5
    else:
        config = defaults.decode()
        config.target = "meta-llama/Llama-3.1-70B"
        config.drafts = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
        config.max_source_len = 1024
        config.max_new_tokens = 256
        config.gamma = 5
    config.batch_size = 1
    config.dtype = "bfloat16"
    config.replicate_draft = name == "t5-11b"  # the drafts of a Llama are large
    return config
