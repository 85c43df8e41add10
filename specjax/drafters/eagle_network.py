"""The parameters of an EAGLE, one layer around those of a Llama, and their names in files."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from specjax.checkpoints import FAMILIES
from specjax.checkpoints import llama as names_of
from specjax.models.attention import KV, MASKED, CausalBias, causal_bias, write
from specjax.models.blocks import Attention, Scope
from specjax.models.layers import Linear, RMSNorm, project
from specjax.models.llama import INITIAL_STD, LlamaConfig, Rotation, feed_forward_of, heads_of
from specjax.models.t5 import T5Config, attention_of
from specjax.types import Call


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The architecture of an EAGLE: EAGLE-1 without taps, EAGLE-3 with them."""

    layer: LlamaConfig
    """Sizes of the one layer, which is as wide as the target."""
    taps: tuple[int, ...] = ()
    """Numbers of the target's layers after which EAGLE-3 takes a state: three."""
    rows: int = 0
    """Number of rows of EAGLE-3's own head, one for each frequent id."""
    fuse_bias: bool = False
    """Whether the projection of pairs or taps has a bias."""
    residual_normed: bool = False
    """EAGLE-3: whether the residual stream begins after the feature's norm."""
    first_learned: bool = True
    """Whether f_{−1} is a learned feature. If not, no other slot sees slot 0, and a round that
    must begin there uses zeros."""
    cross: bool = False
    """Whether the layer reads the encoder's output."""


Source = tuple[KV, Array]
"""Keys and values of the encoder's output for the layer, S slots, and their bias, (B, 1, 1, S)."""


class Network(nnx.Module):
    """The parameters of an EAGLE: a Llama layer without a first norm, or with one for each half."""

    def __init__(
        self,
        config: EagleConfig,
        encoder: tuple[T5Config, int] | None,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
    ):
        """Build the layer; `encoder`: heads for the encoder's output, and its width."""
        layer, width, taps = config.layer, config.layer.hidden_size, len(config.taps)

        def norm() -> RMSNorm:
            return RMSNorm(width, layer.rms_norm_eps, dtype=dtype)

        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        inputs = (taps or 2) * width
        self.config = config
        self.fuse = Linear(inputs, width, inputs**-0.5, bias=config.fuse_bias, **options)
        read = 2 * width if taps else width
        self.attention = Attention(heads_of(layer, dtype), inputs=read, **options)
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward_of(layer, **options)
        if encoder is not None:
            sizes, source = encoder
            self.cross_norm, self.cross = norm(), attention_of(sizes, source=source, **options)
        if taps:
            self.embedding_norm, self.feature_norm, self.norm = norm(), norm(), norm()
            self.head = Linear(width, config.rows, INITIAL_STD, **options)
        if config.first_learned:
            self.first = nnx.Param(jnp.zeros((width,), dtype))

    def feature(self, hidden: Array) -> Array:
        """Map the target's states (..., F) to a pair's feature (..., E)."""
        if not self.config.taps:
            return hidden
        return self.fuse(hidden[..., self.config.layer.hidden_size :])

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        start: Array,
        cache: KV | None,
        source: Source | tuple[()],
    ) -> tuple[Array, KV]:
        """Run K pairs of each row, 2 × (B, K, E), in slots start … start+K−1 → h, and the cache."""
        count = embedded.shape[1]
        slots = count if cache is None else cache.values.shape[2]
        residual, x = self.enter(embedded, feature)
        scope = Scope(Call(start), self.bias(start, count, slots), self.rotation(start, count))
        attended, cache = self.attention(x, scope, cache)
        return self.leave(residual + attended, source), cache

    def remember(self, embedded: Array, feature: Array, start: Array, cache: KV) -> KV:
        """Write to the cache as `__call__` does, without computing h."""
        _, x = self.enter(embedded, feature)
        turned = self.rotation(start, x.shape[1])
        return write(cache, self.attention.project(x, rotation=turned)[1], start)

    def enter(self, embedded: Array, feature: Array) -> tuple[Array, Array]:
        """Map pairs to the residual stream and the input of attention."""
        if not self.config.taps:
            fused = self.fuse(jnp.concatenate([embedded, feature], axis=-1))
            return fused, fused
        normed = self.feature_norm(feature)
        x = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        return (normed if self.config.residual_normed else feature), x

    def leave(self, x: Array, source: Source | tuple[()]) -> Array:
        """Map the residual stream after self-attention to h."""
        if source:
            x = x + self.cross.read(self.cross_norm(x), source)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def rotation(self, start: Array, count: int) -> Rotation:
        """The rotation of K pairs from slot `start` on."""
        return Rotation.at(start[:, None] + jnp.arange(count)[None, :], self.config.layer)

    def bias(self, start: Array, count: int, slots: int) -> CausalBias:
        """A causal bias; without a first feature, slot 0 is seen by itself alone."""
        bias = causal_bias(start, count, slots)
        if not self.config.first_learned:
            query, key = jnp.arange(count)[:, None], jnp.arange(count)[None, :]
            first = (start[:, None, None] + key[None] == 0) & (key != query)[None]
            bias = bias._replace(
                before=bias.before.at[..., 0].set(MASKED),
                within=jnp.where(first[:, None], MASKED, bias.within),
            )
        return bias

    def few(self, hidden: Array) -> Array:
        """Apply EAGLE-3's own head: (..., E) → (..., rows), in at least float32."""
        wide = np.promote_types(hidden.dtype, jnp.float32)
        return project(self.norm(hidden), self.head.weight[...], self.head.input_first, wide)


def settings_of(config: EagleConfig) -> dict[str, Any]:
    """The settings of a config, as JSON values."""
    family = FAMILIES[config.layer.model_type]
    layer = {"model_type": config.layer.model_type, **family.config_to_hub(config.layer)}
    return {**dataclasses.asdict(config), "taps": list(config.taps), "layer": layer}


def tensor_names(config: EagleConfig) -> dict[tuple, dict[str, int]]:
    """The published heads' names of the tensors of each parameter, by its path.

    The cross-attention and the first feature, which those heads lack, keep their names here.
    """
    place = "midlayer" if config.taps else "layers.0"
    found: dict[tuple, dict[str, int]] = {("fuse", "weight"): {"fc.weight": 1}}
    if config.fuse_bias:
        found["fuse", "bias"] = {"fc.bias": 1}
    prefix = f"{names_of.PREFIX}layers.0"
    names = FAMILIES[config.layer.model_type].tensor_names(config.layer)
    for path, parts in names.items():
        if path[:2] == ("layers", 0) and path[2] != "attention_norm":
            found[path[2:]] = {place + name[len(prefix) :]: n for name, n in parts.items()}
    if config.taps:
        found["embedding_norm", "scale"] = {f"{place}.input_layernorm.weight": 1}
        found["feature_norm", "scale"] = {f"{place}.hidden_norm.weight": 1}
        found["norm", "scale"] = {"norm.weight": 1}
        found["head", "weight"] = {"lm_head.weight": 1}
    if config.cross:
        found["cross_norm", "scale"] = {"cross_norm.weight": 1}
        for part in ("query", "kv", "output"):
            found["cross", part, "weight"] = {f"cross.{part}.weight": 1}
    if config.first_learned:
        found["first",] = {"first": 1}
    return found
