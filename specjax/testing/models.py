"""The check of models: a call depends on its tokens, its positions and the slots before it."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.base import started
from specjax.testing.common import quickly
from specjax.testing.tables import inputs_of
from specjax.types import Call, Inputs, Layout, Model, Packing

TOKENS, ROOM = 12, 64  # tokens of a test text, and slots of the buffer
STARTS, COUNTS = (1, 4, 6), (2, 1, 4)  # where rows go on, and how many packed tokens they read
PARENTS = (0, 0, 0, 1, 2, 2, 5)  # of a tree's nodes; node 0 is the root


def check_model(
    model: Model, *, inputs: Inputs | None = None, atol: float = 5e-5, seed: int = 0
) -> None:
    """Check that a model's calls do as `Model.__call__` says.

    - A text in pieces of any sizes has the logits of the text in one call.
    - Rows may stand at different positions.
    - Rejected tokens leave no trace, and neither do tokens past the buffer.
    - No position depends on a later token.
    - A `PackingModel` computes the positions of a packing as a whole call does.
    - A `BranchingModel` computes each node of a tree as it does the path to it, and the cache after
      `compact` is that of the path.

    Args:
      model: a model over any number of ids.
      inputs: sources of some rows; their prompts are not used. Default: three rows without any.
      atol: the largest difference between logits of calls of different shapes; if a logit is above
        1, as a share of the largest.
      seed: picks the texts.

    Raises:
      AssertionError: the message names the error and its size.
    """
    check = _Check(model, inputs_of([[0]] * 3) if inputs is None else inputs, atol, seed)
    check.pieces()
    check.rejected()
    check.past_the_buffer()
    check.causal()
    if getattr(model, "packs", False):
        check.packed()
    if getattr(model, "branches", False):
        check.tree()


@quickly
def _start(model, inputs: Inputs):
    return started(model, inputs, ROOM)


@quickly
def _call(model, tokens, place, context, cache):
    hidden, cache = model(tokens, place, context, cache)
    return model.logits(hidden), cache


@quickly
def _compact(model, cache, start, path):
    return model.compact(cache, start, path)


class _Check:
    """A model, random texts, and their logits in one call."""

    def __init__(self, model: Model, inputs: Inputs, atol: float, seed: int):
        self.model, self.atol, rows = model, atol, len(inputs.prompt_len)
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(model.vocab_size, size=(rows, TOKENS), dtype=np.int32)
        ones = jnp.ones((rows,), jnp.int32)
        begun = inputs._replace(prompt=jnp.asarray(self.tokens[:, :1]), prompt_len=ones)
        self.context, self.empty = _start(model, begun)
        self.zero = np.zeros((rows,), np.int32)
        self.starts, self.counts = (np.resize(x, rows).astype(np.int32) for x in (STARTS, COUNTS))
        self.whole, self.full = self(self.tokens, self.zero, self.empty)

    def __call__(self, tokens: Any, place: Any, cache: Any) -> tuple[np.ndarray, Any]:
        """Logits (B, K, V), and the cache."""
        place = Call.of(place) if isinstance(place, Call) else jnp.asarray(place)
        logits, cache = _call(self.model, jnp.asarray(tokens), place, self.context, cache)
        return np.asarray(logits), cache

    def fed(self, count: int) -> Any:
        """The cache after the first `count` tokens of each row."""
        return self(self.tokens[:, :count], self.zero, self.empty)[1]

    def at(self, start: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Each row's tokens from a position on, and their logits in one call."""
        slots = start[:, None] + np.arange(count)
        logits = np.take_along_axis(self.whole, slots[:, :, None], axis=1)
        return np.take_along_axis(self.tokens, slots, axis=1), logits

    def require(self, found: np.ndarray, expected: np.ndarray, atol: float, fault: str) -> None:
        """Raise AssertionError if logits differ by more than `atol` allows."""
        with np.errstate(invalid="ignore"):
            error = np.where(found == expected, 0.0, np.abs(found - expected))
        worst = np.nan_to_num(error, nan=np.inf).max(initial=0.0)
        if worst > atol * max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0)):
            name = type(self.model).__name__
            raise AssertionError(f"{name}: {fault}: logits differ by {worst:.2g}.")

    def pieces(self) -> None:
        for sizes in (TOKENS * (1,), (5, 1, 2, 4)):
            at, cache, pieces = 0, self.empty, []
            for size in sizes:
                block = self.tokens[:, at : at + size]
                logits, cache = self(block, self.zero + at, cache)
                pieces.append(logits)
                at += size
            fault = f"a text in pieces of {sizes} tokens is not that in one call"
            self.require(np.concatenate(pieces, axis=1), self.whole, self.atol, fault)
        tokens, expected = self.at(self.starts, 3)
        found = self(tokens, self.starts, self.fed(6))[0]
        self.require(found, expected, self.atol, f"rows at positions {self.starts} disturb others")

    def rejected(self) -> None:
        clean = self.fed(6)
        junk = np.full((len(self.zero), 8), self.model.vocab_size - 1, np.int32)
        _, dirty = self(junk, self.starts, clean)
        for step in range(0, 6, 2):
            block, at = self.tokens[:, step : step + 2], self.starts + step
            expected, clean = self(block, at, clean)
            found, dirty = self(block, at, dirty)
            self.require(found, expected, 0.0, "rejected tokens leave a trace")

    def past_the_buffer(self) -> None:
        _, clean = self(self.tokens, self.zero + ROOM - TOKENS, self.empty)
        _, dirty = self(self.tokens[:, :4], self.zero + ROOM - 2, clean)
        block, at = self.tokens[:, :1], self.zero + ROOM - 3
        found, expected = (self(block, at, cache)[0] for cache in (dirty, clean))
        self.require(found, expected, 0.0, "tokens past the buffer are written before its end")

    def causal(self) -> None:
        changed, half = self.tokens.copy(), TOKENS // 2
        changed[:, half:] = (changed[:, half:] + 1) % self.model.vocab_size
        found = self(changed, self.zero, self.empty)[0]
        fault = "a position depends on a later token"
        self.require(found[:, :half], self.whole[:, :half], self.atol, fault)

    def packed(self) -> None:
        for size in (sum(self.counts) + 1, 4 * len(self.counts)):
            tokens, expected = self.at(self.starts, 4)
            packing = Packing.first(jnp.asarray(self.counts), 4, int(size))
            call = Call(jnp.asarray(self.starts), packing=packing)
            found, cache = self(tokens, call, self.fed(6))
            real = np.arange(4)[None, :] < self.counts[:, None]
            found = np.asarray(call.unpack(jnp.asarray(found)))
            fault = f"{size} packed positions are not those of a whole call"
            self.require(found[real], expected[real], self.atol, fault)
            after = self.starts + self.counts
            tokens, expected = self.at(after, 2)
            found = self(tokens, after, cache)[0]
            self.require(found, expected, self.atol, "a packed call writes other slots")

    def tree(self) -> None:
        paths = [[0]]
        for node, parent in enumerate(PARENTS[1:], 1):
            paths.append([*paths[parent], node])
        depth = jnp.asarray([[len(path) - 1 for path in paths]], jnp.int32)
        seen = np.array([[[node in path for node in range(len(paths))] for path in paths]])
        tokens, cache = self.tokens[:, : len(paths)], self.fed(6)
        start = self.starts - 1
        tree = Call(jnp.asarray(start), Layout(depth, jnp.asarray(seen)))
        found, written = self(tokens, tree, cache)
        for node, path in enumerate(paths):
            expected, fed = self(tokens[:, path], start, cache)
            fault = f"node {node} of a tree is not the end of its path"
            self.require(found[:, node], expected[:, -1], self.atol, fault)
        lines = np.tile(np.array(paths[-1][1:], np.int32), (len(start), 1))
        moved = _compact(self.model, written, jnp.asarray(start), jnp.asarray(lines))
        block, at = self.tokens[:, -2:], start + len(paths[-1])
        found, expected = (self(block, at, cache)[0] for cache in (moved, fed))
        self.require(found, expected, self.atol, "`compact` does not leave the cache of a path")
