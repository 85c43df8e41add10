"""Bandits whose arms are draft lengths; the speedup of an arm is estimated from its rounds.

The speedup of a round that drafts k tokens is tokens per time, emitted/cost(k), divided by the
largest value of any arm, so it lies in [0, 1]. Without costs every round costs the same, and long
drafts win.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key, UInt32

from specjax.policies.base import Policy, noise_keys, salts
from specjax.policies.costs import Costs, checked, round_costs
from specjax.pytrees import pytree
from specjax.rounds import Round, where_active
from specjax.sampling import draw
from specjax.support.ranges import number


def speedups(
    costs: Costs | None,
    tokens: Int[Array, "*batch"],
    drafted: Int[Array, "*batch"],
    gamma_max: int,
) -> Float[Array, "*batch"]:
    """Tokens per time of rounds, by drafted tokens, divided by the largest possible value."""
    cost = round_costs(costs, gamma_max)
    most = jnp.max(jnp.arange(1, gamma_max + 2, dtype=jnp.float32) / cost)
    return tokens.astype(jnp.float32) / cost[drafted] / most


def _one_hot(arm: Int[Array, " B"], arms: int) -> Float[Array, "B K"]:
    return jax.nn.one_hot(arm, arms, dtype=jnp.float32)


class _Bandit(Policy):
    """Base of bandits. Evidence about arms carries over to the next batch; noise does not."""

    carries = True

    def resume(self, fresh, past, rows):
        return super().resume(fresh, past, rows)._replace(salt=fresh.salt)


class Played(NamedTuple):
    """The state of UCB1 over K arms."""

    arm: Int[Array, " B"]
    plays: Float[Array, "B K"]
    reward: Float[Array, "B K"]  # sums
    salt: UInt32[Array, " B"]


def unplayed(keys: Key[Array, " B"], arms: int) -> Played:
    """The state of UCB1 before the first round."""
    none = jnp.zeros((*keys.shape, arms), jnp.float32)
    return Played(jnp.zeros(keys.shape, jnp.int32), none, none, salts(keys))


def with_best_arm(state: Played, width: Float[Array, ""]) -> Played:
    """Choose the arm of largest mean reward + width·√(2 ln t/plays), by UCB1.

    Arms that were never played come first, in random order.
    """
    count = jnp.sum(state.plays, axis=1)
    plays = jnp.where(state.plays > 0, state.plays, 1.0)
    radius = jnp.sqrt(2 * jnp.log(jnp.maximum(count, 1.0))[:, None] / plays)
    index = jnp.where(state.plays > 0, state.reward / plays + width * radius, jnp.inf)
    best = index == jnp.max(index, axis=1, keepdims=True)
    keys = noise_keys(state.salt, count.astype(jnp.int32))
    return state._replace(arm=draw(keys, best.astype(jnp.float32)))


def rewarded(state: Played, round_: Round, reward: Float[Array, " B"]) -> Played:
    """Add a round's reward, in [0, 1], to the arm that was played."""
    played = _one_hot(state.arm, state.plays.shape[1])
    new = state._replace(plays=state.plays + played, reward=state.reward + played * reward[:, None])
    return where_active(round_, new, state)


@pytree
class Ucb(_Bandit):
    """UCB1 over 1 … γ_max tokens, by speedup: see `with_best_arm`. Arm i drafts i + 1 tokens."""

    costs: Costs | None
    width: Float[Array, ""]

    def init(self, keys, gamma_max):
        round_costs(self.costs, gamma_max)
        return unplayed(keys, gamma_max)

    def begin(self, state, live, gamma_max):
        state = with_best_arm(state, self.width)
        return state, state.arm + 1

    def update(self, state, round_):
        speedup = speedups(self.costs, round_.emitted, round_.drafted, round_.gamma_max)
        return rewarded(state, round_, speedup)


def ucb(costs: Costs | None = None, width: float = 1.0) -> Ucb:
    """Make a UCB1 policy over draft lengths."""
    return Ucb(checked(costs), jnp.float32(number("width", width, "[0, ∞)")))


class Weighed(NamedTuple):
    """The state of exponential weights."""

    arm: Int[Array, " B"]
    loss: Float[Array, "B K"]  # estimated sums of 1 − speedup
    counted: Int[Array, " B"]  # rounds
    salt: UInt32[Array, " B"]


