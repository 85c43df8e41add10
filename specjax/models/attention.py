"""Attention over a cache that is passed in and out, shared by the model families.

Axis legend, as everywhere: B rows, S source length, T buffer length, K tokens in one call,
V vocabulary, L layers, H heads, D head size, E model width, F feed-forward width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import devices
from specjax.models import int8
from specjax.models.products import row_sum
from specjax.types import Layout

# Added to the logit of a slot that a query must not see. Finite, so that a row with all slots
# masked gives some average and not NaN; far below any real logit, so that exp gives 0.
MASKED = -1e30


class KV(NamedTuple):
    """Keys and values of one attention layer.

    Keys lie by column: otherwise XLA's CPU backend takes longer for the scores of a few queries,
    since it transposes the keys.
    """

    keys: Array  # (B, H, D, T)
    values: Array  # (B, H, T, D)
    key_scale: Array | None = None  # (B, H, T) float32, of keys in int8; None: they are floats
    value_scale: Array | None = None  # (B, H, T) float32, of values in int8

    @classmethod
    def of(cls, keys: Array, values: Array) -> "KV":
        """Make a cache from keys and values of (B, H, T, D) each."""
        return cls(jnp.swapaxes(keys, 2, 3), values)

    def quantised(self) -> "KV":
        """Round to int8, with a scale for each slot's key and value of each head."""
        keys, key_scale = int8.quantise(self.keys, axis=2)
        values, value_scale = int8.quantise(self.values, axis=3)
        return KV(keys, values, key_scale, value_scale)

    def kept_narrow(self, queries: Array) -> "KV":
        """Keep int8 arrays narrow in loops; see `int8.late`.

        There may be one row of `self` for all queries: beams share the encoder's output.
        """
        if self.key_scale is None:
            return self
        rows = len(self.keys)
        keys, values = (
            int8.late(part, queries, lambda queries: queries[:rows, :, :1, :1]) for part in self[:2]
        )
        return self._replace(keys=keys, values=values)

    def part(self, at: Array, size: int) -> "KV":
        """Cut out `size` slots from `at` on."""
        return self.by_slots(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, at, size, axis))

    def by_slots(self, do: Callable[..., Array], *others: "KV") -> "KV":
        """Apply `do` to each array and the arrays of others beside it, with the axis of its slots.

        The axis counts from the end, so a row without the axis of rows works too.
        """
        parts = [
            None if x is None else do(x, axis, *rest)
            for axis, x, *rest in zip((-1, -2, -1, -1), self, *others, strict=True)
        ]
        return KV(*parts)  # type: ignore[arg-type]


def capped(x: Array, cap: float) -> Array:
    """Bend numbers smoothly into (−cap, cap): cap · tanh(x / cap). A cap of 0 changes nothing."""
    return cap * jnp.tanh(x / cap) if cap else x


def attend(queries: Array, kv: KV, bias: Array, cap: float = 0.0) -> Array:
    """Softmax attention over T keys and values.

    Args:
      queries: (B, H, K, D), already scaled where the family scales them (T5 does not).
      bias: broadcastable to (B, H, K, T), float32; `MASKED` where a query must not look.
      cap: of the scores, before the bias is added; see `capped`.

    Returns:
      (B, K, H·D) in the dtype of the values, or of the queries if those are in int8; the
      softmax is taken in at least float32.
    """

    def by_tiles(queries: Array, kv: KV, bias: Array) -> Array:
        two = _two_queries(queries)
        mean = Mean.empty(two).join(two, kv, bias, cap)
        return _join_heads(mean.average(queries).astype(_result_dtype(queries, kv)))

    def at_once(queries: Array, kv: KV, bias: Array) -> Array:
        return _attend(queries, [(kv.kept_narrow(queries), bias)], cap)

    return devices.by_platform(queries, kv, bias, cpu=by_tiles, accelerator=at_once)


def _attend(queries: Array, parts: Sequence[tuple[KV, Array]], cap: float) -> Array:
    """Softmax attention over the slots of all parts together, each with its bias; see `attend`."""
    scores = [_scores(queries, kv, bias, cap) for kv, bias in parts]
    tops = [part.max(-1, keepdims=True) for part in scores]
    # The top cancels, and so do its gradients.
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    weights = [jnp.exp(part - top) for part in scores]
    pairs = zip(weights, parts, strict=True)
    mixed = functools.reduce(jnp.add, (_mix(w, kv, queries.dtype) for w, (kv, _) in pairs))
    total = functools.reduce(jnp.add, (part.sum(-1, keepdims=True) for part in weights))
    return _join_heads((mixed / total).astype(_result_dtype(queries, parts[0][0])))


