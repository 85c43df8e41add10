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
from operator import attrgetter
from typing import Any

from specjax.checkpoints.config_json import ENDS, TIED, check_built, check_sizes
from specjax.checkpoints.family import Family, Row, Stack, tie, untied, with_prefix
from specjax.checkpoints.tensors import Tensor
from specjax.models.llama import Llama, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Rope
from specjax.support.ranges import LARGEST, SMALLEST, shown

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
    ENDS: 2,
    TIED: False,
}
_QWEN = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    ENDS: None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "attention_bias": False, "mlp_bias": False},
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
}
WINDOW, FIRST_WINDOWED = 4096, 28  # defaults of `sliding_window` and `max_window_layers`
# The only value of each field that is implemented; an absent field has it too.
BUILT: dict[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
FULL, WINDOWED = "full_attention", "sliding_attention"  # in `layer_types`
PREFIX = "model."
EMBEDDING, HEAD = f"{PREFIX}embed_tokens.weight", "lm_head.weight"
COMPUTED = ".rotary_emb.inv_freq"  # stored by early checkpoints
_qk_norm, _attention_bias, _mlp_bias = map(attrgetter, ("qk_norm", "attention_bias", "mlp_bias"))


def _qkv_bias(config: LlamaConfig) -> bool:
    return config.qkv_bias or config.attention_bias


def _qkv(x: str, heads: str) -> Row:
    return Row(f"self_attn.{x}_proj", "attention.qkv.weight", f"attn_{x}", heads, _qkv_bias)


PROJECTIONS = (
    Row("self_attn.q_norm", "attention.query_norm.scale", "attn_q_norm", when=_qk_norm),
    Row("self_attn.k_norm", "attention.key_norm.scale", "attn_k_norm", when=_qk_norm),
    _qkv("q", "num_attention_heads"),
    _qkv("k", "num_key_value_heads"),
    _qkv("v", "num_key_value_heads"),
    Row("self_attn.o_proj", "attention.output.weight", "attn_output", bias=_attention_bias),
    Row("mlp.gate_proj", "feed_forward.input.weight", "ffn_gate", bias=_mlp_bias),
    Row("mlp.up_proj", "feed_forward.input.weight", "ffn_up", bias=_mlp_bias),
    Row("mlp.down_proj", "feed_forward.output.weight", "ffn_down", bias=_mlp_bias),
)
LAYER = (
    Row("input_layernorm", "attention_norm.scale", "attn_norm"),
    Row("post_attention_layernorm", "feed_forward_norm.scale", "ffn_norm"),
    *PROJECTIONS,
)
ROWS = (
    Row("model.embed_tokens", "embedding", "token_embd"),
    Row("model.norm", "norm.scale", "output_norm"),
    Row("lm_head", "head", "output", when=untied),
)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefix all names; drop stored frequencies and, if `raw` ties the head, its copy."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED)}
    found = with_prefix(kept, PREFIX, head=HEAD)
    if raw.get(TIED):
        tie(found, HEAD, EMBEDDING)
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """Read the config of a checkpoint of the Llama layout; see `Family.config_from_hub`."""
    check_built(raw, BUILT)
    kind = raw["model_type"]
    known = fields_of(raw, DEFAULTS[kind], tensors, ("num_key_value_heads", "head_dim"))
    window, full_layers = _windows(raw, known["num_hidden_layers"])
    return FAMILIES[kind].config_class(
        **known,
        rope=rope_of(raw, known["max_position_embeddings"]),
        sliding_window=window,
        full_layers=full_layers,
    )


def fields_of(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    derived: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields of a config that `defaults` names, EOS ids aside, and `pad_token_id`.

    Args:
      derived: sizes that follow from others where they are null, and are 0 then.

    Raises:
      ValueError: a size is not a positive integer, or there is no first token.
    """
    known = {key: raw.get(key, value) for key, value in defaults.items()}
    eos = known.pop(ENDS)
    for key, value in known.items():
        if value is None and (type(defaults[key]) is bool or key == "rms_norm_eps"):
            known[key] = defaults[key]
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
    absent = [key for key in derived if known[key] is None]
    check_sizes({key: value for key, value in known.items() if key not in absent})
    known[TIED] = HEAD not in tensors and known[TIED]
    return {**known, **dict.fromkeys(absent, 0)}


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
        check_sizes({"sliding_window": window})
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


def _more_to_hub(config: LlamaConfig) -> dict[str, Any]:
    """Fields of windows and of the rotation."""
    fields = rope_to_hub(config.rope)
    if config.model_type == "llama":
        return fields
    fields["sliding_window"] = config.sliding_window or None
    if config.model_type == "mistral":
        return fields
    types = types_of(config)
    first = types.index(WINDOWED) if WINDOWED in types else len(types)
    return fields | {
        "use_sliding_window": config.sliding_window > 0,
        "layer_types": types,
        "max_window_layers": first,
    }


def types_of(config: LlamaConfig) -> list[str]:
    """`layer_types` of a config."""
    return [WINDOWED if window else FULL for window in config.windows]


FAMILIES = {
    config.model_type: Family(
        config,
        Llama,
        f"{config.model_type.capitalize()}ForCausalLM",
        DEFAULTS[config.model_type],
        {"hidden_act": "silu", "attention_dropout": 0.0},
        ROWS,
        (Stack("num_hidden_layers", "model.layers.", "layers", LAYER),),
        select_tensors,
        config_from_hub,
        _more_to_hub,
    )
    for config in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
}
