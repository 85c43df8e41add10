"""Models small enough to enumerate: a random table behind the `Model` protocol.

`TableModel` finds its logits by a hash of all slots up to the query's: a stale, missing or
misplaced cache entry changes the distribution.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.base import started
from specjax.pytrees import pytree
from specjax.types import Call, Inputs

UNWRITTEN = 1_000_003  # the content of a slot before its first write
_MULTIPLIERS = np.random.default_rng(0).integers(1 << 32, size=(2, 64), dtype=np.uint32) | 1


def _scramble(x: Array) -> Array:
    """Map 32-bit numbers by a fixed permutation."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def _hash(tokens: Array, which: int) -> Array:
    """Hash (B, T) → (B, T) uint32: entry t depends on the tokens 0 … t and their slots."""
    factors = jnp.asarray(_MULTIPLIERS[which, : tokens.shape[1]])[None, :]
    mixed = (tokens.astype(jnp.uint32) + np.uint32(1)) * factors
    return jnp.cumsum(mixed, axis=1, dtype=jnp.uint32)


@pytree
class TableModel:
    """A model whose next token depends on the source and on the whole prefix."""

    table: Array  # (N, V) logits; prefixes are spread over the N rows

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def start(self, inputs: Inputs, buffer_len: int):
        """Make the context, a hash of the source, and the cache, the fed tokens slot by slot."""
        batch = inputs.prompt.shape[0]
        cache = jnp.full((batch, buffer_len), UNWRITTEN, jnp.int32)
        context = jnp.zeros((batch,), jnp.uint32)
        if inputs.source.shape[1]:
            hashes = _hash(inputs.source, 1)
            context = jnp.take_along_axis(hashes, inputs.source_len[:, None] - 1, axis=1)[:, 0]
        return context, cache

    def __call__(self, tokens, start, context, cache):
        """Run K tokens; the hidden state is the row of the table."""
        call = Call.of(start)
        start, layout = call.start, call.layout
        tokens = call.unpack(call.pack(tokens))
        slots = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        rows = jnp.arange(tokens.shape[0])[:, None]
        before = jnp.pad(_hash(cache, 0), ((0, 0), (1, 0)))  # entry t: of the slots before t
        cache = cache.at[rows, slots].set(tokens, mode="drop")
        if layout is None:
            seen = jnp.take_along_axis(_hash(cache, 0), slots, axis=1, mode="clip")
        else:
            factors = jnp.asarray(_MULTIPLIERS[0])[start[:, None] + layout.depth]
            own = (tokens.astype(jnp.uint32) + np.uint32(1)) * factors
            own = jnp.where(layout.seen, own[:, None, :], np.uint32(0)).sum(-1, dtype=jnp.uint32)
            seen = jnp.take_along_axis(before, start[:, None], axis=1) + own
        index = _scramble(seen ^ context[:, None]) % np.uint32(self.table.shape[0])
        return self.table[call.pack(index)], cache

    branches: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    def compact(self, cache, start, path):
        rows = jnp.arange(len(path))[:, None]
        to = start[:, None] + 1 + jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
        return cache.at[rows, to].set(cache[rows, start[:, None] + path], mode="drop")

    def logits(self, hidden):
        return hidden


def random_table(
    seed: int, vocab_size: int = 3, *, rows: int = 4096, forbidden: float = 0.15, dtype=float
) -> TableModel:
    """Make a table of normal logits of deviation 1.5; a share is −inf, never a row's largest."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(rows, vocab_size))
    banned = rng.random(logits.shape) < forbidden
    banned[np.arange(rows), logits.argmax(axis=1)] = False
    return TableModel(jnp.asarray(np.where(banned, -np.inf, logits), dtype))


def hopeless(model: TableModel) -> TableModel:
    """Make a draft that prefers the model's least likely tokens, and its impossible ones most."""
    return TableModel(jnp.where(jnp.isfinite(model.table), -3.0 * model.table, 5.0))


def one_hot(seed: int, vocab_size: int = 3, *, rows: int = 4096, dtype=float) -> TableModel:
    """Make a deterministic table: one token is certain after each prefix."""
    choice = np.random.default_rng(seed).integers(vocab_size, size=rows)
    return TableModel(jnp.asarray(np.where(np.eye(vocab_size)[choice], 0.0, -np.inf), dtype))


def inputs_of(prompts: list[list[int]], sources: list[list[int]] | None = None) -> Inputs:
    """Make inputs from ragged lists, right-padded with 0; without sources their width is 0."""

    def pad(rows):
        width = max(len(row) for row in rows)
        padded = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
        return jnp.asarray(padded.reshape(len(rows), width)), jnp.int32([len(row) for row in rows])

    return Inputs(*pad(sources or [[] for _ in prompts]), *pad(prompts))


def repeat(inputs: Inputs, times: int) -> Inputs:
    """Repeat the first row to a batch of `times` rows."""
    return jax.tree.map(lambda x: jnp.repeat(x[:1], times, axis=0), inputs)


def logits_after(model, inputs: Inputs, prefixes: list[tuple], width: int) -> np.ndarray:
    """Logits of the next token after each prefix, without decoding: (N, V).

    Args:
      inputs: the source of the first row is used.
      prefixes: prompt and output so far, of any lengths up to `width`.
    """
    filled = prefixes + prefixes[:1] * (-len(prefixes) % 64)  # few shapes, few compilations
    tokens = np.zeros((len(filled), width), np.int32)
    for row, prefix in zip(tokens, filled, strict=True):
        row[: len(prefix)] = prefix
    lengths = np.array([len(prefix) for prefix in filled], np.int32)
    source = repeat(inputs, len(filled))
    asked = source._replace(prompt=jnp.asarray(tokens), prompt_len=jnp.asarray(lengths))
    return np.asarray(_prefill_and_ask(model, asked))[: len(prefixes)]


@jax.jit
def _prefill_and_ask(model, inputs: Inputs):
    context, cache = started(model, inputs, inputs.prompt.shape[1])
    newest = inputs.prompt_len - 1
    token = jnp.take_along_axis(inputs.prompt, newest[:, None], axis=1)
    hidden, _ = model(token, newest, context, cache)
    return model.logits(hidden[:, 0])
