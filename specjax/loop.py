"""The loop of every method, speculative or plain: rounds until all rows are done."""

from functools import partial
from typing import Any, Protocol

import jax
from jax import Array
from jaxtyping import Int, Key

from specjax.accept import AcceptanceRule
from specjax.models import sharding
from specjax.rounds import Round
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
    def gamma_max(self) -> int:
        """The most tokens, one after the other, that a round drafts."""
        ...

    @property
    def slots(self) -> int:
        """Tokens that a round's call of the target sees: slots that it writes."""
        ...

    def start(
        self, inputs: Inputs, keys: Key[Array, " B"], budget: Int[Array, " B"], buffer_len: int
    ) -> tuple[Context, State]:
        """See `start`."""
        ...

    def step(self, context: Context, state: State) -> tuple[State, Round]:
        """One round for every live row: the loop's body, which Python may call as well."""
        ...


@partial(jax.jit, static_argnames="buffer_len")
def start(
    method: Method,
    inputs: Inputs,
    keys: Key[Array, " B"],
    budget: Int[Array, " B"],
    *,
    buffer_len: int,
) -> tuple[Any, State]:
    """Encode, and read the prompt but for its last token.

    Args:
      keys: one for each (input, sample), see `sampling.row_keys`.
      budget: new tokens allowed for each row; 0 finishes a row at once (padding of a batch).
      buffer_len: ≥ prompt + budget + slots.
    """
    context, state = method.start(inputs, keys, budget, buffer_len)
    return context, sharding.keep_rows(method, state, len(keys))


@partial(jax.jit, donate_argnames="state")
def decode(method: Method, context: Any, state: State) -> State:
    """Run rounds until every row is done. Donates `state`."""
    return jax.lax.while_loop(unfinished, lambda state: method.step(context, state)[0], state)
