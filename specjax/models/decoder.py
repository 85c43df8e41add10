"""The base of all families' decoders."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax import devices
from specjax.models import int8
from specjax.models.attention import KV, compact, empty
from specjax.models.blocks import Scope
from specjax.models.layers import project
from specjax.models.products import kept
from specjax.types import Call, Encoding, Inputs


def table(rows: int, width: int, std: float, *, rngs: nnx.Rngs, dtype: Any) -> nnx.Param:
    """Make an embedding of random numbers."""
    return nnx.Param(std * jax.random.normal(rngs.params(), (rows, width), dtype))


def rows_of(
    embedding: nnx.Param, scale: nnx.Param | None, tokens: Array, dtype: Any, turned: bool = False
) -> Array:
    """Look ids up in an embedding: (B, K) → (B, K, E) in `dtype`.

    Args:
      scale: (V,), of an embedding in int8.
      turned: whether the embedding is (E, V).
    """
    table = embedding[...]
    if table.dtype != dtype and scale is None:
        # Else XLA converts the whole table of bfloat16 on a CPU, and does so before a loop.
        table, tokens = jax.lax.optimization_barrier((table, tokens))
    rows = jnp.moveaxis(table[:, tokens], 0, -1) if turned else table[tokens]
    if scale is None:
        return rows.astype(dtype)
    by_row = scale[...][tokens][..., None]
    return (int8.signed(rows).astype(by_row.dtype) * by_row).astype(dtype)


class DecoderOnly:
    """The fields that configs of models without an encoder share."""

    is_encoder_decoder: ClassVar[bool] = False
    vocab_size: int
    bos_token_id: int
    pad_token_id: int

    @property
    def start_id(self) -> int:
        """The first token of a text without a prompt; never emitted by the loops as output."""
        return self.bos_token_id

    def check_ids(self) -> None:
        """Raise ValueError if an id lies outside the vocabulary."""
        for name in ("bos_token_id", "pad_token_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is no id of a vocabulary of {self.vocab_size}; "
                    "name one that is."
                )


class Decoder(nnx.Module):
    """The base of all families' decoders: ids in, logits out, and a cache.

    A family sets `config`, `embedding` (V, E), `input_first`, unless its embeddings are tied
    `head` (V, E), its layers and the norm after them. It defines `cache_shape` and `scopes`.
    """

    stack: ClassVar[str] = "layers"
    """The name of the list of decoder layers."""
    last: ClassVar[str] = "norm"
    """The name of the norm between the last layer and the head."""

    config: Any
    embedding: nnx.Param
    head: nnx.Param
    input_first: bool  # of the head; see `arrange`
    embedding_scale: nnx.Param | None = None  # (V,) float32, of an embedding in int8
    head_scale: nnx.Param | None = None  # of a head of its own in int8
    split: bool = False  # embedding and head, over the devices of a mesh; see `sharding.split`
    int8_cache: bool = False  # whether caches, and the encoder's keys and values, are in int8

    @property
    def vocab_size(self) -> int:
        """Width of the output layer, padding included."""
        return self.config.vocab_size

    @property
    def dtype(self) -> Any:
        """The dtype of hidden states."""
        return self.final_norm.scale.dtype

    @property
    def matrix_dtype(self) -> Any:
        """The dtype of matrices; that of hidden states if matrices are in int8."""
        found = self.turned_weight().dtype
        return found if jnp.issubdtype(found, jnp.floating) else self.dtype

    @property
    def final_norm(self) -> Any:
        """The norm between the last layer and the head."""
        return getattr(self, self.last)

    def cache_shape(self) -> tuple[int, int, int]:
        """Return the number of layers, the heads of each, and their size D."""
        raise NotImplementedError

    def keep(self, layers: Sequence[int]) -> None:
        """Leave out all layers but these, in place; an encoder keeps its own."""
        kept_layers = nnx.List(getattr(self, self.stack)[i] for i in layers)
        setattr(self, self.stack, kept_layers)
        self.config = self.config.with_layers(layers)

    def encode(self, source: Array, source_len: Array, encoding: Encoding | None = None) -> Any:
        """Compute the context, which is empty without an encoder."""
        del source, source_len, encoding
        return ()

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Any, tuple[KV, ...]]:
        """Encode, and make an empty cache of `buffer_len` slots."""
        context = self.encode(inputs.source, inputs.source_len, inputs.encoding)
        return context, self.empty_cache(inputs.prompt.shape[0], buffer_len)

    def empty_cache(self, batch: int, length: int) -> tuple[KV, ...]:
        """Make a cache of `length` slots for each row."""
        layers, heads, size = self.cache_shape()
        dtype = jnp.int8 if self.int8_cache else self.dtype
        return tuple(empty(batch, heads, length, size, dtype) for _ in range(layers))

    def __call__(
        self, tokens: Array, start: Array | Call, context: Any, cache: tuple[KV, ...] | None
    ) -> tuple[Array, tuple[KV, ...]]:
        """Run K tokens per row: (B, K, E) after the final norm, and the cache. See `states`."""
        states, cache = self.states(tokens, start, context, cache)
        return self.final_norm(states[-1]), cache

    def states(
        self, tokens: Array, start: Array | Call, context: Any, cache: tuple[KV, ...] | None
    ) -> tuple[list[Array], tuple[KV, ...]]:
        """Run K tokens per row at positions start[b] … start[b]+K−1.

        Args:
          tokens: (B, K) int32.
          start: (B,) int32, ≥ 0; or a `Call` that begins there.
          context: from `start`, or from `encode` where there is no cache.
          cache: from `start` or the previous call. None: the tokens are the whole text and `start`
            is 0, as in training.

        Returns:
          states: L + 1 of (B, K, E), or packed of (N, E): the input of the first layer, and the
            output of each.
          cache: with slots start … start+K−1 overwritten.
        """
        call, layers = Call.of(start), getattr(self, self.stack)
        if cache is None and self.int8_cache:  # the rounding of int8 is part of the model
            cache = self.empty_cache(*tokens.shape)
        slots = tokens.shape[1] if cache is None else cache[0].values.shape[2]
        scopes = self.scopes(call, tokens.shape[1], slots, context)
        x = self.enter(tokens, call)
        states, written = [x], []
        for layer, scope, kv in zip(layers, scopes, cache or len(layers) * [None], strict=True):
            x, kv = layer(x, scope, kv)
            states.append(x)
            written.append(kv)
        return states, tuple(written)

    def enter(self, tokens: Array, call: Call) -> Array:
        """Map ids (B, K) to the input of the first layer, (B, K, E) or packed (N, E)."""
        return self.embed(call.pack(tokens))

    def scopes(self, call: Call, count: int, slots: int, context: Any) -> Sequence[Scope]:
        """What the queries of each layer see, for K = `count` tokens and T = `slots`."""
        raise NotImplementedError

    def compact(self, cache: tuple[KV, ...], start: Array, path: Array) -> tuple[KV, ...]:
        """Copy an accepted path's slots together; see `BranchingModel.compact`.

        Keys hold no position, or that of root and depth, so they are copied as they are.
        """
        return tuple(compact(kv, start, path) for kv in cache)

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states, (..., E) → (..., V), in at least float32 from the product on.

        With bfloat16's 8 bits, logits of 20 would be rounded by up to 0.06.
        """
        wide = np.promote_types(hidden.dtype, jnp.float32)
        head, scale = self.turned_weight()[...], self.turned_scale()
        logits = project(hidden, head, self.input_first, wide, scale, self.split)
        if head.dtype != jnp.bfloat16:
            return logits
        return devices.by_platform(logits, cpu=kept, accelerator=lambda logits: logits)

    def embed(self, tokens: Array) -> Array:
        """Embed ids: (B, K) → (B, K, E). A tied embedding has the head's layout."""
        turned = self.config.tie_word_embeddings and self.input_first
        return rows_of(self.embedding, self.embedding_scale, tokens, self.dtype, turned)

    def turned_weight(self) -> nnx.Param:
        """The head, which `arrange` transposes."""
        return self.embedding if self.config.tie_word_embeddings else self.head

    def turned_scale(self) -> nnx.Param | None:
        """The scales of the head in int8."""
        return self.embedding_scale if self.config.tie_word_embeddings else self.head_scale

    def matrices(self) -> dict[str, bool]:
        """The own matrices that `quantise_weights` rounds; True: it is (E, V)."""
        if self.config.tie_word_embeddings:
            return {"embedding": self.input_first}
        return {"embedding": False, "head": self.input_first}
