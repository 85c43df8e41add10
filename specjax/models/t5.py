"""T5 encoder-decoder (Raffel et al. 2020), versions 1.0 and 1.1, with a rollback-free cache.

Differences from other transformers: RMSNorm before each sublayer, no biases, and attention logits
that are not divided by √D. Positions enter only through a bias on self-attention, which depends on
the bucketed distance and is shared by all layers of a stack. mT5 (Xue et al. 2021) and ByT5 (Xue et
al. 2022) have the layers of T5 1.1. In umT5 (Chung et al. 2023) each layer has a bias of its own.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.models.attention import (
    KV,
    MASKED,
    CausalBias,
    attend,
    attend_and_write,
    chain,
    slide,
    split_heads,
    whole_tiles,
)
from specjax.models.encoder_decoder import Context, EncoderDecoder, padding_bias
from specjax.models.layers import Fused, Linear, RMSNorm
from specjax.models.packing import Packing, pack, unpack
from specjax.types import Encoding, Inputs, Layout, Params

PLAIN = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
}
# By `feed_forward_proj`. Its "gated-gelu" is the tanh approximation, as transformers reads it.
ACTIVATIONS = {
    **PLAIN,
    **{f"gated-{name}": activation for name, activation in PLAIN.items()},
    "gated-gelu": PLAIN["gelu_new"],
}


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shapes and variants of a T5; field names follow Hugging Face's config.json.

    v1.0: feed_forward_proj="relu", a tied head, decoder output scaled by d_model^−½.
    v1.1: feed_forward_proj="gated-gelu", an untied head, no scaling.
    """

    vocab_size: int = 32128  # rows of the embedding, padding included
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_layers: int = 8
    num_decoder_layers: int = 8
    num_heads: int = 6
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "gated-gelu"
    tie_word_embeddings: bool = False
    scale_decoder_outputs: bool = False
    decoder_start_token_id: int = 0
    pad_token_id: int = 0

    is_encoder_decoder: ClassVar[bool] = True
    model_type: ClassVar[str] = "t5"
    bias_in_each_layer: ClassVar[bool] = False

    def __post_init__(self):
        if self.feed_forward_proj not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj={self.feed_forward_proj!r} is not supported; "
                f"use one of {sorted(ACTIVATIONS)}."
            )

    @property
    def start_id(self) -> int:
        """The decoder's first token; never emitted by the loops as output."""
        return self.decoder_start_token_id

    @property
    def max_positions(self) -> None:
        """None: positions are relative, so no text is too long."""
        return None


@dataclasses.dataclass(frozen=True)
class MT5Config(T5Config):
    """An mT5: a T5 1.1 under another `model_type`."""

    model_type: ClassVar[str] = "mt5"


@dataclasses.dataclass(frozen=True)
class UMT5Config(T5Config):
    """A umT5: a T5 1.1 whose layers have a position bias each."""

    model_type: ClassVar[str] = "umt5"
    bias_in_each_layer: ClassVar[bool] = True


