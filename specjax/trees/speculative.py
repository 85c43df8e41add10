"""Speculative decoding with trees: a round drafts several continuations and keeps at most one.

    draft → verify → accept → compact → commit → observe

The target scores the root, which is the last known token, and all drafted nodes in one call, in
which a node sees its ancestors alone. The rule says at which node acceptance ends. The path to it
becomes text, its slots of the cache move together, and drafter and policy observe as ever. The
output's distribution is the target's.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.accept import AcceptanceRule, resolve_rule
from specjax.drafters.base import Drafter
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rounds import Round
from specjax.sampling import Sampling
from specjax.speculative import Contexts, Dice, dice_for, narrowest, padded, start
from specjax.state import State, commit, is_finite, left
from specjax.trees import drafting
from specjax.trees.nodes import Nodes, layout, lineage, path_to, reach, taken
from specjax.trees.rules import TreeRule, of_chain
from specjax.trees.shapes import BestFirst, FixedTree
from specjax.types import BranchingModel, Context, Layout


@pytree
class TreeSpeculative:
    """What to decode with, as `Speculative`, whose fields it has, with a shape for the draft."""

    target: BranchingModel
    drafter: Drafter
    rule: AcceptanceRule  # of chains; trees have one each that does the same
    policy: Policy  # caps depth and nodes
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    shape: FixedTree | BestFirst = dataclasses.field(metadata={"static": True})
    # Numbers < `slots` of tokens that the verify pass may have where no row's tree is larger.
    widths: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __post_init__(self):
        resolve_rule(self)
        if isinstance(self.sampling, Sampling):
            of_chain(self.rule, chosen=self.chosen)

    @property
    def gamma_max(self) -> int:
        """The longest path."""
        return self.shape.depth

    @property
    def slots(self) -> int:
        """Of the cache, that a round writes: the root's and the nodes'."""
        return self.shape.nodes + 1

    @property
    def chosen(self) -> bool:
        """Whether children are the drafter's most likely tokens. If not, they are drawn."""
        return self.sampling.greedy or isinstance(self.shape, BestFirst) or self.shape.draw == "top"

    @property
    def dynamic(self) -> bool:
        """Whether rows have trees of their own."""
        return isinstance(self.shape, BestFirst)

    @property
    def tree_rule(self) -> TreeRule:
        """See `trees.rules`."""
        return of_chain(self.rule, chosen=self.chosen)

    def start(self, inputs, keys, budget, buffer_len):
        method: Any = self  # it has all that a `Speculative` needs to start
        return start(method, inputs, keys, budget, buffer_len)

    def step(self, context, state, dice=None):
        return step(self, context, state, dice)


