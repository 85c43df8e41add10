"""The parts that all families are made of: attention, feed-forward layers, and layers of both."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import (
    KV,
    CausalBias,
    attend,
    attend_and_write,
    split_heads,
    whole_tiles,
)
from specjax.models.layers import Fused, Linear
from specjax.types import WHOLE, Call

ACTIVATIONS = {  # by the names of transformers; "gelu_new" is the approximation by tanh
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
}


class Scope(NamedTuple):
    """What the queries of one layer see in one call."""

    call: Call
    bias: CausalBias | Array
    """The bias of cached slots and of the call's own tokens. An array, (B, H, K, K): the K tokens
    are the whole text, as in an encoder, and are summed in tiles."""
    rotation: Any = None
    """A function that rotates queries and keys; None: positions enter elsewhere."""
    source: tuple[Any, Array] | None = None
    """Keys and values (`KV`) of an encoder's output for this layer, and their bias."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes and variants of attention."""

    width: int
    """The width E of the residual stream."""
    count: int
    """The number H of heads of queries."""
    size: int
    """The size D of each head."""
    groups: int
    """The number of heads of keys and values; H / groups heads of queries share one."""
    scale: float = 1.0
    """The factor of queries."""
    cap: float = 0.0
    """The cap of scores; see `attention.capped`."""
    qkv_bias: bool = False
    bias: bool = False
    """Whether the output projection has a bias, and in cross-attention all projections."""
    norm: Callable[[int], Any] | None = None
    """Makes a norm of each head's queries, and one of its keys."""
    std: float = 0.02
    """The initial deviation of queries, keys and values."""
    query_std: float = 0.02
    """The initial deviation of queries in cross-attention."""
    output_std: float = 0.02


class Attention(nnx.Module):
    """Self-attention with one fused projection, or cross-attention to an encoder's output.

    G heads of queries share one head of keys and values, and no key is copied for them.
    """

    def __init__(self, heads: Heads, *, inputs: int = 0, source: int = 0, rngs, dtype):
        """Build the layer.

        Args:
          inputs: the width of its input; 0: that of the residual stream.
          source: the width of the encoder's output, which cross-attention reads; 0:
            self-attention.
        """
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        inner, shared = heads.count * heads.size, heads.groups * heads.size
        if source:
            options["bias"] = heads.bias
            self.query = Linear(heads.width, inner, heads.query_std, **options)
            self.kv = Fused(source, 2 * (shared,), heads.std, **options)
        else:
            parts, bias = (inner, shared, shared), {"bias": heads.qkv_bias}
            self.qkv = Fused(inputs or heads.width, parts, heads.std, **bias, **options)
            options["bias"] = heads.bias
        self.output = Linear(inner, heads.width, heads.output_std, **options)
        make = heads.norm if heads.norm and not source else lambda size: None
        self.query_norm, self.key_norm = make(heads.size), make(heads.size)
        self.heads, self.groups = heads.count, heads.groups
        self.scale, self.cap = heads.scale, heads.cap

    def __call__(self, x: Array, scope: Scope, cache: KV | None = None) -> tuple[Array, KV]:
        """Self-attention: map (B, K, E), or packed (N, E), to the same and the cache.

        Queries also read the scope's source. Without a cache the K tokens are the whole text.
        """
        queries, new = self.project(x, scope.call, scope.rotation)
        if isinstance(scope.bias, CausalBias):
            seen = scope.bias, scope.call.start, self.cap, scope.source
            mixed, new = attend_and_write(queries, new, cache, *seen)
        else:
            mixed = attend(queries, new, scope.bias, self.cap)
        return self.merge(mixed, scope.call), new

    def read(self, x: Array, source: tuple[Any, Array], call: Call = WHOLE) -> Array:
        """Cross-attention to a source: map (B, K, E), or packed (N, E), to the same."""
        queries = self._grouped(split_heads(call.unpack(self.query(x)), self.heads))
        return self.merge(attend(queries, *source, self.cap), call)

    def project(self, x: Array, call: Call = WHOLE, rotation: Any = None) -> tuple[Array, KV]:
        """Project (B, K, E), or packed (N, E): queries (B, groups, G·K, D), keys and values."""
        heads = self.heads, self.groups, self.groups
        parts = [call.unpack(part) for part in self.qkv(x)]
        queries, keys, values = map(split_heads, parts, heads)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if rotation is not None:
            queries, keys = rotation(queries), rotation(keys)
        return self._grouped(queries), KV.of(keys, values)

    def source(self, encoded: Array) -> KV:
        """Project an encoder's output (B, S, E) to keys and values of S slots, in whole tiles.

        Otherwise attention would add slots in each call. In self-attention queries are not needed.
        """
        parts = self.kv(encoded) if hasattr(self, "kv") else self.qkv(encoded)[1:]
        keys, values = (split_heads(part, self.groups) for part in parts)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return KV.of(keys, values).by_slots(whole_tiles)

    def merge(self, mixed: Array, call: Call = WHOLE) -> Array:
        """Project results of attention, (B, G·K, groups·D), to (B, K, E), or packed (N, E)."""
        shared = self.heads // self.groups
        if shared > 1:
            batch, count, size = len(mixed), mixed.shape[1] // shared, mixed.shape[2] // self.groups
            apart = mixed.reshape(batch, shared, count, self.groups, size)
            mixed = jnp.moveaxis(apart, 1, 3).reshape(batch, count, -1)
        return self.output(call.pack(mixed))

    def _grouped(self, queries: Array) -> Array:
        """Scale queries, and stack the heads of each group: (B, H, K, D) → (B, groups, G·K, D)."""
        scaled = queries if self.scale == 1 else queries * self.scale
        return scaled.reshape(len(scaled), self.groups, -1, scaled.shape[-1])