def relative_buckets(
    offsets: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """The bucket of each offset = slot − query, as T5 defines it.

    Half of the buckets hold one distance each, the other half grow logarithmically up to
    `max_distance`. Bidirectional stacks use one half of all buckets for each direction; a causal
    stack only looks back (offsets > 0 share bucket 0 and are masked anyway). float32 arithmetic
    puts boundaries such as distance 16 of 128 where checkpoints expect them.
    """
    buckets = np.zeros(offsets.shape, np.int32)
    if bidirectional:
        num_buckets //= 2
        buckets += (offsets > 0).astype(np.int32) * num_buckets
        distance = np.abs(offsets)
    else:
        distance = np.maximum(-offsets, 0)
    exact = num_buckets // 2
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    scaled = np.log(ratio) / np.float32(math.log(max_distance / exact)) * (num_buckets - exact)
    far = np.minimum(exact + scaled.astype(np.int32), num_buckets - 1)
    return buckets + np.where(distance < exact, distance, far).astype(np.int32)


class SelfAttention(nnx.Module):
    """Queries, keys and values from one fused projection."""

    def __init__(self, config: T5Config, *, rngs, dtype):
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.qkv = Fused(width, 3 * (inner,), width**-0.5, rngs=rngs, dtype=dtype)
        # T5 folds attention's 1/√D into the initial scale of the queries.
        first = self.qkv.weight[...]
        self.qkv.weight[...] = first.at[:inner].multiply(config.d_kv**-0.5)
        self.output = Linear(inner, width, inner**-0.5, rngs=rngs, dtype=dtype)
        self.heads = config.num_heads

    def __call__(self, x: Array, bias: Array) -> Array:
        """Map (B, K, E) to (B, K, E): the K tokens see one another where the bias allows it."""
        queries, keys, values = self._project(x)
        return self.output(attend(queries, KV.of(keys, values), bias))

    def cached(
        self,
        x: Array,
        start: Array,
        bias: CausalBias,
        cache: KV | None,
        packing: Packing | None = None,
    ):
        """Map (B, K, E), or packed (N, E), to the same and the cache with keys and values."""
        queries, keys, values = self._project(x, packing)
        mixed, cache = attend_and_write(queries, KV.of(keys, values), cache, bias, start)
        return self.output(pack(mixed, packing)), cache

    def _project(self, x: Array, packing: Packing | None = None) -> list[Array]:
        return [split_heads(unpack(part, packing), self.heads) for part in self.qkv(x)]


class CrossAttention(nnx.Module):
    """Queries from the decoder; keys and values from the encoder, made once per input."""

    def __init__(self, config: T5Config, *, source: int = 0, rngs, dtype):
        """Build the layer; `source`: the width of the encoder's output; 0: the decoder's."""
        width, inner = config.d_model, config.num_heads * config.d_kv
        source = source or width
        query_std = (width * config.d_kv) ** -0.5
        self.query = Linear(width, inner, query_std, rngs=rngs, dtype=dtype)
        self.kv = Fused(source, 2 * (inner,), source**-0.5, rngs=rngs, dtype=dtype)
        self.output = Linear(inner, width, inner**-0.5, rngs=rngs, dtype=dtype)
        self.heads = config.num_heads

    def project(self, encoded: Array) -> KV:
        """Project (B, S, E) to keys and values of S slots, in whole tiles."""
        parts = (split_heads(part, self.heads) for part in self.kv(encoded))
        return KV.of(*parts).by_slots(whole_tiles)

    def __call__(self, x: Array, kv: KV, bias: Array, packing: Packing | None = None) -> Array:
        """Map (B, K, E) to (B, K, E), or packed (N, E) to (N, E)."""
        queries = split_heads(unpack(self.query(x), packing), self.heads)
        return self.output(pack(attend(queries, kv, bias), packing))


class FeedForward(nnx.Module):
    """The feed-forward layer relu(x Wᵢ) Wₒ, or (gelu(x W₀) · x W₁) Wₒ with W₀ and W₁ fused."""

    def __init__(self, config: T5Config, *, rngs, dtype):
        self.gated = config.feed_forward_proj.startswith("gated-")
        self.activation = config.feed_forward_proj
        parts = (config.d_ff,) * (2 if self.gated else 1)
        self.input = Fused(config.d_model, parts, config.d_model**-0.5, rngs=rngs, dtype=dtype)
        self.output = Linear(config.d_ff, config.d_model, config.d_ff**-0.5, rngs=rngs, dtype=dtype)

    def __call__(self, x: Array) -> Array:
        first, *others = self.input(x)
        inner = ACTIVATIONS[self.activation](first)
        return self.output(inner * others[0] if self.gated else inner)


class EncoderLayer(nnx.Module):
    """An encoder layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: T5Config, *, rngs, dtype):
        width, epsilon = config.d_model, config.layer_norm_epsilon
        if config.bias_in_each_layer:
            self.bias = RelativeBias(config, bidirectional=True, rngs=rngs, dtype=dtype)
        self.attention_norm = RMSNorm(width, epsilon, dtype=dtype)
        self.attention = SelfAttention(config, rngs=rngs, dtype=dtype)
        self.feed_forward_norm = RMSNorm(width, epsilon, dtype=dtype)
        self.feed_forward = FeedForward(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: Array, bias: Array) -> Array:
        x = x + self.attention(self.attention_norm(x), bias)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DecoderLayer(nnx.Module):
    """An encoder layer with cross-attention between its two sublayers."""

    def __init__(self, config: T5Config, *, rngs, dtype):
        width, epsilon = config.d_model, config.layer_norm_epsilon
        if config.bias_in_each_layer:
            self.bias = RelativeBias(config, bidirectional=False, rngs=rngs, dtype=dtype)
        self.attention_norm = RMSNorm(width, epsilon, dtype=dtype)
        self.attention = SelfAttention(config, rngs=rngs, dtype=dtype)
        self.cross_norm = RMSNorm(width, epsilon, dtype=dtype)
        self.cross = CrossAttention(config, rngs=rngs, dtype=dtype)
        self.feed_forward_norm = RMSNorm(width, epsilon, dtype=dtype)
        self.feed_forward = FeedForward(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: Array, start, self_bias, cross_kv, cross_bias, cache, packing=None):
        seen = self.attention_norm(x)
        attended, cache = self.attention.cached(seen, start, self_bias, cache, packing)
        x = x + attended
        x = x + self.cross(self.cross_norm(x), cross_kv, cross_bias, packing)
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class RelativeBias(nnx.Module):
    """Self-attention's position bias, one learned number per head and bucket of distance."""

    def __init__(self, config: T5Config, *, bidirectional: bool, rngs, dtype):
        shape = (config.relative_attention_num_buckets, config.num_heads)
        std = config.d_model**-0.5
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype))
        self.bidirectional = bidirectional
        self.max_distance = config.relative_attention_max_distance

    def by_offset(self, length: int) -> Array:
        """The bias by offset o = slot − query, at entry `length + o`: (H, 2·length) float32.

        In a causal stack the future (o > 0) is MASKED, so one addition places and masks.
        """
        offsets = np.arange(-length, length)
        buckets = relative_buckets(
            offsets,
            bidirectional=self.bidirectional,
            num_buckets=self.weight.shape[0],
            max_distance=self.max_distance,
        )
        wide = np.promote_types(self.weight.dtype, jnp.float32)
        bias = self.weight[...].astype(wide)[buckets].T
        if self.bidirectional:
            return bias
        return jnp.where((offsets <= 0)[None, :], bias, MASKED)


