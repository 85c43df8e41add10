"""Drafting a tree: level by level, the branches of a level side by side.

Any drafter can draft trees. Its state after a node is a value, so a child starts from a copy of its
parent's, as in beam search. `extend` runs for all branches of a level in one call (`vmap`).
Copies of a large drafter's state are expensive, so trees pay with small drafters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax import sampling as smp
from specjax.drafters.abilities import fork
from specjax.drafters.base import Drafter, proposal
from specjax.rounds import where_rows
from specjax.sampling import Sampling
from specjax.state import State, is_finite
from specjax.trees.nodes import Nodes, taken
from specjax.trees.shapes import BestFirst, FixedTree
from specjax.types import Context


class Allowed(NamedTuple):
    """The largest depth and number of nodes of each row's tree."""

    depth: Int[Array, " B"]
    nodes: Int[Array, " B"]


class Level(NamedTuple):
    """The M nodes of one depth that have children."""

    nodes: Int[Array, "B M"]  # −1: no node of the tree, or the drafter was left out
    states: Any  # the drafter's state after each, from `fork`; leaves (B, M, …)
    logprobs: Float[Array, "B M V"]  # of the next token, under the sampling
    belief: Float[Array, "B M V"]  # at temperature 1 where decoding is greedy, else the same
    proposes: Bool[Array, "B M"]  # False: the drafter proposes nothing


class Drafted(NamedTuple):
    """The result of drafting a tree."""

    nodes: Nodes
    levels: list[Level]  # from the root's on
    rest: Any  # the part of the drafter's state that all branches share (`abilities.fork`)
    finite: Bool[Array, ""]


def root(method: Any, context: Context, state: State) -> tuple[Level, Any]:
    """The level of the root, and the part of the drafter's state that all branches share."""
    known = state.tokens, state.length, context, state.drafter
    hidden, drafter = method.drafter.begin(*known)
    own, rest = fork(method.drafter, drafter)
    states = jax.tree.map(lambda x: x[:, None], own)
    return level(method, jnp.zeros_like(state.length)[:, None], states, hidden[:, None]), rest


def expand(
    method: Any,
    context: Context,
    above: Level,
    at: Int[Array, "B M"],
    nodes: Int[Array, "B M"],
    tokens: Int[Array, "B M"],
    position: Int[Array, " B"],
    needed: Bool[Array, ""],
) -> Level:
    """Run the drafter after M tokens, each the child of a node of the level above.

    Args:
      at: index of each token's parent in the level above.
      nodes: the tokens' node numbers.
      position: position of the tokens.
      needed: whether any row has nodes below these. If not, and unless the policy is `fixed`, the
        drafter does not run and proposes nothing.
    """

    def grown():
        states = taken(above.states, at)
        grow = jax.vmap(method.drafter.extend, in_axes=(1, None, None, 1), out_axes=1)
        hidden, states = grow(tokens, position, context, states)
        return level(method, nodes, states, hidden)

    def left_out():
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grown))
        return nothing._replace(nodes=jnp.full_like(nodes, -1))

    return grown() if method.policy.fixed else jax.lax.cond(needed, grown, left_out)


def level(method: Any, nodes: Array, states: Any, hidden: Float[Array, "B M E"]) -> Level:
    """Make a level with the drafter's proposals."""
    drafter: Drafter = method.drafter
    sampling: Sampling = method.sampling
    logits = jax.vmap(drafter.logits, in_axes=1, out_axes=1)(hidden)
    proposed = proposal(logits, sampling)
    return Level(nodes, states, proposed.logprobs, proposed.belief, proposed.proposes)


def finite(level: Level, state: State) -> Bool[Array, ""]:
    """Whether the drafter's logits are valid in all active rows."""
    live = ~state.done[:, None] & level.proposes
    flat = level.logprobs.reshape(-1, level.logprobs.shape[-1])
    return is_finite(flat, live.reshape(-1))


# --- a fixed tree --------------------------------------------------------------------------------


