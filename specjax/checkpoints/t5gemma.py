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
from operator import attrgetter
from typing import Any

from specjax.checkpoints import gemma, llama
from specjax.checkpoints.config_json import (
    ENDS,
    IDS,
    TIED,
    check_built,
    check_fields,
    check_sizes,
    naming,
)
from specjax.checkpoints.family import Family, Row, Stack, tie, untied, with_prefix
from specjax.checkpoints.tensors import Tensor
from specjax.models.t5gemma import Config, T5Gemma, T5Gemma2Config, T5GemmaConfig

CONFIGS: dict[str, type[Config]] = {c.model_type: c for c in (T5GemmaConfig, T5Gemma2Config)}
LAYERS = {"t5gemma": "gemma2", "t5gemma2": "gemma3_text"}  # the type whose fields a stack has
BUILT: dict[str, Any] = {"is_encoder_decoder": True, "quantization_config": None}
EOI = 256_000
PREFIX, HEAD = "model.", "lm_head.out_proj.weight"
DECODER, TABLE, AFTER_IMAGE = "model.decoder", "embed_tokens", "embed_tokens.eoi_embedding"
ENCODERS = {"t5gemma": "model.encoder", "t5gemma2": "model.encoder.text_model"}
VISION = tuple(f"model.encoder.{name}." for name in ("vision_tower", "multi_modal_projector"))
# The smallest that transformers builds.
NO_VISION = {
    "model_type": "siglip_vision_model",
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 1),
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 1,
}
# By other names than in a Gemma.
NORMS = (
    Row("pre_self_attn_layernorm", "attention_norm.scale"),
    Row("post_self_attn_layernorm", "attention_end.scale"),
    *gemma.NORMS[2:],
)


def _cross(x: str, parameter: str) -> Row:
    bias = attrgetter("attention_bias")
    return Row(f"cross_attn.{x}_proj", f"cross.{parameter}.weight", bias=bias)


CROSS = (
    Row("pre_cross_attn_layernorm", "cross_norm.scale"),
    Row("post_cross_attn_layernorm", "cross_end.scale"),
    _cross("q", "query"),
    _cross("k", "kv"),
    _cross("v", "kv"),
    _cross("o", "output"),
)


def _shares(config: Config) -> bool:
    return not config.two_embeddings


def _embeddings(kind: str) -> tuple[Row, ...]:
    """The embedding, one or two, and in a T5Gemma 2 its row for the token after an image."""
    encoder, two = ENCODERS[kind], attrgetter("two_embeddings")
    rows = [
        Row(f"{DECODER}.{TABLE}", "embedding", when=two),
        Row(f"{encoder}.{TABLE}", "encoder_embedding", when=two),
        Row(f"{encoder}.{TABLE}", "embedding", when=_shares),
    ]
    if kind == "t5gemma2":
        rows += [
            Row(f"{DECODER}.{AFTER_IMAGE}", "after_image", when=two, suffix=""),
            Row(f"{encoder}.{AFTER_IMAGE}", "encoder_after_image", when=two, suffix=""),
            Row(f"{encoder}.{AFTER_IMAGE}", "after_image", when=_shares, suffix=""),
        ]
    return tuple(rows)


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
    if raw.get(TIED) is False:
        return found
    tie(found, HEAD, f"{encoder if kind == 't5gemma2' else DECODER}.{TABLE}.weight")
    if kind == "t5gemma2":
        for name in (f"{TABLE}.weight", AFTER_IMAGE):
            tie(found, f"{DECODER}.{name}", f"{encoder}.{name}")
    return found


def config_from_hub(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Config:
    """Read the config of a checkpoint; see `Family.config_from_hub`.

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
    outer: dict[str, Any] = {"model_type": LAYERS[kind], TIED: raw.get(TIED) is not False}
    places = {"decoder": raw.get("decoder"), "encoder": raw.get("encoder")}
    known: dict[str, Any] = {}
    if kind == "t5gemma2":
        whole = places["encoder"] or {}
        check_fields(whole)
        known["eoi_token_index"] = whole.get("eoi_token_index", EOI)
        check_sizes({"eoi_token_index": known["eoi_token_index"]})
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


def _more_to_hub(config: Config) -> dict[str, Any]:
    """Fields of both stacks."""
    inner = gemma.FAMILIES[LAYERS[config.model_type]]
    decoder, encoder = (inner.config_to_hub(part) for part in (config, config.encoder))
    for part in (decoder, encoder):
        del part["architectures"]
    if isinstance(config, T5Gemma2Config):
        eoi = config.eoi_token_index
        encoder = {"text_config": encoder, "vision_config": NO_VISION, "eoi_token_index": eoi}
    return {"decoder": decoder, "encoder": encoder}


def _stacks(kind: str) -> tuple[Stack, ...]:
    rows = (*NORMS, *llama.PROJECTIONS)
    crossed = rows if kind == "t5gemma2" else (*rows, *CROSS)
    layers, of_encoder = "num_hidden_layers", attrgetter("encoder")
    return (
        Stack(layers, f"{DECODER}.layers.", "decoder", crossed),
        Stack(layers, f"{ENCODERS[kind]}.layers.", "encoder", rows, config=of_encoder),
    )


FAMILIES = {
    kind: Family(
        config,
        T5Gemma,
        f"T5Gemma{kind[7:]}ForConditionalGeneration",
        {key: gemma.DEFAULTS[layers][key] for key in ("vocab_size", ENDS, TIED)},
        {"is_encoder_decoder": True, "dropout_rate": 0.0, "attention_dropout": 0.0},
        (
            *_embeddings(kind),
            Row(f"{ENCODERS[kind]}.norm", "encoder_norm.scale"),
            Row(f"{DECODER}.norm", "decoder_norm.scale"),
            Row("lm_head.out_proj", "head", when=untied),
        ),
        _stacks(kind),
        select_tensors,
        config_from_hub,
        _more_to_hub,
    )
    for (kind, config), layers in zip(CONFIGS.items(), LAYERS.values(), strict=True)
}
