"""Qwen2.5-Coder-1.5B-Instruct with its 0.5B: which draft is fastest for which kind of question.

    make pair                                  # or make pair FILES=DIR
    python -m experiments.chat --config=configs/pair.py:full --workdir=runs/pair_full
    python -m experiments.chat --config=configs/pair.py:same --config.questions=question.jsonl \\
        --workdir=runs/pair_same
    python -m experiments.chat --config=configs/pair.py:policies --workdir=runs/pair_policies \\
        --config.questions=experiments/chat/code.jsonl,question.jsonl

The first shows code written, code edited and a chat in at most four minutes on two cores, after two
files of 1.6 GB were downloaded from the hub; with FILES=DIR or --config.files=DIR they lie in DIR.
`full` has two questions of five kinds and longer answers. `same` counts how many outputs for 60
questions of Spec-Bench are plain decoding's; `same-bfloat16` does so in bfloat16, as the others are
in int8. `policies` races draft lengths with the 0.5B on the seven kinds of text of the shipped
traces (docs/results/mixed), on questions that are not in them.
"""

import pathlib

import ml_collections

from configs import chat

CHOICES = ("demo", "full", "same", "same-bfloat16", "policies")
PROMPTS = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "chat" / "pair.jsonl"
TARGET, DRAFT = (f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF" for size in ("1.5B", "0.5B"))

KINDS = (
    "code written", "code edited", "code completed", "math_reasoning", "conversation", "qa",
    "translation",
)  # fmt: skip
LEARNED = "learned(trace='docs/results/mixed/0.5B-T0.npz')"


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
    """`size` is one of `CHOICES`."""
    if size not in CHOICES:
        raise ValueError(f"configs/pair.py:{size}: choose one of {', '.join(CHOICES)}.")
    config = chat.get_config()
    int8 = size != "same-bfloat16"
    config.target = TARGET
    config.weights, config.dtype = ("int8", "") if int8 else ("", "bfloat16")
    config.wide = False  # of this size a row of float32 takes twice as long as one of bfloat16
    draft = f"int8(draft={DRAFT!r})" if int8 else DRAFT
    draft = f"first_ids(draft={draft!r}, share=0.43)"  # its whole head takes a third of a step
    config.names = ("lookup", "0.5B", "switch")
    config.drafts = (
        "lookup",
        draft,
        f"switch(drafts=('lookup(min_ngram=3)', {draft!r}), choice='fixed')",
    )
    config.gammas = (2, 5)
    config.questions = str(PROMPTS)
    config.group_size = 1  # a run that was cut off loses one question
    config.repeats = 1
    if size == "demo":
        config.categories = ("code written", "code edited", "chat")
        config.questions_per_category = 1
        config.max_new_tokens = 48
    elif size == "full":
        config.max_new_tokens = 160
        config.repeats = 3
    elif size == "policies":
        config.questions = "experiments/chat/code.jsonl,question.jsonl"
        config.categories = KINDS
        config.questions_per_category = 6
        config.skip = 16  # those of the traces
        config.drafts, config.names = (draft,), ("0.5B",)
        config.gammas = (1, 2, 3, 5, 8)
        config.policies = (LEARNED, "svip", "lookahead", "online", "goodput")
        config.widths = (1, 2, 3, 4, 6)
        config.max_new_tokens = 63
    else:
        config.questions = "question.jsonl"
        config.questions_per_category = 10
        config.names, config.drafts = config.names[:2], config.drafts[:2]
        config.gammas = (5,)
        config.max_new_tokens = 24
    return config