def fixed(method: Any, context: Context, state: State, allowed: Allowed, dice: Any) -> Drafted:
    """Draft the nodes of `method.shape`, as many and as deep as each row is allowed."""
    shape: FixedTree = method.shape
    deepest = jnp.asarray(np.maximum.accumulate(shape.depths))[allowed.nodes]
    allowed = allowed._replace(depth=jnp.minimum(allowed.depth, deepest))
    first, rest = root(method, context, state)
    levels = [first]
    parts: list[Children] = []  # by level
    order: list[int] = []  # the node numbers, in the same order
    submitted = {0: jnp.ones_like(state.done)}  # by node
    for depth in range(shape.depth):
        inner = shape.inner(depth)
        if depth:
            above, last = shape.inner(depth - 1), order[-parts[-1].tokens.shape[1] :]
            tokens = parts[-1].tokens[:, np.array([last.index(node) for node in inner])]
            at, number = (
                jnp.broadcast_to(jnp.array(which, jnp.int32)[None], tokens.shape)
                for which in ([above.index(int(shape.parent[node])) for node in inner], inner)
            )
            needed, place = jnp.any(allowed.depth > depth), state.length + depth - 1
            levels.append(expand(method, context, levels[-1], at, number, tokens, place, needed))
        parts.append(_children(method, state, levels[-1], inner, depth, allowed, submitted, dice))
        order += [child for node in inner for child in shape.children(node)]
    back = np.argsort(order)
    tokens, logprobs, beliefs, there = (
        jnp.concatenate(x, axis=1)[:, back] for x in zip(*parts, strict=True)
    )
    joined = Nodes(
        tokens=tokens,
        parent=jnp.asarray(shape.parent)[None, :],
        depth=jnp.asarray(shape.depths)[None, :],
        submitted=there,
        logprobs=None if method.chosen else logprobs,
        belief=beliefs,
    )
    sound = jnp.all(jnp.stack([finite(one, state) for one in levels]))
    return Drafted(joined, levels, rest, sound)


class Children(NamedTuple):
    """The M nodes of one depth; see `Nodes`."""

    tokens: Int[Array, "B M"]
    logprobs: Float[Array, "B M V"]
    belief: Float[Array, "B M"]
    submitted: Bool[Array, "B M"]


def _children(
    method: Any,
    state: State,
    above: Level,
    inner: list[int],
    depth: int,
    allowed: Allowed,
    submitted: dict[int, Bool[Array, " B"]],
    dice: Any,
) -> Children:
    """Draft the children of a level's inner nodes, node by node, and add them to `submitted`."""
    shape: FixedTree = method.shape
    children = [shape.children(node) for node in inner]
    position = state.length + depth
    left = above.belief if method.chosen else above.logprobs
    given = jax.vmap(method.rule.given_noise, in_axes=(1, None, None), out_axes=1)
    draw = jax.vmap(dice.draft, in_axes=(None, 0, 1, 1), out_axes=1)
    by_rank = []
    for rank in range(max(map(len, children))):
        # A node with fewer children repeats the slot of its last; that draw is not used.
        slots = jnp.array([of[min(rank, len(of) - 1)] - 1 for of in children], jnp.int32)
        token = smp.argmax(left)
        if not method.chosen:
            token = draw(state, slots, given(left, state.keys, position), token)
        belief = jnp.take_along_axis(above.belief, token[..., None], axis=2)[..., 0]
        possible = jnp.max(left, axis=-1) > -jnp.inf  # else no token is left for one more child
        by_rank.append((token, left, belief.astype(jnp.float32), possible))
        if method.chosen or shape.draw == "without":
            left = without(left, token)
    found = []
    for place, (node, of) in enumerate(zip(inner, children, strict=True)):
        for rank, child in enumerate(of):
            token, law, belief, possible = (x[:, place] for x in by_rank[rank])
            there = submitted[node] & above.proposes[:, place] & possible
            there &= (depth < allowed.depth) & (child <= allowed.nodes)
            submitted[child] = there
            found.append(Children(token, law, belief, there))
    return jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *found)


def without(logprobs: Float[Array, "*batch V"], token: Int[Array, "*batch"]) -> Array:
    """Leave a token out of a distribution and normalise; −inf throughout if none is left."""
    ids = jnp.arange(logprobs.shape[-1], dtype=jnp.int32)
    hit = jnp.expand_dims(ids, tuple(range(token.ndim))) == token[..., None]
    rest = jnp.where(hit, -jnp.inf, logprobs)
    total = jax.nn.logsumexp(rest, axis=-1, keepdims=True)
    some = total > -jnp.inf
    return jnp.where(some, rest - jnp.where(some, total, 0.0), -jnp.inf)


