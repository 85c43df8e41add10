"""Bandits: over draft lengths (`ucb`, `exp3`, `hedge`), and over policies (`tapout`).

The reward of a round that drafts k tokens is tokens per time, emitted/cost(k), divided by the
largest value of any arm, so it lies in [0, 1]. Without costs every round costs the same, and long
drafts win.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key, UInt32

from specjax.policies import Costs, Policy, Round, parse
from specjax.policies.base import by_slot, counts_nodes
from specjax.policies.constant import Undecided
from specjax.policies.costs import checked
from specjax.pytrees import check_pytree, pytree
from specjax.rounds import where_active, where_rows
from specjax.sampling import draw
from specjax.support.ranges import has, number, shown


class Arms(NamedTuple):
    """The state of a bandit over K arms."""

    arm: Int[Array, " B"]
    plays: Float[Array, "B K"]  # of UCB1
    sums: Float[Array, "B K"]  # UCB1: of rewards; exponential weights: estimates of 1 − reward
    counted: Int[Array, " B"]  # rounds, of exponential weights
    salt: UInt32[Array, " B"]  # the seed of the row's noise


class Bandit(Policy):
    """Base of bandits. Evidence about arms carries over to the next batch; noise does not."""

    carries = True

    costs: Costs | None

    def fresh(self, keys: Key[Array, " B"], arms: int, gamma_max: int) -> Arms:
        """The state before the first round; ValueError for costs of another γ_max."""
        self.round_costs(gamma_max)
        none, zero = jnp.zeros((*keys.shape, arms), jnp.float32), jnp.zeros(keys.shape, jnp.int32)
        salt = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
        return Arms(zero, none, none, zero, salt)

    def resume(self, fresh, past, rows):
        return super().resume(fresh, past, rows)._replace(salt=fresh.salt)

    def round_costs(self, gamma_max: int) -> Float[Array, " K"]:
        """Times of whole rounds; without costs each takes one target step."""
        if self.costs is None:
            return jnp.ones((gamma_max + 1,), jnp.float32)
        return self.costs.round_times(gamma_max)

    def rewards(self, tokens: Array, verified: Array, gamma_max: int) -> Float[Array, "*batch"]:
        """Rewards of rounds that emit these tokens, by verified tokens."""
        cost = self.round_costs(gamma_max)
        most = jnp.max(jnp.arange(1, gamma_max + 2, dtype=jnp.float32) / cost)
        return tokens.astype(jnp.float32) / cost[verified] / most


def drawn(state: Arms, rounds: Int[Array, " B"], weights: Float[Array, "B K"]) -> Arms:
    """Draw each row's arm in proportion to weights, with noise by its number of rounds."""
    keys = jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))
    return state._replace(arm=draw(keys(state.salt, rounds), weights))


def with_best_arm(state: Arms, width: Float[Array, ""]) -> Arms:
    """Choose the arm of largest mean reward + width·√(2 ln t/plays), by UCB1.

    Arms that were never played come first, in random order.
    """
    count = jnp.sum(state.plays, axis=1)
    plays = jnp.where(state.plays > 0, state.plays, 1.0)
    radius = jnp.sqrt(2 * jnp.log(jnp.maximum(count, 1.0))[:, None] / plays)
    index = jnp.where(state.plays > 0, state.sums / plays + width * radius, jnp.inf)
    best = index == jnp.max(index, axis=1, keepdims=True)
    return drawn(state, count.astype(jnp.int32), best.astype(jnp.float32))


def rewarded(state: Arms, round_: Round, reward: Float[Array, " B"]) -> Arms:
    """Add a round's reward to the arm that was played."""
    played = jax.nn.one_hot(state.arm, state.plays.shape[1], dtype=jnp.float32)
    new = state._replace(plays=state.plays + played, sums=state.sums + played * reward[:, None])
    return where_active(round_, new, state)


@pytree
class Ucb(Bandit):
    """UCB1 over 1 … γ_max tokens: see `with_best_arm`. Arm i drafts i + 1 tokens."""

    costs: Costs | None
    width: Float[Array, ""]

    def init(self, keys, gamma_max):
        return self.fresh(keys, gamma_max, gamma_max)

    def begin(self, state, live, gamma_max):
        state = with_best_arm(state, self.width)
        return state, state.arm + 1

    def update(self, state, round_):
        reward = self.rewards(round_.emitted, round_.verified, round_.gamma_max)
        return rewarded(state, round_, reward)


