"""EAGLE: one layer that drafts from the target's own hidden states.

EAGLE-1 (Li et al. 2024, 2401.15077) predicts the target's next feature, the hidden state that the
target's head reads, and uses that head. EAGLE-3 (2503.01840) reads the states of three of the
target's layers, predicts tokens alone, and has its own head over frequent ids.

Let f_s be the target's feature after token x_s. Slot s of the one layer reads the pair

    (f_{s−1}, embedding of x_s)    and gives h_s, from which the token x_{s+1} is drawn.

While it drafts there is no f_{s−1}, and h_{s−1} replaces it. Once the target has read the block,
`observe` computes the block's keys and values again, from the target's features. They overwrite
the slots that drafting made from guesses. With known tokens a b c and drafts [d e], of which d is
accepted and x follows:

    begin    slot 2  (f_1, c)  → h_2, d drawn
    extend   slot 3  (h_2, d)  → h_3, e drawn
    target   reads [c d e]     → f_2, f_3 and one that is not used
    observe  slots 2, 3, 4     (f_1, c) (f_2, d) (f_3, e)
    begin    slot 4  (f_3, x)  → overwrites the rejected e

In a pass of one position `observe` keeps the feature and computes nothing, so an EAGLE is free
where nobody drafts. `begin` fills the slots that lag.

The embedding and EAGLE-1's head are the target's arrays, and are not stored. A published head
with another embedding keeps its own. In an encoder-decoder the layer may read the encoder's
output too, by cross-attention.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from specjax import checkpoints, devices
from specjax.checkpoints import llama as names_of
from specjax.checkpoints.tensors import Held
from specjax.drafters.base import Drafter, block_at, catch_up
from specjax.drafters.eagle_network import (
    EagleConfig,
    Network,
    Source,
    settings_of,
    tensor_names,
)
from specjax.models import int8
from specjax.models.attention import KV, empty
from specjax.models.checkpoint import Checkpoint, decoder_of
from specjax.models.decoder import Decoder
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange, narrow_weights
from specjax.models.llama import LlamaConfig
from specjax.models.t5 import T5Config
from specjax.pytrees import pytree
from specjax.types import Encoding, Inputs, Model

TABLE = "embed_tokens.weight"  # in the files of a head with its own embedding


class EagleState(NamedTuple):
    """The state of an EAGLE."""

    cache: KV  # of the one layer
    end: Int[Array, " B"]  # slots before it hold pairs with true features
    features: Float[Array, "B T E"]  # entry s: the target's feature for slot s; of known tokens
    guess: Float[Array, "B E"]  # h of the last token that was drafted from


@pytree
class Eagle(Drafter):
    """An EAGLE-1 or EAGLE-3 of one target. Made by `fresh`, `from_tensors` or `attached.load`."""

    guesses: ClassVar[bool] = True
    stride: ClassVar[int] = 8
    """Slots per call while the cache catches up."""

    target: LanguageModel
    """The target, for its embedding, head and encoder; shared."""
    params: Any
    """The parameters of the EAGLE itself."""
    ids: Int[Array, " N"] | None
    """EAGLE-3: the target's id of each row of its head."""
    row_of: Int[Array, " V"] | None
    """EAGLE-3: the row of each id of the target; N where it has none."""
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    config: EagleConfig = dataclasses.field(metadata={"static": True})
    table: Float[Array, "V E"] | None = None
    """The EAGLE's own embedding; None: the target's."""

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def module(self) -> Network:
        """The network with its parameters."""
        return nnx.merge(self.graphdef, self.params, copy=True)

    @property
    def dtype(self) -> Any:
        """The dtype of norms, cache and features; on a CPU matrices may be narrower."""
        return self.params["feed_forward_norm"]["scale"].dtype

    def sees(self, target: Model) -> Model:
        decoder_of(target, "EAGLE")
        taps = self.config.taps
        return dataclasses.replace(target, taps=taps) if taps else target  # type: ignore[type-var]

    @property
    def shares(self) -> bool:
        """Whether the layer reads the target's encoding (`sharing.shares`)."""
        return self.config.cross

    def start(self, inputs: Inputs, buffer_len: int):
        """Make the state, and project the target's encoding if the layer reads the source."""
        layer, module = self.config.layer, self.module
        batch = inputs.prompt.shape[0]
        heads, size = layer.num_key_value_heads, layer.head_dim
        first = jnp.zeros((layer.hidden_size,), self.dtype)
        if self.config.first_learned:
            first = module.first[...]
        first = jnp.broadcast_to(first[None, :], (batch, len(first)))
        features = jnp.zeros((batch, buffer_len, len(first[0])), self.dtype).at[:, 0].set(first)
        cache = empty(batch, heads, buffer_len, size, self.dtype)
        end = jnp.zeros((batch,), jnp.int32)
        # Fill slot 0 now: a prompt of two tokens has a pass of one position.
        cache = self.module.remember(self.embed(inputs.prompt[:, :1]), first[:, None], end, cache)
        state = EagleState(cache, end + 1, features, first)
        return self.read(*inputs[:2], inputs.encoding), state

    def read(
        self,
        source: Int[Array, "B S"],
        source_len: Int[Array, " B"],
        encoding: Encoding | None = None,
    ) -> Source | tuple[()]:
        """Encode the source for the layer; () if it does not read it.

        Args:
          encoding: the target's, of this source; None: its encoder runs.
        """
        if not self.config.cross:
            return ()
        if encoding is None:
            encoding = Encoding(*self.target.module().read(source, source_len))
        output = encoding.output.astype(self.dtype)
        return self.module.cross.source(output), encoding.bias

    def observe(self, tokens, start, hidden, count, context, state):
        """Keep the features. If there may have been drafts, compute the block's keys and values
        again, each token with the target's feature of the token before it."""
        slots = start[:, None] + 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        put = jax.vmap(lambda row, at, some: row.at[at].set(some, mode="drop"))
        features = put(state.features, slots, self.features(hidden))
        if tokens.shape[1] == 1:
            return state._replace(features=features)
        cache = self._remember(tokens, features, start, state.cache)
        # A row that lags has no pairs between its end and the block.
        end = jnp.where(state.end < start, state.end, jnp.maximum(state.end, start + count))
        return EagleState(cache, end, features, state.guess)

    def begin(self, tokens, length, context, state, *, lags=True):
        """Fill the slots that lag, `stride` at a time, and then run the newest token."""
        newest, cache = length - 1, state.cache

        def feed(at, count, cache):
            return self._remember(block_at(tokens, at, count), state.features, at, cache)

        if lags:
            cache = catch_up(feed, state.end, newest, min(self.stride, tokens.shape[1]), cache)
        here = block_at(tokens, newest, 1)[:, 0], block_at(state.features, newest, 1)[:, 0]
        return self._guess(*here, newest, context, state._replace(cache=cache, end=length))

    def extend(self, token, position, context, state):
        return self._guess(token, state.guess, position, context, state)

    def _remember(self, tokens, features, at, cache):
        """Write keys and values of tokens from a slot on."""
        return self.module.remember(
            self.embed(tokens), block_at(features, at, tokens.shape[1]), at, cache
        )

    def _guess(self, token, feature, position, context, state):
        pair = self.embed(token[:, None]), feature[:, None]
        hidden, cache = self.module(*pair, position, state.cache, context)
        return hidden[:, 0], state._replace(cache=cache, guess=hidden[:, 0])

    def fork(self, state):
        return state._replace(features=()), state.features

    def join(self, own, shared):
        return own._replace(features=shared)

    def features(self, hidden: Float[Array, "*batch F"]) -> Float[Array, "*batch E"]:
        """Map the target's hidden states to the features of pairs."""
        return self.module.feature(hidden.astype(self.dtype))

    def embed(self, tokens: Int[Array, "B K"]) -> Float[Array, "B K E"]:
        """Embed tokens by the target's table, or the EAGLE's own."""
        if self.table is not None:
            return self.table[tokens]
        return self.target.module().embed(tokens).astype(self.dtype)

    def logits(self, hidden):
        if self.row_of is None:
            return self.target.logits(hidden.astype(self.target_dtype))
        few = self.module.few(hidden)
        # A gather, because a scatter of the rows is a loop on a CPU.
        found = few.at[..., self.row_of].get(mode="clip")
        known = jnp.broadcast_to(self.row_of < self.config.rows, found.shape)
        return jnp.where(known, found, -jnp.inf)

    @property
    def target_dtype(self) -> Any:
        """The dtype of the features that the target's head reads."""
        return self.target.module().dtype

    # --- files -----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The settings for `from_tensors`, as JSON values."""
        return settings_of(self.config)

    def tensors(self) -> dict[str, np.ndarray]:
        """The EAGLE's parameters by the names of published heads; d2t[i] is ids[i] − i."""
        found = checkpoints.unfilled(self.module, tensor_names(self.config))
        if self.ids is not None:
            found["d2t"] = np.asarray(self.ids, np.int64) - np.arange(len(self.ids))
        if self.table is not None:
            found[TABLE] = np.asarray(self.table)
        return found

    @classmethod
    def from_tensors(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: Checkpoint
    ) -> "Eagle":
        """Make an EAGLE of `target` from `settings` and `tensors`.

        Raises:
          ValueError: the parts do not fit together, or the target lacks the layers.
        """
        layer = names_of.config_from_hub(settings["layer"], {})
        config = EagleConfig(**{**settings, "layer": layer, "taps": tuple(settings["taps"])})
        floats = {name: Held.of(x) for name, x in tensors.items() if name not in ("d2t", TABLE)}
        dtype = next(iter(floats.values())).dtype
        module = _without_params(config, target, dtype)
        ids = None
        if config.taps:
            offsets = tensors.get("d2t", np.zeros(config.rows, np.int64))
            ids = np.asarray(offsets, np.int64) + np.arange(len(offsets))
        found = _of(target, checkpoints.filled(module, tensor_names(config), floats), ids)
        table = tensors.get(TABLE)
        if table is None or _is_the_targets(table, found):
            return found
        return dataclasses.replace(found, table=jnp.asarray(table))