def bias_within(by_offset: Array, count: int, layout: Layout | None) -> Array:
    """The bias among the K tokens of a call, (R, H, K, K): in a tree by the difference of depths.

    Args:
      by_offset: as `RelativeBias.by_offset` gives it.
    """
    if layout is None:
        return slide(by_offset, jnp.arange(count)[None, :], count)
    depth, seen = layout
    offset = depth[:, None, :] - depth[:, :, None]
    bias = by_offset[:, by_offset.shape[1] // 2 + offset]  # (H, R, K, K)
    return jnp.where(seen[:, None], jnp.moveaxis(bias, 0, 1), MASKED)


class T5(EncoderDecoder):
    """Parameters of a T5 and the pure functions `encode`, `start`, `__call__` and `logits`."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        shape = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype))
        if not config.bias_in_each_layer:
            self.encoder_bias = RelativeBias(config, bidirectional=True, rngs=rngs, dtype=dtype)
        self.encoder = nnx.List(
            EncoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)
        )
        self.encoder_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, dtype=dtype)
        if not config.bias_in_each_layer:
            self.decoder_bias = RelativeBias(config, bidirectional=False, rngs=rngs, dtype=dtype)
        self.decoder = nnx.List(
            DecoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_decoder_layers)
        )
        self.decoder_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, dtype=dtype)
        if not config.tie_word_embeddings:
            head = config.d_model**-0.5 * jax.random.normal(rngs.params(), shape, dtype)
            self.head = nnx.Param(head)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        return self.config.num_decoder_layers, self.config.num_heads, self.config.d_kv

    def keep(self, layers: Sequence[int]) -> None:
        """Leave out all decoder layers but these, in place; see `Decoder.keep`."""
        self.decoder = nnx.List(self.decoder[i] for i in layers)
        self.config = dataclasses.replace(self.config, num_decoder_layers=len(layers))

    def read(self, source: Array, source_len: Array) -> tuple[Array, Array]:
        """Run the encoder; see `EncoderDecoder.read`."""
        length, source_bias = source.shape[1], padding_bias(source, source_len)
        place = jnp.arange(length)[None, :]
        biases = [
            slide(bias.by_offset(length), place, length) + source_bias
            for bias in self.position_biases("encoder")
        ]
        x = self.embed(source)
        for layer, bias in zip(self.encoder, itertools.cycle(biases), strict=False):
            x = layer(x, bias)
        return self.encoder_norm(x), whole_tiles(source_bias, 3, MASKED)

    def project_source(self, layer: DecoderLayer, encoded: Array) -> KV:
        """Project the encoder's output for a layer's cross-attention."""
        return layer.cross.project(encoded)

    @staticmethod
    def encoder_params(params: Params) -> tuple[list[Params], list[Params]]:
        """See `EncoderDecoder.encoder_params`."""
        names = ("embedding", "embedding_scale", "encoder", "encoder_bias", "encoder_norm")
        layers = [params["decoder"][i]["cross"]["kv"] for i in sorted(params["decoder"])]
        return [params.get(name) for name in names], layers

    def start(
        self, inputs: Inputs, buffer_len: int, encoding: Encoding | None = None
    ) -> tuple[Context, tuple[KV, ...]]:
        """Encode, and make an empty cache and the biases of `buffer_len` slots."""
        context, cache = super().start(inputs, buffer_len, encoding)
        return context._replace(self_biases=self.by_offset(cache[0].values.shape[2])), cache

    def by_offset(self, length: int) -> tuple[Array, ...]:
        """The decoder's biases, one for each layer or for all; see `RelativeBias.by_offset`."""
        return tuple(bias.by_offset(length) for bias in self.position_biases("decoder"))

    def position_biases(self, stack: str) -> list[RelativeBias]:
        """The biases of "encoder" or "decoder": one for each layer, or the one that all share."""
        if self.config.bias_in_each_layer:
            return [layer.bias for layer in getattr(self, stack)]
        return [getattr(self, f"{stack}_bias")]

    def states(
        self,
        tokens: Array,
        start: Array,
        context: Context,
        cache: tuple[KV, ...] | None,
        layout: Layout | None = None,
        packing: Packing | None = None,
    ) -> tuple[list[Array], tuple[KV, ...]]:
        """Run K tokens per row; see `Decoder.states`."""
        cache, count = self.ready(tokens, cache), tokens.shape[1]
        slots = count if cache is None else cache[0].values.shape[2]
        by_offset = context.self_biases
        if by_offset is None:
            by_offset = self.by_offset(slots)
        depth, _ = layout or chain(count)
        old = jnp.arange(slots)[None, None, None, :] < start[:, None, None, None]
        biases = [
            CausalBias(
                jnp.where(old, slide(bias, start[:, None] + depth, slots), MASKED),
                bias_within(bias, count, layout),
            )
            for bias in by_offset
        ]
        x = self.embed(pack(tokens, packing))
        states, written = [x], []
        for i, bias in zip(range(len(self.decoder)), itertools.cycle(biases), strict=False):
            own = None if cache is None else cache[i]
            cross = context.cross[i], context.cross_bias
            x, kv = self.decoder[i](x, start, bias, *cross, own, packing)
            states.append(x)
            written.append(kv)
        return states, tuple(written)

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states: (..., E) → (..., V)."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        return super().logits(hidden)
