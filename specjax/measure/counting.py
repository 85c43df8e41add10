"""Loops that draft a given number of tokens in every round, and counts of their work."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from specjax.models import sharding
from specjax.policies import Policy
from specjax.policies.constant import Undecided
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.state import State


class Counts(NamedTuple):
    """Work done in each row."""

    rounds_by_length: Int[Array, "B K"]  # by the batch's longest draft, which sets their time
    policy: Any  # the state of the policy that decides


@pytree
class Always(Policy):
    """Drafts `length` tokens in every round, and counts the rounds.

    The budget or the drafter may end a draft early. `policy` decides too, so that its time is
    measured. Its decisions apply only if `length` is negative, which the compiler cannot rule out.
    With `refuses` it calls the drafter and takes no token.
    """

    reads_batch = True

    length: Int[Array, ""]
    policy: Policy = Undecided()
    refuses: Bool[Array, ""] | bool = False

    def init(self, keys, gamma_max):
        rounds = jnp.zeros((*keys.shape, gamma_max + 1), jnp.int32)
        return Counts(rounds, self.policy.init(keys, gamma_max))

    def begin(self, state, live, gamma_max):
        own, decided = self.policy.begin(state.policy, live, gamma_max)
        return state._replace(policy=own), self._or(decided, self.length)

    def keep_drafting(self, state, seen):
        own, decided = self.policy.keep_drafting(state.policy, seen)
        drafting = seen.drafting & jnp.logical_not(self.refuses)
        return state._replace(policy=own), self._or(decided, drafting)

    def go_on(self, state, drafting, logprob):
        own, decided = self.policy.go_on(state.policy, drafting, logprob)
        return state._replace(policy=own), self._or(decided, drafting)

    def _or(self, decided, otherwise):
        return jnp.where(self.length < 0, decided, otherwise)

    def update(self, state, round_):
        lengths = jnp.arange(state.rounds_by_length.shape[1], dtype=jnp.int32)[None, :]
        more = (jnp.max(round_.verified) == lengths).astype(jnp.int32)
        new = state._replace(rounds_by_length=state.rounds_by_length + more)
        own = self.policy.update(state.policy, round_)
        return where_active(round_, new, state)._replace(policy=own)


@pytree
class Sized(Policy):
    """Drafts `length` tokens in every round, and counts rounds by their verified positions."""

    reads_batch = True

    length: Int[Array, ""]

    def init(self, keys, gamma_max):
        return jnp.zeros((*keys.shape, keys.size * (gamma_max + 1) + 1), jnp.int32)

    def begin(self, state, live, gamma_max):
        return state, self.length

    def update(self, state, round_):
        positions = jnp.sum(jnp.where(round_.active, round_.verified + 1, 0))
        sizes = jnp.arange(state.shape[1], dtype=jnp.int32)
        return where_active(round_, state + (sizes == positions)[None, :].astype(jnp.int32), state)


class Note(NamedTuple):
    """Counts of one batch, those of rounds in the row that had the most."""

    calls: int  # of the target
    draft_calls: int  # that gave a token
    rounds: list[int] | None  # by drafted tokens, or by positions; None: not counted
    tokens: Int[np.ndarray, "2 B"]  # accepted and tested in each row, none behind an EOS

    def by_length(self, length: int) -> list[int]:
        """Rounds by drafted tokens: all but the last had room for `length` of them."""
        if self.rounds is not None or not length:
            return self.rounds or [self.calls]
        full, left = divmod(self.draft_calls, length)
        found = [0] * (length + 1)
        found[length] += full
        found[left] += left > 0
        found[0] += self.calls - sum(found)
        return found


def note(state: State) -> Note:
    """Read the counts of a finished batch."""
    stats = sharding.fetch(state.stats)
    row = int(stats.target_calls.argmax())
    own = state.policy
    own = own[0] if type(own) is tuple and own else own  # the first of `policies.both`
    counts = own.rounds_by_length if isinstance(own, Counts) else own
    rounds = sharding.fetch(counts)[row].tolist() if isinstance(counts, Array) else None
    tokens = np.stack([stats.accepted, stats.tested.sum(axis=1)])
    return Note(int(stats.target_calls[row]), int(stats.draft_calls[row]), rounds, tokens)