@pytree
class Exp3(_Bandit):
    """Exponential weights over 1 … γ_max tokens, learning from the arm that was played.

    Arms are drawn ∝ exp(−η·loss), η = rate·√(ln K/(K·t)). The loss of the played arm is divided by
    its probability, so the sums are unbiased for every arm.
    """

    costs: Costs | None
    rate: Float[Array, ""]

    def init(self, keys, gamma_max):
        round_costs(self.costs, gamma_max)
        zeros = jnp.zeros(keys.shape, jnp.int32)
        return Weighed(zeros, jnp.zeros((*keys.shape, gamma_max), jnp.float32), zeros, salts(keys))

    def begin(self, state, live, gamma_max):
        arm = draw(noise_keys(state.salt, state.counted), self.probs(state))
        return state._replace(arm=arm), arm + 1

    def update(self, state, round_):
        played = _one_hot(state.arm, round_.gamma_max)
        speedup = speedups(self.costs, round_.emitted, round_.drafted, round_.gamma_max)
        loss = played * (1 - speedup)[:, None] / self.probs(state)
        new = state._replace(
            loss=state.loss + jnp.where(played > 0, loss, 0.0), counted=state.counted + 1
        )
        return where_active(round_, new, state)

    def probs(self, state: Weighed) -> Float[Array, "B K"]:
        """The distribution that this round's arm is drawn from."""
        arms = state.loss.shape[1]
        rounds = (state.counted + 1).astype(jnp.float32)[:, None]
        eta = self.rate * jnp.sqrt(jnp.log(jnp.float32(arms)) / (arms * rounds))
        return jax.nn.softmax(-eta * state.loss, axis=1)


def exp3(costs: Costs | None = None, rate: float = 1.0) -> Exp3:
    """Make an EXP3 policy over draft lengths."""
    return Exp3(checked(costs), jnp.float32(number("rate", rate, "[0, ∞)")))


@pytree
class Hedge(_Bandit):
    """Exponential weights over 0 … γ_max tokens, learning from all arms that a round reveals.

    A round with a rejection after a tokens reveals the count of every length k, min(a, k); one
    without reveals it for all k ≤ L. So k is hidden only if the played arm was too short to show
    its end or a rejection before it. A revealed loss is divided by the probability that the arm is
    long enough. η = rate·√(ln K/t).

    Rules that decide a token by later tokens reveal nothing of this (`needs_shorter`).
    """

    needs_shorter = True

    costs: Costs | None
    rate: Float[Array, ""]

    def init(self, keys, gamma_max):
        round_costs(self.costs, gamma_max)
        zeros = jnp.zeros(keys.shape, jnp.int32)
        loss = jnp.zeros((*keys.shape, gamma_max + 1), jnp.float32)
        return Weighed(zeros, loss, zeros, salts(keys))

    def begin(self, state, live, gamma_max):
        arm = draw(noise_keys(state.salt, state.counted), self.probs(state))
        return state._replace(arm=arm), arm

    def update(self, state, round_):
        arms = round_.gamma_max + 1
        lengths = jnp.arange(arms, dtype=jnp.int32)[None, :]
        known = state.arm, round_.drafted, round_.accepted, round_.emitted
        arm, drafted, accepted, emitted = (x[:, None] for x in known)
        # A draft that the row's end, or a drafter without a proposal, cut short would have been cut
        # for longer arms too.
        would_draft = jnp.minimum(lengths, jnp.where(drafted < arm, drafted, arms))
        # An EOS among the accepted tokens ends longer drafts too, and so does a rejection.
        ends = jnp.where(accepted < drafted, accepted + 1, arms)
        ends = jnp.where(emitted <= accepted, emitted, ends)
        needed = jnp.minimum(would_draft, ends)
        at_least = jnp.cumsum(self.probs(state)[:, ::-1], axis=1)[:, ::-1]
        chance = jnp.take_along_axis(at_least, needed, axis=1)
        tokens = jnp.minimum(jnp.minimum(accepted, would_draft) + 1, emitted)
        loss = (1 - speedups(self.costs, tokens, would_draft, round_.gamma_max)) / chance
        new = state._replace(
            loss=state.loss + jnp.where(arm >= needed, loss, 0.0), counted=state.counted + 1
        )
        return where_active(round_, new, state)

    def probs(self, state: Weighed) -> Float[Array, "B K"]:
        """The distribution that this round's arm is drawn from."""
        rounds = (state.counted + 1).astype(jnp.float32)[:, None]
        eta = self.rate * jnp.sqrt(jnp.log(jnp.float32(state.loss.shape[1])) / rounds)
        return jax.nn.softmax(-eta * state.loss, axis=1)


def hedge(costs: Costs | None = None, rate: float = 1.0) -> Hedge:
    """Make a policy of exponential weights that uses all feedback of token verification."""
    return Hedge(checked(costs), jnp.float32(number("rate", rate, "[0, ∞)")))
