"""T5Gemma (Zhang et al. 2025, 2504.06225) and T5Gemma 2 (2512.14856): encoder-decoders of Gemmas.

Encoder and decoder are stacks of Gemma layers (`llama.Layer`), of a Gemma 2 or of a Gemma 3. The
encoder's layers see both directions. A T5Gemma's decoder layer has cross-attention between its two
sublayers. A T5Gemma 2's has none: its self-attention also reads the encoder's output, through the
same projections, in one softmax. Images, which a T5Gemma 2 reads too, are left out.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import MASKED, CausalBias, capped
from specjax.models.blocks import Scope
from specjax.models.decoder import rows_of, table
from specjax.models.encoder_decoder import Context, EncoderDecoder
from specjax.models.llama import (
    INITIAL_STD,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    Rotation,
    causal_scopes,
    gemma_scaled,
    layer_of,
    norm_of,
)
from specjax.types import WHOLE, Call

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


class T5Gemma(EncoderDecoder):
    """Parameters of a T5Gemma or T5Gemma 2, and its functions; see `EncoderDecoder`."""

    config: Config
    encoder_embedding_scale: nnx.Param | None = None  # (V,) float32, of an embedding in int8

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        rows, options = config.vocab_size, {"rngs": rngs, "dtype": dtype}
        self.config, encoder = config, config.encoder
        self.embedding = table(rows, config.hidden_size, INITIAL_STD, **options)
        if config.two_embeddings:
            self.encoder_embedding = table(rows, encoder.hidden_size, INITIAL_STD, **options)
        if config.merged:
            self.after_image = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
            if config.two_embeddings:
                self.encoder_after_image = nnx.Param(jnp.zeros((encoder.hidden_size,), dtype))
        source = 0 if config.merged else encoder.hidden_size
        for name, one, read in (("encoder", encoder, 0), ("decoder", config, source)):
            count = one.num_hidden_layers
            layers = [layer_of(one, source=read, **options) for _ in range(count)]
            setattr(self, name, nnx.List(layers))
            setattr(self, f"{name}_norm", norm_of(one, one.hidden_size, dtype))
        if not config.tie_word_embeddings:
            self.head = table(rows, config.hidden_size, INITIAL_STD, **options)
        self.input_first = False  # of the head; see `arrange`

    def cache_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head size); see `Decoder.cache_shape`."""
        config = self.config
        return config.num_hidden_layers, config.num_key_value_heads, config.head_dim

    def source_scopes(self, padding: Array) -> list[Scope]:
        """See `EncoderDecoder.source_scopes`."""
        config, place = self.config.encoder, jnp.arange(padding.shape[3])

        def scope(window: int) -> Scope:
            near = padding
            if window:
                before, after = self.config.sees(window)
                offset = place[None, :] - place[:, None]
                seen = (-before <= offset) & (offset <= after)
                near = padding + jnp.where(seen, 0.0, MASKED)[None, None]
            rotation = Rotation.at(place[None, :], config, window)
            return Scope(WHOLE, CausalBias(padding, near), rotation)

        found = {window: scope(window) for window in set(config.windows)}
        return [found[window] for window in config.windows]

    def scopes(self, call: Call, count: int, slots: int, context: Context) -> list[Scope]:
        """See `Decoder.scopes`."""
        pairs = zip(causal_scopes(self.config, call, count, slots), context.cross, strict=True)
        return [scope._replace(source=(kv, context.cross_bias)) for scope, kv in pairs]

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
