"""Rounds along recorded rollouts: what a row drafts where it stands, and what is accepted.

A row's drafts follow the output up to the first token that is not accepted, and then the rollout
recorded there (`rollouts.py`). For a drafter that `guesses`, the whole round was recorded where it
begins.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax.policies import Observation, Policy, Round
from specjax.policies.base import by_slot
from specjax.policies.slots import rated
from specjax.replay.rollouts import Rollouts, acceptance_point
from specjax.rounds import Drafts


@dataclasses.dataclass(frozen=True)
class Remembered:
    """An `Observation` from rollouts, without distributions over the vocabulary."""

    slot: Int[Array, ""]
    drafting: Bool[Array, " N"]
    recorded: Rollouts
    look_up: Callable[
        [Array], Array
    ]  # a field of (N, T, G, …) where each row's distribution stands

    @property
    def entropy(self) -> Float[Array, " N"]:
        """Entropy of the belief, in nats; float32."""
        return self.look_up(self.recorded.entropy)

    @property
    def top1(self) -> Float[Array, " N"]:
        """Largest probability of the belief; float32."""
        return self.look_up(self.recorded.top1)

    @property
    def hidden(self) -> Float[Array, "N E"]:
        """The drafter's hidden state at this distribution; float32."""
        if self.recorded.hidden.shape[-1] == 0:
            raise ValueError(
                "This policy reads the drafter's hidden states, which were not recorded: make the "
                "trace with --hidden."
            )
        return self.look_up(self.recorded.hidden)

    @property
    def draft_logprobs(self):
        """Raise ValueError: distributions are too large to record."""
        raise ValueError(
            "This policy reads distributions over the whole vocabulary, which a trace does not "
            "hold; it holds their entropy and top1."
        )

    belief_logprobs = draft_logprobs


def first_rejections(rollouts: Rollouts, keys: Key[Array, " N"]) -> Int[Array, "N T"]:
    """Find for each position the next one where a drafted token is rejected.

    If the longest draft has no rejected token, any later position may be returned.
    """
    count = rollouts.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), rollouts.tokens.shape)
    kept = jax.vmap(acceptance_point, (None, 1), 1)(keys, positions) < rollouts.acceptance
    here = jnp.where(kept, count - 1, positions)
    found = jax.lax.cummin(here, axis=1, reverse=True)
    settled = jnp.minimum(positions + rollouts.accepted, count - 1)
    return jnp.where(rollouts.accepted < 0, found, settled)


class Path(NamedTuple):
    """Places where the tokens of a round's draft were recorded, (N, G)."""

    where: Array  # the rollout, by the position at which it begins
    slot: Array  # the slot in the rollout
    on_output: Array  # whether it is the output's own token, which is recorded separately


def path(rollouts: Rollouts, begin: Int[Array, " N"], rejected: Int[Array, " N"]) -> Path:
    """Locate the drafts of rounds that start at `begin` and are first rejected at `rejected`."""
    slots = jnp.arange(rollouts.gamma_max, dtype=jnp.int32)[None, :]
    begin, rejected = begin[:, None], rejected[:, None]
    position = begin + slots
    settled = jnp.take_along_axis(rollouts.accepted, begin, axis=1, mode="clip") >= 0
    where = jnp.where(settled, begin, jnp.minimum(position, rejected))
    return Path(where, position - where, (position < rejected) & ~settled)


@dataclasses.dataclass(frozen=True)
class Along:
    """A round of each row along its rollout."""

    recorded: Rollouts  # of N rows
    begin: Int[Array, " N"]  # tokens of the output before the round
    rejected: Int[Array, " N"]  # the first position where a drafted token is rejected

    @property
    def path(self) -> Path:
        """Where the drafted tokens were recorded."""
        return path(self.recorded, self.begin, self.rejected)

    @property
    def belief_logprob(self) -> Float[Array, "N G"]:
        """The log-probability of each drafted token, see `Round`."""
        return self.over_slots(self.recorded.belief_logprob, self.recorded.own_belief_logprob)

    def over_slots(self, field: Array, own: Array | None = None) -> Array:
        """Select each draft's slots: (N, T, G) → (N, G).

        Args:
          own: the field of the output's own tokens, (N, T).
        """
        where, slot, on_output = self.path
        rows = jnp.arange(len(where))[:, None]
        found = field[rows, where, slot]
        return found if own is None else jnp.where(on_output, own[rows, where], found)

    def room(self, live: Bool[Array, " N"], allowed: Array) -> Int[Array, " N"]:
        """The longest draft of each row; 0 in rows that have ended."""
        room = jnp.minimum(self.recorded.budget - self.begin - 1, self.recorded.gamma_max)
        return jnp.where(live, jnp.clip(jnp.asarray(allowed, jnp.int32), 0, room), 0)

    def draft(self, policy: Policy, state: Any, cap: Array):
        """Draft up to `cap` (N,) tokens of each row as the loop does: `speculative.propose`.

        Returns:
          The policy's state; drafts that have lengths and chances alone; and for each slot and row,
          (G, N), whether the drafter was called, whether it proposed a token, and whether that was
          drafted.
        """
        where, there, _ = self.path
        rows, logprob = jnp.arange(len(cap)), self.belief_logprob
        silent = there >= self.recorded.length[rows[:, None], where]

        def propose(carry, slot):
            state, drafts, called = carry
            proposed = called & ~silent[:, slot]
            look_up = partial(_at, rows, where[:, slot], there[:, slot])
            seen = cast(Observation, Remembered(slot, proposed, self.recorded, look_up))
            state, keep = policy.keep_drafting(state, seen)
            drafting = proposed & keep
            drafts = rated(policy, state, drafts, slot)
            drafts = drafts._replace(length=drafts.length + drafting.astype(jnp.int32))
            state, further = policy.go_on(state, drafting, logprob[:, slot])
            going = drafting & (drafts.length < cap) & further
            return (state, drafts, going), (called, proposed, drafting)

        nothing = jax.ShapeDtypeStruct((len(cap), 0), jnp.float32)
        none = Drafts.empty(cap, self.recorded.gamma_max, nothing, by_slot(policy))
        slots = jnp.arange(self.recorded.gamma_max, dtype=jnp.int32)
        (state, drafts, _), each = jax.lax.scan(propose, (state, none, cap > 0), slots)
        return state, drafts, each

    def conclude(self, live: Bool[Array, " N"], verified: Int[Array, " N"]) -> Round:
        """The round in which the target sees this many drafted tokens of each row."""
        recorded, slots = self.recorded, jnp.arange(self.recorded.gamma_max, dtype=jnp.int32)
        accepted = jnp.minimum(verified, self.rejected - self.begin)
        gained = jnp.minimum(accepted + 1, recorded.emitted - self.begin)
        gained = jnp.where(live, gained, 0)
        after = self.begin + gained
        target = self.over_slots(recorded.target, recorded.own_target)
        draft = self.over_slots(recorded.draft, recorded.own_draft)
        return Round(
            active=live,
            drafted=verified,
            accepted=accepted,
            emitted=gained,
            overlap=self.over_slots(recorded.overlap),
            ratio=jnp.exp(jnp.minimum(target - draft, 0.0)),
            belief_logprob=self.belief_logprob,
            submitted=slots[None, :] < verified[:, None],
            left=jnp.where(after < recorded.emitted, recorded.budget - after, 0),
        )


def _at(rows, where, slot, field):
    return field[rows, where, slot]
