"""Acceptance rules for trees: at which node acceptance ends, and the token that follows there.

As for chains, a rule draws nothing. It returns one distribution over the nodes at which acceptance
may end, `stop`, and at each node the distribution of the next token. One uniform number decides the
first. On a chain `Sibling` is the token rule and `Traversal` the block rule.

    p[v]    the target's distribution after node v
    q[c]    the distribution of c's token given all tokens drawn before it; 0 where there is no c

Tokens that were chosen, not drawn, have no draft distribution. `Follow` is exact for them, and no
lossless rule accepts more. It is exact for drawn tokens too.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax import rules
from specjax.pytrees import pytree
from specjax.rules import residual
from specjax.trees.nodes import Nodes, all_rows, comes_before


class Endings(NamedTuple):
    """The distributions of the node where acceptance ends, and of the next token there."""

    stop: Float[Array, "B C"]
    next_probs: Float[Array, "B C V"]  # arbitrary at nodes where it cannot end


class TreeRule(Protocol):
    """The protocol of rules for trees."""

    def endings(
        self, target_probs: Float[Array, "B C V"], nodes: Nodes, lines: Int[Array, "R C D1"]
    ) -> Endings:
        """Decide where acceptance ends, given the tokens.

        Args:
          target_probs: the target's distribution after each node.
          lines: see `nodes.lineage`.
        """
        ...


@pytree
class Follow:
    """Draw a token y from p at a node; follow the child that is y, else stop there with y.

    The children's tokens are distinct, so P(c is followed) = p(x_c). It is exact for any tree.
    """

    def endings(self, target_probs, nodes, lines):
        """Compute reach[c] = reach[v]·p[v](x_c); at v, p without its children's tokens is left."""
        parent = all_rows(nodes.parent, nodes.tokens)
        rows = jnp.arange(len(parent))[:, None]
        width = target_probs.shape[-1]
        # A child with the token of an earlier sibling is never followed, and takes no mass.
        token = jnp.where(nodes.submitted, nodes.tokens, width)
        twins = (parent[:, 1:, None] == parent[:, None, 1:]) & (token[:, :, None] == token[:, None])
        earlier = jnp.tril(jnp.ones(twins.shape, bool), -1)
        token = jnp.where(jnp.any(twins & earlier, axis=-1), width, token)
        at = rows, parent[:, 1:], token
        chance = target_probs.at[at].get(mode="fill", fill_value=0.0)
        left = target_probs.at[at].set(0.0, mode="drop")
        remains = jnp.sum(left, axis=-1)
        chance = jnp.pad(chance, ((0, 0), (1, 0)), constant_values=1.0)
        stop = _reached(chance, lines) * remains
        usable = (remains > 0)[..., None]
        left = jnp.where(usable, left / jnp.where(usable, remains[..., None], 1.0), target_probs)
        return Endings(stop, left)


@pytree
class Sibling:
    """Judge children in order, each by the token rule against the residual of earlier siblings.

    With M = p[v], child c is accepted with probability min(1, M(x)/q[c](x)), else M becomes
    norm[M − q[c]]₊; if all are rejected the next token follows M. For draws with replacement this
    is the rule of SpecInfer (Miao et al. 2023); without replacement, of RSD (Jeon et al. 2024) and
    Sequoia (Chen et al. 2024).
    """

    def endings(self, target_probs, nodes, lines):
        rows = jnp.arange(len(target_probs))

        def child(c, carry):
            chance, rejected, left = carry
            v, x, q = _child(nodes, c)
            M, R = left[rows, v], rejected[rows, v]
            a = jnp.minimum(1.0, over(M[rows, x], q[rows, x]))
            here = jnp.any(q > 0, axis=1)  # a child that is absent changes nothing
            M = jnp.where(here[:, None], residual(M, q), M)
            return (
                chance.at[:, c].set(R * a),
                rejected.at[rows, v].set(R * (1.0 - a)),
                left.at[rows, v].set(M),
            )

        ones = jnp.ones(target_probs.shape[:2], target_probs.dtype)
        first = ones, ones, target_probs
        chance, rejected, left = jax.lax.fori_loop(1, nodes.size + 1, child, first)
        return Endings(_reached(chance, lines) * rejected, left)


