"""The protocol of budgets, and the one place where a budget is handed out.

A target call takes a time that depends on the number N of its positions, whichever rows they belong
to. After drafting, a budget decides which drafted tokens of all rows are worth a position. Tokens
without one are dropped, so the decision must not depend on them. Token i of a row may be dropped or
kept by

- past rounds,
- the row's tokens before i, and the distribution that token i is drawn from,
- tokens of other rows whose slots were looked at before,

but not by token i, nor by what follows it in its row. `hand_out` makes it so: it takes the slots in
falling order of chances that fall along each row, and a budget answers slot by slot whether to go
on. It never sees a token, nor the chance of a later slot. `specjax.audit` has rules that do, and
what goes wrong.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax.policies.base import Observation, first_state
from specjax.rounds import Round


class Slot(NamedTuple):
    """A drafted token that waits for a position of the target's call, and all before it."""

    taken: Int[Array, "..."]  # slots of all rows that have a position already
    gained: Float[Array, "..."]  # tokens that the round then brings: live rows, and chances so far
    chance: Float[Array, "..."]  # of this slot, see `Budget.chance`
    place: Int[Array, "..."]  # i, of the token in its draft, from 0
    rows: Int[Array, "..."]  # live rows, each of which has a position anyway


class Budget(Protocol):
    """The protocol and base of budgets. The defaults verify all drafted tokens.

    A state's leaves have a row for each row of the batch.

    Attributes:
      fills: whether slots that cost nothing are taken too: those up to the compiled size of pass
        that is needed anyway.
    """

    fills: ClassVar[bool] = False

    def init(self, keys: Key[Array, " B"], gamma_max: int) -> Any:
        """The state before the first round. The keys are the budget's own, one for each row."""
        return ()

    def begin(self, state: Any, live: Bool[Array, " B"], gamma_max: int) -> tuple[Any, Array]:
        """Begin a round: the state, and the longest draft worth drafting, for each row or all.

        Args:
          live: rows that have not ended.
        """
        return state, jnp.int32(gamma_max)

    def chance(self, state: Any, seen: Observation) -> tuple[Any, Float[Array, " B"]]:
        """Estimate the chance that token i of each row is reached and accepted.

        Called before the token is drawn. It sets the order of slots; a larger value than that of
        the token before counts as that one.
        """
        return state, jnp.broadcast_to(1 / (1 + seen.slot.astype(jnp.float32)), seen.drafting.shape)

    def drawn(self, state: Any, logprob: Float[Array, " B"]) -> Any:
        """Update the state by the token that was drawn, for the tokens after it.

        Args:
          logprob: float32, the token's log-probability in the drafter's belief: at most 0.
        """
        return state

    def takes(self, state: Any, slot: Slot) -> Bool[Array, "..."]:
        """Whether a slot gets a position. The first that does not ends the handing out.

        Fields of `slot` are scalars. The state is that of the beginning of the round.
        """
        return jnp.bool_(True)

    def update(self, state: Any, round_: Round) -> Any:
        """Update the state after a round; its `drafted` are the verified tokens."""
        return state


# Without a budget (None) the functions below verify all drafted tokens and compute nothing.


class Chances(NamedTuple):
    """A budget's states in a round, and its chances of each slot."""

    before: Any  # the state at the beginning of the round
    state: Any  # the state after the tokens so far
    chance: Any  # (B, G) float32, falling along each row


def first(budget: Budget | None, keys: Key[Array, " B"], gamma_max: int) -> Any:
    """The state before the first round."""
    return () if budget is None else first_state(budget, keys, gamma_max)


def begin(
    budget: Budget | None, state: Any, live: Bool[Array, " B"], gamma_max: int
) -> tuple[Array, Chances]:
    """Begin a round: the longest draft worth drafting, and the chances of no slots yet."""
    if budget is None:
        return jnp.int32(gamma_max), Chances((), (), ())
    state, worth = budget.begin(state, live, gamma_max)
    none = jnp.zeros((len(live), gamma_max), jnp.float32)
    return worth, Chances(state, state, none)


def before_the_draw(budget: Budget | None, chances: Chances, seen: Observation) -> Chances:
    """Add the chance of a slot whose token is not drawn yet, at most that of the slot before."""
    if budget is None:
        return chances
    state, chance = budget.chance(chances.state, seen)
    last = jax.lax.dynamic_index_in_dim(chances.chance, jnp.maximum(seen.slot - 1, 0), 1, False)
    falling = jnp.where(seen.slot > 0, jnp.minimum(chance, last), chance).astype(jnp.float32)
    put = jax.lax.dynamic_update_index_in_dim(chances.chance, falling, seen.slot, 1)
    return chances._replace(state=state, chance=put)


def after_the_draw(budget: Budget | None, chances: Chances, logprob: Float[Array, " B"]) -> Chances:
    """Let the budget see the token that was drawn, for the chances of later slots."""
    if budget is None:
        return chances
    return chances._replace(state=budget.drawn(chances.state, logprob))


def hand_out(
    budget: Budget | None,
    chances: Chances,
    length: Int[Array, " B"],
    live: Bool[Array, " B"],
    sizes: Sequence[int] | Int[Array, " M"] = (),
) -> Int[Array, " B"]:
    """The number of drafted tokens of each row that get a position.

    Slots come in falling order of their chance; of equal ones first those of earlier tokens.

    Args:
      length: drafted tokens.
      sizes: of compiled passes, ascending up to all positions, for budgets that fill them.
    """
    if budget is None:
        return length
    rows, gamma = chances.chance.shape
    exists = jnp.arange(gamma, dtype=jnp.int32)[:, None] < length[None, :]
    chance = jnp.where(exists, chances.chance.T, -jnp.inf).ravel()  # slot by slot, then by rows
    order = jnp.argsort(-chance, stable=True).astype(jnp.int32)
    chance, exists = chance[order], exists.ravel()[order]
    count = jnp.sum(live, dtype=jnp.int32)
    worth = jnp.where(exists, chance, 0.0)
    slots = Slot(
        taken=jnp.arange(rows * gamma, dtype=jnp.int32),
        gained=count.astype(jnp.float32) + jnp.cumsum(worth) - worth,
        chance=worth,
        place=order // rows,
        rows=jnp.broadcast_to(count, order.shape),
    )
    takes = jax.vmap(lambda slot: budget.takes(chances.before, slot))(slots)
    taken = jnp.cumprod((takes & exists).astype(jnp.int32))
    if budget.fills and len(sizes):
        each, needed = jnp.asarray(sizes, jnp.int32), count + jnp.sum(taken, dtype=jnp.int32)
        size = each[jnp.searchsorted(each, needed)]
        taken = (exists & (slots.taken + count < size)).astype(jnp.int32)
    return jnp.zeros((rows,), jnp.int32).at[order % rows].add(taken)


def update(budget: Budget | None, state: Any, round_: Round) -> Any:
    """The state after a round."""
    return state if budget is None else budget.update(state, round_)