def _result_dtype(queries: Array, kv: KV) -> Any:
    """The dtype of averaged values."""
    return kv.values.dtype if kv.key_scale is None else queries.dtype


def _scores(queries: Array, kv: KV, bias: Array, cap: float) -> Array:
    """Scores (B, H, Q, D) · (B, H, D, T), capped, + bias: (B, H, Q, T), in at least float32.

    The bias is of K queries. Q is a multiple of K if groups of heads are stacked as queries.
    """
    wide, keys = np.promote_types(queries.dtype, jnp.float32), kv.keys
    if kv.key_scale is not None:
        keys = keys.astype(queries.dtype)
    products = jnp.einsum("bhkd,bhdt->bhkt", queries, keys, preferred_element_type=wide)
    if kv.key_scale is not None:
        products = products * kv.key_scale[:, :, None, :].astype(wide)
    scores, count = capped(products, cap), bias.shape[2]
    if count in (1, scores.shape[2]):
        return scores + bias.astype(wide)
    by_head = scores.reshape(*scores.shape[:2], -1, count, scores.shape[3])
    return (by_head + bias[:, :, None].astype(wide)).reshape(scores.shape)


def _mix(weights: Array, kv: KV, dtype: Any) -> Array:
    """Average values: (B, H, K, T) · (B, H, T, D) → (B, H, K, D), in the dtype of the weights.

    Heads stay in front: asked for (B, K, H, D), XLA's CPU backend swaps the factors, and the
    product takes several times as long.

    Args:
      dtype: the dtype in which values in int8 are multiplied.
    """
    scaled, values = weights, kv.values
    if kv.value_scale is not None:
        scaled = weights * kv.value_scale[:, :, None, :].astype(weights.dtype)
        values = values.astype(dtype)
    narrow = scaled.astype(values.dtype)
    return jnp.einsum("bhkt,bhtd->bhkd", narrow, values, preferred_element_type=weights.dtype)


def _join_heads(mixed: Array) -> Array:
    """Join heads: (B, H, K, D) → (B, K, H·D)."""
    return jnp.moveaxis(mixed, 1, 2).reshape(mixed.shape[0], mixed.shape[2], -1)


class CausalBias(NamedTuple):
    """The bias on the scores of K queries, for slots from before the call and for its own K."""

    before: Array  # (B or 1, H or 1, K or 1, T) float32, MASKED from each row's `start` on
    within: Array  # (B or 1, H or 1, K, K) float32, MASKED ahead of the query
    first: Array | int = 0  # () int32: a slot before which no query looks


def causal_bias(
    start: Array, count: int, slots: int, window: int = 0, layout: Layout | None = None
) -> CausalBias:
    """The bias of a causal mask alone: a query sees itself and all slots before it.

    Args:
      start: (B,) int32, the position of each row's first query.
      count: K.
      slots: T.
      window: the query at t sees only positions in (t − window, t]. 0: it sees all of them.
      layout: None: the K tokens are one after the other.
    """
    depth, near = layout or Layout.chain(count)
    if window:
        near = near & (depth[:, :, None] - depth[:, None, :] < window)
    slot, row = jnp.arange(slots)[None, None, None, :], start[:, None, None, None]
    old = slot < row
    first: Array | int = 0
    if 0 < window < slots:
        old &= slot > row + depth[:, None, :, None] - window
        first = jnp.maximum(jnp.min(start) - window + 1, 0)
    before, within = (jnp.where(seen, 0.0, MASKED) for seen in (old, near[:, None]))
    return CausalBias(before, within, first)


TILE = 64
"""Slots that attention sums together on a CPU. A cache has a whole number of tiles."""


def attend_and_write(
    queries: Array,
    new: KV,
    cache: KV | None,
    bias: CausalBias,
    start: Array,
    cap: float = 0.0,
    source: tuple[KV, Array] | None = None,
) -> tuple[Array, KV]:
    """Causal attention over a cache and the call's own K tokens, which are written to it.

    A CPU reads the filled slots tile by tile. An accelerator reads all slots, which takes fewer
    operations.

    Args:
      queries: (B, H, Q, D), scaled; Q is K, or a multiple if groups of heads share a key.
      new: of the K tokens.
      cache: of T slots. None: the K tokens are the whole text. In int8, own keys and values are
        rounded before they are read: results do not depend on the call in which a token came.
      start: (B,) int32, the position of each row's first query.
      cap: of the scores; see `capped`.
      source: further slots that all queries read, and their bias; None: there are none.

    Returns:
      (B, Q, H·D), and the cache with the new slots; without a cache, `new`.
    """
    fixed = () if source is None else (source,)
    if cache is None:
        return _attend(queries, [(new, bias.within), *fixed], cap), new
    if cache.key_scale is not None:
        new = new.quantised()
    operands = queries, write(cache, new, start), bias, start, fixed
    cpu, accelerator = (functools.partial(f, cap=cap) for f in (read_tiles, read_all))
    return devices.by_platform(*operands, cpu=cpu, accelerator=accelerator)