def step(
    method: TreeSpeculative, contexts: Contexts, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """One round for every live row: the loop's body."""
    dice = dice or dice_for(method)
    policy, allowed = begin(method, state)
    nodes, levels, rest, finite = grow(method)(method, contexts.drafter, state, allowed, dice)
    lines = lineage(nodes.parent, nodes.depth, method.gamma_max)

    block = block_of(state, nodes)
    tree = layout(lines, nodes.depth)
    run = partial(score, method, contexts.target, state, block, tree)
    (logprobs, hidden), cache = narrowest(
        method.widths, block.shape[1], last_of(nodes) + 1, run, state.cache
    )

    given = jax.vmap(method.rule.given_noise, in_axes=(1, None, 1), out_axes=1)
    place = jnp.broadcast_to(state.length[:, None] + nodes.depth, block.shape)
    probs = jnp.exp(given(logprobs, state.keys, place))
    endings = method.tree_rule.endings(probs, nodes, lines)
    node = dice.accepted(state, endings.stop)
    next_probs = jnp.take_along_axis(endings.next_probs, node[:, None, None], axis=1)[:, 0]
    token = dice.next(state, next_probs)

    root = state.length - 1
    path = path_to(lines, node)
    depth = jnp.broadcast_to(nodes.depth, block.shape)
    accepted = jnp.take_along_axis(depth, node[:, None], axis=1)[:, 0]
    drafted = taken(block, path)
    below = jnp.broadcast_to(nodes.parent, block.shape)[:, 1:] == node[:, None]
    tested = accepted + jnp.any(below & nodes.submitted, axis=1).astype(jnp.int32)
    sound = is_finite(logprobs, ~state.done)
    before = state.replace(
        cache=method.target.compact(cache, root, path),
        drafter=method.drafter.join(drafting.state_at(levels, path, accepted), rest),
        policy=policy,
        target_finite=state.target_finite & sound,
        draft_finite=state.draft_finite & finite,
    )
    count = jnp.sum(nodes.submitted, axis=1, dtype=jnp.int32)
    deepest = jnp.max(jnp.where(nodes.submitted, nodes.depth[:, 1:], 0), axis=1)
    size = count, deepest
    after = commit(before, drafted, tested, accepted, token, method.eos_ids, submitted=size)
    seen = jnp.pad(path, ((0, 0), (1, 0)))  # the root, and the way to the last accepted node
    hidden = taken(hidden, seen)
    slot = jnp.arange(method.gamma_max, dtype=jnp.int32)[None, :]
    reached = reach(endings.stop, lines)
    ratio = taken(_chance_below(endings.stop, reached), seen[:, :-1])
    round_ = Round(
        active=~state.done,
        drafted=deepest,
        accepted=accepted,
        emitted=after.length - state.length,
        overlap=ratio,
        ratio=ratio,
        confidence=taken(_belief_below(nodes), seen[:, :-1]),
        submitted=slot < tested[:, None],
        left=left(after),
        target_logprobs=logprobs,
        hidden=hidden,
        stop=endings.stop,
        next_probs=next_probs,
        next_token=token,
        nodes=nodes,
        node=node,
        reach=reached,
    )
    read = taken(block, seen), root, hidden, accepted + 1
    after = after.replace(
        drafter=method.drafter.observe(*read, contexts.drafter, after.drafter),
        policy=method.policy.update(after.policy, round_),
    )
    return after, round_


def score(
    method: TreeSpeculative,
    context: Context,
    state: State,
    block: Int[Array, "B C"],
    tree: Layout,
    width: int,
    turn: Array | int,
    cache: Any,
) -> tuple[tuple[Float[Array, "B C V"], Float[Array, "B C E"]], Any]:
    """What the target says of the first nodes of the block, 0 for the others; see `narrowest`."""
    tokens = block[:, :width].at[:, 0].add(turn)
    seen = method.target(tokens, state.length - 1 + turn, context, cache, layout=tree.first(width))
    hidden, cache = seen
    logprobs = method.rule.target_distribution(method.target.logits(hidden), method.sampling)
    more = block.shape[1] - width
    return (padded(logprobs, more), padded(hidden, more)), cache


def begin(method: TreeSpeculative, state: State) -> tuple[Any, drafting.Allowed]:
    """The policy's state, and how large each row's tree may be.

    A row with r tokens left drafts no deeper than r − 1: the target adds one of its own.
    """
    policy, depth = method.policy.begin(state.policy, method.gamma_max)
    nodes = method.policy.nodes(policy, method.shape.nodes)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    room = jnp.where(state.done, 0, room)
    most = jnp.full_like(room, method.shape.nodes)

    def up_to(limit, asked):
        return jnp.clip(jnp.asarray(asked, jnp.int32), 0, limit)

    return policy, drafting.Allowed(up_to(room, depth), up_to(most, nodes))


def last_of(nodes: Nodes) -> Int[Array, ""]:
    """The last node that any row has; 0 where none has any."""
    number = jnp.arange(1, nodes.size + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(nodes.submitted, number, 0))


def _chance_below(stop: Float[Array, "B C"], reached: Float[Array, "B C"]) -> Array:
    """(B, C) float32: P(a child is accepted), once the node is."""
    some = reached > 0
    ends = jnp.where(some, stop / jnp.where(some, reached, 1.0), 1.0)
    return jnp.clip(1.0 - ends, 0.0, 1.0).astype(jnp.float32)


def _belief_below(nodes: Nodes) -> Float[Array, "B C"]:
    """Log of the belief in a node's children together, at most 0; −inf where it has none."""
    belief = jnp.where(nodes.submitted, jnp.exp(nodes.belief), 0.0)
    rows = jnp.arange(len(belief))[:, None]
    total = jnp.zeros((len(belief), nodes.size + 1), belief.dtype)
    parent = jnp.broadcast_to(nodes.parent[:, 1:], belief.shape)
    return jnp.minimum(jnp.log(total.at[rows, parent].add(belief)), 0.0)


def grow(method: TreeSpeculative) -> Callable[..., drafting.Drafted]:
    """What drafts the method's shape."""
    return drafting.best_first if method.dynamic else drafting.fixed


def block_of(state: State, nodes: Nodes) -> Int[Array, "B C"]:
    """What the target reads in a round: the last known token and the drafted ones."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    return jnp.concatenate([last, nodes.tokens], axis=1)
