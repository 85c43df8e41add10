"""Hugging Face's form of T5, mT5, umT5 and ByT5: config.json and the tensors in the files.

Two facts need care (checked with transformers 5.23). In files from before transformers 5,
`tie_word_embeddings` means both "the head is the embedding" and "scale the decoder's output by
d_model^−½". In later files it is always true, and `scale_decoder_outputs` stands beside it. A
checkpoint may store a tied head all the same. So the tensors decide what is tied, and the newest
field decides about scaling.

transformers 5 never scales an mT5 and always scales a umT5. Published umT5s have
tie_word_embeddings=false and were trained without scaling, so here they are not scaled: their
logits are √d_model times those of transformers 5, with the same greedy tokens.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.config_json import ENDS, TIED, check_built, check_sizes, fill_in
from specjax.checkpoints.family import Family, Row, Stack, drop_copy, tie, untied
from specjax.checkpoints.tensors import Tensor, equal
from specjax.models.t5 import T5, MT5Config, T5Config, UMT5Config

SCALED = "scale_decoder_outputs"
# transformers' defaults for config.json: T5 v1.0 small, and the small sizes of mT5 and umT5.
SMALL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,  # as many as num_layers
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "decoder_start_token_id": None,  # pad_token_id
    "pad_token_id": 0,
    ENDS: 1,
    TIED: True,
    SCALED: None,
}
SMALL_MT5 = {
    **SMALL,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
# Fields that have one value here, and other names of sizes, as transformers reads them.
BUILT: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "quantization_config": None,
}
ALIASES = {
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
BIAS = "layer.0.SelfAttention.relative_attention_bias"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Stored by some early checkpoints and read by no model: cross-attention has no position bias.
UNUSED = "layer.1.EncDecAttention.relative_attention_bias"


def _gated(config: T5Config) -> bool:
    return config.feed_forward_proj.startswith("gated-")


def _one_bias(config: T5Config) -> bool:
    return not config.bias_in_each_layer


def _layer(last: int) -> tuple[Row, ...]:
    """A layer's rows: self-attention, cross-attention in the decoder, and sublayer `last`."""
    own, cross, wide = "layer.0.SelfAttention", "layer.1.EncDecAttention", f"layer.{last}"
    wide_in = "feed_forward.input.weight"
    rows = [
        Row("layer.0.layer_norm", "attention_norm.scale", "attn_norm"),
        *(Row(f"{own}.{x}", "attention.qkv.weight", f"attn_{x}") for x in "qkv"),
        Row(f"{own}.o", "attention.output.weight", "attn_o"),
        Row(BIAS, "bias.weight", "attn_rel_b", when=lambda config: config.bias_in_each_layer),
        Row(f"{wide}.layer_norm", "feed_forward_norm.scale", "ffn_norm"),
        Row(f"{wide}.DenseReluDense.wi", wide_in, "ffn_up", when=lambda c: not _gated(c)),
        Row(f"{wide}.DenseReluDense.wi_0", wide_in, "ffn_gate", when=_gated),
        Row(f"{wide}.DenseReluDense.wi_1", wide_in, "ffn_up", when=_gated),
        Row(f"{wide}.DenseReluDense.wo", "feed_forward.output.weight", "ffn_down"),
    ]
    if last == 2:
        rows += [
            Row("layer.1.layer_norm", "cross_norm.scale", "cross_attn_norm"),
            Row(f"{cross}.q", "cross.query.weight", "cross_attn_q"),
            *(Row(f"{cross}.{x}", "cross.kv.weight", f"cross_attn_{x}") for x in "kv"),
            Row(f"{cross}.o", "cross.output.weight", "cross_attn_o"),
            Row(UNUSED, "", "cross_attn_rel_b"),
        ]
    return tuple(rows)


