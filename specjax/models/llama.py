"""The Llama layout (Touvron et al. 2023): Llama, Mistral, dense Qwen 2 and 3, Gemma 2 and 3.

A decoder alone: RMSNorm before each sublayer, positions as rotations of queries and keys, groups of
query heads that share a head of keys and values, and a gated feed-forward layer. The families
differ in biases, norms and windows, as their configs say. A Gemma (Gemma Team 2024, 2408.00118, and
2025, 2503.19786) also has a norm after each sublayer, GELU, and embeddings scaled by √E.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.models.attention import capped, causal_bias
from specjax.models.blocks import Attention, FeedForward, Heads, Layer, Scope
from specjax.models.decoder import Decoder, DecoderOnly, table
from specjax.models.layers import RMSNorm
from specjax.types import Call

C = TypeVar("C", bound="LlamaConfig")
INITIAL_STD = 0.02
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
OPTIONS = (  # fields that some model types alone can have
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "full_layers",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "local_rope",
)


@dataclasses.dataclass(frozen=True)
class Rope:
    """The speeds at which positions turn queries and keys, and their scaling for longer texts.

    default: pair i of D dimensions turns by theta^(−2i/D) for each position.
    linear: all turn `factor` times more slowly.
    llama3, yarn: pairs that turn at most `slow` times in `original_length` tokens turn `factor`
    times more slowly. Those that turn at least `fast` times stay, and between the two the change
    is gradual.
    dynamic: scales texts longer than `max_position_embeddings` alone, and none is longer here.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0
    slow: float = 1.0
    fast: float = 32.0
    attention_factor: float = 1.0  # of queries and of keys
    truncate: bool = True  # yarn: whether the ramp begins and ends at whole pairs of dimensions

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"rope_type={self.kind!r} is not supported; use one of {', '.join(ROPE_KINDS)}."
            )
        if self.kind == "yarn" and not self.theta > 1:
            raise ValueError(f"rope_type='yarn' needs rope_theta={self.theta:g} above 1.")
        if self.kind in ("llama3", "yarn") and not self.slow < self.fast:
            raise ValueError(
                f"rope_type={self.kind!r} needs a range of frequencies, but its lower end "
                f"{self.slow:g} is not below its upper end {self.fast:g}; correct rope_parameters."
            )


