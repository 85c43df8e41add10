"""A policy learned offline: chances of acceptance by logistic regression on recorded rollouts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.policies import Costs, Policy
from specjax.policies.calibrated import log_odds
from specjax.policies.costs import required
from specjax.pytrees import pytree
from specjax.replay.rollouts import Rollouts
from specjax.rounds import where_active
from specjax.support.ranges import listed, number

MEMORY = 0.8  # the share of past rounds in a row's mean acceptance
FIRST = 0.7  # which is this before any round
STEPS, RATE, DECAY = 400, 0.1, 1e-3  # of Adam, with a weight for the squares


class Seen(NamedTuple):
    """A row's rounds so far, and its draft in this one."""

    past: Float[Array, " B"]  # the mean acceptance of tested tokens, fading
    entropy: Float[Array, " B"]  # of the distribution that the newest token is drawn from
    count: Int[Array, " B"]  # drafted tokens
    survival: Float[Array, " B"]  # P(all of them are accepted)


def features(belief: Array, entropy: Array, slot: Array, past: Array) -> Float[Array, "*batch 5"]:
    """What is known of a drafted token: its belief, entropy and slot, and the row's past."""
    each = jnp.ones_like(past), log_odds(belief), entropy, jnp.log1p(slot), log_odds(past)
    return jnp.stack(jnp.broadcast_arrays(*each), axis=-1).astype(jnp.float32)


@pytree
class Learned(Policy):
    """Drafts while the next token is worth its time at a given rate of tokens.

    After token n was drawn, all drafted ones are accepted with the chance S, and the next one with
    S·b. Another token is drafted if S·b > rate · (cost(n + 1) − cost(n)). S and b are logistic in
    the `features` of the newest token, b of a round's first token in the row's past alone.
    """

    here: Float[Array, " F"]  # weights of the newest token's own chance
    after: Float[Array, " F"]  # of the next one's, if it is accepted
    first: Float[Array, " 2"]  # of a round's first token: a level, and the past
    rate: Float[Array, ""]  # tokens per time
    costs: Costs

    def init(self, keys, gamma_max):
        ones = jnp.ones(keys.shape, jnp.float32)
        return Seen(FIRST * ones, 0 * ones, jnp.zeros(keys.shape, jnp.int32), ones)

    def begin(self, state, live, gamma_max):
        fresh = state._replace(count=0 * state.count, survival=jnp.ones_like(state.survival))
        chance = jax.nn.sigmoid(self.first[0] + self.first[1] * log_odds(state.past))
        cost = self.costs.round_times(gamma_max)
        return fresh, jnp.where(chance > self.rate * (cost[1] - cost[0]), gamma_max, 0)

    def keep_drafting(self, state, seen):
        return state._replace(entropy=seen.entropy), seen.drafting

    def go_on(self, state, drafting, logprob):
        known = features(jnp.exp(logprob), state.entropy, state.count, state.past)
        survival = state.survival * jax.nn.sigmoid(known @ self.here)
        count = state.count + 1
        cost = self.costs.round_times(self.costs.gamma_max)
        more = jnp.append(jnp.diff(cost), jnp.inf)[count]
        pays = survival * jax.nn.sigmoid(known @ self.after) > self.rate * more
        return state._replace(count=count, survival=survival), drafting & pays

    def update(self, state, round_):
        tested = jnp.sum(round_.tested, axis=1)
        mean = jnp.sum(jnp.where(round_.tested, round_.ratio, 0.0), axis=1)
        new = MEMORY * state.past + (1 - MEMORY) * mean / jnp.maximum(tested, 1)
        past = jnp.where(tested > 0, new, state.past)
        return where_active(round_, state._replace(past=past), state)


def learned(
    here: tuple[float, ...], after: tuple[float, ...], first: tuple[float, ...], rate: float,
    costs: Costs,
) -> Learned:  # fmt: skip
    """Make a policy of weights, as `fit` finds them."""
    weights = (jnp.float32(listed(name, w)) for name, w in
               (("here", here), ("after", after), ("first", first)))  # fmt: skip
    return Learned(*weights, jnp.float32(number("rate", rate, "[0, ∞)")), required(costs))


class Tested(NamedTuple):
    """Tested tokens of rounds of γ_max tokens along outputs."""

    known: Float[np.ndarray, "N F"]
    accepted: Bool[np.ndarray, " N"]
    following: Bool[np.ndarray, " N"]  # whether the next token of the round is tested
    next_accepted: Bool[np.ndarray, " N"]


def seen_in(found: Rollouts) -> Tested:
    """Decode outputs in rounds of γ_max tokens, and list the tokens that the target tests."""
    chances = np.asarray(found.acceptance)
    drawn = np.random.default_rng(0).random(chances.shape) < chances
    belief, own = np.exp(np.asarray(found.belief_logprob)), np.exp(found.own_belief_logprob)
    entropy, emitted = np.asarray(found.entropy), np.asarray(found.emitted)
    rows: list[tuple[float, ...]] = []
    for n, length in enumerate(emitted):
        begin, past = 0, FIRST
        while begin < length:
            kept = 0
            while kept < found.gamma_max and begin + kept < length and drawn[n, begin + kept]:
                kept += 1
            last = min(kept + 1, found.gamma_max, length - begin)
            for slot in range(last):
                at, ok = begin + slot, slot < kept
                seen = own[n, at] if ok else belief[n, at, 0]
                rows.append((seen, entropy[n, at, 0], slot, past, ok, slot + 1 < last,
                             slot + 1 < kept))  # fmt: skip
            past = MEMORY * past + (1 - MEMORY) * kept / last
            begin += kept + 1
    columns = np.array(rows).T
    known = np.asarray(features(*map(jnp.asarray, columns[:4])))
    return Tested(known, *(column > 0 for column in columns[4:]))


def fit(found: Rollouts, costs: Costs, rate: float) -> Learned:
    """Fit the weights to recorded rollouts.

    Args:
      rate: tokens per time at which another token is worth drafting, such as that of the best γ.
    """
    seen = seen_in(found)
    first = seen.known[:, 3] == 0
    past = seen.known[first][:, [0, 4]]
    return Learned(
        _logistic(seen.known, seen.accepted),
        _logistic(seen.known[seen.following], seen.next_accepted[seen.following]),
        _logistic(past, seen.accepted[first]),
        jnp.float32(rate), costs,
    )  # fmt: skip


def _logistic(known: Float[np.ndarray, "N F"], true: Bool[np.ndarray, " N"]) -> Float[Array, " F"]:
    """Weights with the least mean cross-entropy."""

    def loss(weights):
        odds = jnp.asarray(known) @ weights
        each = optax.sigmoid_binary_cross_entropy(odds, jnp.asarray(true, jnp.float32))
        return jnp.mean(each) + DECAY * jnp.sum(weights**2)

    adam = optax.adam(RATE)

    def step(_, carry):
        weights, state = carry
        updates, state = adam.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    start = jnp.zeros(known.shape[1], jnp.float32)
    return jax.jit(lambda w: jax.lax.fori_loop(0, STEPS, step, (w, adam.init(w)))[0])(start)
