"""The vocabulary of specjax: axis legend, arrays and the protocols that the loops are built on.

Axes: B rows of the batch · S source length · T buffer length · K tokens in one call (γ or γ+1) ·
V vocabulary · L layers · H heads · D head size · E model width. A name like `logits_BKV` carries
its shape.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jax import Array
from jaxtyping import Bool, Float, Int

Text = str | Sequence[int]  # an input: a string, or token ids
Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays with a slot for every position of the buffer
Context = Any  # a pytree of arrays that decoding only reads


class Inputs(NamedTuple):
    """The inputs of a batch. Ids are right-padded; padding is never attended to.

    An encoder-decoder reads `source` and starts every row with one start token as its prompt. A
    decoder-only model reads its text as the prompt and has a source of width 0.
    """

    source: Int[Array, "B S"]
    source_len: Int[Array, " B"]
    prompt: Int[Array, "B P"]
    prompt_len: Int[Array, " B"]  # ≥ 1


class Encoding(NamedTuple):
    """The output of an encoder that has run, for every model that reads it while it starts."""

    output: Float[Array, "B S E"]
    bias: Any  # (B, 1, 1, slots), in whole tiles, or what stands for it in a context
    cross: tuple[Any, ...] = ()  # keys and values by decoder layer; None or (): projected anew
    context: Context = None  # of the target; None while the target itself starts


class Layout(NamedTuple):
    """The tree of the K tokens of one call; R is B, or 1 where all rows share one tree.

    Token k is written to slot start + k, as in a chain, but its position is start + depth[k]. Its
    query sees all slots before the call and, by `seen`, its ancestors and itself.
    """

    depth: Int[Array, "R K"]
    seen: Bool[Array, "R K K"]  # by query, then by slot of the call

    def first(self, count: int) -> "Layout":
        """The layout of the first tokens; a token's ancestors are among them."""
        return Layout(self.depth[:, :count], self.seen[:, :count, :count])


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
        self, tokens: Int[Array, "B K"], start: Int[Array, " #B"], context: Context, cache: Cache
    ) -> tuple[Float[Array, "B K E"], Cache]:
        """Run K tokens per row at positions start[b] … start[b]+K−1.

        Their keys and values overwrite those slots; the query at position t sees slots ≤ t. There
        is no length in the cache, so rolling back is starting at a smaller position.

        A model that scores trees is a `BranchingModel`.
        """
        ...

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """Unnormalised log-probabilities of the next token, V = vocab_size."""
        ...


class EncodingModel(Model, Protocol):
    """A target whose encoder's output its drafters can read (`specjax.drafters.sharing`)."""

    def encoding(self, inputs: Inputs) -> Encoding | None:
        """Run the encoder alone; None: there is none."""
        ...

    def start(
        self, inputs: Inputs, buffer_len: int, encoding: Encoding | None = None
    ) -> tuple[Context, Cache]:
        """Start as `Model.start` does, from an encoding of these inputs if there is one.

        The context has `cross_bias`, and `cross` by decoder layer.
        """
        ...


class PackingModel(Model, Protocol):
    """A target that can compute some of a call's positions: N of all rows."""

    packs: ClassVar[bool] = True

    def __call__(
        self,
        tokens: Int[Array, "B K"],
        start: Int[Array, " #B"],
        context: Context,
        cache: Cache,
        packing: Any = None,
    ) -> tuple[Float[Array, "... E"], Cache]:
        """Run K tokens per row as `Model.__call__` does.

        With a `specjax.models.packing.Packing` the hidden states are (N, E), and the slots of
        positions that are not packed are stale.
        """
        ...


class BranchingModel(Model, Protocol):
    """A target that can score a tree in one call."""

    branches: ClassVar[bool] = True

    def __call__(
        self,
        tokens: Int[Array, "B K"],
        start: Int[Array, " #B"],
        context: Context,
        cache: Cache,
        layout: Layout | None = None,
    ) -> tuple[Float[Array, "B K E"], Cache]:
        """Run K tokens per row as `Model.__call__` does; with a layout they form a tree."""
        ...

    def compact(self, cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
        """The cache with one path of the tree that the last call wrote from slot `start` on.

        The entry of the call's token path[i] is copied to slot start + 1 + i, for all i at once.
        The cache is then as if the path alone had been fed after token 0.
        """
        ...