def frequencies(rope: Rope, size: int) -> np.ndarray:
    """Radians per position of each pair of a head's D = `size` dimensions: (D/2,) float32."""
    pair = np.arange(size // 2)
    plain = rope.theta ** (-2 * pair / size)
    kept: np.ndarray = np.ones_like(plain)  # weight of the plain frequency; the rest is divided
    if rope.kind == "linear":
        kept = np.zeros_like(plain)
    elif rope.kind == "llama3":
        turns = rope.original_length * plain / (2 * math.pi)
        kept = (turns - rope.slow) / (rope.fast - rope.slow)
    elif rope.kind == "yarn":
        ends = [
            size * math.log(rope.original_length / (2 * math.pi * turns)) / 2 / math.log(rope.theta)
            for turns in (rope.fast, rope.slow)
        ]
        if rope.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], size - 1)
        kept = 1 - (pair - first) / ((last - first) or 1e-3)
    kept = np.clip(kept, 0.0, 1.0)
    return (plain * (kept + (1 - kept) / rope.factor)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderOnly):
    """Shapes of a Llama (1 to 3, TinyLlama); most field names follow Hugging Face's config.json."""

    vocab_size: int = 32000  # rows of the embedding, padding included
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # 0: as many as there are query heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rope: Rope = Rope()
    sliding_window: int = 0  # how many tokens a query sees, itself included; 0: all
    full_layers: tuple[int, ...] = ()  # layers where it sees all of them nevertheless
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    pad_token_id: int = 1
    query_pre_attn_scalar: int = 0  # queries are divided by its root; 0: head_dim
    attn_logit_softcapping: float = 0.0  # the cap of attention's scores; 0: none
    final_logit_softcapping: float = 0.0  # the cap of logits; 0: none
    local_rope: Rope | None = None  # of layers with a window; None: `rope`

    model_type: ClassVar[str] = "llama"
    split_sizes: ClassVar[tuple[str, ...]] = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    options: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    qkv_bias: ClassVar[bool] = False  # of queries, keys and values, whatever `attention_bias` says
    qk_norm: ClassVar[bool] = False  # of each head's queries and keys
    gemma: ClassVar[bool] = False  # norms after sublayers, GELU, scaled embeddings

    def __post_init__(self):
        heads = self.num_attention_heads
        for name, value in (
            ("num_key_value_heads", self.num_key_value_heads or heads),
            ("head_dim", self.head_dim or self.hidden_size // heads),
            ("full_layers", tuple(self.full_layers)),
        ):
            object.__setattr__(self, name, value)
        for name in OPTIONS:
            if getattr(self, name) and name not in self.options:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is nothing that a model of type "
                    f"{self.model_type!r} can have; leave it out or choose another type."
                )
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={heads} is not divisible by num_key_value_heads="
                f"{self.num_key_value_heads}; choose another number of either."
            )
        if self.head_dim % 2 or not self.head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} is odd or 0, but positions turn pairs of dimensions; "
                "choose an even one."
            )
        self.check_ids()

    @property
    def windows(self) -> tuple[int, ...]:
        """The number of tokens that a query sees in each layer, itself included; 0: all."""
        layers = range(self.num_hidden_layers)
        return tuple(0 if i in self.full_layers else self.sliding_window for i in layers)

    @property
    def max_positions(self) -> int:
        """The longest text, prompt and output together."""
        return self.max_position_embeddings

    @property
    def query_scale(self) -> float:
        """The factor of queries."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def with_layers(self: C, layers: Sequence[int]) -> C:
        """The config of the model cut to these layers."""
        full = tuple(i for i, layer in enumerate(layers) if layer in self.full_layers)
        return dataclasses.replace(self, num_hidden_layers=len(layers), full_layers=full)


class MistralConfig(LlamaConfig):
    """The config of a Mistral, which may have a sliding window in all layers."""

    model_type: ClassVar[str] = "mistral"
    options: ClassVar[tuple[str, ...]] = ("sliding_window",)


class Qwen2Config(LlamaConfig):
    """The config of a Qwen 2 or 2.5: biases in queries, keys and values; windows in some layers."""

    model_type: ClassVar[str] = "qwen2"
    options: ClassVar[tuple[str, ...]] = ("sliding_window", "full_layers")
    qkv_bias: ClassVar[bool] = True


class Qwen3Config(LlamaConfig):
    """The config of a Qwen 3: normalised queries and keys of each head; windows in some layers."""

    model_type: ClassVar[str] = "qwen3"
    options: ClassVar[tuple[str, ...]] = ("attention_bias", "sliding_window", "full_layers")
    qk_norm: ClassVar[bool] = True


class Gemma2Config(LlamaConfig):
    """The config of a Gemma 2: caps of scores and logits; windows in some layers."""

    model_type: ClassVar[str] = "gemma2"
    options: ClassVar[tuple[str, ...]] = tuple(
        name for name in OPTIONS if name not in ("mlp_bias", "local_rope")
    )
    gemma: ClassVar[bool] = True


class Gemma3Config(LlamaConfig):
    """The config of a Gemma 3's text model: layers with a window have rotations of their own."""

    model_type: ClassVar[str] = "gemma3_text"
    options: ClassVar[tuple[str, ...]] = tuple(
        name for name in OPTIONS if name not in ("mlp_bias", "attn_logit_softcapping")
    )
    qk_norm: ClassVar[bool] = True
    gemma: ClassVar[bool] = True