class FeedForward(nnx.Module):
    """The layer f(x Wᵢ) Wₒ, or gated (f(x W₀) · x W₁) Wₒ with W₀ and W₁ in one projection."""

    def __init__(
        self,
        width: int,
        inner: int,
        activation: str,
        *,
        parts: int = 2,
        bias: bool = False,
        stds: tuple[float, float] = (0.02, 0.02),
        rngs: nnx.Rngs,
        dtype: Any,
    ):
        """Build the layer.

        Args:
          activation: f, one of `ACTIVATIONS`.
          parts: 2: gated. 1 or 0: not gated, and with 0 the input is no `Fused` layer. Saved states
            of optimizers name matrices by this.
          stds: the initial deviations of the input's weights and of the output's.
        """
        options: dict[str, Any] = {"bias": bias, "rngs": rngs, "dtype": dtype}
        first, last = stds
        if parts:
            self.input: Linear = Fused(width, parts * (inner,), first, **options)
        else:
            self.input = Linear(width, inner, first, **options)
        self.output = Linear(inner, width, last, **options)
        self.activation, self.parts = activation, parts

    def __call__(self, x: Array) -> Array:
        """Map (..., E) to (..., E)."""
        first, *values = self.input(x) if self.parts else [self.input(x)]
        inner = ACTIVATIONS[self.activation](first)
        return self.output(inner * values[0] if values else inner)


class Layer(nnx.Module):
    """A layer: x + attention(norm(x)), maybe x + cross(norm(x)), then x + feed_forward(norm(x)).

    Without cross-attention its self-attention reads the source, if there is one.
    """

    attention_norm: Any
    cross_norm: Any
    feed_forward_norm: Any
    bias: Any  # a umT5's, of positions

    def __init__(
        self,
        attention: Attention,
        feed_forward: FeedForward,
        norm: Callable[[], Any],
        cross: Attention | None = None,
        *,
        ends: bool = False,
    ):
        """Build the layer from its parts.

        Args:
          norm: makes a norm of the residual stream.
          ends: whether a norm also follows each sublayer.
        """
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        for name in ("attention", "cross", "feed_forward"):
            if getattr(self, name) is not None:
                setattr(self, f"{name}_norm", norm())
                if ends:
                    setattr(self, f"{name}_end", norm())
        self.ends = ends

    def __call__(self, x: Array, scope: Scope, cache: KV | None = None) -> tuple[Array, KV]:
        """Map (B, K, E), or packed (N, E), to the same and the cache."""
        own = scope if self.cross is None else scope._replace(source=None)
        attended, cache = self.attention(self.attention_norm(x), own, cache)
        x = self._added(x, attended, "attention")
        if self.cross is not None:
            assert scope.source is not None
            read = self.cross.read(self.cross_norm(x), scope.source, scope.call)
            x = self._added(x, read, "cross")
        return self._added(x, self.feed_forward(self.feed_forward_norm(x)), "feed_forward"), cache

    def source(self, encoded: Array) -> KV:
        """Project an encoder's output to the keys and values that this layer reads."""
        return (self.attention if self.cross is None else self.cross).source(encoded)

    def _added(self, x: Array, sublayer: Array, name: str) -> Array:
        return x + (getattr(self, f"{name}_end")(sublayer) if self.ends else sublayer)