ROWS = (
    Row("shared", "embedding", "token_embd"),
    Row("lm_head", "head", "output", when=untied),
    Row("encoder.final_layer_norm", "encoder_norm.scale", "enc.output_norm"),
    Row("decoder.final_layer_norm", "decoder_norm.scale", "dec.output_norm"),
    Row(f"encoder.block.0.{BIAS}", "encoder_bias.weight", when=_one_bias),
    Row(f"decoder.block.0.{BIAS}", "decoder_bias.weight", when=_one_bias),
)
STACKS = (
    Stack("num_layers", "encoder.block.", "encoder", _layer(1), "enc.blk."),
    Stack("num_decoder_layers", "decoder.block.", "decoder", _layer(2), "dec.blk."),
)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop copies of the embedding, so that a head that remains is the model's own.

    Warn if config.json (`raw`) promises a head of its own that the files lack.

    Raises:
      ValueError: encoder and decoder have different embeddings.
    """
    found = dict(tensors)
    for copy in COPIES:
        if copy not in found:
            continue
        tensor = found.pop(copy)
        if not equal(found.setdefault(EMBEDDING, tensor), tensor):
            raise ValueError(
                f"{tensor.file}: {copy!r} differs from {EMBEDDING!r}. A T5 with several embeddings "
                "is not supported; save the checkpoint with its embeddings shared."
            )
    found.pop(f"decoder.block.0.{UNUSED}.weight", None)
    if raw.get(TIED) is not False:
        tie(found, HEAD, EMBEDDING)
    elif raw.get(SCALED) is None and HEAD not in found and EMBEDDING in found:
        warnings.warn(
            f"{found[EMBEDDING].file.parent}: config.json says tie_word_embeddings=false, but the "
            f"weights have no {HEAD!r}, so the embedding serves as the head, as in transformers.",
            stacklevel=4,
        )
    drop_copy(found, HEAD, EMBEDDING)
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> T5Config:
    """Read the config of a T5's checkpoint; see `Family.config_from_hub`.

    Raises:
      ValueError: also if two fields contradict each other.
    """
    kind = raw["model_type"]
    known = fill_in(raw, DEFAULTS[kind])
    same = {"num_decoder_layers": "num_layers", "decoder_start_token_id": "pad_token_id"}
    known |= {key: known[other] for key, other in same.items() if known[key] is None}
    if known[SCALED] is None:
        known[SCALED] = kind != "mt5" and known[TIED]
    check_sizes(known)
    check_built(raw, BUILT | {alias: known[key] for alias, key in ALIASES.items()})
    check_built(raw, _parts_of(known["feed_forward_proj"]))
    buckets, reach = (known[f"relative_attention_{x}"] for x in ("num_buckets", "max_distance"))
    if buckets < 4 or reach <= buckets // 2:
        raise ValueError(
            f"relative_attention_max_distance={reach} should be above half of "
            f"relative_attention_num_buckets={buckets}, which should be at least 4."
        )
    for key in ("decoder_start_token_id", "pad_token_id"):
        if known[key] >= known["vocab_size"]:
            raise ValueError(
                f"{key}={known[key]} is no id of a vocabulary of {known['vocab_size']}."
            )
    return FAMILIES[kind].config_class(**{**known, TIED: HEAD not in tensors})


def _parts_of(feed_forward_proj: str) -> dict[str, Any]:
    """The fields that transformers derives from `feed_forward_proj`, and reads before it."""
    name = feed_forward_proj.removeprefix("gated-")
    return {
        "is_gated_act": name != feed_forward_proj,
        "dense_act_fn": "gelu_new" if feed_forward_proj == "gated-gelu" else name,
    }


DEFAULTS = {"t5": SMALL, "mt5": SMALL_MT5, "umt5": SMALL_MT5}
FAMILIES = {
    config.model_type: Family(
        config,
        T5,
        f"{config.model_type.upper()}ForConditionalGeneration",
        DEFAULTS[config.model_type],
        {"is_encoder_decoder": True, "dropout_rate": 0.0},
        ROWS,
        STACKS,
        select_tensors,
        config_from_hub,
    )
    for config in (T5Config, MT5Config, UMT5Config)
}
