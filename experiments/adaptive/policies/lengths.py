"""GammaTune and the tiers of SGLang, by average numbers of accepted tokens; first descent; and
lengths that are set beforehand."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from specjax.policies import Costs, Policy
from specjax.policies.goodput import Goodput, Tally, checked
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
    gamma, memory = whole("gamma", gamma, "[1, ∞)"), number("memory", memory, "[0, 1)")
    return GammaTune(jnp.int32(gamma), jnp.float32(memory))


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


@pytree
class Given(Policy):
    """Drafts these lengths in turn, whatever is seen; so a loop is timed without decisions."""

    lengths: Int[Array, " N"]

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live, gamma_max):
        return state, self.lengths[state % len(self.lengths)]

    def update(self, state, round_):
        return where_active(round_, state + 1, state)


@pytree
class Reading(Given):
    """Drafts them too, and computes an entropy for each token, which decides nothing."""

    def keep_drafting(self, state, seen):
        return state, seen.drafting & (seen.entropy > -1)


def given(lengths: Sequence[int], reads: str = "") -> Given:
    """Make a policy of lengths that repeat; reads: "entropy", which takes time, or ""."""
    each = jnp.int32([whole("lengths", one, "[0, ∞)") for one in listed("lengths", lengths)])
    if reads not in ("", "entropy"):
        raise ValueError(f"reads={reads!r} must be 'entropy' or ''.")
    return Reading(each) if reads else Given(each)


BINS = 8


class Descent(NamedTuple):
    """Counts by the belief in a token, and the position in this round."""

    tally: Tally  # (B, BINS)
    drafted: Int[Array, " B"]
    survival: Float[Array, " B"]  # P(all drafted tokens so far are accepted), estimated
    expected: Float[Array, " B"]  # tokens that the round would give if it stopped here


@pytree
class FirstDescent(Goodput):
    """Drafts while one more token is expected to raise tokens per time, decided token by token.

    A token's chance of acceptance is estimated from past tokens of similar belief; before the
    token is drawn, from all past tokens. Drafting stops at the first length, 0 included, after
    which expected tokens per time would fall; longer drafts are not considered.
    """

    def outside(self):
        """The policy itself: it never considers longer drafts if one token does not pay."""
        return self

    def init(self, keys, gamma_max):
        self.costs.round_times(gamma_max)
        none = jnp.zeros((*keys.shape, BINS), jnp.float32)
        return self._fresh(Tally(none, none))

    def begin(self, state, live, gamma_max):
        cost = self.costs.round_times(gamma_max)
        return state, jnp.where(self._pays(state, cost), len(cost) - 1, 0)

    def go_on(self, state, drafting, logprob):
        cost = self.costs.round_times(self.costs.gamma_max)
        at = _bin(logprob)[:, None]
        tally = jax.tree.map(lambda x: jnp.take_along_axis(x, at, axis=1)[:, 0], state.tally)
        survival = jnp.where(drafting, state.survival * self.alpha(tally), state.survival)
        state = Descent(
            state.tally,
            state.drafted + drafting.astype(jnp.int32),
            survival,
            state.expected + jnp.where(drafting, survival, 0.0),
        )
        return state, drafting & self._pays(state, cost)

    def update(self, state, round_):
        bins = jnp.arange(BINS, dtype=jnp.int32)[None, None, :]
        hit = _bin(round_.belief_logprob)[:, :, None] == bins
        hit = (hit & round_.tested[:, :, None]).astype(jnp.float32)
        tally = Tally(
            self.memory * state.tally.accepted + jnp.sum(hit * round_.ratio[:, :, None], axis=1),
            self.memory * state.tally.tested + jnp.sum(hit, axis=1),
        )
        return self._fresh(where_active(round_, tally, state.tally))

    def _pays(self, state, cost):
        """Whether one token more is expected to raise tokens per time."""
        overall = jax.tree.map(lambda x: jnp.sum(x, axis=1), state.tally)
        now = jnp.minimum(state.drafted, len(cost) - 1)
        then = jnp.minimum(now + 1, len(cost) - 1)
        expected = state.expected + state.survival * self.alpha(overall)
        return expected * cost[now] > state.expected * cost[then]

    def _fresh(self, tally):
        ones = jnp.ones(tally.tested.shape[:1], jnp.float32)
        return Descent(tally, jnp.zeros(ones.shape, jnp.int32), ones, ones)


def _bin(logprob: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """The index of a probability's bin, of BINS equal ones."""
    which = jnp.floor(jnp.exp(logprob) * BINS).astype(jnp.int32)
    return jnp.clip(which, 0, BINS - 1)


def first_descent(
    costs: Costs, prior: float = 0.7, weight: float = 4.0, memory: float = 0.9
) -> FirstDescent:
    """Make a goodput policy by this round's beliefs, with a table of costs."""
    return FirstDescent(*checked(costs, prior, weight, memory))