def _is_the_targets(table: np.ndarray, drafter: Eagle, most: int = 1024) -> bool:
    """Whether a head's embedding is a copy of the target's, up to the rounding of int8.

    At most `most` rows, evenly spaced, are compared; for an outline, none.

    Raises:
      ValueError: the table has another shape.
    """
    wanted = jax.eval_shape(drafter.embed, jax.ShapeDtypeStruct((1, 1), jnp.int32)).shape[-1]
    if table.ndim != 2 or table.shape[1] != wanted or len(table) < drafter.vocab_size:
        raise ValueError(
            f"{TABLE} has shape {table.shape}, and the target {drafter.vocab_size} ids of width "
            f"{wanted}."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(drafter.target)):
        return True
    ids = np.unique(np.linspace(0, drafter.vocab_size - 1, most).astype(np.int32))
    ours = np.asarray(drafter.embed(jnp.asarray(ids)[None])[0], np.float32)
    theirs = np.asarray(table[ids], np.float32)
    return bool(np.all(np.abs(ours - theirs) <= 0.01 * np.abs(ours).max(axis=1, keepdims=True)))


def _of(target: Checkpoint, module: Network, ids: np.ndarray | None) -> Eagle:
    graphdef, params = nnx.split(module)
    config, row_of = module.config, None
    if ids is not None:
        size = target.model.vocab_size
        if len(ids) != config.rows:
            raise ValueError(f"{len(ids)} ids are not those of a head of {config.rows} rows.")
        rows = target.config.vocab_size
        if len(wrong := ids[(ids < 0) | (ids >= rows)]):
            raise ValueError(f"d2t gives the id {wrong[0]}, and {target.name} has 0 … {rows - 1}.")
        real = ids < size  # the embedding's padding is never drafted
        row_of = np.full(size, config.rows, np.int32)
        row_of[ids[real]] = np.flatnonzero(real)
    return Eagle(
        target=target.model,
        params=nnx.to_pure_dict(params),
        ids=None if ids is None else jnp.asarray(ids, jnp.int32),
        row_of=None if row_of is None else jnp.asarray(row_of),
        graphdef=graphdef,
        config=config,
    )


