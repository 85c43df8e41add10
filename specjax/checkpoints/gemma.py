"""Hugging Face's form of Gemma 2 and of Gemma 3's text model: config.json and tensors.

Model types: gemma2, gemma3_text, and gemma3, of which the text model alone is read (checked with
transformers 5.23). A checkpoint of type gemma3 is saved as gemma3_text.

Unusual settings:
- Without `layer_types`, every second layer of a Gemma 2 sees all tokens, from layer 1 on, and of a
  Gemma 3 every `sliding_window_pattern`-th, 6 by default.
- A Gemma 3 turns positions at two speeds: `rope_parameters` has an entry for each type of layer
  since transformers 5. Before it, `rope_theta` and `rope_scaling` were those of full layers, and
  `rope_local_base_freq` that of layers with a window.
- transformers does not apply `attn_logit_softcapping` in a Gemma 3, so a cap is refused there.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checkpoints import llama
from specjax.checkpoints.config_json import check_built, check_sizes
from specjax.checkpoints.llama import FULL, WINDOWED
from specjax.checkpoints.tensors import Tensor
from specjax.models.llama import Gemma2Config, Gemma3Config, LlamaConfig, Rope

CONFIGS = {c.model_type: c for c in (Gemma2Config, Gemma3Config)}
ARCHITECTURES = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
# transformers' defaults for config.json.
_GEMMA2: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072},
}
PAD, WINDOW, QUERY_SCALAR, PATTERN = 0, 4096, 256, 6
SCORES, LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
CAPS: dict[str, dict[str, Any]] = {
    "gemma2": {SCORES: 50.0, LOGITS: 30.0},
    "gemma3_text": {SCORES: None, LOGITS: None},
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # of a Gemma 3
# The only value of each field that is implemented; an absent field has it too.
BUILT: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "quantization_config": None,
}
VISION = ("vision_tower.", "multi_modal_projector.")
TEXT = "language_model."


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the text model of a gemma3, under the names of a gemma3_text; else see `llama`."""
    found = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith(TEXT):  # "language_model.model.", or "model.language_model." since 5
            plain = plain.removeprefix(TEXT).removeprefix("model.")
            name = plain if plain.startswith("lm_head") else f"model.{plain}"
        if not plain.startswith(VISION):
            found[name] = tensor
    return llama.select_tensors({"tie_word_embeddings": _tied(raw)}, found)


def _tied(raw: Mapping[str, Any]) -> bool:
    return raw.get("tie_word_embeddings") is not False


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """Read the config of a Gemma's checkpoint; see `llama.config_from_hub`."""
    kind = raw["model_type"]
    check_built(raw, BUILT | ({SCORES: None} if kind == "gemma3_text" else {}))
    known = llama.sizes({"pad_token_id": PAD, **raw}, DEFAULTS[kind])
    layers, longest = known["num_hidden_layers"], known["max_position_embeddings"]
    pattern = 2 if kind == "gemma2" else raw.get("sliding_window_pattern") or PATTERN
    types = raw.get("layer_types") or [
        WINDOWED if (i + 1) % pattern else FULL for i in range(layers)
    ]
    known["query_pre_attn_scalar"] = raw.get("query_pre_attn_scalar", QUERY_SCALAR)
    known |= {key: _cap(raw, key, default) for key, default in CAPS[kind].items()}
    check_sizes(known, other=("rms_norm_eps", *CAPS[kind]))
    window = raw.get("sliding_window", WINDOW)
    if window is not None:
        check_sizes({"sliding_window": window}, other=())
    window, full_layers = llama.windows_of(types, window, layers)
    if kind == "gemma3_text":
        rope, local_rope = _ropes(raw, longest)
    else:
        rope, local_rope = llama.rope_of(raw, longest), None
    return CONFIGS[kind](
        **known,
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        full_layers=full_layers,
        attention_bias=bool(raw.get("attention_bias")),
        tie_word_embeddings=llama.HEAD not in tensors and _tied(raw),
    )


def _cap(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    """Read a cap; 0.0 if it is null."""
    value = raw.get(key, default)
    if value == 0:
        raise ValueError(f"{key}={value!r} should be a number > 0, or null for no cap.")
    return 0.0 if value is None else float(value)


def _ropes(raw: Mapping[str, Any], longest: int) -> tuple[Rope, Rope]:
    """The rotations of a Gemma 3's full layers, and of those with a window."""
    given = raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or not {FULL, WINDOWED}.issuperset(given):
        raise ValueError(
            f"rope_parameters={given!r} should have settings for {FULL!r} and {WINDOWED!r} alone."
        )

    def one(kind: str, theta: Any, scaling: Any) -> Rope:
        own = given.get(kind) or {}
        if not isinstance(own, dict) or not isinstance(scaling, dict):
            raise ValueError(
                f"rope_parameters={given!r} and rope_scaling={scaling!r} hold no settings."
            )
        return llama.rope_of({"rope_parameters": {"rope_theta": theta, **own, **scaling}}, longest)

    def base(key: str, default: float) -> Any:
        return default if raw.get(key) is None else raw[key]

    full = one(FULL, base("rope_theta", GLOBAL_THETA), raw.get("rope_scaling") or {})
    return full, one(WINDOWED, base("rope_local_base_freq", LOCAL_THETA), {})


def config_to_hub(config: LlamaConfig) -> dict[str, Any]:
    """The architecture's fields of config.json, for transformers before and since version 5."""
    kind = "gemma2" if isinstance(config, Gemma2Config) else "gemma3_text"
    rope: dict[str, Any] = llama.rope_to_hub(config.rope)
    if config.local_rope is not None:
        local = llama.rope_to_hub(config.local_rope)["rope_parameters"]
        rope["rope_parameters"] = {FULL: rope["rope_parameters"], WINDOWED: local}
        rope["rope_local_base_freq"] = config.local_rope.theta
    return {
        "architectures": [ARCHITECTURES[kind]],
        **{key: getattr(config, key) for key in DEFAULTS[kind] if key != "eos_token_id"},
        **{key: getattr(config, key) or None for key in CAPS[kind]},
        **rope,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "sliding_window": config.sliding_window or None,
        "layer_types": [WINDOWED if window else FULL for window in config.windows],
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_activation": BUILT["hidden_activation"],
        "attention_dropout": 0.0,
    }
