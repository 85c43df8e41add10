"""The one place where drafted tokens get positions of the target's call, or none.

A target call takes a time that depends on the number N of its positions, whichever rows they belong
to. After drafting, a policy with a `verifies` of its own decides which drafted tokens of all rows
are worth a position. The others are dropped, so the decision must not depend on them. Token i of a
row may be dropped or kept by

- past rounds,
- the row's tokens before i, and the distribution that token i is drawn from,
- tokens of other rows whose slots were looked at before,

but not by token i, nor by what follows it in its row. `allocate` makes it so: it takes the slots in
falling order of chances that fall along each row, and the policy answers slot by slot whether to go
on. It never sees a token, nor the chance of a later slot. `specjax.audit` has rules that do, and
what goes wrong.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from specjax.policies.base import Policy, Slot, by_slot
from specjax.rounds import Drafts


def rated(policy: Policy, state: Any, drafts: Drafts, slot: Int[Array, ""]) -> Drafts:
    """Note the policy's chance of a slot, at most that of the slot before."""
    if not by_slot(policy):
        return drafts
    last = jax.lax.dynamic_index_in_dim(drafts.chance, jnp.maximum(slot - 1, 0), 1, False)
    chance = jnp.broadcast_to(policy.chance(state, slot), last.shape)
    falling = jnp.where(slot > 0, jnp.minimum(chance, last), chance).astype(jnp.float32)
    put = jax.lax.dynamic_update_index_in_dim(drafts.chance, falling, slot, 1)
    return drafts._replace(chance=put)


def allocate(
    policy: Policy,
    state: Any,
    drafts: Drafts,
    live: Bool[Array, " B"],
    sizes: Sequence[int] | Int[Array, " M"] = (),
) -> Drafts:
    """Shorten drafts to the tokens that get a position; without own `verifies`, all of them.

    Slots come in falling order of their chance; ties go to earlier tokens.

    Args:
      state: the policy's, from `begin`.
      sizes: of compiled passes, ascending up to all positions, for policies that fill them.
    """
    if not by_slot(policy):
        return drafts
    rows, gamma = drafts.chance.shape
    exists = jnp.arange(gamma, dtype=jnp.int32)[:, None] < drafts.length[None, :]
    chance = jnp.where(exists, drafts.chance.T, -jnp.inf).ravel()  # slot by slot, then by rows
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
    verifies = jax.vmap(lambda slot: policy.verifies(state, slot))(slots)
    taken = jnp.cumprod((verifies & exists).astype(jnp.int32))
    if policy.fills and len(sizes):
        each, needed = jnp.asarray(sizes, jnp.int32), count + jnp.sum(taken, dtype=jnp.int32)
        size = each[jnp.searchsorted(each, needed)]
        taken = (exists & (slots.taken + count < size)).astype(jnp.int32)
    kept = jnp.zeros((rows,), jnp.int32).at[order % rows].add(taken)
    return drafts._replace(length=kept)