def ucb(costs: Costs | None = None, width: float = 1.0) -> Ucb:
    """Make a UCB1 policy over draft lengths."""
    return Ucb(checked(costs), jnp.float32(number("width", width, "[0, ∞)")))


@pytree
class Exp3(Bandit):
    """Exponential weights over 1 … γ_max tokens, learning from the arm that was played.

    Arms are drawn ∝ exp(−η·loss), η = rate·√(ln K/(K·t)). The loss of the played arm is divided by
    its probability, so the sums are unbiased for every arm.
    """

    reveals_all: ClassVar[bool] = False  # whether a round shows losses of other arms too

    costs: Costs | None
    rate: Float[Array, ""]

    def init(self, keys, gamma_max):
        return self.fresh(keys, gamma_max, gamma_max)

    def begin(self, state, live, gamma_max):
        state = drawn(state, state.counted, self.probs(state))
        return state, state.arm + 1

    def update(self, state, round_):
        played = jnp.arange(round_.gamma_max, dtype=jnp.int32)[None, :] == state.arm[:, None]
        loss = 1 - self.rewards(round_.emitted, round_.verified, round_.gamma_max)
        return self.added(state, round_, jnp.where(played, loss[:, None] / self.probs(state), 0.0))

    def probs(self, state: Arms) -> Float[Array, "B K"]:
        """The distribution that this round's arm is drawn from."""
        arms, rounds = state.sums.shape[1], (state.counted + 1).astype(jnp.float32)[:, None]
        terms = rounds if self.reveals_all else arms * rounds
        eta = self.rate * jnp.sqrt(jnp.log(jnp.float32(arms)) / terms)
        return jax.nn.softmax(-eta * state.sums, axis=1)

    def added(self, state: Arms, round_: Round, loss: Float[Array, "B K"]) -> Arms:
        """Add a round's losses."""
        new = state._replace(sums=state.sums + loss, counted=state.counted + 1)
        return where_active(round_, new, state)


def exp3(costs: Costs | None = None, rate: float = 1.0) -> Exp3:
    """Make an EXP3 policy over draft lengths."""
    return Exp3(checked(costs), jnp.float32(number("rate", rate, "[0, ∞)")))


@pytree
class Hedge(Exp3):
    """Exponential weights over 0 … γ_max tokens, learning from all arms that a round reveals.

    A round with a rejection after a tokens reveals the count of every length k, min(a, k); one
    without reveals it for all k ≤ L. So k is hidden only if the played arm was too short to show
    its end or a rejection before it. A revealed loss is divided by the probability that the arm is
    long enough. η = rate·√(ln K/t).

    Rules that decide a token by later tokens reveal nothing of this (`needs_shorter`).
    """

    needs_shorter = reveals_all = True

    def init(self, keys, gamma_max):
        return self.fresh(keys, gamma_max + 1, gamma_max)

    def begin(self, state, live, gamma_max):
        state = drawn(state, state.counted, self.probs(state))
        return state, state.arm

    def update(self, state, round_):
        arms = round_.gamma_max + 1
        lengths = jnp.arange(arms, dtype=jnp.int32)[None, :]
        known = state.arm, round_.verified, round_.accepted, round_.emitted
        arm, verified, accepted, emitted = (x[:, None] for x in known)
        # A draft that the row's end, or a drafter without a proposal, cut short would have been cut
        # for longer arms too.
        would_draft = jnp.minimum(lengths, jnp.where(verified < arm, verified, arms))
        # An EOS among the accepted tokens ends longer drafts too, and so does a rejection.
        ends = jnp.where(accepted < verified, accepted + 1, arms)
        ends = jnp.where(emitted <= accepted, emitted, ends)
        needed = jnp.minimum(would_draft, ends)
        at_least = jnp.cumsum(self.probs(state)[:, ::-1], axis=1)[:, ::-1]
        chance = jnp.take_along_axis(at_least, needed, axis=1)
        tokens = jnp.minimum(jnp.minimum(accepted, would_draft) + 1, emitted)
        loss = (1 - self.rewards(tokens, would_draft, round_.gamma_max)) / chance
        return self.added(state, round_, jnp.where(arm >= needed, loss, 0.0))


def hedge(costs: Costs | None = None, rate: float = 1.0) -> Hedge:
    """Make a policy of exponential weights that uses all feedback of token verification."""
    return Hedge(checked(costs), jnp.float32(number("rate", rate, "[0, ∞)")))


