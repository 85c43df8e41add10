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

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.models.attention import (
    KV,
    CausalBias,
    attend_and_write,
    capped,
    causal_bias,
    chain,
    split_heads,
)
from specjax.models.decoder import Decoder, DecoderOnly
from specjax.models.layers import Fused, Linear, RMSNorm
from specjax.models.packing import Packing, pack, unpack
from specjax.types import Layout

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


class SelfAttention(nnx.Module):
    """Queries, keys and values from one fused projection; G query heads share one key head."""

    def __init__(self, config: LlamaConfig, *, inputs: int = 0, rngs, dtype):
        """Build the layer; `inputs`: the width of its input; 0: the model's."""
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, size = config.hidden_size, config.head_dim
        self.qkv = Fused(
            inputs or width,
            (self.heads * size, self.kv_heads * size, self.kv_heads * size),
            INITIAL_STD,
            bias=config.qkv_bias or config.attention_bias,
            rngs=rngs,
            dtype=dtype,
        )
        bias, inner = config.attention_bias, self.heads * size
        self.output = Linear(inner, width, INITIAL_STD, bias=bias, rngs=rngs, dtype=dtype)

        def norm() -> RMSNorm | None:
            return norm_of(config, size, dtype) if config.qk_norm else None

        self.query_norm, self.key_norm = norm(), norm()
        self.query_scale, self.cap = config.query_scale, config.attn_logit_softcapping

    def __call__(
        self,
        x: Array,
        start: Array,
        bias: CausalBias,
        rotation: Rotation,
        cache: KV | None,
        packing: Packing | None = None,
        source: tuple[KV, Array] | None = None,
    ):
        """Map (B, K, E) to (B, K, E) and the cache.

        With a packing it maps (N, E) to (N, E). Queries also read the slots of a `source`.
        """
        queries, new = self.project(x, rotation, packing)
        mixed, cache = attend_and_write(queries, new, cache, bias, start, self.cap, source)
        return self.merge(mixed, packing), cache

    def project(
        self, x: Array, rotation: Rotation, packing: Packing | None = None
    ) -> tuple[Array, KV]:
        """Project (B, K, E) or packed (N, E) to queries (B, kv_heads, G·K, D), scaled, and keys
        and values."""
        heads = self.heads, self.kv_heads, self.kv_heads
        parts = [unpack(part, packing) for part in self.qkv(x)]
        queries, keys, values = map(split_heads, parts, heads)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys = rotation(queries) * self.query_scale, rotation(keys)
        return in_groups(queries, self.kv_heads), KV.of(keys, values)

    def merge(self, mixed: Array, packing: Packing | None = None) -> Array:
        """Merge the results of `project`'s queries: (B, G·K, kv_heads·D) → (B, K, E), or packed."""
        return self.output(pack(join_groups(mixed, self.heads, self.kv_heads), packing))


def in_groups(queries: Array, kv_heads: int) -> Array:
    """Stack the G heads of each group as G·K queries: (B, H, K, D) → (B, kv_heads, G·K, D).

    No key is copied for them.
    """
    return queries.reshape(len(queries), kv_heads, -1, queries.shape[-1])


def join_groups(mixed: Array, heads: int, kv_heads: int) -> Array:
    """Undo `in_groups` in the result of attention: (B, G·K, kv_heads·D) → (B, K, heads·D)."""
    batch, groups = len(mixed), heads // kv_heads
    count, size = mixed.shape[1] // groups, mixed.shape[2] // kv_heads
    apart = mixed.reshape(batch, groups, count, kv_heads, size)
    return jnp.moveaxis(apart, 1, 3).reshape(batch, count, -1)


class FeedForward(nnx.Module):
    """The feed-forward layer (f(x W₀) · x W₁) Wₒ, with W₀ and W₁ in one projection.

    f is SiLU, or in a Gemma GELU as tanh approximates it.
    """

    def __init__(self, config: LlamaConfig, *, rngs, dtype):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.input = Fused(width, 2 * (inner,), INITIAL_STD, bias=bias, rngs=rngs, dtype=dtype)
        self.output = Linear(inner, width, INITIAL_STD, bias=bias, rngs=rngs, dtype=dtype)
        self.gelu = config.gemma

    def __call__(self, x: Array) -> Array:
        gate, value = self.input(x)
        gate = jax.nn.gelu(gate, approximate=True) if self.gelu else jax.nn.silu(gate)
        return self.output(gate * value)


