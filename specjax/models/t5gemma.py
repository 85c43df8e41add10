"""T5Gemma (Zhang et al. 2025, 2504.06225) and T5Gemma 2 (2512.14856): encoder-decoders of Gemmas.

Encoder and decoder are stacks of Gemma layers (`llama.Layer`), of a Gemma 2 or of a Gemma 3. The
encoder's layers see both directions. A T5Gemma's decoder layer has cross-attention between its two
sublayers. A T5Gemma 2's has none: its self-attention also reads the encoder's output, through the
same projections, in one softmax. Images, which a T5Gemma 2 reads too, are left out.
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
    MASKED,
    CausalBias,
    attend,
    capped,
    split_heads,
    whole_tiles,
)
from specjax.models.decoder import rows_of
from specjax.models.encoder_decoder import Context, EncoderDecoder, padding_bias
from specjax.models.layers import Fused, Linear
from specjax.models.llama import (
    INITIAL_STD,
    Gemma2Config,
    Gemma3Config,
    Layer,
    LlamaConfig,
    Rotation,
    causal_places,
    gemma_scaled,
    in_groups,
    join_groups,
    norm_of,
    with_layers,
)
from specjax.models.packing import Packing, pack, unpack
from specjax.types import Layout, Params

DEFAULT, DEFAULT_2 = Gemma2Config(), Gemma3Config()


class TwoStacks:
    """The parts that both configs share: their own fields are the decoder's."""

    encoder: LlamaConfig
    tie_word_embeddings: bool

    is_encoder_decoder: ClassVar[bool] = True
    merged: ClassVar[bool] = False  # whether self-attention reads the source too

    @property
    def max_source_positions(self) -> int:
        """The longest source."""
        return self.encoder.max_position_embeddings

    @property
    def two_embeddings(self) -> bool:
        """Whether the encoder has an embedding of its own."""
        return not (self.merged and self.tie_word_embeddings)


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(TwoStacks, Gemma2Config):
    """Shapes of a T5Gemma: the fields are the decoder's, and `encoder` has the encoder's."""

    encoder: LlamaConfig = DEFAULT

    model_type: ClassVar[str] = "t5gemma"

    def sees(self, window: int) -> tuple[int, int]:
        """How many tokens before and after itself an encoder's query sees in a layer's window."""
        return window, window


@dataclasses.dataclass(frozen=True)
class T5Gemma2Config(TwoStacks, Gemma3Config):
    """Shapes of a T5Gemma 2's text model; see `T5GemmaConfig`."""

    encoder: LlamaConfig = DEFAULT_2
    eoi_token_index: int = 256_000  # the id, after an image, that has an embedding apart

    model_type: ClassVar[str] = "t5gemma2"
    merged: ClassVar[bool] = True

    def sees(self, window: int) -> tuple[int, int]:
        """How many tokens before and after itself an encoder's query sees: `window` in all."""
        return (window + 1) // 2 - 1, window // 2


Config = T5GemmaConfig | T5Gemma2Config


class CrossAttention(nnx.Module):
    """A T5Gemma's cross-attention, without rotations; keys and values are made once per input."""

    def __init__(self, config: Config, *, rngs, dtype):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, bias, inner = config.hidden_size, config.attention_bias, config.head_dim * self.heads
        parts = 2 * (self.kv_heads * config.head_dim,)

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, INITIAL_STD, bias=bias, rngs=rngs, dtype=dtype)

        self.query, self.output = linear(width, inner), linear(inner, width)
        self.kv = Fused(
            config.encoder.hidden_size, parts, INITIAL_STD, bias=bias, rngs=rngs, dtype=dtype
        )
        self.query_scale, self.cap = config.query_scale, config.attn_logit_softcapping

    def project(self, encoded: Array) -> KV:
        """Project (B, S, E) to keys and values of S slots, in whole tiles."""
        parts = (split_heads(part, self.kv_heads) for part in self.kv(encoded))
        return KV.of(*parts).by_slots(whole_tiles)

    def __call__(self, x: Array, kv: KV, bias: Array, packing: Packing | None = None) -> Array:
        """Map (B, K, E) to (B, K, E), or packed (N, E) to (N, E)."""
        queries = split_heads(unpack(self.query(x), packing), self.heads) * self.query_scale
        mixed = attend(in_groups(queries, self.kv_heads), kv, bias, self.cap)
        return self.output(pack(join_groups(mixed, self.heads, self.kv_heads), packing))


class DecoderLayer(Layer):
    """A Gemma layer that also reads the source."""

    def __init__(self, config: Config, *, rngs, dtype):
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.merged = config.merged
        if not config.merged:
            self.cross_norm = norm_of(config, config.hidden_size, dtype)
            self.cross = CrossAttention(config, rngs=rngs, dtype=dtype)
            self.cross_end = norm_of(config, config.hidden_size, dtype)

    def __call__(self, x, start, bias, rotation, source, cache, packing=None):  # type: ignore[override]
        """Map (B, K, E), or packed (N, E), to the same and the cache.

        Args:
          source: keys and values of the encoder's output, and their bias.
        """
        own = source if self.merged else None
        x, cache = self.attend(x, start, bias, rotation, cache, packing, own)
        if not self.merged:
            kv, seen = source
            x = x + self.cross_end(self.cross(self.cross_norm(x), kv, seen, packing))
        return self.feed(x), cache

    def project_source(self, encoded: Array) -> KV:
        """Project the encoder's output (B, S, E) to keys and values of S slots, in whole tiles."""
        if not self.merged:
            return self.cross.project(encoded)
        attention = self.attention
        _, keys, values = attention.qkv(encoded)  # queries are not needed
        keys, values = (split_heads(part, attention.kv_heads) for part in (keys, values))
        keys = keys if attention.key_norm is None else attention.key_norm(keys)
        return KV.of(keys, values).by_slots(whole_tiles)