# --- a tree that follows the beliefs -------------------------------------------------------------


def best_first(method: Any, context: Context, state: State, allowed: Allowed, dice: Any) -> Drafted:
    """Draft the best nodes of `method.shape`, for each row its own, the best node first."""
    del dice  # nothing is drawn
    shape: BestFirst = method.shape
    width = shape.width
    rows = state.length.shape[0]
    first, rest = root(method, context, state)
    levels = [first]
    path = jnp.zeros((rows, 1), jnp.float32)  # log of the belief in the path to each inner node
    tokens, parents, depths, beliefs, paths = [], [], [], [], []
    count = 0  # candidates so far; candidate i has the number i + 1
    for depth in range(1, shape.depth + 1):
        above = levels[-1]
        belief, token = jax.lax.top_k(above.belief.astype(jnp.float32), width)  # (B, M, W)
        there = above.proposes & (depth <= allowed.depth)[:, None]
        total = jnp.where(there[..., None], path[..., None] + belief, -jnp.inf)
        size = token.shape[1] * width
        tokens.append(token.reshape(rows, size))
        beliefs.append(belief.reshape(rows, size))
        paths.append(total.reshape(rows, size))
        parents.append(jnp.repeat(jnp.maximum(above.nodes, 0), width, axis=1))
        depths.append(jnp.full((rows, size), depth, jnp.int32))
        if depth < shape.depth:
            path, at = jax.lax.top_k(paths[-1], width)
            number, place = count + 1 + at, state.length + depth - 1
            chosen = jnp.take_along_axis(tokens[-1], at, axis=1)
            needed = jnp.any(allowed.depth > depth)
            levels.append(
                expand(method, context, above, at // width, number, chosen, place, needed)
            )
        count += size
    drafted = [jnp.concatenate(x, axis=1) for x in (tokens, parents, depths, beliefs, paths)]
    # No child is better than its parent, and of equals the first comes first: the parent.
    _, kept = jax.lax.top_k(drafted[-1], shape.nodes)
    tokens_, parents_, depths_, beliefs_, paths_ = (
        jnp.take_along_axis(x, kept, axis=1) for x in drafted
    )
    at = jnp.arange(rows)[:, None]
    places = jnp.arange(1, shape.nodes + 1, dtype=jnp.int32)[None, :]
    renumber = jnp.zeros((rows, count + 1), jnp.int32).at[at, kept + 1].set(places)
    nodes = Nodes(
        tokens=tokens_,
        parent=jnp.pad(jnp.take_along_axis(renumber, parents_, axis=1), ((0, 0), (1, 0))),
        depth=jnp.pad(depths_, ((0, 0), (1, 0))),
        submitted=(paths_ > -jnp.inf) & (places <= allowed.nodes[:, None]),
        logprobs=None,
        belief=beliefs_,
    )
    levels = [levels[0]] + [
        one._replace(nodes=_renumbered(one.nodes, renumber)) for one in levels[1:]
    ]
    sound = jnp.all(jnp.stack([finite(one, state) for one in levels]))
    return Drafted(nodes, levels, rest, sound)


def _renumbered(nodes: Int[Array, "B M"], renumber: Int[Array, "B A"]) -> Int[Array, "B M"]:
    """Renumber expanded nodes; −1 for those that are not kept in the tree."""
    found = jnp.take_along_axis(renumber, jnp.maximum(nodes, 0), axis=1)
    return jnp.where(found > 0, found, -1)


# --- afterwards ----------------------------------------------------------------------------------


def state_at(levels: list[Level], path: Int[Array, "B D"], accepted: Int[Array, " B"]) -> Any:
    """The drafter's state after the last expanded node of the accepted path, without the part that
    all branches share.

    Args:
      path: the nodes at depths 1 … D.
      accepted: the number of accepted nodes.
    """
    found = jax.tree.map(lambda x: x[:, 0], levels[0].states)
    for depth, one in enumerate(levels[1:], start=1):
        hit = (one.nodes == path[:, depth - 1, None]) & (depth <= accepted)[:, None]
        at = jnp.argmax(hit, axis=1, keepdims=True)
        new = jax.tree.map(lambda x: x[:, 0], taken(one.states, at))
        found = where_rows(jnp.any(hit, axis=1), new, found)
    return found
