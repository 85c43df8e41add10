"""Hugging Face's form of the Llama layout: config.json and the tensors in its files.

Model types: llama, mistral, qwen2 and qwen3 (checked with transformers 5.23). Settings of positions
are read and written in two forms: `rope_parameters` since version 5, and `rope_theta` and
`rope_scaling` before it. Old files name its `rope_type` `type`.

Unusual settings:
- rope_type "dynamic" scales only texts longer than `max_position_embeddings`. No text is longer
  here, so it equals "default".
- Without a `bos_token_id` (Qwen), a text without a prompt starts from the first EOS id. Without a
  `pad_token_id`, that id fills the rows.
- A Mistral's window is that of all layers. A Qwen's, with `use_sliding_window`, is that of the
  layers that `layer_types` names or, in older files, of those from `max_window_layers` on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from specjax.checkpoints.config_json import check_built, check_sizes, is_copy, tie, with_prefix
from specjax.checkpoints.tensors import Tensor
from specjax.models.llama import Llama, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Rope
from specjax.support.ranges import LARGEST, SMALLEST, shown

CONFIGS = {c.model_type: c for c in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# transformers' defaults for config.json: the first model of each type.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as there are query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
WINDOW, FIRST_WINDOWED = 4096, 28  # defaults of `sliding_window` and `max_window_layers`
# The only value of each field that is implemented; an absent field has it too.
BUILT: dict[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
BIASES = ("attention_bias", "mlp_bias")
GATED = {"gate_proj": 1, "up_proj": 1}
FULL, WINDOWED = "full_attention", "sliding_attention"  # in `layer_types`
PREFIX = "model."
EMBEDDING, HEAD = f"{PREFIX}embed_tokens.weight", "lm_head.weight"
COMPUTED = ".rotary_emb.inv_freq"  # stored by early checkpoints


def build(config: LlamaConfig, *, rngs: nnx.Rngs, dtype) -> Llama:
    """Build a freshly initialised Llama."""
    return Llama(config, rngs=rngs, dtype=dtype)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix all names; drop stored frequencies and, if `raw` ties the head, its copy."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}
    found = with_prefix(kept, PREFIX, head=HEAD)
    if raw.get("tie_word_embeddings"):
        tie(found, HEAD, EMBEDDING)
    if raw.get("tie_word_embeddings") and is_copy(found, HEAD, EMBEDDING):
        del found[HEAD]
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """Read the config of a checkpoint of the Llama layout.

    Args:
      raw: config.json, as it is in the file.
      tensors: from `select_tensors`.

    Raises:
      ValueError: a size is not a positive integer, or a variant is not supported.
    """
    check_built(raw, BUILT)
    config_class = CONFIGS[raw["model_type"]]
    known = sizes(raw, DEFAULTS[raw["model_type"]])
    window, full_layers = _windows(raw, known["num_hidden_layers"])
    known |= {key: bool(raw.get(key)) for key in BIASES if key in config_class.options}
    return config_class(
        **known,
        rope=rope_of(raw, known["max_position_embeddings"]),
        sliding_window=window,
        full_layers=full_layers,
        tie_word_embeddings=HEAD not in tensors and bool(raw.get("tie_word_embeddings")),
    )


def sizes(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that `defaults` names, EOS ids aside, and `pad_token_id`.

    Raises:
      ValueError: a size is not a positive integer, or there is no first token.
    """
    known = {key: raw.get(key, value) for key, value in defaults.items()}
    eos = known.pop("eos_token_id")
    if known["rms_norm_eps"] is None:
        known["rms_norm_eps"] = defaults["rms_norm_eps"]
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    if known["bos_token_id"] is None:
        known["bos_token_id"] = first_eos
    if known["bos_token_id"] is None:
        raise ValueError(
            "it has neither bos_token_id nor eos_token_id, and a text needs a first "
            "token; add one of them."
        )
    pad = raw.get("pad_token_id")
    known["pad_token_id"] = known["bos_token_id"] if pad is None else pad
    own = [key for key in ("num_key_value_heads", "head_dim") if known[key] is None]
    check_sizes(known, other=["rms_norm_eps", *own])
    return {**known, **dict.fromkeys(own, 0)}


def rope_of(raw: Mapping[str, Any], longest: int) -> Rope:
    """Read the rotation from config.json, of texts of at most `longest` tokens."""
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(field) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(
            f"{field}={given!r} are not one set of settings for all layers; "
            "choose a model that has one."
        )
    check_built(given, {"partial_rotary_factor": 1.0})
    settings = {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **{key: value for key, value in given.items() if value is not None},
        "original_max_position_embeddings": raw.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or longest,
    }

    def number(key: str, default: float | None = None) -> float:
        value: Any = settings.get(key, default)
        if type(value) not in (int, float) or not SMALLEST <= value <= LARGEST:
            raise ValueError(f"{key}={shown(value)} should be a number > 0.")
        return float(value)

    kind = settings.get("rope_type") or settings.get("type") or "default"
    rope = Rope(kind, number("rope_theta"))  # refuses kinds that are not built
    if kind == "default":
        return rope
    length = number("original_max_position_embeddings")
    factor = number("factor", longest / length if kind == "yarn" else None)
    rope = dataclasses.replace(rope, factor=factor)
    if kind == "llama3":
        return dataclasses.replace(
            rope,
            original_length=int(length),
            slow=number("low_freq_factor"),
            fast=number("high_freq_factor"),
        )
    if kind == "yarn":
        return dataclasses.replace(
            rope,
            original_length=int(length),
            slow=number("beta_slow", 1),
            fast=number("beta_fast", 32),
            attention_factor=number("attention_factor", _attention_factor(settings, factor)),
            truncate=bool(settings.get("truncate", True)),
        )
    return rope


