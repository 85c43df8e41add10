"""What the commands are run with where the user says nothing; configs/ builds on it."""

from typing import Any

import jax.numpy as jnp
import ml_collections

DTYPES = {"": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Of the field dtype."""
NARROW = ("", "int8")  # of the fields weights and cache


def get_config(command: str) -> ml_collections.ConfigDict:
    """As --config=FILE:COMMAND calls it."""
    return {"decode": decode, "select": select}[command]()


def decode() -> ml_collections.ConfigDict:
    """Of `specjax decode` and `specjax doctor`; `specjax decode --help` says what a field does."""
    config = ml_collections.ConfigDict()
    config.target = ""  # whose distribution the output follows
    config.draft = ""  # proposes, lookup among others; not needed by method autoregressive
    config.method = "speculative"  # or autoregressive
    config.gamma = 4  # drafted tokens per target call; with a policy the most
    config.tree = "chain"  # or fixed(branches=(3, 2)), best_first(width=4, depth=4, nodes=16)
    config.policy = ""  # how long drafts are, such as svip(threshold=0.3); "": gamma tokens
    config.rule = ""  # what is accepted: block, gumbel, lenient(lenience=0.3); "": the paper's
    config.compare = False  # decode without the draft too, and print both side by side
    config.rounds_file = ""  # JSON lines, one for each round; "": none
    config.carry = False  # begin each batch with what the policy learned in the one before
    config.samples = 1  # draws per input
    config.replicate_draft = True  # on a mesh: every device has all of a draft model, not a part
    config.update(shared())
    return config


def select() -> ml_collections.ConfigDict:
    """Of `specjax select`; `specjax select --help` says what a field does."""
    config = ml_collections.ConfigDict()
    config.target = ""  # whose outputs are to come sooner
    config.drafts = ""  # names with commas between; unigram, bigram and lookup need no model
    config.update(shared())
    config.alpha_inputs = 200  # inputs at most, for α
    config.timed_inputs = 16  # of those, inputs that are timed, at batch 1
    config.repeats = 5  # of each timing
    config.gammas = (1, 2, 3, 5, 7, 10)  # among which the best is sought
    config.nodes = ()  # sizes of trees, which are tried too
    return config


def shared() -> ml_collections.ConfigDict:
    """The fields of both."""
    config = ml_collections.ConfigDict()
    config.temperature = 0.0  # 0: greedy
    config.top_k = 0  # 0: off
    config.top_p = 1.0  # 1: off
    config.filters = ""  # more, such as my_module:min_p(0.1), with commas between
    config.max_new_tokens = 128
    config.max_source_len = 0  # 0: the target's own limit
    config.seed = 0
    config.batch_size = 8  # rows at once; `select` times batches of 1
    config.dtype = ""  # float32, bfloat16; "": float32 on a CPU, elsewhere the checkpoint's
    config.weights = ""  # of the target: int8, or "" for dtype; a draft is named int8(draft='DIR')
    config.cache = ""  # the same of the target's keys and values
    config.check_tokens = True  # False: take a draft whose tokens are not the target's
    config.mesh = ""  # several devices, data=2,model=4; "": one
    return config


def precision(config) -> dict[str, Any]:
    """How the target is loaded: the options of `hub.load`.

    Raises:
      ValueError: dtype, weights or cache is none of those there are.
    """
    found = {}
    for field, known in (("dtype", DTYPES), ("weights", NARROW), ("cache", NARROW)):
        found[field] = config.get(field, "")  # configs of one's own may lack the newer ones
        if found[field] not in known:
            raise ValueError(
                f"{field}={found[field]!r} must be one of {', '.join(map(repr, known))}."
            )
    narrow = {field: found[field] or None for field in ("weights", "cache")}
    return {"dtype": DTYPES[found["dtype"]], **narrow}
