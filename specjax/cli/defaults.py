"""Defaults of the commands' configs; configs/ builds on them."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from specjax import defaults, trees
from specjax.decoding.run import Run
from specjax.sampling import Sampling
from specjax.settings import Drafting

DTYPES = {"": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
"""Values of the field dtype."""
NARROW = ("", "int8")  # values of the fields weights and cache


Fields = dict[str, tuple[Any, str]]
"""Fields of a config: defaults and meanings."""

SHARED: Fields = {
    "temperature": (defaults.TEMPERATURE, "0: greedy"),
    "top_k": (defaults.TOP_K, "draw from so many likeliest tokens; 0: off"),
    "top_p": (defaults.TOP_P, "draw from the likeliest tokens with this probability; 1: off"),
    "filters": ("", "more filters, such as my_module:min_p(0.1), with commas between"),
    "max_new_tokens": (defaults.NEW_TOKENS, "tokens of an output at most"),
    "max_source_len": (0, "tokens of an input at most; 0: the target's own limit"),
    "seed": (0, "of all draws"),
    "batch_size": (defaults.BATCH_SIZE, "rows at once; select times batches of 1"),
    "dtype": ("", "float32, bfloat16; empty: the fastest on a CPU, elsewhere the checkpoint's"),
    "weights": ("", "int8: the target's in 8 bits; a draft's by its name, int8(draft='DIR')"),
    "cache": ("", "int8: the target's in 8 bits; int8(draft='DIR', cache=True)"),
    "check_tokens": (True, "False: take drafts whose tokens are not the target's; costs speed"),
    "mesh": ("", "several devices: data=2,model=4 splits rows over two, the target over four"),
}
"""Fields of `specjax decode` and `specjax select`."""

MINUTES = defaults.MINUTES, "for measuring, which times less if there are fewer; 0: no limit"

DECODE: Fields = {
    "target": ("", "the model whose distribution outputs follow: a directory, *.gguf or hub name"),
    "draft": ("", "the same; or unigram, bigram, lookup, lookup(max_ngram=2), an import path"),
    "method": ("speculative", "or autoregressive, which needs no draft"),
    "gamma": (defaults.GAMMA, "drafted tokens per target call; with a policy the most"),
    "tree": ("chain", "or fixed(3, 2), best_first(width=4, depth=4, nodes=16)"),
    "policy": ("", "how long drafts are: svip(threshold=0.3), an import path; empty: gamma"),
    "rule": ("", "what is accepted: block, gumbel, lenient(lenience=0.3), an import path"),
    "compare": (False, "decode without the draft too, and print both side by side"),
    "rounds_file": ("", "a file of JSON lines, one for each round; empty: none"),
    "carry": (False, "begin each batch with what the policy learned in the one before"),
    "samples": (1, "draws per input"),
    "replicate_draft": (True, "on a mesh every device has all of a draft model, not a part"),
} | SHARED
"""Fields of `specjax decode`."""

DOCTOR: Fields = {
    name: field
    for name, field in DECODE.items()
    if name not in ("method", "compare", "rounds_file", "carry", "samples")
}
"""Fields of `specjax doctor`."""

TUNE: Fields = DOCTOR | {
    "gamma": (defaults.LONGEST, "the longest draft that is tried"),
    "policy": ("", "how long drafts are; empty: lookahead, or goodput with a tree"),
    "minutes": MINUTES,
}
"""Fields of `specjax tune`."""

TUNED = ("gamma", "tree", "policy", "rule")
"""Fields that a file of `specjax tune` holds."""

SELECT: Fields = {
    "target": ("", "the model whose outputs are to come sooner: a directory, *.gguf or hub name"),
    "drafts": ("", "names with commas between; empty: smaller members of the target's family"),
    **SHARED,
    "alpha_inputs": (200, "inputs for α, at most"),
    "timed_inputs": (defaults.TIMED_INPUTS, "of those, inputs that are timed, at batch 1"),
    "repeats": (defaults.REPEATS, "of each timing"),
    "minutes": MINUTES,
    "gammas": (defaults.GAMMAS, "draft lengths among which the best is sought"),
    "nodes": ((), "sizes of trees to try too, (8, 16, 32); empty: chains alone"),
}
"""Fields of `specjax select`."""


def get_config(command: str) -> ml_collections.ConfigDict:
    """Build a command's config, as --config=FILE:COMMAND calls it."""
    return config_of({"decode": DECODE, "select": SELECT, "tune": DECODE | TUNE}[command])


def decode() -> ml_collections.ConfigDict:
    """Build the config of `specjax decode`, on which others build."""
    return config_of(DECODE)


def config_of(fields: Fields) -> ml_collections.ConfigDict:
    """Build a config of fields with their defaults."""
    return ml_collections.ConfigDict({name: default for name, (default, _) in fields.items()})


def help_of(fields: Fields) -> str:
    """Format a line for each field, with its default and meaning, for --help."""
    shown = {f"{name}={default}": meaning for name, (default, meaning) in fields.items()}
    lines = [f"  {name:<21} {meaning}" for name, meaning in shown.items()]
    return "\n".join(
        ["Fields of the config, --config.NAME=VALUE, with their defaults:", *lines, ""]
    )


def sampling(config) -> Sampling:
    """Build the sampling of a config from its four fields."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.filters)


def drafting(config) -> Drafting:
    """Build the drafting of a config from its fields; γ is that of chains with a draft."""
    given = {name: config[name] for name in (*TUNED, "check_tokens") if name in config}
    chains = isinstance(trees.parse(given.get("tree")), trees.Chain)
    if not chains or config.get("method", "speculative") != "speculative":
        given.pop("gamma", None)
    return Drafting(**given)


def run_of(config) -> Run:
    """Build the run of a config from its fields."""
    return Run(
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        num_samples=config.samples,
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
        carry_state=config.carry,
        names=(config.target, config.draft),
    )


def precision(config) -> dict[str, Any]:
    """Collect the options of `hub.load` for the target.

    Raises:
      ValueError: dtype, weights or cache has an unknown value.
    """
    found = {}
    for field, known in (("dtype", DTYPES), ("weights", NARROW), ("cache", NARROW)):
        found[field] = config.get(field, "")  # users' configs may lack newer fields
        if found[field] not in known:
            raise ValueError(
                f"{field}={found[field]!r} must be one of {', '.join(map(repr, known))}."
            )
    narrow = {field: found[field] or None for field in ("weights", "cache")}
    return {"dtype": DTYPES[found["dtype"]], **narrow}
