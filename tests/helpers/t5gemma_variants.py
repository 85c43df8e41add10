"""Tiny checkpoints of T5Gemma and T5Gemma 2, as `t5_variants` has them of a T5."""

import dataclasses
from typing import Any

import numpy as np

import llama_variants
import t5_variants
from t5_variants import write_files

LOCAL, WHOLE = "sliding_attention", "full_attention"
# Windows are shorter than the texts, and heads do not make up the model's width.
STACK = llama_variants.STACK | {
    "head_dim": 6,
    "query_pre_attn_scalar": 3,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "bos_token_id": 3,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LARGE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
NO_CAPS = dict.fromkeys(CAPS)


@dataclasses.dataclass(frozen=True)
class Variant:
    """config.json beyond `STACK`, and what the inputs are like."""

    name: str
    model_type: str
    encoder: dict[str, Any] = dataclasses.field(default_factory=dict)
    decoder: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    eoi: int = 7
    source_lens: tuple[int, ...] = (9, 4, 1)
    target_len: int = 12

    @property
    def raw(self) -> dict[str, Any]:
        """config.json."""
        encoder, decoder = ({**STACK, **part} for part in (self.encoder, self.decoder))
        if self.model_type == "t5gemma2":
            vision = {**VISION, "model_type": "siglip_vision_model"}
            encoder = {"text_config": encoder, "vision_config": vision, "eoi_token_index": self.eoi}
        return {
            "model_type": self.model_type,
            "is_encoder_decoder": True,
            "encoder": encoder,
            "decoder": decoder,
            "vocab_size": STACK["vocab_size"],
            **self.config,
        }

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.config.get("tie_word_embeddings", True)


VISION = {
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 1,
}
UNTIED = {"tie_word_embeddings": False}
ROPES = {
    WHOLE: {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
    LOCAL: {"rope_type": "default", "rope_theta": 20.0},
}
VARIANTS = {
    variant.name: variant
    for variant in (
        # A wide encoder before a narrow decoder.
        Variant("t5gemma", "t5gemma", {**CAPS, **LARGE}, {**CAPS, "num_hidden_layers": 3}),
        Variant(
            "t5gemma_untied",
            "t5gemma",
            {**NO_CAPS, "attention_bias": True, "layer_types": [WHOLE, LOCAL]},
            {**NO_CAPS, "attention_bias": True, "num_key_value_heads": 4, "rope_theta": 100.0},
            UNTIED,
        ),
        Variant(
            "t5gemma2",
            "t5gemma2",
            {"sliding_window_pattern": 2, "num_hidden_layers": 3, "rope_parameters": ROPES},
            {"layer_types": [WHOLE, LOCAL], "sliding_window": 5},
        ),
        Variant(
            "t5gemma2_untied",
            "t5gemma2",
            {"layer_types": [LOCAL, LOCAL], "sliding_window": 5, "num_key_value_heads": 4},
            {
                "layer_types": [LOCAL, WHOLE],
                "num_key_value_heads": 1,
                "final_logit_softcapping": 2.0,
            },
            UNTIED,
        ),
    )
}


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, float32, each (out, in); no vision model."""
    raw, newer = variant.raw, variant.model_type == "t5gemma2"
    place = "encoder.text_model" if newer else "encoder"
    encoder = raw["encoder"]["text_config"] if newer else raw["encoder"]
    shapes: dict[str, tuple[int, ...]] = {}
    for stack, part in ((place, encoder), ("decoder", raw["decoder"])):
        width = part["hidden_size"]
        if not (newer and variant.tied and stack == "decoder"):
            shapes[f"{stack}.embed_tokens.weight"] = part["vocab_size"], width
            if newer:
                shapes[f"{stack}.embed_tokens.eoi_embedding"] = (width,)
        shapes[f"{stack}.norm.weight"] = (width,)
        for i in range(part["num_hidden_layers"]):
            layer = f"{stack}.layers.{i}"
            sublayers = ["self_attn", "feedforward"]
            shapes |= _attention(f"{layer}.self_attn", part, width, newer)
            if stack == "decoder" and not newer:
                sublayers.append("cross_attn")
                shapes |= _attention(f"{layer}.cross_attn", part, encoder["hidden_size"], False)
            for at in ("pre", "post"):
                for name in sublayers:
                    shapes[f"{layer}.{at}_{name}_layernorm.weight"] = (width,)
            wide = part["intermediate_size"]
            shapes |= {f"{layer}.mlp.{x}_proj.weight": (wide, width) for x in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = width, wide
    found = {f"model.{name}": shape for name, shape in shapes.items()}
    if not variant.tied:
        found["lm_head.out_proj.weight"] = STACK["vocab_size"], raw["decoder"]["hidden_size"]
    rng = np.random.default_rng(0)
    return {name: llama_variants.draw(rng, name, shape, True) for name, shape in found.items()}


def _attention(place: str, part: dict, source: int, normed: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of an attention layer whose keys and values come from a width of `source`."""
    width, size = part["hidden_size"], part["head_dim"]
    inner, shared = (part[f"num_{x}_heads"] * size for x in ("attention", "key_value"))
    shapes = {
        "q": (inner, width),
        "k": (shared, source),
        "v": (shared, source),
        "o": (width, inner),
    }
    found: dict[str, tuple[int, ...]] = {
        f"{place}.{name}_proj.weight": shape for name, shape in shapes.items()
    }
    if part.get("attention_bias"):
        found |= {f"{place}.{name}_proj.bias": shape[:1] for name, shape in shapes.items()}
    if normed:
        found |= {f"{place}.{name}_norm.weight": (size,) for name in "qk"}
    return found


def write(directory, variant: Variant):
    """Write a checkpoint."""
    return write_files(directory, variant.raw, tensors(variant))


def inputs(variant: Variant) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source (B, S), its lengths (B,) and decoder tokens (B, T); see `t5_variants.inputs`."""
    source, lengths, tokens = t5_variants.inputs(variant)
    tokens[:, 0] = STACK["bos_token_id"]
    return source, lengths, tokens
