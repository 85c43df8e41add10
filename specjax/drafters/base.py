"""The `Drafter` protocol, and drafting by a model that decodes autoregressively."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from specjax import sampling as smp
from specjax.drafters import sharing
from specjax.pytrees import pytree
from specjax.sampling import Sampling
from specjax.types import Cache, Context, Inputs, Model

PIECE = 512  # tokens of a prompt that are read at once


class Drafter(Protocol):
    """The protocol of drafters. Their logits pass the same `standardize` as the target's.

    As in `Model`, a call returns a hidden state, and `logits` reads the distribution from it. A
    drafter without hidden states returns the logits, and `logits` is the identity.

    A row of logits that is −inf throughout proposes nothing, and the row's draft ends there. Like
    all logits it depends on the known tokens alone, so the output's distribution does not change.

    A class need not inherit from this one, but then it defines `observe` too. Optional abilities
    are in `abilities` and `sharing`.
    """

    if TYPE_CHECKING:  # a property here would be in the way of a field of this name

        @property
        def vocab_size(self) -> int:
            """Width V of the drafter's logits."""
            ...

    @abstractmethod
    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Any]:
        """Make a read-only context and the first state; the prompt is in `inputs`."""
        ...

    def observe(
        self,
        tokens: Int[Array, "B K"],
        start: Int[Array, " B"],
        hidden: Float[Array, "B K E"],
        count: Int[Array, " B"],
        context: Context,
        state: Any,
    ) -> Any:
        """Update the state by the target's hidden states; unchanged by default.

        Called once after the prompt has been read, unless it is a single token, and after every
        round, including rounds without drafts. Values that are not read are not computed.

        Args:
          tokens: the tokens that the target read, at positions start[b] … start[b]+K−1.
          hidden: the target's hidden states after each of them; width E of the target.
          count: how many of them, from the first, are part of the text. The rest was rejected, or
            is padding: a prompt of one token beside longer ones has a count of 0.
        """
        return state

    @abstractmethod
    def begin(
        self,
        tokens: Int[Array, "B T"],
        length: Int[Array, " B"],
        context: Context,
        state: Any,
        *,
        lags: bool = True,
    ) -> tuple[Float[Array, "B E"], Any]:
        """Hidden state for the token at position `length`, given the `length` ≥ 1 known tokens.

        Args:
          lags: whether rounds may have passed since the last call. False: `begin` was called in
            every round, so at most two known tokens are new.
        """
        ...

    @abstractmethod
    def extend(
        self, token: Int[Array, " B"], position: Int[Array, " B"], context: Context, state: Any
    ) -> tuple[Float[Array, "B E"], Any]:
        """Hidden state for the token after `token`, which was drafted at `position`."""
        ...

    @abstractmethod
    def logits(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Logits of the next token."""
        ...


class Fed(NamedTuple):
    """A model's cache, and the end of its known tokens."""

    cache: Cache
    end: Int[Array, " B"]  # slots before it hold known tokens


class ByModel(Drafter):
    """Base of drafters that decode with a model and its own cache."""

    stride: ClassVar[int] = 2
    """Tokens per call while the cache catches up."""

    if TYPE_CHECKING:

        @property
        def model(self) -> Model:
            """The model that decodes."""
            ...

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def shared(self) -> tuple[int | None, ...] | None:
        """As `sharing.shared_layers` returns it; None: the model encodes the source itself."""
        return None

    @property
    def shares(self) -> bool:
        """Whether the model reads its target's encoding (`sharing.shares`)."""
        return self.shared is not None

    def start(self, inputs, buffer_len):
        if inputs.encoding is not None and self.shared is not None:
            encoding = sharing.for_layers(inputs.encoding, self.shared)
            inputs = inputs._replace(encoding=encoding)
        context, cache = started(self.model, inputs, buffer_len)
        return context, Fed(cache, inputs.prompt_len - 1)

    def observe(self, tokens, start, hidden, count, context, state):
        """Move the cache's end before rejected tokens. The target's own token was never fed."""
        return state._replace(end=jnp.minimum(state.end, start + count))

    def begin(self, tokens, length, context, state, *, lags=True):
        """Feed the last two known tokens and read the last.

        After a fully accepted round the cache lacks the last drafted token, which was proposed
        but never fed, as well as the bonus token: with known tokens a b c d e and d drafted last,
        the cache ends after c, and [d e] go to positions 3 and 4. Otherwise the token before the
        last is fed again, to the same effect. Rounds in which nothing was drafted leave more to
        catch up.
        """
        newest = jnp.maximum(length - 2, 0)  # with one known token: position 0, and 1 is scratch
        cache = state.cache

        def feed(at, count, cache):
            return self.model(block_at(tokens, at, count), at, context, cache)[1]

        if lags:
            cache = catch_up(feed, state.end, newest, min(self.stride, tokens.shape[1]), cache)
        hidden, cache = self.model(block_at(tokens, newest, 2), newest, context, cache)
        last = jnp.take_along_axis(hidden, (length - 1 - newest)[:, None, None], axis=1)[:, 0]
        return last, Fed(cache, length)

    def extend(self, token, position, context, state):
        hidden, cache = self.model(token[:, None], position, context, state.cache)
        return hidden[:, 0], Fed(cache, position + 1)

    def logits(self, hidden):
        return self.model.logits(hidden)


@pytree
class ModelDrafter(ByModel):
    """Drafts with a small model."""

    model: Model
    shared: tuple[int | None, ...] | None = dataclasses.field(
        default=None, kw_only=True, metadata={"static": True}
    )


def prefill(
    model: Model, inputs: Inputs, context: Context, cache: Cache
) -> tuple[Float[Array, "B P E"] | None, Cache]:
    """Run the P − 1 prompt tokens before the last: hidden states (B, P − 1, E), and the cache.

    There are no hidden states if the prompt is a single token. In a row with a short prompt the
    padding is fed too; the row's own tokens overwrite those slots before a query sees them. Long
    prompts are read in pieces, since the scores of a piece take PIECE · P numbers of each head.
    """
    tokens, first = inputs.prompt[:, :-1], jnp.zeros_like(inputs.prompt_len)
    length = tokens.shape[1]
    if length == 0:
        return None, cache
    if length <= PIECE:
        return model(tokens, first, context, cache)

    def piece(cache, at):
        part = jax.lax.dynamic_slice_in_dim(tokens, at, PIECE, axis=1)
        hidden, cache = model(part, first + at, context, cache)
        return cache, hidden

    # The last piece ends with the prompt, and reads some tokens again, to the same effect.
    places = np.minimum(np.arange(0, length, PIECE, dtype=np.int32), length - PIECE)
    cache, pieces = jax.lax.scan(piece, cache, jnp.asarray(places))
    whole = jnp.moveaxis(pieces[:-1], 0, 1).reshape(len(tokens), -1, pieces.shape[-1])
    rest = length - whole.shape[1]
    return jnp.concatenate([whole, pieces[-1, :, PIECE - rest :]], axis=1), cache


def started(model: Any, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
    """Context and cache after the prompt, except its last token.

    With `Inputs.encoding` the context has places for parts of the target's (`sharing.joined`).
    """
    context, cache = model.start(inputs, buffer_len)
    whole = context
    if inputs.encoding is not None:
        whole = sharing.joined(context, inputs.encoding.context)
    return context, prefill(model, inputs, whole, cache)[1]


def is_silent(logits: Float[Array, "*batch V"]) -> Bool[Array, "*batch"]:
    """Whether a drafter proposes nothing: −inf throughout (NaN and +inf are faults)."""
    return jnp.max(logits, axis=-1) == -jnp.inf


class Proposal(NamedTuple):
    """A drafter's proposal for the next token. Fields that are not read are not computed."""

    proposes: Bool[Array, "*batch"]  # whether it proposes; if not, all else is arbitrary and finite
    logprobs: Float[Array, "*batch V"]  # of the distribution that is sampled
    belief: Float[Array, "*batch V"]  # the same; at temperature 0 log_softmax(logits), not one-hot
    best: Int[Array, "*batch"]  # the likeliest token; the first of equals

    @property
    def entropy(self) -> Float[Array, "*batch"]:
        """The entropy of the belief, in nats; float32."""
        return smp.entropy(self.belief)


def proposal(logits: Float[Array, "*batch V"], sampling: Sampling) -> Proposal:
    """Make a proposal from a drafter's logits.

    All fields read the maximum of the same array, which XLA computes once. So rows without a
    proposal are masked in the results: masked logits would be another array.
    """
    logits = logits.astype(np.promote_types(logits.dtype, jnp.float32))
    silent = is_silent(logits)

    def standardized(by: Sampling) -> Array:
        flat = -math.log(logits.shape[-1])
        return jnp.where(silent[..., None], flat, smp.standardize(logits, by))

    logprobs = standardized(sampling)
    belief = standardized(smp.Sampling(1.0)) if sampling.greedy else logprobs
    return Proposal(~silent, logprobs, belief, smp.argmax(logits))


def first_distribution(
    drafter: Drafter,
    sampling: Sampling,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    context: Context,
    state: Any,
) -> Float[Array, "B V"]:
    """Log-probabilities of the token after the known ones."""
    hidden, _ = drafter.begin(tokens, length, context, state)
    return smp.standardize(drafter.logits(hidden), sampling)


def catch_up(
    feed: Callable[[Int[Array, " B"], int, Cache], Cache],
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    count: int,
    cache: Cache,
) -> Cache:
    """Feed the tokens between `first` and `newest`, `count` slots at a time.

    The last call ends before `newest`, and may feed some tokens again. Where fewer tokens are
    known, slots beyond them are overwritten before a query sees them.

    Args:
      feed: fills the given number of cache slots, from a given slot on.
    """

    def behind(carry):
        return jnp.any(carry[0] < newest)

    def again(carry):
        first, cache = carry
        at = jnp.minimum(first, jnp.maximum(newest - count, 0))
        return first + count, feed(at, count, cache)

    return jax.lax.while_loop(behind, again, (first, cache))[1]


def block_at(x: Shaped[Array, "B T ..."], first: Int[Array, " B"], count: int) -> Array:
    """Take `count` entries of each row from its `first` on, (B, count, …)."""
    slots = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 2)), axis=1)
