"""Speculative decoding with trees: a round drafts several continuations and keeps at most one.

    draft → judge (verify, accept, compact) → conclude (commit, observe)

The target scores the root, which is the last known token, and all drafted nodes in one call. A node
sees its ancestors alone. The rule decides at which node acceptance ends. The path to it becomes
text, its cache slots are compacted, and drafter and policy observe as for chains. The output's
distribution is the target's.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax import passes
from specjax.contracts import watched
from specjax.dice import Dice, dice_for
from specjax.drafters.abilities import join
from specjax.drafters.base import Drafter
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rounds import Round
from specjax.rules import AcceptanceRule, given_noise, resolve_rule
from specjax.sampling import Sampling
from specjax.speculative import Contexts, start
from specjax.state import State, block, commit, left
from specjax.trees import drafting
from specjax.trees.nodes import Nodes, layout, lineage, path_to, reach, taken
from specjax.trees.rules import TreeRule, of_chain
from specjax.trees.shapes import BestFirst, FixedTree
from specjax.types import BranchingModel, Call, Context, Layout


@pytree
class TreeSpeculative:
    """The method of decoding with trees: the fields of `Speculative`, with a shape for drafts."""

    target: BranchingModel
    drafter: Drafter
    rule: AcceptanceRule  # of chains; `tree_rule` is its counterpart for trees
    policy: Policy  # caps depth and nodes
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    shape: FixedTree | BestFirst = dataclasses.field(metadata={"static": True})
    # Numbers of positions of the batch, of narrower verify passes: see `passes.narrowed`.
    passes: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    branches = True

    def __post_init__(self):
        resolve_rule(self)
        if isinstance(self.sampling, Sampling):
            of_chain(self.rule, chosen=self.chosen)

    @property
    def gamma_max(self) -> int:
        """The length of the longest path."""
        return self.shape.depth

    @property
    def slots(self) -> int:
        """Number of cache slots that a round writes: the root's and the nodes'."""
        return self.shape.nodes + 1

    @property
    def chosen(self) -> bool:
        """Whether children are the drafter's most likely tokens, and not drawn."""
        return self.sampling.greedy or isinstance(self.shape, BestFirst) or self.shape.draw == "top"

    @property
    def dynamic(self) -> bool:
        """Whether each row has its own tree."""
        return isinstance(self.shape, BestFirst)

    @property
    def tree_rule(self) -> TreeRule:
        """The rule for trees that corresponds to `rule`."""
        return of_chain(self.rule, chosen=self.chosen)

    def start(self, inputs, keys, max_new, buffer_len):
        method: Any = self  # it has all that a `Speculative` needs to start
        return start(method, inputs, keys, max_new, buffer_len)

    def step(self, context, state, dice=None):
        return step(self, context, state, dice)


