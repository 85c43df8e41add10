"""Policies for trees: the depth and number of nodes of the next tree."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.base import Policy
from specjax.policies.costs import Costs, required
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.sampling import argmax
from specjax.support.ranges import number, whole


@pytree
class Cut(Policy):
    """Drafts the same part of the tree in every round."""

    depth: Int[Array, ""]
    count: Int[Array, ""]

    def begin(self, state, live, gamma_max):
        return state, self.depth

    def nodes(self, state, most):
        return self.count


def cut(depth: int, nodes: int) -> Cut:
    """Make a policy of the first `nodes` nodes, down to depth `depth`; both ≥ 0."""
    found = whole("depth", depth, "[0, ∞)"), whole("nodes", nodes, "[0, ∞)")
    return Cut(*(jnp.int32(limit) for limit in found))


class Reached(NamedTuple):
    """Fading sums for each of N nodes, over the rounds that drafted it."""

    accepted: Float[Array, "B N"]  # the chances of acceptance
    seen: Float[Array, "B N"]
    counted: Int[Array, " B"]  # rounds


@pytree
class BestNodes(Policy):
    """Drafts the n nodes of largest (1 + Σ P(node i is accepted), i ≤ n) / cost(n).

    A round reveals P(i is accepted), given the tokens, for all its nodes: the chance that
    acceptance ends there or below. The estimates are fading means. Every `every` rounds all nodes
    are drafted, so that nodes that were left out are measured again.
    """

    carries = True

    costs: Costs  # of rounds, by nodes
    memory: Float[Array, ""]  # the share of the evidence that a round keeps
    every: Int[Array, ""]  # rounds from one whole tree to the next

    def init(self, keys, gamma_max):
        none = jnp.zeros((*keys.shape, self.costs.gamma_max), jnp.float32)
        return Reached(none, none, jnp.zeros(keys.shape, jnp.int32))

    def nodes(self, state, most):
        cost = self.costs.round_times(most)
        chance = state.accepted / jnp.where(state.seen > 0, state.seen, 1.0)
        tokens = 1.0 + jnp.pad(jnp.cumsum(chance, axis=1), ((0, 0), (1, 0)))
        return jnp.where(state.counted % self.every == 0, most, argmax(tokens / cost[None]))

    def update(self, state, round_):
        had = round_.nodes.submitted
        old, new = jnp.where(had, self.memory, 1.0), had.astype(jnp.float32)
        chance = new * round_.reach[:, 1:].astype(jnp.float32)
        known = Reached(old * state.accepted + chance, old * state.seen + new, state.counted + 1)
        return where_active(round_.uncut, known, state)


def nodes(costs: Costs, memory: float = 0.9, every: int = 16) -> BestNodes:
    """Make the policy that drafts the part of a tree with the most expected tokens per time.

    Args:
      costs: of rounds with 0 … N nodes; `specjax.tune` measures them.
      memory: share of the evidence about acceptance that a round keeps, in [0, 1].
      every: rounds from one whole tree to the next, which measures all nodes again; ≥ 1.
    """
    return BestNodes(
        required(costs),
        jnp.float32(number("memory", memory, "[0, 1]")),
        jnp.int32(whole("every", every, "[1, ∞)")),
    )