class T5Gemma(EncoderDecoder):
    """Parameters of a T5Gemma or T5Gemma 2, and its functions; see `EncoderDecoder`."""

    config: Config
    encoder_embedding_scale: nnx.Param | None = None  # (V,) float32, of an embedding in int8

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        def table(width: int) -> nnx.Param:
            shape = config.vocab_size, width
            return nnx.Param(INITIAL_STD * jax.random.normal(rngs.params(), shape, dtype))

        self.config, encoder = config, config.encoder
        self.embedding = table(config.hidden_size)
        if config.two_embeddings:
            self.encoder_embedding = table(encoder.hidden_size)
        if config.merged:
            self.after_image = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
            if config.two_embeddings:
                self.encoder_after_image = nnx.Param(jnp.zeros((encoder.hidden_size,), dtype))
        self.encoder = nnx.List(
            Layer(encoder, rngs=rngs, dtype=dtype) for _ in range(encoder.num_hidden_layers)
        )
        self.encoder_norm = norm_of(encoder, encoder.hidden_size, dtype)
        self.decoder = nnx.List(
            DecoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_hidden_layers)
        )
        self.decoder_norm = norm_of(config, config.hidden_size, dtype)
        if not config.tie_word_embeddings:
            self.head = table(config.hidden_size)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    def keep(self, layers: Sequence[int]) -> None:
        """Leave out all decoder layers but these, in place; see `Decoder.keep`."""
        self.decoder = nnx.List(self.decoder[i] for i in layers)
        self.config = with_layers(self.config, layers)

    def read(self, source: Array, source_len: Array) -> tuple[Array, Array]:
        """Run the encoder; see `EncoderDecoder.read`."""
        config, source_bias = self.config.encoder, padding_bias(source, source_len)
        place = jnp.arange(source.shape[1])

        def bias(window: int) -> CausalBias:
            if not window:
                return CausalBias(source_bias, source_bias)
            before, after = self.config.sees(window)
            offset = place[None, :] - place[:, None]
            seen = (-before <= offset) & (offset <= after)
            near = source_bias + jnp.where(seen, 0.0, MASKED)[None, None]
            return CausalBias(source_bias, near)

        biases = {window: bias(window) for window in set(config.windows)}
        rotations = {w: Rotation.at(place[None, :], config, w) for w in biases}
        x, start = self.embed_source(source), jnp.zeros_like(source_len)
        for layer, window in zip(self.encoder, config.windows, strict=True):
            x, _ = layer(x, start, biases[window], rotations[window], None)
        return self.encoder_norm(x), whole_tiles(source_bias, 3, MASKED)

    def project_source(self, layer: DecoderLayer, encoded: Array) -> KV:
        """Project the encoder's output for a decoder layer."""
        return layer.project_source(encoded)

    @staticmethod
    def encoder_params(params: Params) -> tuple[list[Params], list[Params]]:
        """See `EncoderDecoder.encoder_params`."""
        own = "encoder_" if "encoder_embedding" in params else ""
        names = [f"{own}{name}" for name in ("embedding", "embedding_scale", "after_image")]

        def projection(layer: Params) -> Params:
            if "cross" in layer:
                return layer["cross"]["kv"]
            return {name: layer["attention"][name] for name in ("qkv", "key_norm")}

        layers = [projection(params["decoder"][i]) for i in sorted(params["decoder"])]
        return [params.get(name) for name in (*names, "encoder", "encoder_norm")], layers

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
        x = self.embed(pack(tokens, packing))
        states, written = [x], []
        places = causal_places(self.config, start, count, slots, layout)
        for i, (layer, (bias, rotation)) in enumerate(zip(self.decoder, places, strict=True)):
            source, own = (
                (context.cross[i], context.cross_bias),
                None if cache is None else cache[i],
            )
            x, kv = layer(x, start, bias, rotation, source, own, packing)
            states.append(x)
            written.append(kv)
        return states, tuple(written)

    def embed(self, tokens: Array) -> Array:
        """Embed ids for the decoder: (B, K) → (B, K, E)."""
        rows = gemma_scaled(super().embed(tokens), self.matrix_dtype)
        return self._after_image(rows, tokens, "after_image")

    def embed_source(self, source: Array) -> Array:
        """Embed ids for the encoder: (B, S) → (B, S, E)."""
        if not self.config.two_embeddings:
            return self.embed(source)
        scale = self.encoder_embedding_scale
        rows = rows_of(self.encoder_embedding, scale, source, self.dtype)
        rows = gemma_scaled(rows, self.matrix_dtype)
        return self._after_image(rows, source, "encoder_after_image")

    def _after_image(self, rows: Array, tokens: Array, name: str) -> Array:
        """Put a T5Gemma 2's embedding of the token after an image into its places."""
        if not self.config.merged:
            return rows
        at = jnp.equal(tokens, self.config.eoi_token_index)  # type: ignore[union-attr]
        apart = jnp.broadcast_to(getattr(self, name)[...].astype(rows.dtype), rows.shape)
        return jnp.where(at[..., None], apart, rows)

    def logits(self, hidden: Array) -> Array:
        """Logits of hidden states: (..., E) → (..., V)."""
        return capped(super().logits(hidden), self.config.final_logit_softcapping)

    def matrices(self) -> dict[str, bool]:
        """See `Decoder.matrices`."""
        own = {"encoder_embedding": False} if self.config.two_embeddings else {}
        return super().matrices() | own