class Rotation(NamedTuple):
    """The rotation of each of K tokens, in float32."""

    cos: Array  # (B, 1, K, D/2)
    sin: Array

    @classmethod
    def at(cls, positions: Array, config: LlamaConfig, window: int = 0) -> "Rotation":
        """The rotation at (B, K) positions, in layers with this window."""
        rope = (config.local_rope if window else None) or config.rope
        turning = jnp.asarray(frequencies(rope, config.head_dim))
        angles = positions[:, None, :, None].astype(jnp.float32) * turning[None, None, None, :]
        factor = rope.attention_factor
        return cls(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def __call__(self, x: Array) -> Array:
        """Rotate (B, H, K, D): dimensions i and i + D/2 are one pair."""
        wide = np.promote_types(x.dtype, jnp.float32)
        left, right = jnp.split(x.astype(wide), 2, axis=-1)
        cos, sin = (part.astype(wide) for part in self)
        turned = left * cos - right * sin, right * cos + left * sin
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def norm_of(config: LlamaConfig, width: int, dtype: Any) -> RMSNorm:
    """Build a norm of the config's family."""
    return RMSNorm(width, config.rms_norm_eps, offset=float(config.gemma), dtype=dtype)


def heads_of(config: LlamaConfig, dtype: Any) -> Heads:
    """The sizes and variants of the config's attention."""
    return Heads(
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.num_key_value_heads,
        config.query_scale,
        config.attn_logit_softcapping,
        qkv_bias=config.qkv_bias or config.attention_bias,
        bias=config.attention_bias,
        norm=(lambda size: norm_of(config, size, dtype)) if config.qk_norm else None,
    )


def feed_forward_of(config: LlamaConfig, *, rngs: nnx.Rngs, dtype) -> FeedForward:
    """Build a gated feed-forward layer: by SiLU, or in a Gemma by GELU as tanh approximates it."""
    return FeedForward(
        config.hidden_size,
        config.intermediate_size,
        "gelu_new" if config.gemma else "silu",
        bias=config.mlp_bias,
        rngs=rngs,
        dtype=dtype,
    )


def layer_of(config: LlamaConfig, *, source: int = 0, rngs: nnx.Rngs, dtype) -> Layer:
    """Build a layer; in a Gemma a norm also follows each sublayer.

    Args:
      source: the width of the output of an encoder that it reads by cross-attention, which has no
        rotations; 0: none.
    """
    heads, options = heads_of(config, dtype), {"rngs": rngs, "dtype": dtype}
    return Layer(
        Attention(heads, **options),
        feed_forward_of(config, **options),
        lambda: norm_of(config, config.hidden_size, dtype),
        Attention(heads, source=source, **options) if source else None,
        ends=config.gemma,
    )


def causal_scopes(config: LlamaConfig, call: Call, count: int, slots: int) -> list[Scope]:
    """The scope of each layer, by its window; see `Decoder.scopes`."""
    at = call.start[:, None] + call.tree(count).depth
    found = {
        window: Scope(
            call,
            causal_bias(call.start, count, slots, window, call.layout),
            Rotation.at(at, config, window),
        )
        for window in set(config.windows)
    }
    return [found[window] for window in config.windows]


def gemma_scaled(rows: Array, dtype: Any) -> Array:
    """Multiply embeddings (..., E) by √E.

    Gemma was trained with a factor in the weights' `dtype`: √3072 is 55.5 in bfloat16.
    """
    factor = jnp.asarray(rows.shape[-1] ** 0.5, dtype)
    return rows * factor.astype(rows.dtype)


class Llama(Decoder):
    """Parameters of a Llama and the pure functions `encode`, `start`, `__call__` and `logits`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        rows, width, options = config.vocab_size, config.hidden_size, {"rngs": rngs, "dtype": dtype}
        self.config = config
        self.embedding = table(rows, width, INITIAL_STD, **options)
        self.layers = nnx.List(layer_of(config, **options) for _ in range(config.num_hidden_layers))
        self.norm = norm_of(config, width, dtype)
        if not config.tie_word_embeddings:
            self.head = table(rows, width, INITIAL_STD, **options)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    def scopes(self, call: Call, count: int, slots: int, context: tuple[()]) -> list[Scope]:
        """See `Decoder.scopes`."""
        return causal_scopes(self.config, call, count, slots)

    def embed(self, tokens: Array) -> Array:
        """Embed ids: (B, K) → (B, K, E)."""
        rows = super().embed(tokens)
        return gemma_scaled(rows, self.matrix_dtype) if self.config.gemma else rows

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states: (..., E) → (..., V)."""
        return capped(super().logits(hidden), self.config.final_logit_softcapping)
