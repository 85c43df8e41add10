"""GPT-2 (Radford et al. 2019): a decoder alone, with a rollback-free cache.

LayerNorm before each sublayer, biases everywhere but in the head, learned absolute positions, and
one fused projection for queries, keys and values. There is no source: a text is conditioned on its
prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import causal_bias
from specjax.models.blocks import Attention, FeedForward, Heads, Layer, Scope
from specjax.models.decoder import Decoder, DecoderOnly, table
from specjax.models.layers import LayerNorm
from specjax.types import Call

ACTIVATIONS = "gelu", "gelu_new", "relu"
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
    split_sizes: ClassVar[tuple[str, ...]] = ("n_head", "n_head", "n_inner")

    def __post_init__(self):
        object.__setattr__(self, "n_inner", self.n_inner or 4 * self.n_embd)
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function={self.activation_function!r} is not supported; "
                f"use one of {', '.join(ACTIVATIONS)}."
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

    def with_layers(self, layers: Sequence[int]) -> "GPTConfig":
        """The config of the model cut to these layers."""
        return dataclasses.replace(self, n_layer=len(layers))


def layer_of(config: GPTConfig, *, rngs: nnx.Rngs, dtype) -> Layer:
    """Build a layer. Its outputs begin the narrower, the more layers are added up."""
    width, size, output_std = config.n_embd, config.n_embd // config.n_head, _residual_std(config)
    heads = Heads(
        width, config.n_head, size, config.n_head, size**-0.5,
        qkv_bias=True, bias=True, std=INITIAL_STD, output_std=output_std,
    )  # fmt: skip
    return Layer(
        Attention(heads, rngs=rngs, dtype=dtype),
        FeedForward(
            width, config.n_inner, config.activation_function, parts=0, bias=True,
            stds=(INITIAL_STD, output_std), rngs=rngs, dtype=dtype,
        ),
        lambda: LayerNorm(width, config.layer_norm_epsilon, dtype=dtype),
    )  # fmt: skip


def _residual_std(config: GPTConfig) -> float:
    return INITIAL_STD * (2 * config.n_layer) ** -0.5


class GPT(Decoder):
    """Parameters of a GPT-2 and the pure functions `encode`, `start`, `__call__` and `logits`."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        width, options = config.n_embd, {"rngs": rngs, "dtype": dtype}
        self.config = config
        self.embedding = table(config.vocab_size, width, INITIAL_STD, **options)
        self.positions = table(config.n_positions, width, INITIAL_STD, **options)
        self.layers = nnx.List(layer_of(config, **options) for _ in range(config.n_layer))
        self.norm = LayerNorm(width, config.layer_norm_epsilon, dtype=dtype)
        if not config.tie_word_embeddings:
            self.head = table(config.vocab_size, width, INITIAL_STD, **options)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.n_layer, config.n_head, config.n_embd // config.n_head

    def enter(self, tokens: Array, call: Call) -> Array:
        """Add the learned positions to the embedding; see `Decoder.enter`.

        Tokens past the last learned position share it: they may only be padding, or drafted tokens
        that are never kept.
        """
        positions = call.start[:, None] + call.tree(tokens.shape[1]).depth
        last = self.config.n_positions - 1
        positions = jnp.minimum(jnp.broadcast_to(positions, tokens.shape), last)
        return super().enter(tokens, call) + self.positions[...][call.pack(positions)]

    def scopes(self, call: Call, count: int, slots: int, context: tuple[()]) -> list[Scope]:
        """See `Decoder.scopes`."""
        scope = Scope(call, causal_bias(call.start, count, slots, layout=call.layout))
        return len(self.layers) * [scope]
