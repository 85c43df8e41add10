"""Speculative decoding with trees: a round drafts several continuations and keeps at most one.

    draft → verify → accept → compact → commit → observe

The target scores the root, which is the last known token, and all drafted nodes in one call, in
which a node sees its ancestors alone. The rule says at which node acceptance ends. The path to it
becomes text, its slots of the cache move together, and drafter and policy observe as ever. The
output's distribution is the target's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from specjax.accept import AcceptanceRule, resolve_rule
from specjax.drafters.base import Drafter
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rounds import Round
from specjax.sampling import Sampling
from specjax.speculative import Contexts, Dice, dice_for, start
from specjax.state import State, commit, is_finite
from specjax.trees import drafting
from specjax.trees.nodes import Nodes, layout, lineage, path_to, taken
from specjax.trees.rules import TreeRule, of_chain
from specjax.trees.shapes import BestFirst, FixedTree
from specjax.types import BranchingModel


@pytree
class TreeSpeculative:
    """What to decode with, as `Speculative`, whose fields it has, with a shape for the draft."""

    target: BranchingModel
    drafter: Drafter
    rule: AcceptanceRule  # of chains; trees have one each that does the same
    policy: Policy  # caps the depth
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    shape: FixedTree | BestFirst = dataclasses.field(metadata={"static": True})

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
    policy, allowed = method.policy.begin(state.policy, method.gamma_max)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    cap = jnp.where(state.done, 0, jnp.clip(jnp.asarray(allowed, jnp.int32), 0, room))
    nodes, levels, finite = grow(method)(method, contexts.drafter, state, cap, dice)
    lines = lineage(nodes.parent, nodes.depth, method.gamma_max)

    block = block_of(state, nodes)
    root = state.length - 1
    tree = layout(lines, nodes.depth)
    hidden, cache = method.target(block, root, contexts.target, state.cache, layout=tree)
    logprobs = method.rule.target_distribution(method.target.logits(hidden), method.sampling)

    given = jax.vmap(method.rule.given_noise, in_axes=(1, None, 1), out_axes=1)
    place = jnp.broadcast_to(state.length[:, None] + nodes.depth, block.shape)
    probs = jnp.exp(given(logprobs, state.keys, place))
    endings = method.tree_rule.endings(probs, nodes, lines)
    node = dice.accepted(state, endings.stop)
    next_probs = jnp.take_along_axis(endings.next_probs, node[:, None, None], axis=1)[:, 0]
    token = dice.next(state, next_probs)

    path = path_to(lines, node)
    accepted = jnp.broadcast_to(nodes.depth, block.shape)
    accepted = jnp.take_along_axis(accepted, node[:, None], axis=1)[:, 0]
    drafted = taken(block, path)
    below = jnp.broadcast_to(nodes.parent, block.shape)[:, 1:] == node[:, None]
    tested = accepted + jnp.any(below & nodes.submitted, axis=1).astype(jnp.int32)
    sound = is_finite(logprobs, ~state.done)
    before = state.replace(
        cache=method.target.compact(cache, root, path),
        drafter=drafting.state_at(levels, path, accepted),
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
    unknown = jnp.zeros_like(drafted, jnp.float32)  # policies with a fixed depth read none of it
    round_ = Round(
        active=~state.done,
        drafted=tested,
        accepted=accepted,
        emitted=after.length - state.length,
        overlap=unknown,
        ratio=unknown,
        confidence=unknown,
        submitted=slot < tested[:, None],
        target_logprobs=logprobs,
        hidden=hidden,
        stop=endings.stop,
        next_probs=next_probs,
        next_token=token,
        nodes=nodes,
        node=node,
    )
    read = taken(block, seen), root, hidden, accepted + 1
    after = after.replace(
        drafter=method.drafter.observe(*read, contexts.drafter, after.drafter),
        policy=method.policy.update(after.policy, round_),
    )
    return after, round_


def grow(method: TreeSpeculative) -> Callable[..., drafting.Drafted]:
    """What drafts the method's shape."""
    return drafting.best_first if method.dynamic else drafting.fixed


def block_of(state: State, nodes: Nodes) -> Int[Array, "B C"]:
    """What the target reads in a round: the last known token and the drafted ones."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    return jnp.concatenate([last, nodes.tokens], axis=1)
