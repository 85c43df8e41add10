"""Tiny GPT-2 checkpoints of every variant, written without torch, and the texts they are tried on.

As in `t5_variants`: weights are uniform numbers from a seed, strong enough that every layer shows.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from t5_variants import write_files

SIZES = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 40,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TEXT_LEN = 12
ODD = {  # sizes, activation and ε
    "n_embd": 18, "n_head": 3, "n_inner": 25, "n_layer": 3,
    "activation_function": "gelu", "layer_norm_epsilon": 1e-2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Variant:
    """config.json beyond `SIZES`, and what the files are like."""

    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    own_head: bool = False
    bare: bool = False  # names without "transformer.", and the causal masks

    @property
    def raw(self) -> dict[str, Any]:
        """config.json."""
        return {**SIZES, **self.config}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("tied"),
        Variant("untied", {"tie_word_embeddings": False}, own_head=True),
        Variant("bare", bare=True),
        Variant("odd_heads", ODD),
        Variant("relu", {"activation_function": "relu", "n_layer": 1}),
    )
}


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, float32; projections are (in, out)."""
    raw = variant.raw
    width, length = raw["n_embd"], raw["n_positions"]
    wide = raw.get("n_inner") or 4 * width
    shapes = {"wte.weight": (raw["vocab_size"], width), "wpe.weight": (length, width)}
    norms = ["ln_f"]
    for i in range(raw["n_layer"]):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        for name, shape in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, wide)),
            ("mlp.c_proj", (wide, width)),
        ):
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    if variant.own_head:
        shapes["lm_head.weight"] = (raw["vocab_size"], width)
    rng = np.random.default_rng(0)
    found = {name: _draw(rng, name, shape) for name, shape in shapes.items()}
    if variant.bare:
        for i in range(raw["n_layer"]):
            found[f"h.{i}.attn.bias"] = np.tri(length, dtype=np.bool_)[None, None]
            found[f"h.{i}.attn.masked_bias"] = np.float32(-1e4)
        return found
    return {n if n.startswith("lm_head") else f"transformer.{n}": a for n, a in found.items()}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.random(shape, np.float32) * 2 - 1
    if ".ln_" in f".{name}" and name.endswith("weight"):
        return 1 + noise / 2
    if len(shape) == 1:
        return noise / 2
    return noise * np.float32(2 if name.startswith("w") else 2 * shape[0] ** -0.5)


def write(directory: Path, variant: Variant) -> Path:
    """Write a checkpoint."""
    weights = {name: np.asarray(array) for name, array in tensors(variant).items()}
    return write_files(directory, variant.raw, weights)


def texts() -> np.ndarray:
    """(3, TEXT_LEN) int32."""
    rng = np.random.default_rng(1)
    return rng.integers(2, SIZES["vocab_size"], (3, TEXT_LEN), np.int32)