def _attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Yarn's default factor for queries and keys."""

    def growth(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(max(factor, 1))

    scales = [settings.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(scale is None or type(scale) in (int, float) for scale in scales):
        raise ValueError("mscale={!r} and mscale_all_dim={!r} should be numbers.".format(*scales))
    ours, of_all = scales
    return growth(ours) / growth(of_all) if ours and of_all else growth(1)


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """Find the window (0: none) and the layers that do without it."""
    kind, window = raw["model_type"], raw.get("sliding_window", WINDOW)
    if kind == "llama" or (kind != "mistral" and not raw.get("use_sliding_window")):
        window = None
    if window is not None:
        check_sizes({"sliding_window": window}, other=())
    if kind in ("llama", "mistral"):
        return window or 0, ()
    given = raw.get("max_window_layers")
    first = layers if window is None else FIRST_WINDOWED if given is None else given
    types = raw.get("layer_types") or [FULL if i < first else WINDOWED for i in range(layers)]
    return windows_of(types, window, layers)


def windows_of(types: list[str], window: int | None, layers: int) -> tuple[int, tuple[int, ...]]:
    """Find the window (0: none) and the layers that do without it, by the type of each layer."""
    if len(types) != layers or not {FULL, WINDOWED}.issuperset(types):
        raise ValueError(
            f"layer_types={types!r} should be {FULL!r} or {WINDOWED!r} for each of {layers} layers."
        )
    if window is None and WINDOWED in types:
        raise ValueError(
            f"layer_types has {WINDOWED!r}, but there is no window; set sliding_window (and "
            f"use_sliding_window, if it is a Qwen), or make all of them {FULL!r}."
        )
    full = tuple(i for i, kind in enumerate(types) if kind == FULL)
    return (window, full) if window and len(full) < layers else (0, ())


def config_to_hub(config: LlamaConfig) -> dict[str, Any]:
    """The architecture's fields of config.json, for transformers before and since version 5."""
    return {
        "architectures": [ARCHITECTURES[config.model_type]],
        **{
            key: getattr(config, key)
            for key in DEFAULTS[config.model_type]
            if key != "eos_token_id"
        },
        **{key: getattr(config, key) for key in BIASES if key in config.options},
        **_windows_to_hub(config),
        **rope_to_hub(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def rope_to_hub(rope: Rope) -> dict[str, Any]:
    """The fields of config.json that describe a rotation, in both forms."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.slow, "high_freq_factor": rope.fast}
    if rope.kind == "yarn":
        scaling |= {"beta_slow": rope.slow, "beta_fast": rope.fast}
        scaling |= {"attention_factor": rope.attention_factor, "truncate": rope.truncate}
    return {
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
    }


def _windows_to_hub(config: LlamaConfig) -> dict[str, Any]:
    window: dict[str, Any] = {"sliding_window": config.sliding_window or None}
    if config.model_type == "llama":
        return {}
    if config.model_type == "mistral":
        return window
    types = [WINDOWED if window else FULL for window in config.windows]
    first = types.index(WINDOWED) if WINDOWED in types else len(types)
    return window | {
        "use_sliding_window": config.sliding_window > 0,
        "layer_types": types,
        "max_window_layers": first,
    }


def tensor_names(config: LlamaConfig) -> dict[tuple, dict[str, int]]:
    """Map each parameter's path in the module to its tensors, stacked by rows.

    Each tensor has its share of the rows: there are more query heads than heads of keys and values.
    """
    names: dict[tuple, dict[str, int]] = {
        ("embedding",): {EMBEDDING: 1},
        ("norm", "scale"): {f"{PREFIX}norm.weight": 1},
    }
    if not config.tie_word_embeddings:
        names["head",] = {HEAD: 1}
    for i in range(config.num_hidden_layers):
        found = layer_names(config, f"{PREFIX}layers.{i}")
        names |= {("layers", i, *path): parts for path, parts in found.items()}
    return names


def layer_names(config: LlamaConfig, place: str) -> dict[tuple, dict[str, int]]:
    """Map the paths of one layer's parameters, within it, to tensors below `place`."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention, feed_forward = f"{place}.self_attn", f"{place}.mlp"
    scales: dict[tuple, str] = {
        ("attention_norm",): f"{place}.input_layernorm",
        ("feed_forward_norm",): f"{place}.post_attention_layernorm",
    }
    if config.gemma:  # what a Llama calls post_attention_layernorm comes before feed-forward
        scales |= {
            ("attention_end",): f"{place}.post_attention_layernorm",
            ("feed_forward_norm",): f"{place}.pre_feedforward_layernorm",
            ("feed_forward_end",): f"{place}.post_feedforward_layernorm",
        }
    if config.qk_norm:
        scales["attention", "query_norm"] = f"{attention}.q_norm"
        scales["attention", "key_norm"] = f"{attention}.k_norm"
    names = {(*path, "scale"): {f"{name}.weight": 1} for path, name in scales.items()}
    qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    for path, module, shares, bias in (
        (("attention", "qkv"), attention, qkv, config.qkv_bias or config.attention_bias),
        (("attention", "output"), attention, {"o_proj": 1}, config.attention_bias),
        (("feed_forward", "input"), feed_forward, GATED, config.mlp_bias),
        (("feed_forward", "output"), feed_forward, {"down_proj": 1}, config.mlp_bias),
    ):
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = {f"{module}.{name}.{kind}": share for name, share in shares.items()}
            names[*path, kind] = parts
    return names
