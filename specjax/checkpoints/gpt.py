"""Hugging Face's form of a GPT-2: its config.json and the tensors in its files.

Checked with transformers 5.23. A stored head that differs from the embedding is the model's own,
whatever config.json says. Files of a model without its head, such as OpenAI's, lack the prefix of
all names. Old files hold the causal mask too.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.config_json import ENDS, TIED, check_built, check_sizes, fill_in
from specjax.checkpoints.family import Family, Row, Stack, tie, untied, with_prefix
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
    ENDS: 50256,
    TIED: True,
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


def _biased(tensor: str, parameter: str, gguf: str) -> Row:
    return Row(tensor, parameter, gguf, bias=lambda config: True)


ROWS = (
    Row("transformer.wte", "embedding", "token_embd"),
    Row("transformer.wpe", "positions", "position_embd"),
    Row("lm_head", "head", "output", when=untied),
    _biased("transformer.ln_f", "norm.scale", "output_norm"),
)
LAYER = (
    _biased("ln_1", "attention_norm.scale", "attn_norm"),
    _biased("attn.c_attn", "attention.qkv.weight", "attn_qkv"),
    _biased("attn.c_proj", "attention.output.weight", "attn_output"),
    _biased("ln_2", "feed_forward_norm.scale", "ffn_norm"),
    _biased("mlp.c_fc", "feed_forward.input.weight", "ffn_up"),
    _biased("mlp.c_proj", "feed_forward.output.weight", "ffn_down"),
)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix all names; drop masks and, unless `raw` asks for a head of its own, a copied head."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    found = with_prefix(kept, PREFIX, head=HEAD)
    if raw.get(TIED) is not False:
        tie(found, HEAD, EMBEDDING)
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GPTConfig:
    """Read the config of a GPT-2's checkpoint; see `Family.config_from_hub`."""
    check_built(raw, BUILT)
    known = fill_in(raw, DEFAULTS)
    pad = raw.get("pad_token_id")
    known["pad_token_id"] = known["bos_token_id"] if pad is None else pad
    check_sizes({key: value for key, value in known.items() if value is not None})
    known |= {"n_inner": known["n_inner"] or 0, TIED: HEAD not in tensors and known[TIED]}
    return GPTConfig(**known)


FAMILIES = {
    "gpt2": Family(
        GPTConfig,
        GPT,
        "GPT2LMHeadModel",
        DEFAULTS,
        BUILT | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        ROWS,
        (Stack("n_layer", "transformer.h.", "layers", LAYER),),
        select_tensors,
        config_from_hub,
        turned=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    )
}
