"""Hugging Face's form of T5Gemma and of T5Gemma 2's text model: config.json and tensors.

config.json has the fields of a Gemma 2 in `encoder` and in `decoder`; in a T5Gemma 2 those of a
Gemma 3, the encoder's in `encoder.text_config` (checked with transformers 5.23). Ids and
`tie_word_embeddings` stand outside, or else the decoder's ids count. The first token of an output
is the decoder's BOS unless `decoder_start_token_id` says otherwise.

Unusual settings:
- A window of the encoder reaches as many tokens to either side in a T5Gemma; in a T5Gemma 2 both
  sides together have that many.
- With tie_word_embeddings=false a T5Gemma 2 has two embeddings and a head.
- A T5Gemma 2 is saved without its vision model; config.json then describes one of a few numbers.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from specjax.checkpoints import gemma, llama
from specjax.checkpoints.config_json import (
    IDS,
    check_built,
    check_fields,
    check_sizes,
    is_copy,
    naming,
    tie,
    with_prefix,
)
from specjax.checkpoints.tensors import Tensor
from specjax.models.t5gemma import Config, T5Gemma, T5Gemma2Config, T5GemmaConfig

CONFIGS: dict[str, type[Config]] = {c.model_type: c for c in (T5GemmaConfig, T5Gemma2Config)}
ARCHITECTURES = {
    "t5gemma": "T5GemmaForConditionalGeneration",
    "t5gemma2": "T5Gemma2ForConditionalGeneration",
}
LAYERS = {"t5gemma": "gemma2", "t5gemma2": "gemma3_text"}  # the type whose fields a stack has
DEFAULTS = {kind: gemma.DEFAULTS[layers] for kind, layers in LAYERS.items()}
BUILT: dict[str, Any] = {"is_encoder_decoder": True, "quantization_config": None}
EOI = 256_000
PREFIX, HEAD = "model.", "lm_head.out_proj.weight"
DECODER, TABLE = f"{PREFIX}decoder", "embed_tokens.weight"
AFTER_IMAGE = "embed_tokens.eoi_embedding"
ENCODERS = {"t5gemma": f"{PREFIX}encoder", "t5gemma2": f"{PREFIX}encoder.text_model"}
VISION = tuple(f"{PREFIX}encoder.{name}." for name in ("vision_tower", "multi_modal_projector"))
# The smallest that transformers builds.
NO_VISION = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 1),
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 1,
}


def build(config: Config, *, rngs: nnx.Rngs, dtype) -> T5Gemma:
    """Build a freshly initialised T5Gemma or T5Gemma 2."""
    return T5Gemma(config, rngs=rngs, dtype=dtype)


def select_tensors(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the text model, under the names that transformers writes since version 5.

    Drop copies of tied embeddings; see `t5.select_tensors`.
    """
    kind, found = raw["model_type"], {}
    encoder = ENCODERS[kind]
    for name, tensor in with_prefix(tensors, PREFIX, head=HEAD).items():
        if name.startswith(VISION):
            continue
        inner = name.removeprefix(f"{PREFIX}encoder.")
        if inner != name and not name.startswith(f"{encoder}."):
            name = f"{encoder}.{inner}"  # as before transformers 5.1
        found[name] = tensor
    if not _tied(raw):
        return found
    shared = _embedding(kind, tied=True)
    copies = {HEAD: shared}
    if kind == "t5gemma2":
        copies |= {f"{DECODER}.{x}": f"{encoder}.{x}" for x in (TABLE, AFTER_IMAGE)}
    for copy, name in copies.items():
        tie(found, copy, name)
        if is_copy(found, copy, name):
            del found[copy]
    return found


def _tied(raw: Mapping[str, Any]) -> bool:
    return raw.get("tie_word_embeddings") is not False


