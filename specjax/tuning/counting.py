"""Loops that draft a given number of tokens in every round, and what they did."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from specjax.models import sharding
from specjax.policies import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.state import State


class Counts(NamedTuple):
    """What was done in each row."""

    rounds_by_length: Int[Array, "B K"]  # the batch's longest draft, which is what they take
    accepted: Int[Array, " B"]  # tokens, none behind an EOS
    tested: Int[Array, " B"]
    policy: Any  # the state of the one that decides


@pytree
class Undecided(Policy):
    """Drafts γ_max tokens, which the loop does not know: what is left of a policy without its
    decisions."""


@pytree
class Always(Policy):
    """Drafts `length` tokens in every round, and counts. The budget may end a draft, and a drafter
    may have nothing to say. What `policy` decides is computed, for its time; it counts where
    `length` is negative, which no compiler knows. Around a policy whose drafts are `fixed` these
    are too, so that the loop is lowered as its own. One that `refuses` calls the drafter and takes
    no token."""

    reads_batch = True

    length: Int[Array, ""]
    policy: Policy = Undecided()
    refuses: Bool[Array, ""] | bool = False

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        """See `Policy`."""
        return self.policy.fixed

    def init(self, keys, gamma_max):
        none = jnp.zeros(keys.shape, jnp.int32)
        rounds = jnp.zeros((*keys.shape, gamma_max + 1), jnp.int32)
        return Counts(rounds, none, none, self.policy.init(keys, gamma_max))

    def begin(self, state, gamma_max):
        own, decided = self.policy.begin(state.policy, gamma_max)
        return state._replace(policy=own), self._or(decided, self.length)

    def keep_drafting(self, state, seen):
        own, decided = self.policy.keep_drafting(state.policy, seen)
        drafting = seen.drafting & jnp.logical_not(self.refuses)
        return state._replace(policy=own), self._or(decided, drafting)

    def go_on(self, state, drafting, confidence):
        own, decided = self.policy.go_on(state.policy, drafting, confidence)
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
    """What is kept of a batch."""

    rounds: list[int]  # of the row that lasted longest, by drafted tokens; plain: its tokens
    tokens: Int[np.ndarray, "2 B"]  # accepted and tested in each row; plain: none


def note(state: State) -> Note:
    """Of a batch that is done, in a loop with `Always` or in plain decoding."""
    calls = sharding.fetch(state.stats.target_calls)
    row = int(calls.argmax())
    if not state.policy:
        return Note([int(calls[row])], np.zeros((2, len(calls)), int))
    counts: Counts = state.policy
    rounds, accepted, tested = sharding.fetch(counts[:3])
    return Note(rounds[row].tolist(), np.stack([accepted, tested]))
