"""The loop of every method, speculative or plain: rounds until all rows are done, or until enough
of them are and new inputs can be admitted into their places."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key

from specjax import log
from specjax.contracts import is_own
from specjax.drafters.base import Drafter
from specjax.models import sharding
from specjax.policies import Policy
from specjax.rounds import Round
from specjax.rules import AcceptanceRule
from specjax.sampling import Sampling
from specjax.state import State, unfinished
from specjax.types import Context, Inputs, Model


class Method(Protocol):
    """A way of decoding: a pytree of what does not change from round to round."""

    @property
    def target(self) -> Model: ...

    @property
    def rule(self) -> AcceptanceRule: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def eos_ids(self) -> Int[Array, " N"]: ...

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, which proposes tokens; None in plain decoding."""
        ...

    @property
    def policy(self) -> Policy | None:
        """The policy, which sets draft lengths; None in plain decoding."""
        ...

    @property
    def branches(self) -> bool:
        """Whether drafts are trees."""
        ...

    @property
    def gamma_max(self) -> int:
        """The longest chain or path of tokens that a round drafts."""
        ...

    @property
    def slots(self) -> int:
        """Number of tokens, and so of cache slots, in a round's target call."""
        ...

    def start(
        self, inputs: Inputs, keys: Key[Array, " B"], max_new: Int[Array, " B"], buffer_len: int
    ) -> tuple[Context, State]:
        """Encode the source and read the prompt; see `loop.start`."""
        ...

    def step(self, context: Context, state: State) -> tuple[State, Round]:
        """Run one round for every live row: the loop's body, which Python may call too."""
        ...


@partial(jax.jit, static_argnames=("buffer_len", "logged"))
def start(
    method: Method,
    inputs: Inputs,
    keys: Key[Array, " B"],
    max_new: Int[Array, " B"],
    *,
    buffer_len: int,
    logged: int = 0,
) -> tuple[Any, State]:
    """Encode the source, and read the prompt except its last token.

    Args:
      keys: one for each (input, sample), see `sampling.row_keys`.
      max_new: new tokens allowed for each row; 0 finishes a row at once (padding of a batch).
      buffer_len: ≥ prompt + max_new + slots.
      logged: rounds per row for which `State.log` has room; 0: no log is written.
    """
    context, state = _start(method, inputs, keys, max_new, buffer_len, logged)
    return context, sharding.keep_rows(method, state, len(keys))


def _start(method, inputs, keys, max_new, buffer_len, logged) -> tuple[Any, State]:
    context, state = method.start(inputs, keys, max_new, buffer_len)
    if is_own(method.rule):
        state = state.replace(rule_sound=jnp.ones(3, bool))
    if logged:
        state = state.replace(log=log.empty(len(keys), logged, method.gamma_max))
    return context, state


@partial(jax.jit, donate_argnames="state")
def decode(method: Method, context: Any, state: State) -> State:
    """Run rounds until every row is done, or `State.until` is met. Donates `state`."""

    def round_(state: State) -> State:
        after, seen = method.step(context, state)
        return after if state.log is None else after.replace(log=log.write(state.log, seen))

    return jax.lax.while_loop(unfinished, round_, state)


@partial(jax.jit, donate_argnames=("context", "state"))
def admit(
    method: Method,
    context: Any,
    state: State,
    rows: Int[Array, " R"],
    inputs: Inputs,
    keys: Key[Array, " R"],
    max_new: Int[Array, " R"],
) -> tuple[Any, State]:
    """Start R inputs in rows that are done, while the others stay as they are.

    Arrays that `start` makes with a row axis are replaced along it. Others are shared and stay.
    Donates `context` and `state`, without a copy.

    Args:
      rows: the row of each input. As padding, an input may be repeated with its row.
      inputs: as wide as those that the other rows were started from.
      keys, max_new: see `start`.
    """
    logged = 0 if state.log is None else state.log.verified.shape[1]
    begun = partial(_start, method, buffer_len=state.tokens.shape[1], logged=logged)
    new = begun(inputs, keys, max_new)

    def put(axis: int | None, old: Array, new: Array) -> Array:
        if axis is not None:  # row by row: XLA's CPU backend would scatter number by number
            for i in range(len(rows)):
                one = jax.lax.index_in_dim(new, i, axis)
                old = jax.lax.dynamic_update_slice_in_dim(old, one, rows[i], axis)
        return old

    axes = row_axes(begun, (inputs, keys, max_new), new)
    old, structure = jax.tree.flatten((context, state))
    each = zip(axes, old, jax.tree.leaves(new), strict=True)
    context, state = jax.tree.unflatten(structure, [put(*leaf) for leaf in each])
    return context, sharding.keep_rows(method, state, len(state.done))


def row_axes(begun: Callable[..., Any], arguments: Any, made: Any) -> list[int | None]:
    """Find the row axis of each leaf of begun(*arguments); None where a leaf has none.

    The row axis is the one that grows with the first axis of the arguments.

    Args:
      made: the value of begun(*arguments).

    Raises:
      ValueError: a leaf has several such axes, or one that is no multiple of the rows.
    """
    count = len(jax.tree.leaves(arguments)[0])

    def longer(x):
        return jax.ShapeDtypeStruct((count + 1, *x.shape[1:]), x.dtype)

    grown = jax.eval_shape(begun, *jax.tree.map(longer, arguments))
    axes: list[int | None] = []
    pairs = zip(jax.tree.leaves_with_path(made), jax.tree.leaves(grown), strict=True)
    for (path, one), other in pairs:
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        found = [(axis, *both) for axis, both in sizes if both[0] != both[1]]
        if found and [both for _, *both in found] != [[count, count + 1]]:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has the shape {one.shape} for {count} rows and "
                f"{other.shape} for {count + 1}: rows are admitted where one axis is theirs alone."
            )
        axes.append(found[0][0] if found else None)
    return axes
