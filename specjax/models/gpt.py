"""GPT-2 (Radford et al. 2019): a decoder alone, with a rollback-free cache.

LayerNorm before each sublayer, biases everywhere but in the head, learned absolute positions, and
one fused projection for queries, keys and values. There is no source: a text is conditioned on its
prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import (
    KV,
    CausalBias,
    attend_and_write,
    causal_bias,
    chain,
    split_heads,
)
from specjax.models.decoder import Decoder, DecoderOnly
from specjax.models.layers import Fused, LayerNorm, Linear
from specjax.models.packing import Packing, pack, unpack
from specjax.types import Layout

ACTIVATIONS = {
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}
INITIAL_STD = 0.02


@dataclasses.dataclass(frozen=True)
class GPTConfig(DecoderOnly):
    """Shapes and variants of a GPT-2; field names follow Hugging Face's config.json."""

    vocab_size: int = 50257  # rows of the embedding, padding included
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int = 0  # width of the feed-forward layer; 0: 4 · n_embd
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    bos_token_id: int = 50256
    pad_token_id: int = 50256

    model_type: ClassVar[str] = "gpt2"

    def __post_init__(self):
        object.__setattr__(self, "n_inner", self.n_inner or 4 * self.n_embd)
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function={self.activation_function!r} is not supported; "
                f"use one of {sorted(ACTIVATIONS)}."
            )
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; choose another "
                "number of heads."
            )
        self.check_ids()

    @property
    def max_positions(self) -> int:
        """The longest text, prompt and output together."""
        return self.n_positions


class SelfAttention(nnx.Module):
    """Queries, keys and values from one fused projection."""

    def __init__(self, config: GPTConfig, *, rngs, dtype):
        width = config.n_embd
        self.qkv = Fused(width, 3 * (width,), INITIAL_STD, bias=True, rngs=rngs, dtype=dtype)
        self.output = Linear(width, width, _residual_std(config), bias=True, rngs=rngs, dtype=dtype)
        self.heads = config.n_head

    def __call__(
        self,
        x: Array,
        start: Array,
        bias: CausalBias,
        cache: KV | None,
        packing: Packing | None = None,
    ):
        """Map (B, K, E) to (B, K, E) and the cache; without one, the K tokens see one another.

        With a packing it maps (N, E) to (N, E).
        """
        parts = (unpack(part, packing) for part in self.qkv(x))
        queries, keys, values = (split_heads(part, self.heads) for part in parts)
        scaled = queries * queries.shape[-1] ** -0.5
        mixed, cache = attend_and_write(scaled, KV.of(keys, values), cache, bias, start)
        return self.output(pack(mixed, packing)), cache


class FeedForward(nnx.Module):
    """The feed-forward layer activation(x Wᵢ + bᵢ) Wₒ + bₒ."""

    def __init__(self, config: GPTConfig, *, rngs, dtype):
        width, inner, std = config.n_embd, config.n_inner, _residual_std(config)
        self.input = Linear(width, inner, INITIAL_STD, bias=True, rngs=rngs, dtype=dtype)
        self.output = Linear(inner, width, std, bias=True, rngs=rngs, dtype=dtype)
        self.activation = config.activation_function

    def __call__(self, x: Array) -> Array:
        return self.output(ACTIVATIONS[self.activation](self.input(x)))


def _residual_std(config: GPTConfig) -> float:
    """GPT-2's initial deviation, which keeps the sum of all sublayers as wide at any depth."""
    return INITIAL_STD * (2 * config.n_layer) ** -0.5


class Layer(nnx.Module):
    """A layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: GPTConfig, *, rngs, dtype):
        width, epsilon = config.n_embd, config.layer_norm_epsilon
        self.attention_norm = LayerNorm(width, epsilon, dtype=dtype)
        self.attention = SelfAttention(config, rngs=rngs, dtype=dtype)
        self.feed_forward_norm = LayerNorm(width, epsilon, dtype=dtype)
        self.feed_forward = FeedForward(config, rngs=rngs, dtype=dtype)

    def __call__(self, x: Array, start: Array, bias: CausalBias, cache: KV | None, packing=None):
        attended, cache = self.attention(self.attention_norm(x), start, bias, cache, packing)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class GPT(Decoder):
    """Parameters of a GPT-2 and the pure functions `encode`, `start`, `__call__` and `logits`."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        def table(rows: int) -> nnx.Param:
            shape = (rows, config.n_embd)
            return nnx.Param(INITIAL_STD * jax.random.normal(rngs.params(), shape, dtype))

        self.config = config
        self.embedding = table(config.vocab_size)
        self.positions = table(config.n_positions)
        self.layers = nnx.List(Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.n_layer))
        self.norm = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype=dtype)
        if not config.tie_word_embeddings:
            self.head = table(config.vocab_size)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.n_layer, config.n_head, config.n_embd // config.n_head

    def keep(self, layers: Sequence[int]) -> None:
        """Leave out all layers but these, in place; see `Decoder.keep`."""
        self.layers = nnx.List(self.layers[i] for i in layers)
        self.config = dataclasses.replace(self.config, n_layer=len(layers))

    def states(
        self,
        tokens: Array,
        start: Array,
        context: tuple[()],
        cache: tuple[KV, ...] | None,
        layout: Layout | None = None,
        packing: Packing | None = None,
    ) -> tuple[list[Array], tuple[KV, ...]]:
        """Run K tokens per row; see `Decoder.states`.

        Tokens past the last learned position share it: they may only be padding, or drafted tokens
        that are never kept.
        """
        del context
        cache, count = self.ready(tokens, cache), tokens.shape[1]
        slots = count if cache is None else cache[0].values.shape[2]
        positions = start[:, None] + (layout or chain(count)).depth
        bias = causal_bias(start, count, slots, layout=layout)
        last = self.config.n_positions - 1
        positions = jnp.minimum(jnp.broadcast_to(positions, tokens.shape), last)
        x = self.embed(pack(tokens, packing)) + self.positions[...][pack(positions, packing)]
        states, written = [x], []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, start, bias, None if cache is None else cache[i], packing)
            states.append(x)
            written.append(kv)
        return states, tuple(written)
