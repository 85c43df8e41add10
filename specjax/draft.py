"""Drafters: where proposals come from. A model drafts by decoding autoregressively itself."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.pytrees import pytree
from specjax.types import Context, Inputs, Model


class Drafter(Protocol):
    """What the loop needs of a drafter. Its logits pass the same `standardize` as the target's.

    As in `Model`, a call returns a hidden state, and `logits` reads the law from it; a drafter
    that has no other state returns the logits themselves, and `logits` passes them on.

    A row of logits that is −inf throughout proposes nothing, and the row's draft ends there. Like
    all logits it depends on the known tokens alone, so the output's law stays the target's.
    """

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""
        ...

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Any]:
        """A read-only context, and the state before the first round."""
        ...

    def begin(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, " B"],
        fed: Int[Array, " B"] | None,
        context: Context,
        state: Any,
    ) -> tuple[Float[Array, "B E"], Any]:
        """Hidden state for the token at position `length`, given the `length` ≥ 1 known tokens.

        Of those, at least `fed` were passed to `begin` or kept from `extend` before. None: all but
        two at most.
        """
        ...

    def extend(
        self, token: Int[Array, " B"], position: Int[Array, " B"], context: Context, state: Any
    ) -> tuple[Float[Array, "B E"], Any]:
        """Hidden state for the token after `token`, which was drafted at `position`."""
        ...

    def logits(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Logits of the next token."""
        ...


@pytree
class ModelDrafter:
    """A small model as drafter; its state is its cache."""

    model: Model

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def start(self, inputs, buffer_len):
        return self.model.start(inputs, buffer_len)

    def begin(self, tokens, length, fed, context, state):
        """Feed the last two known tokens and read the last.

        After a fully accepted round the cache lacks the last drafted token, which was proposed
        but never fed, as well as the bonus token: with known tokens a b c d e and d drafted last,
        fed is 3 and [d e] go to positions 3 and 4. Otherwise the token before the last is fed
        again, to the same effect. Rounds in which nothing was drafted leave more to catch up.
        """
        newest = jnp.maximum(length - 2, 0)  # with one known token: position 0, and 1 is scratch
        if fed is not None:
            state = self._catch_up(tokens, fed, newest, context, state)
        hidden, state = self.model(_two(tokens, newest), newest, context, state)
        last = jnp.take_along_axis(hidden, (length - 1 - newest)[:, None, None], axis=1)[:, 0]
        return last, state

    def _catch_up(self, tokens, fed, newest, context, state):
        """Feed what lies between `fed` and `newest`, two tokens at a time."""

        def behind(carry):
            fed, _ = carry
            return jnp.any(fed < newest)

        def feed_two(carry):
            fed, cache = carry
            first = jnp.minimum(fed, newest)
            _, cache = self.model(_two(tokens, first), first, context, cache)
            return fed + 2, cache

        return jax.lax.while_loop(behind, feed_two, (fed, state))[1]

    def extend(self, token, position, context, state):
        hidden, state = self.model(token[:, None], position, context, state)
        return hidden[:, 0], state

    def logits(self, hidden):
        return self.model.logits(hidden)


def is_silent(logits: Float[Array, "*batch V"]) -> Bool[Array, "*batch"]:
    """Where a drafter proposes nothing: −inf throughout (NaN and +inf are faults)."""
    return jnp.max(logits, axis=-1) == -jnp.inf


def _two(tokens: Int[Array, "B T"], first: Int[Array, " B"]) -> Int[Array, "B 2"]:
    """The tokens at first and first + 1."""
    slots = first[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(tokens, slots, axis=1)


def fed_after(
    length: Int[Array, " B"], accepted: Int[Array, " B"], drafted: Int[Array, " B"]
) -> Int[Array, " B"]:
    """How many committed tokens a drafter has seen after a round that began at `length`.

    It saw the known tokens and all drafted ones but the last; of those, the accepted count.
    """
    return length + jnp.minimum(accepted, jnp.maximum(drafted - 1, 0))
