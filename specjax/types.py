"""The vocabulary of specjax: axis legend, arrays and the protocols that the loops are built on.

Axes: B rows of the batch · S source length · T buffer length · K tokens in one call (γ or γ+1) ·
V vocabulary · L layers · H heads · D head size · E model width. A name like `logits_BKV` carries
its shape.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

Text = str | Sequence[int]  # an input: a string, or token ids
Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays with a slot for every position of the buffer
Context = Any  # a pytree of arrays that decoding only reads


class Encoding(NamedTuple):
    """The output of an encoder that has run, for every model that reads it while it starts."""

    output: Float[Array, "B S E"]
    bias: Any  # (B, 1, 1, slots), in whole tiles, or what stands for it in a context
    cross: tuple[Any, ...] = ()  # keys and values by decoder layer; None or (): projected anew
    context: Context = None  # of the target; None while the target itself starts


class Inputs(NamedTuple):
    """The inputs of a batch. Ids are right-padded; padding is never attended to.

    An encoder-decoder reads `source` and starts every row with one start token as its prompt. A
    decoder-only model reads its text as the prompt and has a source of width 0.
    """

    source: Int[Array, "B S"]
    source_len: Int[Array, " B"]
    prompt: Int[Array, "B P"]
    prompt_len: Int[Array, " B"]  # ≥ 1
    encoding: Encoding | None = None  # of this source; None: a model's own encoder runs


class Layout(NamedTuple):
    """The tree of the K tokens of one call; R is B, or 1 where all rows share one tree.

    Token k is written to slot start + k, as in a chain, but its position is start + depth[k]. Its
    query sees all slots before the call and, by `seen`, its ancestors and itself.
    """

    depth: Int[Array, "R K"]
    seen: Bool[Array, "R K K"]  # by query, then by slot of the call

    @classmethod
    def chain(cls, count: int) -> "Layout":
        """The layout of K tokens one after the other."""
        depth = jnp.arange(count)[None, :]
        return cls(depth, depth[:, :, None] >= depth[:, None, :])

    def first(self, count: int) -> "Layout":
        """The layout of the first tokens; a token's ancestors are among them."""
        return Layout(self.depth[:, :count], self.seen[:, :count, :count])


class Packing(NamedTuple):
    """The positions of a call that are computed: the first few of each row, one row after another.

    Projections, feed-forward layers and the head work on (N, E). Attention sees (B, K): what it
    reads is unpacked before it, and packed again after it. Unpacked entries beyond a row's count
    hold the values of other positions. Their keys and values go to slots that are stale, and
    nothing else may be read of them.
    """

    at: Int[Array, " N"]  # row · K + slot of each packed position
    of: Int[Array, "B K"]  # the packed position of each slot

    @classmethod
    def first(cls, count: Int[Array, " B"], width: int, size: int) -> "Packing":
        """Pack the first `count` positions of each row.

        Args:
          count: 1 … width for each row.
          width: K.
          size: N ≥ the sum of the counts. Positions beyond the sum repeat the last one.
        """
        ends = jnp.cumsum(count, dtype=jnp.int32)
        place = jnp.minimum(jnp.arange(size, dtype=jnp.int32), ends[-1] - 1)
        row = jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        begin = ends - count
        slot = jnp.arange(width, dtype=jnp.int32)[None, :]
        return cls(row * width + place - begin[row], jnp.minimum(begin[:, None] + slot, size - 1))


class Call(NamedTuple):
    """Where the K tokens of a model call are written, what they see, and which are computed."""

    start: Int[Array, " #B"]  # the slot of each row's first token
    layout: Layout | None = None  # None: one token after the other
    packing: Packing | None = None  # None: all positions are computed

    @classmethod
    def of(cls, start: "Int[Array, ' #B'] | Call") -> "Call":
        """The call that begins at `start`; a `Call` as it is."""
        return start if isinstance(start, Call) else cls(start)

    def tree(self, count: int) -> Layout:
        """The layout of the K = `count` tokens."""
        return self.layout or Layout.chain(count)

    def pack(self, x: Shaped[Array, "B K ..."]) -> Array:
        """Take the packed positions, (N, …); without a packing x as it is."""
        return x if self.packing is None else x.reshape(-1, *x.shape[2:])[self.packing.at]

    def unpack(self, x: Shaped[Array, "..."]) -> Array:
        """Put packed positions (N, …) back into (B, K, …); without a packing x as it is."""
        return x if self.packing is None else x[self.packing.of]


WHOLE = Call(np.zeros((1,), np.int32))  # type: ignore[arg-type]
"""The call of a text from its first token on."""


class Model(Protocol):
    """A target or draft model as the loops see it (`models/` has the real ones)."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 … vocab_size−1 can be emitted; padding of the output layer is cut off."""
        ...

    def start(self, inputs: Inputs, buffer_len: int) -> tuple[Context, Cache]:
        """Encode the source, and make an empty cache of `buffer_len` slots per row.

        The context is read-only afterwards. The prompt is fed by ordinary calls.
        """
        ...

    def __call__(
        self, tokens: Int[Array, "B K"], start: Any, context: Context, cache: Cache
    ) -> tuple[Float[Array, "... E"], Cache]:
        """Run K tokens per row at positions start[b] … start[b]+K−1: (B, K, E), and the cache.

        Their keys and values overwrite those slots; the query at position t sees slots ≤ t. There
        is no length in the cache, so rolling back is starting at a smaller position.

        Args:
          start: (B,) or (1,) int32. A `BranchingModel` or a `PackingModel` also takes a `Call`.
        """
        ...

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """Unnormalised log-probabilities of the next token, V = vocab_size."""
        ...


class EncodingModel(Model, Protocol):
    """A target whose encoder's output its drafters can read (`specjax.drafters.sharing`).

    Its `start` reads `Inputs.encoding`. The context has `cross_bias`, and `cross` by decoder layer.
    """

    def encoding(self, inputs: Inputs) -> Encoding | None:
        """Run the encoder alone; None: there is none."""
        ...


class PackingModel(Model, Protocol):
    """A target that can compute some of a call's positions: N of all rows.

    With a `Call.packing` the hidden states are (N, E), and the slots of positions that are not
    packed are stale.
    """

    packs: ClassVar[bool] = True


class BranchingModel(Model, Protocol):
    """A target that can score a tree in one call: the tokens form a `Call.layout`."""

    branches: ClassVar[bool] = True

    def compact(self, cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
        """The cache with one path of the tree that the last call wrote from slot `start` on.

        The entry of the call's token path[i] is copied to slot start + 1 + i, for all i at once.
        The cache is then as if the path alone had been fed after token 0.
        """
        ...
