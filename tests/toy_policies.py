"""Draft-length policies that a test can predict, or that try to break the loop within the rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Erratic:
    """Caps from 0 to γ_max that depend on all past rounds through a number modulo 11."""

    def init(self, keys, gamma_max):
        return jnp.full(keys.shape, gamma_max, jnp.int32)

    def begin(self, state):
        return state, (state * 7) % 4

    def keep_drafting(self, state, seen):
        return state, seen.drafting

    def update(self, state, stats):
        new = (state * 3 + stats.accepted * 5 + stats.drafted + 1) % 11
        return jnp.where(stats.active, new, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntropyStop(Erratic):
    """Drafts while the draft's next law is sharp."""

    def begin(self, state):
        return state, jnp.full(state.shape, 3, jnp.int32)

    def keep_drafting(self, state, seen):
        probs = jnp.exp(seen.draft_logprobs)
        surprise = jnp.where(probs > 0, -seen.draft_logprobs, 0.0)
        return state, jnp.sum(probs * surprise, axis=-1) < 0.8

    def update(self, state, stats):
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConfidenceStop(EntropyStop):
    """Drafts while the token before was likely: draw, keep, then stop."""

    def keep_drafting(self, state, seen):
        return state, seen.previous_logprob > np.log(0.5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Caps written down for each round and row, from the first again after the last."""

    caps: Array  # (R, B) int32

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state):
        row = jnp.arange(state.shape[0], dtype=jnp.int32)
        return state + 1, self.caps[state % self.caps.shape[0], row]

    def keep_drafting(self, state, seen):
        return state, seen.drafting

    def update(self, state, stats):
        return state