class Layer(nnx.Module):
    """A layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

    In a Gemma a norm also follows either sublayer.
    """

    def __init__(self, config: LlamaConfig, *, rngs, dtype):
        def norm() -> RMSNorm:
            return norm_of(config, config.hidden_size, dtype)

        self.attention_norm = norm()
        self.attention = SelfAttention(config, rngs=rngs, dtype=dtype)
        self.feed_forward_norm = norm()
        self.feed_forward = FeedForward(config, rngs=rngs, dtype=dtype)
        self.gemma = config.gemma
        if config.gemma:
            self.attention_end, self.feed_forward_end = norm(), norm()

    def __call__(self, x: Array, start: Array, bias, rotation, cache: KV | None, packing=None):
        x, cache = self.attend(x, start, bias, rotation, cache, packing)
        return self.feed(x), cache

    def attend(self, x: Array, *args) -> tuple[Array, KV]:
        """Run the first sublayer; further arguments as in `SelfAttention`."""
        attended, cache = self.attention(self.attention_norm(x), *args)
        return x + (self.attention_end(attended) if self.gemma else attended), cache

    def feed(self, x: Array) -> Array:
        """Run the second sublayer."""
        mixed = self.feed_forward(self.feed_forward_norm(x))
        return x + (self.feed_forward_end(mixed) if self.gemma else mixed)


def with_layers(config: C, layers: Sequence[int]) -> C:
    """The config of a model that keeps these layers alone."""
    full = tuple(i for i, layer in enumerate(layers) if layer in config.full_layers)
    return dataclasses.replace(config, num_hidden_layers=len(layers), full_layers=full)


def causal_places(
    config: LlamaConfig, start: Array, count: int, slots: int, layout: Layout | None
) -> list[tuple[CausalBias, Rotation]]:
    """The bias and the rotation of each layer, for K = `count` tokens from `start` on.

    Args:
      start: (B,) int32.
      slots: T.
      layout: as in `causal_bias`.
    """
    at = start[:, None] + (layout or chain(count)).depth
    found = {
        window: (
            causal_bias(start, count, slots, window, layout),
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
        def table() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            return nnx.Param(INITIAL_STD * jax.random.normal(rngs.params(), shape, dtype))

        self.config = config
        self.embedding = table()
        self.layers = nnx.List(
            Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = norm_of(config, config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.head = table()
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    def keep(self, layers: Sequence[int]) -> None:
        """Leave out all layers but these, in place; see `Decoder.keep`."""
        self.layers = nnx.List(self.layers[i] for i in layers)
        self.config = with_layers(self.config, layers)

    def states(
        self,
        tokens: Array,
        start: Array,
        context: tuple[()],
        cache: tuple[KV, ...] | None,
        layout: Layout | None = None,
        packing: Packing | None = None,
    ) -> tuple[list[Array], tuple[KV, ...]]:
        """Run K tokens per row; see `Decoder.states`."""
        del context
        cache, count = self.ready(tokens, cache), tokens.shape[1]
        slots = count if cache is None else cache[0].values.shape[2]
        x = self.embed(pack(tokens, packing))
        states, written = [x], []
        places = causal_places(self.config, start, count, slots, layout)
        for i, (layer, (bias, rotation)) in enumerate(zip(self.layers, places, strict=True)):
            own = None if cache is None else cache[i]
            x, kv = layer(x, start, bias, rotation, own, packing)
            states.append(x)
            written.append(kv)
        return states, tuple(written)

    def embed(self, tokens: Array) -> Array:
        """Embed ids: (B, K) → (B, K, E)."""
        rows = super().embed(tokens)
        return gemma_scaled(rows, self.matrix_dtype) if self.config.gemma else rows

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states: (..., E) → (..., V)."""
        return capped(super().logits(hidden), self.config.final_logit_softcapping)
