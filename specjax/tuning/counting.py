"""Loops that draft a fixed number of tokens in every round, and counts of their work."""

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
    accepted: Int[Array, " B"]  # tokens, none behind an EOS
    tested: Int[Array, " B"]
    policy: Any  # the state of the policy that decides


@pytree
class Always(Policy):
    """Drafts `length` tokens in every round, and counts them.

    The budget or the drafter may end a draft early. `policy` decides too, so that its time is
    measured. Its decisions apply only if `length` is negative, which the compiler cannot rule out.
    If `policy` is `fixed`, so is this one. With `refuses` it calls the drafter and takes no token.
    """

    reads_batch = True

    length: Int[Array, ""]
    policy: Policy = Undecided()
    refuses: Bool[Array, ""] | bool = False

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        """Whether drafts have a fixed length, as those of `policy` do."""
        return self.policy.fixed

    def init(self, keys, gamma_max):
        none = jnp.zeros(keys.shape, jnp.int32)
        rounds = jnp.zeros((*keys.shape, gamma_max + 1), jnp.int32)
        return Counts(rounds, none, none, self.policy.init(keys, gamma_max))

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
        new = state._replace(
            rounds_by_length=state.rounds_by_length
            + (jnp.max(round_.drafted) == lengths).astype(jnp.int32),
            accepted=state.accepted + round_.in_output,
            tested=state.tested + jnp.sum(round_.tested, axis=1, dtype=jnp.int32),
        )
        own = self.policy.update(state.policy, round_)
        return where_active(round_, new, state)._replace(policy=own)


class Note(NamedTuple):
    """Counts of one batch."""

    rounds: list[int]  # of the longest-running row, by drafted tokens; plain: its tokens
    tokens: Int[np.ndarray, "2 B"]  # accepted and tested in each row; plain: none


def note(state: State) -> Note:
    """Read the counts of a finished batch, in a loop with `Always` or in plain decoding."""
    calls = sharding.fetch(state.stats.target_calls)
    row = int(calls.argmax())
    if not state.policy:
        return Note([int(calls[row])], np.zeros((2, len(calls)), int))
    counts: Counts = state.policy
    rounds, accepted, tested = sharding.fetch(counts[:3])
    return Note(rounds[row].tolist(), np.stack([accepted, tested]))
