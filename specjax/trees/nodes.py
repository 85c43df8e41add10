"""The tree of a round: its drafted tokens and its structure.

Node 0 is the root, the last known token; nodes 1 … N are drafted tokens. Parents come before their
children, and siblings in drawn order. C = N+1 counts all nodes; R is B, or 1 where all rows share
one tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.types import Layout


class Nodes(NamedTuple):
    """The drafted tokens of every row. Entries of nodes that are not submitted are arbitrary."""

    tokens: Int[Array, "B N"]
    parent: Int[Array, "R C"]  # the root's parent is the root
    depth: Int[Array, "R C"]  # 0 at the root
    submitted: Bool[Array, "B N"]  # a node's parent is submitted too
    logprobs: Float[Array, "B N V"] | None
    """The distribution of a node's token given all tokens drawn before it, its earlier siblings
    included. None: the tokens were chosen, not drawn."""
    belief: Float[Array, "B N"]
    """float32, the drafter's log-probability of the token at temperature 1 after its parent."""

    @property
    def size(self) -> int:
        """Number N of drafted nodes."""
        return self.tokens.shape[1]


def lineage(parent: Int[Array, "R C"], depth: Int[Array, "R C"], deepest: int) -> Array:
    """Ancestors (R, C, deepest + 1): entry d is a node's ancestor at depth d, or itself; then C."""
    count = parent.shape[1]
    levels = jnp.arange(deepest + 1, dtype=jnp.int32)[None, None, :]
    node = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], parent.shape)
    found = jnp.full((*parent.shape, deepest + 1), count, jnp.int32)
    for _ in range(deepest + 1):
        here = jnp.take_along_axis(depth, node, axis=1)[..., None] == levels
        found = jnp.where(here, node[..., None], found)
        node = jnp.take_along_axis(parent, node, axis=1)
    return found


def layout(lines: Int[Array, "R C D1"], depth: Int[Array, "R C"]) -> Layout:
    """The layout of the target's call: a node sees its ancestors and itself.

    Args:
      lines: see `lineage`.
    """
    node = jnp.arange(lines.shape[1], dtype=jnp.int32)
    return Layout(depth, jnp.any(lines[:, :, None, :] == node[None, None, :, None], axis=-1))


def reach(stop: Float[Array, "B C"], lines: Int[Array, "R C D1"]) -> Float[Array, "B C"]:
    """P(acceptance reaches a node), that is, ends there or below."""
    node = jnp.arange(stop.shape[1], dtype=jnp.int32)
    above = jnp.any(lines[..., None] == node[None, None, None], axis=2)  # by end, then by node
    return jnp.einsum("bc,bcn->bn", stop, all_rows(above, stop).astype(stop.dtype))


def comes_before(lines: Int[Array, "R C D1"]) -> Bool[Array, "R C C"]:
    """Whether u comes before v in post-order, at [u, v]: children in drawn order, then the parent.

    It is the lexicographic order of lineages, except that a longer one comes before its prefix.
    """
    one, other = lines[:, :, None, :], lines[:, None, :, :]
    first = jnp.argmax(one != other, axis=-1)[..., None]  # 0 where they are equal: not less
    shape = (*first.shape[:-1], lines.shape[-1])
    one, other = (jnp.broadcast_to(x, shape) for x in (one, other))
    at = (jnp.take_along_axis(x, first, axis=-1)[..., 0] for x in (one, other))
    return next(at) < next(at)


def path_to(lines: Int[Array, "R C D1"], node: Int[Array, " B"]) -> Int[Array, "B D"]:
    """The nodes at depths 1 … D on the path to a node of each row; the node itself beyond it."""
    rows = jnp.broadcast_to(lines, (node.shape[0], *lines.shape[1:]))
    line = jnp.take_along_axis(rows, node[:, None, None], axis=1)[:, 0, 1:]
    return jnp.where(line < lines.shape[1], line, node[:, None])


def all_rows(tree: Array, like: Array) -> Array:
    """Broadcast (R, …) to (B, …)."""
    return jnp.broadcast_to(tree, (like.shape[0], *tree.shape[1:]))


def taken(tree: Any, index: Int[Array, "B M"]) -> Any:
    """Take entries of axis 1 of every leaf, (B, N, …) → (B, M, …)."""

    def take(leaf):
        at = index.reshape(*index.shape, *(1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, at, axis=1)

    return jax.tree.map(take, tree)
