"""Qwen2.5-Coder-1.5B-Instruct with its 0.5B and lookup on a mix of kinds of text, for traces.

    python -m experiments.trace --config=configs/mixed.py --workdir=runs/mixed --inputs=40 \\
        --nocosts --nojudged
    python -m experiments.trace --config=configs/mixed.py:all --workdir=runs/mixed --inputs=40 \\
        --nocosts --nojudged --config.data_dir=experiments/chat/code.jsonl,question.jsonl

The first has code that is written, completed and edited, from prompts of our own. `all` adds the
six kinds of Spec-Bench's file (configs/spec_bench.py). --config.files=DIR is where the models lie,
or are downloaded to. A run that was cut off loses one kind of text.
"""

import pathlib

import ml_collections

from configs import pair
from specjax.cli import defaults

CHOICES = ("code", "all")
PROMPTS = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "chat" / "code.jsonl"
CODE = ("code written", "code edited", "code completed")
SPEC_BENCH = ("math_reasoning", "translation", "qa", "conversation", "summarization", "rag")


def get_config(size: str = "code") -> ml_collections.ConfigDict:
    """`size` is one of `CHOICES`."""
    if size not in CHOICES:
        raise ValueError(f"configs/mixed.py:{size}: choose one of {', '.join(CHOICES)}.")
    config = defaults.decode()
    like = pair.get_config("full")
    for name in ("target", "weights", "dtype", "files"):
        config[name] = like[name]
    config.drafts, config.names = like.drafts[:2], like.names[:2]
    config.task, config.split, config.data_dir = "spec_bench", "test", str(PROMPTS)
    config.categories = CODE if size == "code" else CODE + SPEC_BENCH
    config.timed_ngrams = ()
    config.temperatures = (0.0, 0.7)
    config.max_new_tokens = 95  # positions are padded to 2ᵏ or 3·2ᵏ, with one behind the output
    config.batch_size = 8
    config.repeats = 5  # of timings for costs
    config.timed_inputs = 4
    config.alpha_inputs = 1
    return config
