"""Tiny T5 checkpoints of every variant, written without torch, and the inputs they are tried on.

Weights are uniform numbers from a seed, so that the stored reference logits need no stored
weights. The layers are as strong as the embedding: a freshly initialised T5 only repeats its
input, and would agree with anything.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@dataclasses.dataclass(frozen=True)
class Variant:
    """config.json beyond `SIZES`, and what the weights and the inputs are like."""

    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    own_head: bool = False
    source_lens: tuple[int, ...] = (9, 4, 1)
    target_len: int = 12
    every: int = 1  # position of which logits are stored

    @property
    def raw(self) -> dict[str, Any]:
        """config.json."""
        return {**SIZES, **self.config}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("v1_0"),
        Variant("v1_1", V1_1, own_head=True),
        # The same model as transformers 5 would save it: its own head, though "tied".
        Variant(
            "v1_1_saved_by_5",
            {**V1_1, "tie_word_embeddings": True, "scale_decoder_outputs": False},
            own_head=True,
        ),
        Variant("tied_unscaled", {"tie_word_embeddings": True, "scale_decoder_outputs": False}),
        Variant("untied_scaled", {"scale_decoder_outputs": True}, own_head=True),
        Variant("odd_heads", {**V1_1, "num_heads": 3, "d_kv": 5}, own_head=True),
        Variant("deep_decoder", {"num_layers": 1, "num_decoder_layers": 3}),
        Variant("deep_encoder", {**V1_1, "num_layers": 3, "num_decoder_layers": 1}, own_head=True),
        Variant(
            "long",
            {
                **V1_1,
                "relative_attention_num_buckets": 32,
                "relative_attention_max_distance": 128,
            },
            own_head=True,
            source_lens=(330, 150),
            target_len=300,
            every=23,
        ),
    )
}

# Without stored logits: tests/torch compares these with transformers. The published files of mT5
# and umT5 say tie_word_embeddings=false; transformers 5 writes true.
MT5, UMT5 = ({**V1_1, "model_type": kind} for kind in ("mt5", "umt5"))
OTHERS = {
    variant.name: variant
    for variant in (
        Variant("mt5", MT5, own_head=True),
        Variant("mt5_tied", {**MT5, "tie_word_embeddings": True}),
        Variant("umt5", {**UMT5, "num_layers": 3}, own_head=True),
        Variant("umt5_tied", {**UMT5, "tie_word_embeddings": True, "num_decoder_layers": 3}),
        Variant(
            "byt5",
            {**V1_1, "vocab_size": 384, "num_layers": 3, "num_heads": 3, "d_kv": 4},
            own_head=True,
        ),
        Variant("gated_silu", {**V1_1, "feed_forward_proj": "gated-silu"}, own_head=True),
        Variant("gelu", {"feed_forward_proj": "gelu"}),
    )
}


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, float32, each (out, in)."""
    raw = variant.raw
    width, wide = raw["d_model"], raw["d_ff"]
    inner = raw["d_kv"] * raw["num_heads"]
    gated = raw["feed_forward_proj"].startswith("gated-")
    shapes = {"shared": (raw["vocab_size"], width)}
    if variant.own_head:
        shapes["lm_head"] = (raw["vocab_size"], width)
    for stack, layers in (("encoder", raw["num_layers"]), ("decoder", raw["num_decoder_layers"])):
        for i in range(layers if raw["model_type"] == "umt5" else 1):
            bias = f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias"
            shapes[bias] = (raw["relative_attention_num_buckets"], raw["num_heads"])
        shapes[f"{stack}.final_layer_norm"] = (width,)
        kinds = ["SelfAttention", "DenseReluDense"]
        if stack == "decoder":
            kinds.insert(1, "EncDecAttention")
        for i in range(layers):
            for j, kind in enumerate(kinds):
                layer = f"{stack}.block.{i}.layer.{j}"
                shapes[f"{layer}.layer_norm"] = (width,)
                if kind == "DenseReluDense":
                    for name in ("wi_0", "wi_1") if gated else ("wi",):
                        shapes[f"{layer}.{kind}.{name}"] = (wide, width)
                    shapes[f"{layer}.{kind}.wo"] = (width, wide)
                else:
                    for name in "qkv":
                        shapes[f"{layer}.{kind}.{name}"] = (inner, width)
                    shapes[f"{layer}.{kind}.o"] = (width, inner)
    rng = np.random.default_rng(0)
    return {f"{name}.weight": _draw(rng, name, shape) for name, shape in shapes.items()}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.random(shape, np.float32) * 2 - 1
    if len(shape) == 1:  # a norm
        return 1 + noise / 2
    if name == "shared" or name.endswith("relative_attention_bias"):
        return noise * 2
    return noise * np.float32(2 * shape[1] ** -0.5)


def write(directory: Path, variant: Variant, *, dtype: Any = np.float32, shards: int = 0) -> Path:
    """Write a checkpoint; with `shards`, as that many files and an index."""
    weights = {name: array.astype(dtype) for name, array in tensors(variant).items()}
    if not shards:
        return write_files(directory, variant.raw, weights)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(variant.raw))
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard = {name: weights[name] for name in names[i::shards]}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_files(directory: Path, raw: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """Write config.json and one file of weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def inputs(variant: Variant) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-padded source (B, S), its lengths (B,) and decoder tokens (B, T), all int32."""
    rng, ids = np.random.default_rng(1), variant.raw["vocab_size"]
    lengths = np.array(variant.source_lens, np.int32)
    source = rng.integers(2, ids, (len(lengths), lengths.max()), np.int32)
    source[np.arange(source.shape[1])[None, :] >= lengths[:, None]] = 0
    tokens = rng.integers(2, ids, (len(lengths), variant.target_len), np.int32)
    tokens[:, 0] = SIZES["decoder_start_token_id"]
    return source, lengths, tokens