class Tapped(NamedTuple):
    """The states of the bandit and of each arm."""

    bandit: Arms
    arms: tuple[Any, ...]


@pytree
class TapOut(Bandit):
    """TapOut (Sridhar et al. 2025) decides each round as one of several policies does, the arm that
    UCB1 chooses.

    Outputs keep the target's distribution for the reason that they do with each arm: the choice
    depends on past rounds alone, and the arm decides before a token exists. An arm's state changes
    in its own rounds alone, so an arm never learns from drafts that another one ended.

    Without costs the reward of a round is (accepted/verified + accepted/γ_max)/2: the paper blends
    these two, the rate and the length of acceptance; here they have equal weights.
    """

    arms: tuple[Policy, ...]
    costs: Costs | None
    width: Float[Array, ""]

    def init(self, keys, gamma_max):
        arms = tuple(arm.init(keys, gamma_max) for arm in self.arms)
        return Tapped(self.fresh(keys, len(arms), gamma_max), arms)

    def begin(self, state, live, gamma_max):
        state = state._replace(bandit=with_best_arm(state.bandit, self.width))
        return self._ask(state, lambda arm, own: arm.begin(own, live, gamma_max))

    def keep_drafting(self, state, seen):
        return self._ask(state, lambda arm, own: arm.keep_drafting(own, seen))

    def go_on(self, state, drafting, logprob):
        return self._ask(state, lambda arm, own: arm.go_on(own, drafting, logprob))

    def update(self, state, round_):
        bandit = rewarded(state.bandit, round_, self.reward(round_))
        state, _ = self._ask(state, lambda arm, own: (arm.update(own, round_), round_.active))
        return state._replace(bandit=bandit)

    def resume(self, fresh, past, rows):
        states = zip(self.arms, fresh.arms, past.arms, strict=True)
        arms = tuple(arm.resume(new, old, rows) for arm, new, old in states)
        return Tapped(super().resume(fresh.bandit, past.bandit, rows), arms)

    def reward(self, round_: Round) -> Float[Array, " B"]:
        """The reward of a round, in [0, 1]."""
        if self.costs is not None:
            return self.rewards(round_.emitted, round_.verified, round_.gamma_max)
        accepted, verified = (x.astype(jnp.float32) for x in (round_.in_output, round_.verified))
        return (accepted / jnp.maximum(verified, 1) + accepted / round_.gamma_max) / 2

    def _ask(
        self, state: Tapped, question: Callable[[Policy, Any], tuple[Any, Array]]
    ) -> tuple[Tapped, Array]:
        """Answer for each row as its arm does; the states of its other arms stay."""
        played, states, answers = state.bandit.arm, [], []
        for i, (arm, own) in enumerate(zip(self.arms, state.arms, strict=True)):
            new, answer = question(arm, own)
            states.append(where_rows(played == i, new, own))
            answers.append(jnp.broadcast_to(answer, played.shape))
        return state._replace(arms=tuple(states)), jax.lax.select_n(played, *answers)


ARMS: tuple[Policy | str, ...] = ("confidence", "svip", "adaedl", "heuristic", Undecided())


def tapout(
    costs: Costs | None = None, width: float = 1.0, arms: Sequence[Policy | str] = ARMS
) -> TapOut:
    """Make a TapOut policy: the paper's bandit over whole rounds, without those over tokens and
    without Thompson sampling. By default the arms are the library's, with their settings.

    Args:
      costs: makes the reward tokens per time.
      width: of the confidence radius, 1 for UCB1.
      arms: policies or their names; one that needs costs is given as a value that has them.

    Raises:
      ValueError: no arms, or one that depends on other rows, on shorter drafts or on trees.
    """
    if isinstance(arms, str) or not isinstance(arms, Sequence) or not arms:
        raise ValueError(f"arms={shown(arms)} must be a list of policies or their names.")
    width = number("width", width, "[0, ∞)")
    return TapOut(tuple(map(_arm, arms)), checked(costs), jnp.float32(width))


def _arm(arm: Policy | str) -> Policy:
    """A policy that can be an arm, from its value or name."""
    made = parse(arm) if isinstance(arm, str) else arm
    has("arms", made, ("begin", "update"), "draft-length policies, or their names")
    check_pytree("arms", made)
    if made.reads_batch or by_slot(made) or made.needs_shorter or counts_nodes(made):
        raise ValueError(
            f"arms={shown(made)} reads other rows, shorter drafts or trees: an arm decides the "
            "length of its own row's drafts by its own rounds."
        )
    return made