def _embedding(kind: str, *, tied: bool) -> str:
    """The name of the decoder's embedding."""
    return f"{ENCODERS[kind] if kind == 't5gemma2' and tied else DECODER}.{TABLE}"


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Config:
    """Read the config of a checkpoint; see `t5.config_from_hub`.

    Raises:
      ValueError: also if encoder and decoder have vocabularies of two sizes or, in a T5Gemma 2, two
        widths.
    """
    kind = raw["model_type"]
    check_built(raw, BUILT)
    head = {llama.HEAD: tensors[HEAD]} if HEAD in tensors else {}
    ids = {key: raw[key] for key in IDS if raw.get(key) is not None}
    if ids.get("decoder_start_token_id") is not None:
        ids["bos_token_id"] = ids["decoder_start_token_id"]
    outer: dict[str, Any] = {"model_type": LAYERS[kind], "tie_word_embeddings": _tied(raw)}
    places = {"decoder": raw.get("decoder"), "encoder": raw.get("encoder")}
    known: dict[str, Any] = {}
    if kind == "t5gemma2":
        whole = places["encoder"] or {}
        check_fields(whole)
        known["eoi_token_index"] = whole.get("eoi_token_index", EOI)
        check_sizes({"eoi_token_index": known["eoi_token_index"]}, other=())
        places["encoder"] = whole.get("text_config")
    found = {}
    for place, fields in places.items():
        with naming(place):
            inner = dict(fields or {})
            check_fields(inner)
            width = inner.pop("cross_attention_hidden_size", None)
            found[place] = gemma.config_from_hub({**inner, **outer, **ids}, head)
        if place == "decoder":
            crossed = width
    decoder, encoder = found["decoder"], found["encoder"]
    same = ("vocab_size", "hidden_size") if kind == "t5gemma2" else ("vocab_size",)
    for key in same:
        if getattr(encoder, key) != getattr(decoder, key):
            raise ValueError(
                f"encoder: {key}={getattr(encoder, key)} differs from the decoder's "
                f"{getattr(decoder, key)}; choose a model in which they are equal."
            )
    with naming("decoder"):
        check_built(
            {"cross_attention_hidden_size": crossed},
            {"cross_attention_hidden_size": encoder.hidden_size},
        )
    return CONFIGS[kind](**vars(decoder), encoder=encoder, **known)


def config_to_hub(config: Config) -> dict[str, Any]:
    """The architecture's fields of config.json."""
    decoder, encoder = (gemma.config_to_hub(part) for part in (config, config.encoder))
    for part in (decoder, encoder):
        del part["architectures"]
    if isinstance(config, T5Gemma2Config):
        eoi = config.eoi_token_index
        encoder = {"text_config": encoder, "vision_config": NO_VISION, "eoi_token_index": eoi}
    return {
        "architectures": [ARCHITECTURES[config.model_type]],
        "is_encoder_decoder": True,
        "decoder": decoder,
        "encoder": encoder,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dropout_rate": 0.0,
        "attention_dropout": 0.0,
    }


def tensor_names(config: Config) -> dict[tuple, dict[str, int]]:
    """Map each parameter's path in the module to its tensors, stacked by rows."""
    kind, merged = config.model_type, config.merged
    encoder = ENCODERS[kind]
    names: dict[tuple, dict[str, int]] = {
        ("embedding",): {_embedding(kind, tied=config.tie_word_embeddings): 1},
        ("encoder_norm", "scale"): {f"{encoder}.norm.weight": 1},
        ("decoder_norm", "scale"): {f"{DECODER}.norm.weight": 1},
    }
    if not config.tie_word_embeddings:
        names["head",] = {HEAD: 1}
    if config.two_embeddings:
        names["encoder_embedding",] = {f"{encoder}.{TABLE}": 1}
    if merged:
        own = DECODER if config.two_embeddings else encoder
        names["after_image",] = {f"{own}.{AFTER_IMAGE}": 1}
        if config.two_embeddings:
            names["encoder_after_image",] = {f"{encoder}.{AFTER_IMAGE}": 1}
    for stack, part, place in (("encoder", config.encoder, encoder), ("decoder", config, DECODER)):
        for i in range(part.num_hidden_layers):
            layer = f"{place}.layers.{i}"
            found = llama.layer_names(part, layer)
            found |= {(*path, "scale"): {f"{layer}.{x}.weight": 1} for path, x in NORMS.items()}
            if stack == "decoder" and not merged:
                found |= _cross_names(config, layer)
            names |= {(stack, i, *path): parts for path, parts in found.items()}
    return names


NORMS = {  # by other names than in a Gemma
    ("attention_norm",): "pre_self_attn_layernorm",
    ("attention_end",): "post_self_attn_layernorm",
}


def _cross_names(config: Config, layer: str) -> dict[tuple, dict[str, int]]:
    names: dict[tuple, dict[str, int]] = {
        ("cross_norm", "scale"): {f"{layer}.pre_cross_attn_layernorm.weight": 1},
        ("cross_end", "scale"): {f"{layer}.post_cross_attn_layernorm.weight": 1},
    }
    for part, modules in (("query", "q"), ("kv", "kv"), ("output", "o")):
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            tensors = {f"{layer}.cross_attn.{x}_proj.{kind}": 1 for x in modules}
            names["cross", part, kind] = tensors
    return names