def _without_params(config: EagleConfig, target: Checkpoint, dtype: Any) -> Network:
    """A network of shapes, with matrices as narrow as the target's; ValueError if it misfits."""
    module = decoder_of(target.model, "EAGLE")
    layers = module.cache_shape()[0]
    if wrong := [tap for tap in config.taps if not 0 <= tap <= layers]:
        raise ValueError(
            f"taps={config.taps}: {target.name} has {layers} layers, so {wrong[0]} is none of its "
            f"states 0 … {layers}. Name others."
        )
    if config.cross and not target.config.is_encoder_decoder:
        raise ValueError(
            f"cross=True: {target.name} has no encoder whose output could be read; set cross=False."
        )
    platform = devices.device_of(target.model).platform

    def build() -> Network:
        network = _network(config, target, 0, dtype)
        if module.matrix_dtype != module.dtype == dtype:
            narrow_weights(network, module.matrix_dtype)
        return arrange(network, platform)

    return nnx.eval_shape(build)


def _network(config: EagleConfig, target: Checkpoint, seed: int, dtype: Any) -> Network:
    encoder = _cross_sizes(target.config) if config.cross else None
    return Network(config, encoder, rngs=nnx.Rngs(seed), dtype=dtype)


def _cross_sizes(config: Any) -> tuple[T5Config, int]:
    """Heads as the target's for the encoder's output, and its width."""
    if isinstance(config, T5Config):
        return config, config.d_model
    heads, size = config.num_attention_heads, config.head_dim
    sizes = T5Config(d_model=config.hidden_size, num_heads=heads, d_kv=size)
    return sizes, config.encoder.hidden_size


