"""Hugging Face's form of a GPT-2: its config.json and the tensors in its files.

Checked with transformers 5.23. A stored head that differs from the embedding is the model's own,
whatever config.json says. Files of a model without its head, such as OpenAI's, lack the prefix of
all names. Old files hold the causal mask too.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from specjax.checkpoints.config_json import (
    check_built,
    check_sizes,
    fill_in,
    is_copy,
    tie,
    with_prefix,
)
from specjax.checkpoints.tensors import Tensor
from specjax.models.gpt import GPT, GPTConfig

# transformers' defaults for config.json: the smallest GPT-2.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
# The only value of each field that is implemented; an absent field has it too.
BUILT: dict[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
PREFIX = "transformer."
EMBEDDING, HEAD = f"{PREFIX}wte.weight", "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")
# Suffixes of projections, which are stored as (in, out).
TURNED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def build(config: GPTConfig, *, rngs: nnx.Rngs, dtype) -> GPT:
    """Build a freshly initialised GPT-2."""
    return GPT(config, rngs=rngs, dtype=dtype)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix all names; drop masks and, unless `raw` asks for a head of its own, a copied head."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    found = with_prefix(kept, PREFIX, head=HEAD)
    if raw.get("tie_word_embeddings") is not False:
        tie(found, HEAD, EMBEDDING)
    if is_copy(found, HEAD, EMBEDDING) and raw.get("tie_word_embeddings") is not False:
        del found[HEAD]
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GPTConfig:
    """Read the config of a GPT-2's checkpoint.

    Args:
      raw: config.json, as it is in the file.
      tensors: from `select_tensors`.

    Raises:
      ValueError: a size is not a positive integer, or a variant is not supported.
    """
    check_built(raw, BUILT)
    known = fill_in(raw, DEFAULTS)
    del known["eos_token_id"]
    pad = raw.get("pad_token_id")
    known["pad_token_id"] = known["bos_token_id"] if pad is None else pad
    no_width = ["n_inner"] if known["n_inner"] is None else []
    check_sizes(known, other=["layer_norm_epsilon", "activation_function", *no_width])
    tied = HEAD not in tensors and raw.get("tie_word_embeddings") is not False
    return GPTConfig(**{**known, "n_inner": known["n_inner"] or 0}, tie_word_embeddings=tied)


def config_to_hub(config: GPTConfig) -> dict[str, Any]:
    """The architecture's fields of config.json."""
    fields = {key: getattr(config, key) for key in DEFAULTS if key != "eos_token_id"}
    return {
        "architectures": ["GPT2LMHeadModel"],
        **fields,
        **BUILT,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def tensor_names(config: GPTConfig) -> dict[tuple, dict[str, int]]:
    """Map each parameter's path in the module to its tensor, which has all of its rows."""
    names: dict[tuple, str] = {("embedding",): EMBEDDING, ("positions",): f"{PREFIX}wpe.weight"}
    if not config.tie_word_embeddings:
        names["head",] = HEAD
    modules: dict[tuple, str] = {("norm",): f"{PREFIX}ln_f"}
    for i in range(config.n_layer):
        layer, place = ("layers", i), f"{PREFIX}h.{i}"
        modules |= {
            (*layer, "attention_norm"): f"{place}.ln_1",
            (*layer, "attention", "qkv"): f"{place}.attn.c_attn",
            (*layer, "attention", "output"): f"{place}.attn.c_proj",
            (*layer, "feed_forward_norm"): f"{place}.ln_2",
            (*layer, "feed_forward", "input"): f"{place}.mlp.c_fc",
            (*layer, "feed_forward", "output"): f"{place}.mlp.c_proj",
        }
    for path, module in modules.items():
        weight = "scale" if path[-1].endswith("norm") else "weight"
        names |= {(*path, weight): f"{module}.weight", (*path, "bias"): f"{module}.bias"}
    return {path: {name: 1} for path, name in names.items()}
