"""Tiny checkpoints of the Llama layout, written without torch, and the texts they are tried on.

As in `t5_variants`: weights are uniform numbers from a seed, strong enough that every layer shows.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from t5_variants import write_files

STACK = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = STACK | {
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT_LEN = 12
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.25,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """config.json beyond `SIZES`, and what the files are like."""

    name: str
    model_type: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    bare: bool = False  # names without "model.", and the frequencies

    @property
    def raw(self) -> dict[str, Any]:
        """config.json."""
        return {"model_type": self.model_type, **SIZES, **self.config}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("llama3", "llama", {"rope_theta": 100.0, "rope_scaling": LLAMA3}),
        # One head of keys and values for each of queries, all biases, an old spelling.
        Variant(
            "llama_biased",
            "llama",
            {
                "num_key_value_heads": None,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_scaling": {"type": "linear", "factor": 2.5},
            },
        ),
        Variant(
            "llama_bare",
            "llama",
            {
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            bare=True,
        ),
        # Heads that do not make up the model's width, another ε.
        Variant(
            "mistral",
            "mistral",
            {"sliding_window": 5, "num_attention_heads": 6, "head_dim": 6, "rms_norm_eps": 1e-2},
        ),
        Variant("mistral_whole", "mistral", {"sliding_window": None}),
        Variant("qwen2", "qwen2", {"tie_word_embeddings": True, "bos_token_id": None}),
        Variant(
            "qwen2_windows",
            "qwen2",
            {
                "num_hidden_layers": 3,
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
            },
        ),
        Variant("qwen3", "qwen3", {"head_dim": 8, "rope_parameters": YARN}),
        Variant(
            "qwen3_windows",
            "qwen3",
            {
                "head_dim": 4,
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 3,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    **YARN,
                    "truncate": False,
                    "mscale": 2.0,
                    "mscale_all_dim": 0.5,
                },
            },
        ),
    )
}


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, float32, each (out, in)."""
    raw, kind = variant.raw, variant.model_type
    width, wide, heads = (
        raw["hidden_size"], raw["intermediate_size"], raw["num_attention_heads"]
    )  # fmt: skip
    size = raw.get("head_dim") or width // heads
    inner, shared = heads * size, (raw["num_key_value_heads"] or heads) * size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (raw["vocab_size"], width)}
    norms, gemma = {"norm": width}, kind.startswith("gemma")
    for i in range(raw["num_hidden_layers"]):
        layer = f"layers.{i}"
        norms |= {f"{layer}.input_layernorm": width, f"{layer}.post_attention_layernorm": width}
        if gemma:
            norms |= {f"{layer}.{x}_feedforward_layernorm": width for x in ("pre", "post")}
        if kind in ("qwen3", "gemma3_text"):
            norms |= {f"{layer}.self_attn.{name}_norm": size for name in "qk"}
        biased = raw.get("attention_bias", False)
        for name, shape, has_bias in (
            ("self_attn.q_proj", (inner, width), biased or kind == "qwen2"),
            ("self_attn.k_proj", (shared, width), biased or kind == "qwen2"),
            ("self_attn.v_proj", (shared, width), biased or kind == "qwen2"),
            ("self_attn.o_proj", (width, inner), biased),
            ("mlp.gate_proj", (wide, width), raw.get("mlp_bias", False)),
            ("mlp.up_proj", (wide, width), raw.get("mlp_bias", False)),
            ("mlp.down_proj", (width, wide), raw.get("mlp_bias", False)),
        ):
            shapes[f"{layer}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    shapes |= {f"{name}.weight": (length,) for name, length in norms.items()}
    if not raw.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (raw["vocab_size"], width)
    rng = np.random.default_rng(0)
    found = {name: draw(rng, name, shape, gemma) for name, shape in shapes.items()}
    if variant.bare:
        for i in range(raw["num_hidden_layers"]):
            found[f"layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(size // 2, np.float32)
        return found
    return {n if n.startswith("lm_head") else f"model.{n}": a for n, a in found.items()}


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], gemma: bool) -> np.ndarray:
    """Draw a tensor that is strong enough to show."""
    noise = rng.random(shape, np.float32) * 2 - 1
    if len(shape) == 1:  # of norms, which a Gemma stores less 1, exactly; and biases
        norm = name.endswith("norm.weight")
        return noise / 2 + norm - (norm and gemma)
    strong = 2 / (shape[1] if gemma else 1) ** 0.5  # a Gemma multiplies its embeddings by √E
    return noise * np.float32(strong if "embed_tokens" in name else 2 * shape[1] ** -0.5)


def write(directory: Path, variant: Variant) -> Path:
    """Write a checkpoint."""
    return write_files(directory, variant.raw, tensors(variant))


def texts() -> np.ndarray:
    """(3, TEXT_LEN) int32."""
    rng = np.random.default_rng(1)
    return rng.integers(3, SIZES["vocab_size"], (3, TEXT_LEN), np.int32)
