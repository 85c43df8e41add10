"""A T5 in training: dropout, and layers that are computed again in the backward pass.

Dropout is where transformers' T5 has it: after the embedding and the last norm of each stack, on
the weights of attention, within the feed-forward layer, and on the output of each sublayer before
it is added. Masks follow from a key and the shape alone, so they are the same on every mesh.

With `remat` the forward pass keeps the input of each layer, and the encoder's output once: a
decoder layer projects it to keys and values again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Key

from specjax.models.attention import KV, CausalBias
from specjax.models.blocks import Scope
from specjax.models.t5 import T5
from specjax.support.ranges import number


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a model runs in training. The default is as in decoding, for any family.

    Raises:
      ValueError: a rate outside [0, 1).
    """

    dropout: float = 0.0
    remat: bool = False

    def __post_init__(self):
        number("dropout", self.dropout, "[0, 1)", "0 drops nothing")

    def check(self, family: str) -> None:
        """ValueError unless models of the family run so."""
        if (self.dropout or self.remat) and family != "t5":
            raise ValueError(
                f"dropout={self.dropout} and remat={self.remat} are for T5, and the model is a "
                f"{family}: set dropout=0.0 and remat=False."
            )

    def __call__(self, module: Any, key: Key[Array, ""]) -> Any:
        """Change a module in place, for one call within a trace; return it."""
        if not (self.dropout or self.remat):
            return module
        assert isinstance(module, T5)
        keys = iter(jax.random.split(key, 2 + len(module.encoder) + len(module.decoder)))
        parts: dict[str, Any] = {}
        for name in ("encoder", "decoder"):
            drop = Drop(next(keys), self.dropout)
            norm = f"{name}_norm"
            parts[norm] = _Dropped(getattr(module, norm), after=drop)
            parts[name] = [_Layer(layer, next(keys), self) for layer in getattr(module, name)]
        parts["embed"] = _Dropped(module.embed, after=drop)
        vars(module).update(parts)  # not through nnx: these are no parts of a graph
        return module


class Drop:
    """Dropout with a mask of its own in each call."""

    def __init__(self, key: Key[Array, ""], rate: float):
        self.key, self.rate, self.calls = key, rate, 0

    def __call__(self, x: Array) -> Array:
        """Set a share of the numbers to 0, and divide the others by the share that is kept."""
        if not self.rate:
            return x
        self.calls += 1
        key = jax.random.fold_in(self.key, self.calls)
        kept = jax.random.bernoulli(key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), jnp.zeros((), x.dtype))


def _unchanged(x: Array) -> Array:
    return x


@dataclasses.dataclass
class _Dropped:
    """A layer with dropout before or after it; everything else is the layer's."""

    inner: Any
    before: Callable[[Array], Array] = _unchanged
    after: Callable[[Array], Array] = _unchanged

    def __call__(self, x: Array) -> Array:
        return self.after(self.inner(self.before(x)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Encoded(NamedTuple):
    """The encoder's output, in the place of a layer's keys and values."""

    states: Array  # (B, S, E)


class _Layer:
    """A layer of either stack in training."""

    def __init__(self, layer: Any, key: Key[Array, ""], mode: Mode):
        self.split, self.key, self.mode = nnx.split(layer), key, mode

    def source(self, states: Array) -> _Encoded:
        """The output itself: its projection is put off to the call."""
        return _Encoded(states)

    def __call__(self, x: Array, scope: Scope, cache: None = None) -> tuple[Array, KV]:
        graphdef, params = self.split

        def run(params: nnx.State, key: Key[Array, ""], x: Array, scope: Scope) -> Any:
            layer = nnx.merge(graphdef, params)
            if scope.source is not None:
                encoded, bias = scope.source
                scope = scope._replace(source=(layer.source(encoded.states), bias))
            if self.mode.dropout:
                _with_dropout(layer, Drop(key, self.mode.dropout))
            return layer(x, scope, cache)

        return (jax.checkpoint(run) if self.mode.remat else run)(params, self.key, x, scope)


def _with_dropout(layer: Any, drop: Drop) -> None:
    """Put dropout into a layer's sublayers, in place."""
    inner = layer.feed_forward
    vars(inner)["output"] = _Dropped(inner.output, before=drop, after=drop)
    vars(layer)["attention"] = _Attention(layer.attention, drop)
    if layer.cross is not None:
        vars(layer)["cross"] = _Attention(layer.cross, drop)


@dataclasses.dataclass
class _Attention:
    """`blocks.Attention` with dropout; the tokens are the whole text, and there is no cache."""

    inner: Any
    drop: Drop

    def __call__(self, x: Array, scope: Scope, cache: None) -> tuple[Array, KV]:
        queries, kv = self.inner.project(x)
        bias = scope.bias.within if isinstance(scope.bias, CausalBias) else scope.bias
        return self.drop(self.inner.output(_attend(queries, kv, bias, self.drop))), kv

    def read(self, x: Array, source: tuple[KV, Array], call: Any) -> Array:
        rows, count, _ = x.shape
        heads = self.inner.heads
        queries = jnp.moveaxis(self.inner.query(x).reshape(rows, count, heads, -1), 1, 2)
        return self.drop(self.inner.output(_attend(queries, *source, self.drop)))


def _attend(queries: Array, kv: KV, bias: Array, drop: Drop) -> Array:
    """`attention.attend` with dropout on the weights."""
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    scores = jnp.einsum("bhkd,bhdt->bhkt", queries, kv.keys, preferred_element_type=wide) + bias
    weights = drop(jax.nn.softmax(scores, axis=-1)).astype(kv.values.dtype)
    mixed = jnp.einsum("bhkt,bhtd->bhkd", weights, kv.values)
    return jnp.moveaxis(mixed, 1, 2).reshape(len(queries), queries.shape[2], -1)
