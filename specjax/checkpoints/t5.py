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

from flax import nnx

from specjax.checkpoints.config_json import check_built, check_sizes, fill_in, is_copy, tie
from specjax.checkpoints.tensors import Tensor, equal
from specjax.models.t5 import T5, MT5Config, T5Config, UMT5Config

CONFIGS = {config.model_type: config for config in (T5Config, MT5Config, UMT5Config)}
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
    "eos_token_id": 1,
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
DEFAULTS = {"t5": SMALL, "mt5": SMALL_MT5, "umt5": SMALL_MT5}
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
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Stored by some early checkpoints and read by no model: cross-attention has no position bias.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def build(config: T5Config, *, rngs: nnx.Rngs, dtype) -> T5:
    """Build a freshly initialised T5."""
    return T5(config, rngs=rngs, dtype=dtype)


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
    found.pop(UNUSED, None)
    if raw.get("tie_word_embeddings") is not False:
        tie(found, HEAD, EMBEDDING)
    old_and_untied = (
        raw.get("tie_word_embeddings") is False and raw.get("scale_decoder_outputs") is None
    )
    if old_and_untied and HEAD not in found and EMBEDDING in found:
        warnings.warn(
            f"{found[EMBEDDING].file.parent}: config.json says tie_word_embeddings=false, but the "
            f"weights have no {HEAD!r}, so the embedding serves as the head, as in transformers.",
            stacklevel=4,
        )
    if is_copy(found, HEAD, EMBEDDING):
        del found[HEAD]
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> T5Config:
    """Read the config of a T5's checkpoint.

    Args:
      raw: config.json, as it is in the file.
      tensors: from `select_tensors`.

    Raises:
      ValueError: a size is not a positive integer, or a variant is not supported, or two fields
        contradict each other.
    """
    kind = raw["model_type"]
    known = fill_in(raw, DEFAULTS[kind])
    same = {"num_decoder_layers": "num_layers", "decoder_start_token_id": "pad_token_id"}
    known |= {key: known[other] for key, other in same.items() if known[key] is None}
    del known["eos_token_id"]
    check_sizes(known, other=["layer_norm_epsilon", "feed_forward_proj"])
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
    scale = raw.get("scale_decoder_outputs")
    if scale is None:
        scale = kind != "mt5" and raw.get("tie_word_embeddings") is not False
    return CONFIGS[kind](
        **known,
        tie_word_embeddings=HEAD not in tensors,
        scale_decoder_outputs=bool(scale),
    )


def _parts_of(feed_forward_proj: str) -> dict[str, Any]:
    """The fields that transformers derives from `feed_forward_proj`, and reads before it."""
    name = feed_forward_proj.removeprefix("gated-")
    return {
        "is_gated_act": name != feed_forward_proj,
        "dense_act_fn": "gelu_new" if feed_forward_proj == "gated-gelu" else name,
    }


def config_to_hub(config: T5Config) -> dict[str, Any]:
    """The architecture's fields of config.json, for transformers before and since version 5."""
    fields = {key: getattr(config, key) for key in SMALL if key != "eos_token_id"}
    return {
        "architectures": [f"{config.model_type.upper()}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **fields,
        "tie_word_embeddings": config.tie_word_embeddings,
        "scale_decoder_outputs": config.scale_decoder_outputs,
        "dropout_rate": 0.0,
    }


def tensor_names(config: T5Config) -> dict[tuple, dict[str, int]]:
    """Map each parameter's path in the module to its tensors, stacked by rows.

    Each tensor has its share of the rows.
    """
    names: dict[tuple, dict[str, int]] = {("embedding",): {EMBEDDING: 1}}
    if not config.tie_word_embeddings:
        names["head",] = {HEAD: 1}
    for stack in ("encoder", "decoder"):
        names[f"{stack}_norm", "scale"] = {f"{stack}.final_layer_norm.weight": 1}
        if not config.bias_in_each_layer:
            names[f"{stack}_bias", "weight"] = {f"{stack}.block.0.{BIAS}": 1}
    for i in range(config.num_layers):
        names |= _layer_names(config, "encoder", i)
    for i in range(config.num_decoder_layers):
        names |= _layer_names(config, "decoder", i)
    return names


def _layer_names(config: T5Config, stack: str, i: int) -> dict[tuple, dict[str, int]]:
    def tensors(sublayer: int, *parts: str) -> dict[str, int]:
        return {f"{stack}.block.{i}.layer.{sublayer}.{part}.weight": 1 for part in parts}

    names: dict[tuple, dict[str, int]] = {
        ("attention_norm", "scale"): tensors(0, "layer_norm"),
        ("attention", "qkv", "weight"): tensors(0, *(f"SelfAttention.{x}" for x in "qkv")),
        ("attention", "output", "weight"): tensors(0, "SelfAttention.o"),
    }
    if config.bias_in_each_layer:
        names["bias", "weight"] = {f"{stack}.block.{i}.{BIAS}": 1}
    last = 1
    if stack == "decoder":
        last = 2
        names["cross_norm", "scale"] = tensors(1, "layer_norm")
        names["cross", "query", "weight"] = tensors(1, "EncDecAttention.q")
        names["cross", "kv", "weight"] = tensors(1, *(f"EncDecAttention.{x}" for x in "kv"))
        names["cross", "output", "weight"] = tensors(1, "EncDecAttention.o")
    inputs = ("wi_0", "wi_1") if config.feed_forward_proj.startswith("gated-") else ("wi",)
    names["feed_forward_norm", "scale"] = tensors(last, "layer_norm")
    names["feed_forward", "input", "weight"] = tensors(
        last, *(f"DenseReluDense.{x}" for x in inputs)
    )
    names["feed_forward", "output", "weight"] = tensors(last, "DenseReluDense.wo")
    return {(stack, i, *path): parts for path, parts in names.items()}
