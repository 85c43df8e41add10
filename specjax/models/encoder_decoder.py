"""The part that encoder-decoders share: the source is encoded once, and layers read it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import KV, MASKED
from specjax.models.decoder import Decoder
from specjax.types import Encoding, Inputs, Params


class Context(NamedTuple):
    """The values that decoding reads and never writes."""

    cross: tuple[KV, ...]  # per decoder layer: the encoder's keys and values, in whole tiles
    cross_bias: Array  # (B, 1, 1, slots): 0, or MASKED at padding
    # T5: (H, 2T) by offset + T, MASKED ahead of the query, one for all layers or for each; None:
    # made in each call.
    self_biases: tuple[Array, ...] | None = None


class EncoderDecoder(Decoder):
    """The base of families with an encoder.

    Beside the parts of a `Decoder`, a family sets `decoder`, the list of its layers, and
    `decoder_norm`, and defines `read`, `project_source` and `encoder_params`.
    """

    decoder: nnx.List
    decoder_norm: Any

    @property
    def final_norm(self) -> Any:
        """The norm between the last layer and the head."""
        return self.decoder_norm

    def read(self, source: Array, source_len: Array) -> tuple[Array, Array]:
        """Run the encoder: its output, (B, S, E), and the bias of its slots, in whole tiles.

        Args:
          source: (B, S) int32, right-padded.
          source_len: (B,) int32, ≥ 1.
        """
        raise NotImplementedError

    def project_source(self, layer: Any, encoded: Array) -> KV:
        """Project the encoder's output to the keys and values that a decoder layer reads.

        They are in whole tiles, or attention would add slots in each call.
        """
        raise NotImplementedError

    @staticmethod
    def encoder_params(params: Params) -> tuple[Sequence[Params], list[Params]]:
        """The parameters that `read` reads, and by decoder layer those that project its output.

        Two models in which these are the same arrays have the same keys and values.
        """
        raise NotImplementedError

    def encode(self, source: Array, source_len: Array, encoding: Encoding | None = None) -> Context:
        """Run the encoder once and project its output for every decoder layer.

        Args:
          source, source_len: as in `read`.
          encoding: of this source. None: the encoder runs.
        """
        if encoding is None:
            encoding = Encoding(*self.read(source, source_len))
        encoded = encoding.output.astype(self.dtype)

        def project(layer: Any) -> KV:
            kv = self.project_source(layer, encoded)
            return kv.quantised() if self.int8_cache else kv

        known = encoding.cross or (None,) * len(self.decoder)
        pairs = zip(self.decoder, known, strict=True)
        cross = tuple(project(layer) if kv is None else kv for layer, kv in pairs)
        return Context(cross, encoding.bias)

    def start(
        self, inputs: Inputs, buffer_len: int, encoding: Encoding | None = None
    ) -> tuple[Context, tuple[KV, ...]]:
        """Encode, and make an empty cache of `buffer_len` slots.

        Args:
          encoding: as in `encode`.
        """
        context = self.encode(inputs.source, inputs.source_len, encoding)
        return context, self.empty_cache(inputs.prompt.shape[0], buffer_len)


def padding_bias(source: Array, source_len: Array) -> Array:
    """The bias of a source's slots, (B, 1, 1, S): 0, or MASKED at padding."""
    padding = jnp.arange(source.shape[1])[None, :] >= source_len[:, None]
    return jnp.where(padding, MASKED, 0.0)[:, None, None, :]
