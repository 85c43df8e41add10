"""Published EAGLE heads for targets of the Llama layout: which tensor is what.

The formats are those of SafeAILab/EAGLE (EAGLE-1 and EAGLE-3), sgl-project/SpecForge (EAGLE-3) and
vllm-project/speculators (both):

                    EAGLE-1                       EAGLE-3
    projection      fc | fusion_fc                fc, of three taps
    layer           layers.0.* | transformer.*    midlayer.* | layers.0.*
    head            the target's                  norm, lm_head; d2t[i] + i is the target's id
    config.json     a Llama's of one layer        the same, and draft_vocab_size; speculators has
                                                  it in transformer_layer_config

A tap after j layers is the input of layer j. speculators counts so in
`eagle_aux_hidden_state_layer_ids`; SpecForge's `eagle_config` has one less each, the layers whose
output is tapped. A head's embedding is used where it differs from the target's.

No published head has a feature before the first token, so no other slot sees slot 0.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints import DRAFTER, Checkpoint
from specjax.checkpoints import llama as names_of
from specjax.checkpoints.config_json import check_fields, naming
from specjax.checkpoints.tensors import Tensor
from specjax.checkpoints.weights import find_tensors
from specjax.drafters import eagle, medusa
from specjax.models.checkpoint import decoder_of

PLACES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}  # other names in speculators
# Tensors that are not read: copies of the target's head and norm, and t2d, which d2t determines.
LEFT = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
# Fields of variants that are not supported.
UNBUILT = ("layernorms", "norm_before_fc", "norm_output", "fc_norm", "embed_requires_grad")

FIELDS = {  # of config.json, beside those of a Llama
    **dict.fromkeys(("transformer_layer_config", "eagle_config"), "an object"),
    "speculators_model_type": "a string",
    "eagle_aux_hidden_state_layer_ids": "a list of integers ≥ 0 and below 2³¹",
    "target_hidden_size": "an integer ≥ 1 and below 2³¹",
    "norm_before_residual": "true or false",
}


def is_medusa(place: pathlib.Path, raw: Mapping[str, Any]) -> bool:
    """Whether a directory holds Medusa's heads as FasterDecoding/Medusa writes them."""
    files = any((place / name).is_file() for name in medusa.FILES)
    return DRAFTER not in raw and files and "medusa_num_heads" in raw


def is_head(place: pathlib.Path, raw: Mapping[str, Any]) -> bool:
    """Whether a directory holds the tensors of an EAGLE."""
    if "speculators_model_type" in raw or "draft_vocab_size" in raw:
        return True
    if raw.get("num_hidden_layers") != 1:
        return False
    try:
        found = find_tensors(place)
    except (OSError, ValueError):
        return False  # `load` raises the error
    return "fc.weight" in found and "layers.0.self_attn.q_proj.weight" in found


def layout(
    place: pathlib.Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Checkpoint
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and names of tensors for `Eagle.from_tensors`.

    Returns:
      settings, and for each tensor to read its name here.

    Raises:
      ValueError: an unsupported variant, a field of another kind, or a target of another width or
        vocabulary.
    """
    with naming(place / "config.json"):
        check_fields(raw, FIELDS)
        check_fields(raw.get("eagle_config") or {}, FIELDS)
    kind = raw.get("speculators_model_type", "eagle")
    if kind not in ("eagle", "eagle3"):
        raise ValueError(
            f"{place}: speculators_model_type={kind!r} is no EAGLE, which is all that is read of "
            "published drafters."
        )
    nested = raw.get("eagle_config") or {}
    if unbuilt := [name for name in UNBUILT if raw.get(name) or nested.get(name)]:
        raise ValueError(f"{place}: {unbuilt[0]} is not supported; take a head without it.")
    own: dict[str, Any] = {"model_type": "llama", **(raw.get("transformer_layer_config") or raw)}
    with naming(place / "config.json"):
        check_fields(own)
        layer = names_of.config_from_hub({**own, "num_hidden_layers": 1}, {})
    # speculators writes its target's number into an EAGLE-1, whose only layer is "transformer".
    always_one = "transformer.self_attn.q_proj.weight" in tensors
    if own.get("num_hidden_layers", 1) != 1 and not always_one:
        raise ValueError(
            f"{place}: num_hidden_layers={own['num_hidden_layers']}, and a head of one layer is "
            "all that is read. Take another."
        )
    module = decoder_of(target.model, "EAGLE")
    given = raw.get("target_hidden_size") or layer.hidden_size
    for what, theirs, ours in (
        ("width", layer.hidden_size, eagle.width_of(module)),
        ("width", given, eagle.width_of(module)),
        ("vocabulary", layer.vocab_size, module.config.vocab_size),
    ):
        if theirs != ours:
            raise ValueError(
                f"The head {place} is for a target of {what} {theirs}, and {target.name} has "
                f"{ours}. Load its own target, or take another head."
            )
    names = {name: _ours(name) for name in tensors if name not in LEFT}
    three = "lm_head.weight" in names
    if three:
        names = {name: new.replace("layers.0.", "midlayer.") for name, new in names.items()}
    config = eagle.EagleConfig(
        layer=layer,
        taps=_taps(raw, module.cache_shape()[0]) if three else (),
        rows=tensors["lm_head.weight"].shape[0] if three else 0,
        fuse_bias="fc.bias" in names.values(),
        residual_normed=bool(raw.get("norm_before_residual")),
        first_learned=False,
    )
    return eagle.settings_of(config), names


def _ours(name: str) -> str:
    for theirs, ours in PLACES.items():
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def _taps(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    if given := raw.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(given)
    if given := (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layer + 1 for layer in given)
    return (2, layers // 2, layers - 3)
