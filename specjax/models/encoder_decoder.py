"""The part that encoder-decoders share: the source is encoded once, and layers read it."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from specjax.models.attention import KV, MASKED, whole_tiles
from specjax.models.blocks import Layer, Scope
from specjax.models.decoder import Decoder
from specjax.types import Encoding, Params


class Context(NamedTuple):
    """The values that decoding reads and never writes."""

    cross: tuple[KV, ...]  # per decoder layer: the encoder's keys and values, in whole tiles
    cross_bias: Array  # (B, 1, 1, slots): 0, or MASKED at padding
    # T5: (H, 2T) by offset + T, MASKED ahead of the query, one for all layers or for each; None:
    # made in each call.
    self_biases: tuple[Array, ...] | None = None


class EncoderDecoder(Decoder):
    """The base of families with an encoder.

    Beside the parts of a `Decoder`, a family sets `encoder`, the list of its layers, and
    `encoder_norm`, and defines `source_scopes`.
    """

    stack: ClassVar[str] = "decoder"
    last: ClassVar[str] = "decoder_norm"

    encoder: nnx.List
    encoder_norm: Any
    decoder: nnx.List
    decoder_norm: Any

    def read(self, source: Array, source_len: Array) -> tuple[Array, Array]:
        """Run the encoder: its output, (B, S, E), and the bias of its slots, in whole tiles.

        Args:
          source: (B, S) int32, right-padded.
          source_len: (B,) int32, ≥ 1.
        """
        bias = padding_bias(source, source_len)
        scopes, x = self.source_scopes(bias), self.embed_source(source)
        for layer, scope in zip(self.encoder, scopes, strict=False):
            x, _ = layer(x, scope)
        return self.encoder_norm(x), whole_tiles(bias, 3, MASKED)

    def embed_source(self, source: Array) -> Array:
        """Embed ids for the encoder: (B, S) → (B, S, E)."""
        return self.embed(source)

    def source_scopes(self, padding: Array) -> Iterable[Scope]:
        """What the queries of each encoder layer see; `padding`: see `padding_bias`."""
        raise NotImplementedError

    @staticmethod
    def encoder_params(params: Params) -> tuple[list[Params], list[Params]]:
        """The parameters that `read` reads, and by decoder layer those that project its output.

        Two models in which these are the same arrays have the same keys and values.
        """
        own = "encoder_" if "encoder_embedding" in params else ""
        names = [f"{own}{name}" for name in ("embedding", "embedding_scale", "after_image")]

        def projection(layer: Params) -> Params:
            if "cross" in layer:
                return layer["cross"]["kv"]
            return {name: layer["attention"][name] for name in ("qkv", "key_norm")}

        layers = [projection(params["decoder"][i]) for i in sorted(params["decoder"])]
        names += ["encoder", "encoder_bias", "encoder_norm"]
        return [params.get(name) for name in names], layers

    def encode(self, source: Array, source_len: Array, encoding: Encoding | None = None) -> Context:
        """Run the encoder once and project its output for every decoder layer.

        Args:
          source, source_len: as in `read`.
          encoding: of this source. None: the encoder runs.
        """
        if encoding is None:
            encoding = Encoding(*self.read(source, source_len))
        encoded = encoding.output.astype(self.dtype)

        def project(layer: Layer) -> KV:
            kv = layer.source(encoded)
            return kv.quantised() if self.int8_cache else kv

        known = encoding.cross or (None,) * len(self.decoder)
        pairs = zip(self.decoder, known, strict=True)
        cross = tuple(project(layer) if kv is None else kv for layer, kv in pairs)
        return Context(cross, encoding.bias)


def padding_bias(source: Array, source_len: Array) -> Array:
    """The bias of a source's slots, (B, 1, 1, S): 0, or MASKED at padding."""
    padding = jnp.arange(source.shape[1])[None, :] >= source_len[:, None]
    return jnp.where(padding, MASKED, 0.0)[:, None, None, :]