@pytree
class Traversal:
    """Traversal verification (Weng et al. 2025, 2505.12398): the block rule of trees.

    Leaves are judged first, in post-order; a node is accepted together with the whole path to it.
    P[c] = min(1, R·M(x)/q[c](x)) for R and M of its parent, which begin as P[v] and p[v] and become
    after each child R' = Z/(Z + 1 − R) and M' = [R·M − q]₊/Z, where Z is the mass of the latter.
    """

    def endings(self, target_probs, nodes, lines):
        """Compute stop[v] = R[v]·Π (1 − R[u]) over u before v in post-order, with 1 as root's R."""
        rows = jnp.arange(len(target_probs))

        def child(c, carry):
            kept, left = carry
            v, x, q = _child(nodes, c)
            M, R = left[rows, v], kept[rows, v]
            P = jnp.minimum(1.0, R * over(M[rows, x], q[rows, x]))
            r = jnp.maximum(R[:, None] * M - q, 0.0)
            Z = jnp.sum(r, axis=1)
            some, lost = Z > 0, 1.0 - R
            after = jnp.where(some, Z / jnp.where(some, Z + lost, 1.0), (R == 1).astype(R.dtype))
            after = jnp.minimum(after, 1.0)  # on a GPU the quotient of equals may be above it
            after_M = jnp.where(some[:, None], r / jnp.where(some, Z, 1.0)[:, None], M)
            here = jnp.any(q > 0, axis=1)
            kept = kept.at[rows, v].set(jnp.where(here, after, R))
            return kept.at[:, c].set(P), left.at[rows, v].set(jnp.where(here[:, None], after_M, M))

        ones = jnp.ones(target_probs.shape[:2], target_probs.dtype)
        kept, left = jax.lax.fori_loop(1, nodes.size + 1, child, (ones, target_probs))
        kept = kept.at[:, 0].set(1.0)
        before = comes_before(lines)
        passed = jnp.prod(jnp.where(before, 1.0 - kept[:, :, None], 1.0), axis=1)
        return Endings(kept * passed, left)


# The rule of trees for each rule of chains. Coupled noise makes the target one-hot, so `Follow` is
# enough.
OF_CHAIN: dict[type, type] = {
    rules.Token: Sibling,
    rules.Block: Traversal,
    rules.Gumbel: Follow,
}


def of_chain(rule: rules.AcceptanceRule, *, chosen: bool) -> TreeRule:
    """The rule for trees that corresponds to a rule for chains.

    Args:
      rule: a rule of chains, after `under`.
      chosen: whether the tokens are chosen by the drafter's beliefs, and not drawn.

    Raises:
      ValueError: a rule without a counterpart for trees.
    """
    kind = OF_CHAIN.get(type(rule))
    if kind is None:
        names = ", ".join(one.__name__ for one in OF_CHAIN)
        raise ValueError(
            f"{type(rule).__name__} is a rule for chains alone; trees have {names}. Take one of "
            'them, or tree="chain".'
        )
    return Follow() if chosen else kind()


def _child(nodes: Nodes, c: Int[Array, ""]) -> tuple[Array, Array, Array]:
    """Parent, token and distribution of node c of every row; 0 throughout if c is absent."""
    if nodes.logprobs is None:
        raise ValueError("The tokens of this tree were not drawn: take Follow.")
    i = c - 1
    parent = jax.lax.dynamic_index_in_dim(nodes.parent, c, 1, keepdims=False)
    token = jax.lax.dynamic_index_in_dim(nodes.tokens, i, 1, keepdims=False)
    here = jax.lax.dynamic_index_in_dim(nodes.submitted, i, 1)
    q = jnp.exp(jax.lax.dynamic_index_in_dim(nodes.logprobs, i, 1, keepdims=False))
    return jnp.broadcast_to(parent, token.shape), token, jnp.where(here, q, 0.0)


def over(target: Float[Array, "*batch"], draft: Float[Array, "*batch"]) -> Array:
    """The ratio target/draft; 0 where draft is 0."""
    return jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), 0.0)


def _reached(chance: Float[Array, "B C"], lines: Int[Array, "R C D1"]) -> Float[Array, "B C"]:
    """The product of the chances along the path to each node."""
    padded = jnp.pad(chance, ((0, 0), (0, 1)), constant_values=1.0)
    lines = jnp.broadcast_to(lines, (len(chance), *lines.shape[1:]))
    flat = jnp.take_along_axis(padded, lines.reshape(len(chance), -1), axis=1)
    return jnp.prod(flat.reshape(lines.shape), axis=-1)
