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
from specjax.checkpoints.config_json import ENDS, TIED, check_built, check_sizes
from specjax.checkpoints.family import Family, Row, Stack
from specjax.checkpoints.llama import FULL, WINDOWED
from specjax.checkpoints.tensors import Tensor
from specjax.models.llama import Gemma2Config, Gemma3Config, Llama, LlamaConfig, Rope

SCORES, LOGITS = CAPS = "attn_logit_softcapping", "final_logit_softcapping"
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
    ENDS: 1,
    TIED: True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    SCORES: 50.0,
    LOGITS: 30.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        SCORES: None,
        LOGITS: None,
    },
}
PAD, WINDOW, PATTERN = 0, 4096, 6
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # of a Gemma 3
# The only value of each field that is implemented; an absent field has it too.
BUILT: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "quantization_config": None,
}
VISION = ("vision_tower.", "multi_modal_projector.")
TEXT = "language_model."


NORMS = (  # what a Llama calls post_attention_layernorm comes before feed-forward
    Row("input_layernorm", "attention_norm.scale", "attn_norm"),
    Row("post_attention_layernorm", "attention_end.scale", "post_attention_norm"),
    Row("pre_feedforward_layernorm", "feed_forward_norm.scale", "ffn_norm"),
    Row("post_feedforward_layernorm", "feed_forward_end.scale", "post_ffw_norm"),
)


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
    return llama.select_tensors({TIED: raw.get(TIED) is not False}, found)


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """Read the config of a Gemma's checkpoint; see `llama.config_from_hub`."""
    kind = raw["model_type"]
    check_built(raw, BUILT | ({SCORES: None} if kind == "gemma3_text" else {}))
    known = llama.fields_of({"pad_token_id": PAD, **raw}, DEFAULTS[kind], tensors)
    for cap in CAPS:
        if known[cap] == 0:
            raise ValueError(f"{cap}={known[cap]!r} should be a number > 0, or null for no cap.")
        known[cap] = float(known[cap] or 0)
    layers, longest = known["num_hidden_layers"], known["max_position_embeddings"]
    pattern = 2 if kind == "gemma2" else raw.get("sliding_window_pattern") or PATTERN
    types = raw.get("layer_types") or [
        WINDOWED if (i + 1) % pattern else FULL for i in range(layers)
    ]
    window = raw.get("sliding_window", WINDOW)
    if window is not None:
        check_sizes({"sliding_window": window})
    window, full_layers = llama.windows_of(types, window, layers)
    if kind == "gemma3_text":
        rope, local_rope = _ropes(raw, longest)
    else:
        rope, local_rope = llama.rope_of(raw, longest), None
    return FAMILIES[kind].config_class(
        **known,
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        full_layers=full_layers,
    )


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


def _more_to_hub(config: LlamaConfig) -> dict[str, Any]:
    """Fields of caps, windows and rotations."""
    rope: dict[str, Any] = llama.rope_to_hub(config.rope)
    if config.local_rope is not None:
        local = llama.rope_to_hub(config.local_rope)["rope_parameters"]
        rope["rope_parameters"] = {FULL: rope["rope_parameters"], WINDOWED: local}
        rope["rope_local_base_freq"] = config.local_rope.theta
    return {
        **{key: getattr(config, key) or None for key in CAPS},
        **rope,
        "sliding_window": config.sliding_window or None,
        "layer_types": llama.types_of(config),
    }


FAMILIES = {
    config.model_type: Family(
        config,
        Llama,
        f"Gemma{config.model_type[5]}ForCausalLM",
        DEFAULTS[config.model_type],
        {"hidden_activation": BUILT["hidden_activation"], "attention_dropout": 0.0},
        llama.ROWS,
        (Stack("num_hidden_layers", "model.layers.", "layers", (*NORMS, *llama.PROJECTIONS)),),
        select_tensors,
        config_from_hub,
        _more_to_hub,
    )
    for config in (Gemma2Config, Gemma3Config)
}
