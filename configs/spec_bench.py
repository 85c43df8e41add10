"""Spec-Bench's questions: every draft, γ and policy, both temperatures, one row and a batch.

    python -m experiments.chat --config=configs/spec_bench.py --config.questions=question.jsonl \\
        --workdir=runs/spec_bench
    python -m experiments.chat --config=configs/spec_bench.py:small \\
        --config.questions=question.jsonl --workdir=runs/spec_bench_small

The file is https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl. Files of the
same form, such as EAGLE's, go as well. `small` takes one question of each kind: some minutes on two
cores. All 480 take days there; --config.questions_per_category=16 takes a share of each kind.
"""

import ml_collections

from configs import chat

CHOICES = ("full", "small")


def get_config(size: str = "full") -> ml_collections.ConfigDict:
    """`size` is one of `CHOICES`."""
    if size not in CHOICES:
        raise ValueError(f"configs/spec_bench.py:{size}: choose one of {', '.join(CHOICES)}.")
    config = chat.get_config("full")
    config.questions = "question.jsonl"
    config.repeats = 1  # figures are over many questions
    if size == "full":
        config.gammas = (2, 4, 8)
        config.policies = (
            "heuristic",
            "experiments.adaptive.policies:gammatune",
            "goodput",
            "lookahead",
        )
        config.batch_sizes = (1, 8)
        config.max_new_tokens = 128
    else:
        config.questions_per_category = 1
        config.drafts = ("lookup",)
        config.policies = ("heuristic",)
        config.temperatures = (0.0,)
        config.max_new_tokens = 32
    return config
