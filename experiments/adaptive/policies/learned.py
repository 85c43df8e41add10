"""Policies by logistic regression: learned offline, on recorded rollouts, or online by each row."""

import dataclasses
import math
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
from specjax.replay import rollouts
from specjax.replay.rollouts import Rollouts
from specjax.rounds import where_active
from specjax.support.ranges import number

NUMBERS = 3  # features of a token, beside its slot
MEMORY = 0.8  # the share of past rounds in a row's mean acceptance
FIRST = 0.7  # which is this before any round
FIRST_RATE = 1.5  # tokens per target step, before any round
LASTING = 0.98  # the share of past rounds in a row's rate of tokens
WEIGHT = 20.0  # of the first rate, in target steps
STEPS, ADAM, DECAY = 400, 0.1, 1e-3  # of fitting, with a weight for the squares


class Seen(NamedTuple):
    """A row's rounds so far, and its draft in this one."""

    past: Float[Array, " B"]  # the mean acceptance of tested tokens, fading
    gained: Float[Array, " B"]  # fading sums: tokens, and the time that they took
    spent: Float[Array, " B"]
    here: Float[Array, "B F"]  # weights, as in `Learned`
    after: Float[Array, "B F"]
    entropy: Float[Array, " B"]  # of the distribution that the newest token is drawn from
    known: Float[Array, "B G F"]  # features of this round's tokens
    drafted: Int[Array, " B"]  # tokens
    survival: Float[Array, " B"]  # P(all of them are accepted)


def features(
    belief: Array, entropy: Array, past: Array, slot: Array, gamma_max: int
) -> Float[Array, "*batch F"]:
    """What is known of a drafted token: belief, entropy, the row's past, and its slot one-hot."""
    numbers = jnp.stack([log_odds(belief), entropy, log_odds(past)], axis=-1)
    slots = jax.nn.one_hot(slot, gamma_max, dtype=jnp.float32)
    return jnp.concatenate([numbers.astype(jnp.float32), slots], axis=-1)


@pytree
class Learned(Policy):
    """Drafts while the next token is worth its time at the row's own rate of tokens.

    After token n was drawn, all drafted ones are accepted with the chance S, and the next one with
    S·b. Another token is drafted if S·b > rate · (cost(n + 1) − cost(n)). S and b are logistic in
    the `features` of the newest token, b of a round's first token in the row's past alone. With a
    learning rate each row moves its weights by online logistic regression.
    """

    here: Float[Array, " F"]  # weights of the newest token's own chance
    after: Float[Array, " F"]  # of the next one's, if it is accepted
    first: Float[Array, " 2"]  # of a round's first token: a level, and the past
    rate: Float[Array, ""]  # tokens per target step, before any round
    learning_rate: Float[Array, ""]
    costs: Costs

    def init(self, keys, gamma_max):
        ones = jnp.ones(keys.shape, jnp.float32)
        here, after = (jnp.broadcast_to(w, (*keys.shape, len(w))) for w in (self.here, self.after))
        known = jnp.zeros((*keys.shape, gamma_max, len(self.here)), jnp.float32)
        none, gained = jnp.zeros(keys.shape, jnp.int32), WEIGHT * self.rate * ones
        spent = WEIGHT * self.costs.token * ones
        return Seen(FIRST * ones, gained, spent, here, after, 0 * ones, known, none, ones)

    def begin(self, state, live, gamma_max):
        fresh = state._replace(drafted=0 * state.drafted, survival=jnp.ones_like(state.survival))
        chance = jax.nn.sigmoid(self.first[0] + self.first[1] * log_odds(state.past))
        cost = self.costs.round_times(gamma_max)
        pays = chance > state.gained / state.spent * (cost[1] - cost[0])
        return fresh, jnp.where(pays, gamma_max, 0)

    def keep_drafting(self, state, seen):
        return state._replace(entropy=seen.entropy), seen.drafting

    def go_on(self, state, drafting, logprob):
        gamma_max = state.known.shape[1]
        known = features(jnp.exp(logprob), state.entropy, state.past, state.drafted, gamma_max)
        chance = jax.nn.sigmoid(jnp.sum(known * state.here, axis=1))
        following = jax.nn.sigmoid(jnp.sum(known * state.after, axis=1))
        survival, drafted = state.survival * chance, state.drafted + 1
        more = jnp.append(jnp.diff(self.costs.round_times(gamma_max)), jnp.inf)[drafted]
        pays = survival * following > state.gained / state.spent * more
        rows = jnp.arange(len(drafted))
        state = state._replace(
            known=state.known.at[rows, state.drafted].set(known, mode="drop"),
            drafted=drafted, survival=survival,
        )  # fmt: skip
        return state, drafting & pays

    def update(self, state, round_):
        tested, ratio = round_.tested, round_.ratio
        total = jnp.sum(tested, axis=1, dtype=jnp.float32)
        mean = jnp.sum(jnp.where(tested, ratio, 0.0), axis=1) / jnp.maximum(total, 1)
        took = jnp.asarray(self.costs.round_times(round_.gamma_max))[round_.verified]
        new = state._replace(
            # Without a test it goes back to the first, or a row would never draft again.
            past=MEMORY * state.past + (1 - MEMORY) * jnp.where(total > 0, mean, FIRST),
            gained=LASTING * state.gained + round_.emitted.astype(jnp.float32),
            spent=LASTING * state.spent + took,
            here=state.here + self._step(state.here, state.known, ratio, tested),
            after=state.after
            + self._step(state.after, state.known[:, :-1], ratio[:, 1:], tested[:, 1:]),
        )
        return where_active(round_, new, state)

    def _step(self, weights, known, ratio, tested):
        """The step of online logistic regression that tested tokens make."""
        chance = jax.nn.sigmoid(jnp.einsum("bgf,bf->bg", known, weights))
        error = jnp.where(tested, ratio - chance, 0.0)
        return self.learning_rate * jnp.einsum("bg,bgf->bf", error, known)


