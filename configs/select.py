"""Choose a draft for a target, on inputs of one's own.

    python -m experiments.select --config=configs/select.py \\
        --config.target=google-t5/t5-3b --config.drafts=google-t5/t5-small,lookup --input=FILE

Without drafts the smaller members of the target's family are tried: those beside its directory, or
those of the same name on the hub. Of the embedded families, `--config=configs/embedded.py` says it
all. Some 50 inputs of the kind that will be decoded are enough.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The defaults; `experiments.select --help` says what each field does."""
    config = ml_collections.ConfigDict()
    config.target = ""  # whose outputs are to come sooner
    config.drafts = ""  # names with commas between; unigram, bigram and lookup need no model
    config.temperature = 0.0  # 0: greedy
    config.top_k = 0  # 0: off
    config.top_p = 1.0  # 1: off
    config.max_new_tokens = 128
    config.max_source_len = 0  # 0: the target's own limit
    config.seed = 0
    config.batch_size = 8  # of α, and of the memory
    config.dtype = ""  # float32, bfloat16; "": float32 on a CPU, elsewhere the checkpoint's
    config.alpha_inputs = 200  # inputs at most, for α
    config.timed_inputs = 16  # of those, inputs that are timed, at batch 1
    config.repeats = 5  # of each timing
    config.gammas = (1, 2, 3, 5, 7, 10)  # among which the best is sought
    return config
