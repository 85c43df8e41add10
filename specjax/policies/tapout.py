"""TapOut (Sridhar et al. 2025): a bandit whose arms are policies, such as rules that end drafts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.policies.bandits import Played, rewarded, speedups, unplayed, with_best_arm
from specjax.policies.base import Policy, by_slot, counts_nodes
from specjax.policies.constant import Undecided
from specjax.policies.costs import Costs, checked, round_costs
from specjax.policies.loading import parse
from specjax.pytrees import check_pytree, pytree
from specjax.rounds import Round, where_rows
from specjax.support.ranges import has, number, shown

ARMS: tuple[Policy | str, ...] = ("confidence", "svip", "adaedl", "heuristic", Undecided())


class Tapped(NamedTuple):
    """The states of the bandit and of each arm."""

    bandit: Played
    arms: tuple[Any, ...]


@pytree
class TapOut(Policy):
    """Decides each round as one of several policies does, the arm that UCB1 chooses.

    Outputs keep the target's distribution for the reason that they do with each arm: the choice
    depends on past rounds alone, and the arm decides before a token exists. An arm's state changes
    in its own rounds alone, so an arm never learns from drafts that another one ended.

    The reward of a round is its tokens per time, as in `bandits.speedups`, if there are costs.
    Otherwise it is (accepted/drafted + accepted/γ_max)/2: the paper blends these two, the rate and
    the length of acceptance; here they have equal weights.
    """

    carries = True

    arms: tuple[Policy, ...]
    costs: Costs | None
    width: Float[Array, ""]

    def init(self, keys, gamma_max):
        round_costs(self.costs, gamma_max)
        arms = tuple(arm.init(keys, gamma_max) for arm in self.arms)
        return Tapped(unplayed(keys, len(arms)), arms)

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
        bandit = super().resume(fresh.bandit, past.bandit, rows)._replace(salt=fresh.bandit.salt)
        states = zip(self.arms, fresh.arms, past.arms, strict=True)
        return Tapped(bandit, tuple(arm.resume(new, old, rows) for arm, new, old in states))

    def reward(self, round_: Round) -> Float[Array, " B"]:
        """The reward of a round, in [0, 1]."""
        if self.costs is not None:
            return speedups(self.costs, round_.emitted, round_.drafted, round_.gamma_max)
        accepted, drafted = (x.astype(jnp.float32) for x in (round_.in_output, round_.drafted))
        return (accepted / jnp.maximum(drafted, 1) + accepted / round_.gamma_max) / 2

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


def tapout(
    costs: Costs | None = None, width: float = 1.0, arms: Sequence[Policy | str] = ARMS
) -> TapOut:
    """Make a TapOut policy, which chooses an arm for each round by UCB1.

    This is the paper's bandit over whole rounds; its token-level bandits and Thompson sampling are
    left out. The arms are the package's own rules, with their default settings.

    Args:
      costs: makes the reward tokens per time.
      width: of the confidence radius, 1 for UCB1.
      arms: policies or their names; one that needs costs is given as a value that has them.

    Raises:
      ValueError: no arms, or one that depends on other rows, on shorter drafts or on trees.
    """
    if isinstance(arms, str) or not isinstance(arms, Sequence) or not arms:
        raise ValueError(f"arms={shown(arms)} must be a list of policies or their names.")
    return TapOut(
        tuple(map(_arm, arms)), checked(costs), jnp.float32(number("width", width, "[0, ∞)"))
    )


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