# --- from scratch --------------------------------------------------------------------------------


def fresh(
    target: Checkpoint,
    *,
    version: int = 1,
    heads: int = 0,
    inner: int = 0,
    taps: tuple[int, ...] = (),
    ids: np.ndarray | None = None,
    cross: bool | None = None,
    seed: int = 0,
) -> Eagle:
    """Make an EAGLE for training (`training.eagle`), in float32. The target does not change.

    Args:
      target: a model of the T5, GPT-2 or Llama layout.
      version: 1 or 3.
      heads: number of attention heads; 0: one per 64 numbers of the target's width, at least 4.
      inner: width of the feed-forward layer; 0: twice the target's width.
      taps: EAGLE-3's taps; (): the published ones, after 2, L/2 and L − 3 layers, or after 1, L/2
        and L − 1 where there are fewer than eight.
      ids: distinct ids of EAGLE-3's head; None: all of the target's.
      cross: whether to read the encoder's output; None: if there is an encoder. Tasks that copy
        need it.

    Raises:
      ValueError: no such version, or settings that do not fit the target.
    """
    if version not in (1, 3):
        raise ValueError(f"version={version!r} must be 1 or 3.")
    module = decoder_of(target.model, "EAGLE")
    width, layers = width_of(module), module.cache_shape()[0]
    size = target.model.vocab_size
    if version == 3:
        taps = taps or default_taps(layers)
        ids = np.arange(size) if ids is None else np.asarray(ids)
    heads = heads or max(4, width // 64)
    config = EagleConfig(
        layer=LlamaConfig(
            vocab_size=module.config.vocab_size,
            hidden_size=width,
            intermediate_size=inner or 2 * width,
            num_hidden_layers=1,
            num_attention_heads=heads,
            bos_token_id=target.start_id,
            pad_token_id=target.start_id,
        ),
        taps=taps if version == 3 else (),
        rows=0 if ids is None or version == 1 else len(ids),
        cross=target.config.is_encoder_decoder if cross is None else cross,
    )
    _without_params(config, target, jnp.float32)  # refuses what does not fit
    network = _network(config, target, seed, jnp.float32)
    if version == 3:
        # Copies, because training donates its initial parameters.
        scale = jnp.array(module.final_norm.scale[...], jnp.float32)
        network.norm.scale.set_value(scale + getattr(module.final_norm, "offset", 0.0))
        network.head.weight.set_value(jnp.array(head_rows(module)[ids], jnp.float32))
    network = arrange(network, devices.device_of(target.model).platform)
    return _of(target, network, ids if version == 3 else None)


def default_taps(layers: int) -> tuple[int, ...]:
    """The default taps of EAGLE-3: numbers of the target's layers."""
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, max(layers - 1, 1))


def width_of(module: Decoder) -> int:
    """The width E of the embedding and of the features."""
    shape = module.embedding.shape
    turned = module.config.tie_word_embeddings and module.input_first
    return shape[0] if turned else shape[1]


def head_rows(module: Decoder) -> Array:
    """The rows of a model's head, (V, E), with the factor of its `logits`; a cap is left out."""
    weight, scale = module.turned_weight()[...], module.turned_scale()
    rows = weight.T if module.input_first else weight
    if scale is not None:
        rows = int8.signed(rows).astype(scale.dtype) * scale[...][:, None]
    if getattr(module.config, "scale_decoder_outputs", False):
        rows = rows * jnp.asarray(module.config.d_model**-0.5, rows.dtype)
    return rows
