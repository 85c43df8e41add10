"""Decode one's own input, with any target and draft.

    python -m experiments.decode --config=configs/decode.py \\
        --config.target=google-t5/t5-3b --config.draft=google-t5/t5-small \\
        --input=prompts.txt --output=out.jsonl --config.gamma=7

Target and draft are Hugging Face directories or hub names of one vocabulary; a draft may also be
unigram, bigram, lookup, or the import path of one's own drafter (docs/drafters.md). At
temperature 0 and in float32 the tokens are those of --config.method=autoregressive, sooner.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The defaults; `experiments.decode --help` says what each field does."""
    config = ml_collections.ConfigDict()
    config.target = ""  # whose distribution the output follows
    config.draft = ""  # proposes, lookup among others; not needed by method autoregressive
    config.method = "speculative"  # or autoregressive
    config.gamma = 4  # drafted tokens per target call; with a policy the most
    config.policy = ""  # how long drafts are, such as svip(threshold=0.3); "": gamma tokens
    config.rule = ""  # what is accepted: block, gumbel, lenient(lenience=0.3); "": the paper's
    config.compare = False  # decode without the draft too, and print both side by side
    config.temperature = 0.0  # 0: greedy
    config.top_k = 0  # 0: off
    config.top_p = 1.0  # 1: off
    config.max_new_tokens = 128
    config.max_source_len = 0  # 0: the target's own limit
    config.seed = 0
    config.samples = 1  # draws per input
    config.batch_size = 8
    config.dtype = ""  # float32, bfloat16; "": float32 on a CPU, elsewhere the checkpoint's
    return config
