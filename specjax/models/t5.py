"""T5 encoder-decoder (Raffel et al. 2020), versions 1.0 and 1.1, with a rollback-free cache.

Differences from other transformers: RMSNorm before each sublayer, no biases, and attention logits
that are not divided by √D. Positions enter only through a bias on self-attention, which depends on
the bucketed distance and is shared by all layers of a stack. mT5 (Xue et al. 2021) and ByT5 (Xue et
al. 2022) have the layers of T5 1.1. In umT5 (Chung et al. 2023) each layer has a bias of its own.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.models.attention import KV, MASKED, CausalBias, slide
from specjax.models.blocks import ACTIVATIONS, Attention, FeedForward, Heads, Layer, Scope
from specjax.models.decoder import table
from specjax.models.encoder_decoder import Context, EncoderDecoder
from specjax.models.layers import RMSNorm
from specjax.types import WHOLE, Call, Inputs, Layout

GATED = "gated-"
# By `feed_forward_proj`. Its "gated-gelu" is the tanh approximation, as transformers reads it.
PROJECTIONS = {
    **{name: name for name in ACTIVATIONS},
    **{GATED + name: name for name in ACTIVATIONS},
    "gated-gelu": "gelu_new",
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
    split_sizes: ClassVar[tuple[str, ...]] = ("num_heads", "num_heads", "d_ff")
    bias_in_each_layer: ClassVar[bool] = False

    def __post_init__(self):
        if self.feed_forward_proj not in PROJECTIONS:
            raise ValueError(
                f"feed_forward_proj={self.feed_forward_proj!r} is not supported; "
                f"use one of {sorted(PROJECTIONS)}."
            )

    @property
    def start_id(self) -> int:
        """The decoder's first token; never emitted by the loops as output."""
        return self.decoder_start_token_id

    @property
    def max_positions(self) -> None:
        """None: positions are relative, so no text is too long."""
        return None

    def with_layers(self, layers: Sequence[int]) -> "T5Config":
        """The config of the model whose decoder is cut to these layers."""
        return dataclasses.replace(self, num_decoder_layers=len(layers))


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


def attention_of(config: T5Config, *, source: int = 0, rngs: nnx.Rngs, dtype) -> Attention:
    """Build self-attention, or cross-attention to an encoder's output of this width."""
    width, count, size = config.d_model, config.num_heads, config.d_kv
    inner = count * size
    stds = (source or width) ** -0.5, (width * size) ** -0.5, inner**-0.5
    heads = Heads(width, count, size, count, std=stds[0], query_std=stds[1], output_std=stds[2])
    found = Attention(heads, source=source, rngs=rngs, dtype=dtype)
    if not source:  # T5 folds attention's 1/√D into the initial scale of the queries
        drawn = found.qkv.weight[...]
        found.qkv.weight[...] = drawn.at[:inner].multiply(size**-0.5)
    return found


def layer_of(config: T5Config, *, decodes: bool, rngs: nnx.Rngs, dtype) -> Layer:
    """Build a layer of the encoder, or of the decoder with cross-attention."""
    width, options = config.d_model, {"rngs": rngs, "dtype": dtype}
    own = config.bias_in_each_layer
    bias = RelativeBias(config, bidirectional=not decodes, **options) if own else None
    attention = attention_of(config, **options)
    cross = attention_of(config, source=width, **options) if decodes else None
    feed_forward = FeedForward(
        width,
        config.d_ff,
        PROJECTIONS[config.feed_forward_proj],
        parts=1 + config.feed_forward_proj.startswith(GATED),
        stds=(width**-0.5, config.d_ff**-0.5),
        **options,
    )

    def norm() -> RMSNorm:
        return RMSNorm(width, config.layer_norm_epsilon, dtype=dtype)

    layer = Layer(attention, feed_forward, norm, cross)
    if bias is not None:
        layer.bias = bias
    return layer


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
        rows, width, options = config.vocab_size, config.d_model, {"rngs": rngs, "dtype": dtype}
        stacks = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
        self.config = config
        self.embedding = table(rows, width, 1.0, **options)
        for name, count in stacks.items():
            decodes = name == "decoder"
            if not config.bias_in_each_layer:
                bias = RelativeBias(config, bidirectional=not decodes, **options)
                setattr(self, f"{name}_bias", bias)
            layers = [layer_of(config, decodes=decodes, **options) for _ in range(count)]
            setattr(self, name, nnx.List(layers))
            norm = RMSNorm(width, config.layer_norm_epsilon, dtype=dtype)
            setattr(self, f"{name}_norm", norm)
        if not config.tie_word_embeddings:
            self.head = table(rows, width, width**-0.5, **options)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        return self.config.num_decoder_layers, self.config.num_heads, self.config.d_kv

    def source_scopes(self, padding: Array) -> Iterable[Scope]:
        """See `EncoderDecoder.source_scopes`."""
        length = padding.shape[3]
        place = jnp.arange(length)[None, :]
        return itertools.cycle(
            Scope(WHOLE, slide(bias.by_offset(length), place, length) + padding)
            for bias in self.position_biases("encoder")
        )

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, tuple[KV, ...]]:
        """Encode, and make an empty cache and the biases of `buffer_len` slots."""
        context, cache = super().start(inputs, buffer_len)
        return context._replace(self_biases=self.by_offset(cache[0].values.shape[2])), cache

    def by_offset(self, length: int) -> tuple[Array, ...]:
        """The decoder's biases, one for each layer or for all; see `RelativeBias.by_offset`."""
        return tuple(bias.by_offset(length) for bias in self.position_biases("decoder"))

    def position_biases(self, stack: str) -> list[RelativeBias]:
        """The biases of "encoder" or "decoder": one for each layer, or the one that all share."""
        if self.config.bias_in_each_layer:
            return [layer.bias for layer in getattr(self, stack)]
        return [getattr(self, f"{stack}_bias")]

    def scopes(self, call: Call, count: int, slots: int, context: Context) -> list[Scope]:
        """See `Decoder.scopes`."""
        by_offset = context.self_biases
        if by_offset is None:
            by_offset = self.by_offset(slots)
        start, depth = call.start, call.tree(count).depth
        old = jnp.arange(slots)[None, None, None, :] < start[:, None, None, None]
        biases = [
            CausalBias(
                jnp.where(old, slide(bias, start[:, None] + depth, slots), MASKED),
                bias_within(bias, count, call.layout),
            )
            for bias in by_offset
        ]
        pairs = zip(context.cross, itertools.cycle(biases), strict=False)
        return [Scope(call, bias, source=(kv, context.cross_bias)) for kv, bias in pairs]

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states: (..., E) → (..., V)."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        return super().logits(hidden)