def read_tiles(
    queries: Array,
    cache: KV,
    bias: CausalBias,
    start: Array,
    fixed: Sequence[tuple[KV, Array]] = (),
    cap: float = 0.0,
) -> tuple[Array, KV]:
    """Attend to the parts `fixed`, then tile by tile to a cache that holds the K tokens.

    Tiles begin at multiples of `TILE`, whatever the positions of the queries are. A tile that a
    query does not see adds exactly 0 to its average. So a query's bits depend on its own slots
    alone. Tiles run from the first that a query sees to the last that is filled, and the cost
    follows the text, not the buffer.

    Returns:
      (B, Q, H·D), and the cache. It passes through the loop: read beside it, XLA's CPU backend
      would copy it.
    """
    length = cache.values.shape[2]
    if length % TILE:
        raise ValueError(f"a cache of {length} slots has no whole tiles; make it with `empty`.")
    two, seen = _two_queries(queries), by_slot(bias, start)
    mean = Mean.empty(two)
    for kv, part in fixed:
        mean = mean.join(two, kv, part, cap)
    filled = jnp.minimum(jnp.max(start) + bias.within.shape[3], length)
    end = jax.lax.div(filled + (TILE - 1), jnp.int32(TILE))
    first = jax.lax.div(jnp.asarray(bias.first, jnp.int32), jnp.int32(TILE))
    mean, cache = mean.join_tiles(two, cache, seen, cap, first, end)
    return _join_heads(mean.average(queries).astype(queries.dtype)), cache


def read_all(
    queries: Array,
    cache: KV,
    bias: CausalBias,
    start: Array,
    fixed: Sequence[tuple[KV, Array]] = (),
    cap: float = 0.0,
) -> tuple[Array, KV]:
    """Attend to all slots of a cache that holds the K tokens; those that are empty are MASKED."""
    narrow = ((kv.kept_narrow(queries), part) for kv, part in fixed)
    return _attend(queries, [(cache, by_slot(bias, start)), *narrow], cap), cache


def by_slot(bias: CausalBias, start: Array) -> Array:
    """The bias of each slot after the K tokens are written: (B, H or 1, K, T)."""
    own = jnp.arange(bias.before.shape[3])[None, :] - start[:, None]  # (B, T), 0 … K−1 at own slots
    count = bias.within.shape[3]
    at = jnp.clip(own, 0, count - 1)[:, None, None, :]
    within = jnp.take_along_axis(bias.within, at, axis=3)
    return jnp.where(((own >= 0) & (own < count))[:, None, None, :], within, bias.before)


class Mean(NamedTuple):
    """A softmax average of values that further slots can join, in at least float32."""

    mixed: Array  # (B, H, Q, D): Σ exp(score − top) · value
    total: Array  # (B, H, Q, 1): Σ exp(score − top)
    top: Array  # (B, H, Q, 1): the largest score

    @classmethod
    def empty(cls, queries: Array) -> "Mean":
        """The average of no slots, for queries (B, H, Q, D)."""
        wide = np.promote_types(queries.dtype, jnp.float32)
        none = jnp.zeros((*queries.shape[:3], 1), wide)
        return cls(jnp.zeros(queries.shape, wide), none, none + MASKED)

    def join(self, queries: Array, kv: KV, bias: Array, cap: float) -> "Mean":
        """Add T more slots to the average, tile by tile; arguments as in `attend`."""
        kv, bias = kv.by_slots(whole_tiles), whole_tiles(bias, 3, MASKED)
        tiles = kv.values.shape[2] // TILE
        if tiles == 1:
            return self._join(queries, kv.kept_narrow(queries), bias, cap)
        return self.join_tiles(queries, kv, bias, cap, 0, tiles)[0]

    def join_tiles(
        self, queries: Array, kv: KV, bias: Array, cap: float, first: Any, end: Any
    ) -> tuple["Mean", KV]:
        """Add tiles `first` … `end` − 1 to the average, and return the slots too.

        They pass through the loop: read beside it, a cache would be copied by XLA's CPU backend.
        """

        def tile(i, carry):
            mean, kv = carry
            part = jax.lax.dynamic_slice_in_dim(bias, i * TILE, TILE, 3)
            return mean._join(queries, kv.part(i * TILE, TILE), part, cap), kv

        return jax.lax.fori_loop(first, end, tile, (self, kv))

    def _join(self, queries: Array, kv: KV, bias: Array, cap: float) -> "Mean":
        """Add one tile."""
        scores = _scores(queries, kv, bias, cap)
        # The top cancels, and so do its gradients.
        top = jax.lax.stop_gradient(jnp.maximum(self.top, scores.max(-1, keepdims=True)))
        weights, shrink = jnp.exp(scores - top), jnp.exp(self.top - top)
        mixed = self.mixed * shrink + _mix(weights, kv, queries.dtype)
        return Mean(mixed, self.total * shrink + row_sum(weights), top)

    def average(self, queries: Array) -> Array:
        """The average for these queries, without the one that `_two_queries` added."""
        return (self.mixed / self.total)[:, :, : queries.shape[2]]