def step(
    method: TreeSpeculative, contexts: Contexts, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """Run one round for every live row: the loop's body."""
    method, dice = watched(method, len(state.done)), dice or dice_for(method)
    drafted, state = draft(method, contexts.drafter, state, dice)
    lines = lineage(drafted.nodes.parent, drafted.nodes.depth, method.gamma_max)
    verdict, state = judge(method, contexts.target, state, drafted.nodes, lines, dice)
    return conclude(method, contexts.drafter, state, drafted, lines, verdict)


def draft(
    method: TreeSpeculative, context: Context, state: State, dice: Dice
) -> tuple[drafting.Drafted, State]:
    """Draft a tree for each row, as far as its policy allows."""
    policy, allowed = begin(method, state)
    drafted = grow(method)(method, context, state, allowed, dice)
    return drafted, state.replace(policy=policy, draft_finite=state.draft_finite & drafted.finite)


class Block(NamedTuple):
    """The input of a round's target call."""

    tokens: Int[Array, "B C"]  # the last known token and the nodes'
    tree: Layout

    def within(self, width: int) -> "Block":
        """The part that a pass of `width` positions verifies."""
        return Block(self.tokens[:, :width], self.tree.first(width))


class TreeVerdict(NamedTuple):
    """The target's verdict on a tree; node 0 is the root."""

    target_logprobs: Float[Array, "B C V"]  # after each node, before any noise is known
    hidden: Float[Array, "B C E"]
    stop: Float[Array, "B C"]  # P(acceptance ends at a node)
    node: Int[Array, " B"]  # where it ended
    path: Int[Array, "B D"]  # the path to it, see `path_to`
    accepted: Int[Array, " B"]  # number of nodes on it
    next_probs: Float[Array, "B V"]
    next_token: Int[Array, " B"]


def judge(
    method: TreeSpeculative,
    context: Context,
    state: State,
    nodes: Nodes,
    lines: Int[Array, "R C D1"],
    dice: Dice,
) -> tuple[TreeVerdict, State]:
    """Verify all nodes in one call, accept, and compact the accepted path in the cache."""
    tree = layout(lines, nodes.depth)
    tokens = block(state, nodes.tokens)
    scored = partial(verify, method, context)
    known = state.replace(drafter=()), Block(tokens, tree)
    (logprobs, hidden), after = passes.narrowed(method, last_of(nodes) + 1, scored, *known)
    depth = jnp.broadcast_to(nodes.depth, tokens.shape)
    noisy = given_noise(method.rule, logprobs, state.keys, state.length[:, None] + depth)
    endings = method.tree_rule.endings(jnp.exp(noisy), nodes, lines)
    node = dice.accepted(state, endings.stop)
    next_probs = jnp.take_along_axis(endings.next_probs, node[:, None, None], axis=1)[:, 0]
    verdict = TreeVerdict(
        target_logprobs=logprobs,
        hidden=hidden,
        stop=endings.stop,
        node=node,
        path=path_to(lines, node),
        accepted=jnp.take_along_axis(depth, node[:, None], axis=1)[:, 0],
        next_probs=next_probs,
        next_token=dice.next(state, next_probs),
    )
    cache = method.target.compact(after.cache, state.length - 1, verdict.path)
    return verdict, state.replace(cache=cache, target_finite=after.target_finite)


def verify(
    method: TreeSpeculative, context: Context, state: State, read: Block
) -> tuple[tuple[Float[Array, "B C V"], Float[Array, "B C E"]], State]:
    """Run the target at the root and at each node: log-probabilities, and hidden states."""
    call = Call(state.length - 1, read.tree)
    logprobs, hidden, state = passes.scored(method, read.tokens, call, state, context)
    return (logprobs, hidden), state


def conclude(
    method: TreeSpeculative,
    context: Context,
    state: State,
    drafted: drafting.Drafted,
    lines: Int[Array, "R C D1"],
    verdict: TreeVerdict,
) -> tuple[State, Round]:
    """Commit the accepted path, and update drafter and policy by the round."""
    nodes, path, accepted = drafted.nodes, verdict.path, verdict.accepted
    tokens = block(state, nodes.tokens)
    below = jnp.broadcast_to(nodes.parent, tokens.shape)[:, 1:] == verdict.node[:, None]
    tested = accepted + jnp.any(below & nodes.submitted, axis=1).astype(jnp.int32)
    count = jnp.sum(nodes.submitted, axis=1, dtype=jnp.int32)
    deepest = jnp.max(jnp.where(nodes.submitted, nodes.depth[:, 1:], 0), axis=1)
    gained = taken(tokens, path), tested, accepted, verdict.next_token
    after = commit(state, *gained, method.eos_ids, work=(count, deepest))
    seen = jnp.pad(path, ((0, 0), (1, 0)))  # the root, and the path to the last accepted node
    hidden = taken(verdict.hidden, seen)
    slot = jnp.arange(method.gamma_max, dtype=jnp.int32)[None, :]
    reached = reach(verdict.stop, lines)
    ratio = taken(_chance_below(verdict.stop, reached), seen[:, :-1])
    known = verdict._replace(hidden=hidden)._asdict()
    del known["path"]
    round_ = Round(
        active=~state.done,
        verified=deepest,
        emitted=after.length - state.length,
        overlap=ratio,
        ratio=ratio,
        belief_logprob=taken(_belief_below(nodes), seen[:, :-1]),
        submitted=slot < tested[:, None],
        left=left(after),
        nodes=nodes,
        reach=reached,
        **known,
    )
    own = drafting.state_at(drafted.levels, path, accepted)
    drafter = join(method.drafter, own, drafted.rest)
    read = taken(tokens, seen), state.length - 1, hidden, accepted + 1
    return after.replace(
        drafter=method.drafter.observe(*read, context, drafter),
        policy=method.policy.update(after.policy, round_),
    ), round_


def begin(method: TreeSpeculative, state: State) -> tuple[Any, drafting.Allowed]:
    """Begin a round: the policy's state, and the allowed size of each row's tree.

    A row with r tokens left drafts no deeper than r − 1, because the target adds one token.
    """
    policy, depth = method.policy.begin(state.policy, ~state.done, method.gamma_max)
    nodes = method.policy.nodes(policy, method.shape.nodes)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    room = jnp.where(state.done, 0, room)
    most = jnp.full_like(room, method.shape.nodes)

    def up_to(limit, asked):
        return jnp.clip(jnp.asarray(asked, jnp.int32), 0, limit)

    return policy, drafting.Allowed(up_to(room, depth), up_to(most, nodes))


def last_of(nodes: Nodes) -> Int[Array, ""]:
    """The largest node number of any row; 0 if no row has nodes."""
    number = jnp.arange(1, nodes.size + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(nodes.submitted, number, 0))


def _chance_below(stop: Float[Array, "B C"], reached: Float[Array, "B C"]) -> Array:
    """P(a child is accepted | the node is), (B, C) float32."""
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
    """The function that drafts the method's shape."""
    return drafting.best_first if method.dynamic else drafting.fixed