def online(
    costs: Costs, prior: float = 0.7, slope: float = 0.6, learning_rate: float = 0.05
) -> Learned:
    """Make the policy that learns from the row alone, with a slope for the belief's log-odds and a
    level for each slot, as vLLM's issue 52228 proposes; prior: the chance at even belief.
    """
    table = required(costs)
    level = math.log(number("prior", prior, "(0, 1)") / (1 - prior))
    weights = jnp.float32([slope, 0.0, 0.0, *[level] * table.gamma_max])
    rate = jnp.float32(number("learning_rate", learning_rate, "[0, ∞)"))
    return Learned(weights, weights, jnp.float32([0, 1]), jnp.float32(FIRST_RATE), rate, table)


class Tested(NamedTuple):
    """Tested tokens along outputs."""

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
    budget, silent = np.asarray(found.budget), np.asarray(found.length) == 0
    if np.any(np.asarray(found.accepted)[:, 0] >= 0):
        raise ValueError("No policy is fitted to a drafter whose drafts depend on their round.")
    rows: list[tuple[float, ...]] = []
    for n, length in enumerate(emitted):
        begin, past = 0, FIRST
        while begin < length:
            kept, room = 0, min(found.gamma_max, length - begin, budget[n] - begin - 1)
            room = next((k for k in range(room) if silent[n, begin + k]), room)
            while kept < room and drawn[n, begin + kept]:
                kept += 1
            last = min(kept + 1, room)
            for slot in range(last):
                at, ok = begin + slot, slot < kept
                seen = own[n, at] if ok else belief[n, at, 0]
                then = slot + 1 < last, slot + 1 < kept
                rows.append((seen, entropy[n, at, 0], past, slot, ok, *then))
            past = MEMORY * past + (1 - MEMORY) * (kept / last if last else FIRST)
            begin += kept + 1
    columns = np.array(rows).T
    b, e, p = map(jnp.float32, columns[:3])
    known = np.asarray(features(b, e, p, jnp.asarray(columns[3], jnp.int32), found.gamma_max))
    return Tested(known, *(column > 0 for column in columns[4:]))


def fit(found: Rollouts, costs: Costs) -> Learned:
    """Fit the weights to recorded rollouts; rows then keep them."""
    seen = seen_in(found)
    first = seen.known[:, 3] == 1
    past = np.stack([np.ones(first.sum()), seen.known[first, 2]], axis=1)
    return Learned(
        _logistic(seen.known, seen.accepted),
        _logistic(seen.known[seen.following], seen.next_accepted[seen.following]),
        _logistic(past, seen.accepted[first]),
        jnp.float32(FIRST_RATE), jnp.float32(0.0), costs,
    )  # fmt: skip


def learned(costs: Costs, trace: str) -> Learned:
    """Fit the policy to a file of `experiments.trace`, for drafts as long as its own or shorter."""
    made, gamma_max = fit(rollouts.load(trace), table := required(costs)), table.gamma_max
    if (longest := len(made.here) - NUMBERS) < gamma_max:
        raise ValueError(
            f"trace={trace!r} has drafts of {longest} tokens, and γ_max is {gamma_max}: lower it, "
            "or record longer ones by experiments.trace --gamma_max."
        )
    here, after = (weights[: NUMBERS + gamma_max] for weights in (made.here, made.after))
    return dataclasses.replace(made, here=here, after=after)


def _logistic(known: Float[np.ndarray, "N F"], true: Bool[np.ndarray, " N"]) -> Float[Array, " F"]:
    """Weights with the least mean cross-entropy."""

    def loss(weights):
        odds = jnp.asarray(known) @ weights
        each = optax.sigmoid_binary_cross_entropy(odds, jnp.asarray(true, jnp.float32))
        return jnp.mean(each) + DECAY * jnp.sum(weights**2)

    adam = optax.adam(ADAM)

    def step(_, carry):
        weights, state = carry
        updates, state = adam.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, updates), state

    start = jnp.zeros(known.shape[1], jnp.float32)
    return jax.jit(lambda w: jax.lax.fori_loop(0, STEPS, step, (w, adam.init(w)))[0])(start)