def whole_tiles(x: Array, axis: int, value: float = 0) -> Array:
    """Add entries of this value at the end of an axis, up to a multiple of `TILE`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, -x.shape[axis] % TILE
    return jnp.pad(x, widths, constant_values=value) if widths[axis][1] else x


def _two_queries(queries: Array) -> Array:
    """Add a query of zeros to a single one: XLA's CPU backend sums a single one's products in
    another order."""
    if queries.shape[2] > 1:
        return queries
    return jnp.pad(queries, ((0, 0), (0, 0), (0, 1), (0, 0)))


def split_heads(x: Array, heads: int) -> Array:
    """Split heads: (B, K, H·D) → (B, H, K, D)."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, x.shape[-1] // heads), 1, 2)


def write(cache: KV, new: KV, start: Array) -> KV:
    """Put the K new slots of row b at start[b] … start[b]+K−1; slots past the buffer are dropped.

    Args:
      cache: of T slots.
      new: of K.
      start: (B,) int32, ≥ 0 (a negative start would wrap to the end of the buffer).
    """
    slots = jnp.arange(new.values.shape[2])

    def one(cache: KV, new: KV, first: Array) -> KV:
        def put(x, axis, part):
            return x.at[_at(axis, first + slots)].set(part.astype(x.dtype), mode="drop")

        return cache.by_slots(put, new)

    # By row: the compiler then sees that devices with different rows exchange nothing.
    return jax.vmap(one)(cache, new, start)


def compact(cache: KV, start: Array, path: Array) -> KV:
    """Copy the keys and values of token path[b, i] to slot start[b] + 1 + i.

    Args:
      start: (B,) int32, the first position of the call that wrote the tokens.
      path: (B, D) int32, indices of the call's tokens.
    """

    def one(cache: KV, first: Array, path: Array) -> KV:
        place, to = first + path, first + 1 + jnp.arange(len(path))

        def copied(x, axis):
            return x.at[_at(axis, to)].set(x[_at(axis, place)], mode="drop")

        return cache.by_slots(copied)

    return jax.vmap(one)(cache, start, path)


def _at(axis: int, slots: Array) -> tuple:
    """An index of slots along an axis that counts from the end."""
    return (..., slots, *[slice(None)] * (-1 - axis))


def empty(batch: int, heads: int, length: int, head_size: int, dtype=jnp.float32) -> KV:
    """Make a cache of zeros of at least `length` slots, a multiple of `TILE`.

    In int8 it has scales. Which slots count is decided by each query's position.
    """
    length += -length % TILE
    keys = jnp.zeros((batch, heads, head_size, length), dtype)
    kv = KV(keys, jnp.zeros((batch, heads, length, head_size), dtype))
    if np.dtype(dtype) != np.int8:
        return kv
    scales = (jnp.zeros((batch, heads, length), jnp.float32) for _ in range(2))
    return KV(*kv[:2], *scales)


def slide(by_offset: Array, positions: Array, slots: int) -> Array:
    """Rows of a bias that depends on slot − query alone, cut out of one vector.

    Args:
      by_offset: (H, 2N) float32; entry N + o is the bias of a slot at offset o from its query.
      positions: (B, K) int32, of the queries.
      slots: T ≤ N.

    Returns:
      (B, H, K, T): entry [b, h, k, s] is by_offset[h, N + s − positions[b, k]].
    """
    reach = by_offset.shape[1] // 2

    def one(position):
        return jax.lax.dynamic_slice_in_dim(by_offset, reach - position, slots, axis=1)

    return jnp.moveaxis(jax.vmap(jax.vmap(one))(positions), 1, 2)
