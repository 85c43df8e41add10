"""Two policies together: one ends drafts, and the other decides what of them is verified."""

import jax.numpy as jnp

from specjax.policies.base import Policy, by_slot, counts_nodes
from specjax.policies.loading import parse
from specjax.pytrees import check_pytree, pytree
from specjax.support.ranges import has, shown


@pytree
class Both(Policy):
    """Drafts while both policies do, and verifies what the second one does."""

    reads_batch = True

    first: Policy
    second: Policy

    @property
    def fills(self) -> bool:  # type: ignore[override]
        """Whether the second policy fills passes."""
        return self.second.fills

    @property
    def needs_shorter(self) -> bool:  # type: ignore[override]
        """Whether either learns what shorter drafts would have got."""
        return self.first.needs_shorter or self.second.needs_shorter

    @property
    def carries(self) -> bool:  # type: ignore[override]
        """Whether the next batch may start from the state of either."""
        return self.first.carries or self.second.carries

    def init(self, keys, gamma_max):
        return self.first.init(keys, gamma_max), self.second.init(keys, gamma_max)

    def begin(self, state, live, gamma_max):
        (one, length), (other, limit) = (
            policy.begin(own, live, gamma_max) for policy, own in self._each(state)
        )
        return (one, other), jnp.minimum(length, limit)

    def keep_drafting(self, state, seen):
        (one, more), (other, further) = (
            policy.keep_drafting(own, seen) for policy, own in self._each(state)
        )
        return (one, other), more & further

    def go_on(self, state, drafting, logprob):
        (one, more), (other, further) = (
            policy.go_on(own, drafting, logprob) for policy, own in self._each(state)
        )
        return (one, other), more & further

    def chance(self, state, slot):
        return self.second.chance(state[1], slot)

    def verifies(self, state, slot):
        return self.second.verifies(state[1], slot)

    def update(self, state, round_):
        return tuple(policy.update(own, round_) for policy, own in self._each(state))

    def prefers_plain(self, gamma_max, rounds, rows=1):
        return self.first.prefers_plain(gamma_max, rounds, rows if self.first.reads_batch else 1)

    def resume(self, fresh, past, rows):
        each = zip(self._each(fresh), past, strict=True)
        return tuple(policy.resume(own, old, rows) for (policy, own), old in each)

    def _each(self, state):
        return zip((self.first, self.second), state, strict=True)


def both(first: Policy | str, second: Policy | str) -> Both:
    """Make a policy that ends drafts as `first` does, and verifies tokens as `second` does.

        both("svip", "fixed(8)")

    Raises:
      ValueError: no policies, `second` does not decide slot by slot, or `first` does, or one of
        them sets the nodes of trees.
    """
    made = []
    for name, value in (("first", first), ("second", second)):
        policy = parse(value) if isinstance(value, str) else value
        has(name, policy, ("begin", "update"), "a draft-length policy, or its name")
        check_pytree(name, policy)
        if counts_nodes(policy):
            raise ValueError(f"{name}={shown(policy)} sets the number of a tree's nodes.")
        made.append(policy)
    if not by_slot(made[1]):
        raise ValueError(
            f"second={shown(made[1])} verifies all that was drafted: take one such as fixed(8)."
        )
    if by_slot(made[0]):
        raise ValueError(
            f"first={shown(made[0])} decides slot by slot too, and `second` does: give it alone, "
            "or a policy that ends drafts, such as svip."
        )
    return Both(*made)
