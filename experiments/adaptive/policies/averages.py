"""Policies that follow the average number of accepted tokens: GammaTune, and tiers as in SGLang."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.base import Policy
from specjax.pytrees import pytree
from specjax.rounds import where_active
from specjax.support.ranges import listed, number, whole


class Tuned(NamedTuple):
    gamma: Int[Array, " B"]
    average: Float[Array, " B"]


@pytree
class GammaTune(Policy):
    """Drafts γ tokens: average ← .7·average + .3·a; γ ← a + 2 if a = γ, else ⌈average⌉."""

    carries = True

    gamma: Int[Array, ""]  # γ of the first round, and the first average
    memory: Float[Array, ""]

    def init(self, keys, gamma_max):
        gamma = jnp.full(keys.shape, jnp.minimum(self.gamma, gamma_max), jnp.int32)
        return Tuned(gamma, gamma.astype(jnp.float32))

    def begin(self, state, live, gamma_max):
        return state, state.gamma

    def update(self, state, round_):
        full = round_.accepted == state.gamma
        accepted = round_.accepted.astype(jnp.float32)
        average = self.memory * state.average + (1 - self.memory) * accepted
        average = jnp.where(full, state.average, average)
        gamma = jnp.where(full, round_.accepted + 2, jnp.ceil(average).astype(jnp.int32))
        new = Tuned(jnp.clip(gamma, 1, round_.gamma_max), average)
        return where_active(round_.uncut, new, state)


def gammatune(gamma: int = 4, memory: float = 0.7) -> GammaTune:
    """Make a GammaTune policy that starts from γ ≥ 1."""
    return GammaTune(
        jnp.int32(whole("gamma", gamma, "[1, ∞)")), jnp.float32(number("memory", memory, "[0, 1)"))
    )


class Tier(NamedTuple):
    tier: Int[Array, " B"]  # index of the tier
    average: Float[Array, " B"]
    counted: Int[Array, " B"]  # rounds


@pytree
class Average(Policy):
    """Drafts lengths from a few tiers: e ← .8·e + .2·a, and every fifth round

        down a tier while e ≤ the tier below − .75, else
        up a tier while e > this tier − .5.

    SGLang averages over the batch; here each row has its own e.
    """

    carries = True

    tiers: Int[Array, " N"]  # ascending
    first: Int[Array, ""]  # index of the first tier
    memory: Float[Array, ""]
    every: Int[Array, ""]  # rounds between two changes

    def init(self, keys, gamma_max):
        first = jnp.full(keys.shape, jnp.minimum(self.first, self._last(gamma_max)), jnp.int32)
        average = (self.tiers[first] - 1).astype(jnp.float32)
        return Tier(first, average, jnp.zeros(keys.shape, jnp.int32))

    def begin(self, state, live, gamma_max):
        return state, self.tiers[state.tier]

    def update(self, state, round_):
        accepted = round_.accepted.astype(jnp.float32)
        average = self.memory * state.average + (1 - self.memory) * accepted
        counted = state.counted + 1
        tiers = self.tiers[None, :].astype(jnp.float32)
        # Tiers ascend, so the number of tiers below the average is the tier to move to.
        down = jnp.sum(average[:, None] > tiers - 0.75, axis=1, dtype=jnp.int32)
        up = jnp.sum(average[:, None] > tiers - 0.5, axis=1, dtype=jnp.int32)
        moved = jnp.where(down < state.tier, down, jnp.maximum(state.tier, up))
        moved = jnp.minimum(moved, self._last(round_.gamma_max))
        tier = jnp.where(counted % self.every == 0, moved, state.tier)
        return where_active(round_.uncut, Tier(tier, average, counted), state)

    def _last(self, gamma_max: int) -> Int[Array, ""]:
        """The longest tier that γ_max allows, or the first."""
        return jnp.maximum(jnp.sum(self.tiers <= gamma_max, dtype=jnp.int32) - 1, 0)


def average(
    tiers: Sequence[int] = (1, 3, 5, 7), first: int = 3, memory: float = 0.8, every: int = 5
) -> Average:
    """Make a policy of tiers as in SGLang, which starts from the tier `first`."""
    lengths = [whole("tiers", tier, "[0, ∞)") for tier in listed("tiers", tiers)]
    first = whole("first", first, "[0, ∞)")
    if first not in lengths or any(a >= b for a, b in itertools.pairwise(lengths)):
        raise ValueError(f"tiers={tiers} must ascend, and have first={first}.")
    return Average(
        jnp.asarray(lengths, jnp.int32),
        jnp.int32(lengths.index(first)),
        jnp.float32(number("memory", memory, "[0, 1)")),
        jnp.int32(whole("every", every, "[1, ∞)")),
    )
