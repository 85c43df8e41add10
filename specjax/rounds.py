"""What happened in a round: the one thing that drafters, policies, traces and tests learn from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Drafts(NamedTuple):
    """One round's proposals; entries at or beyond `length` are arbitrary."""

    tokens: Int[Array, "B G"]
    logprobs: Float[Array, "B G V"]  # the distributions that the tokens were drawn from
    length: Int[Array, " B"]
    confidence: Float[Array, "B G"]  # float32, see `Observation.belief_logprobs`


_UNKNOWN: Any = None


class Round(NamedTuple):
    """One round of every row. What nobody reads is not computed: the jitted loop drops the rest.

    Entries after the first rejection describe a prefix that was discarded, and not the output.

    Of a tree, entry i is about the node at depth i of the accepted path, and whether it has a child
    that is accepted: `ratio` and `overlap` are its chance, given the tokens, and `confidence` the
    belief in its children together. `drafted` is the depth.

    The fields from `drafts` on hold distributions and states of the models: enough to compute the
    round's probability. Replay knows the others alone and leaves these None.
    """

    active: Bool[Array, " B"]  # False: the row had finished, learn nothing from it
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]  # before a cut at EOS
    emitted: Int[Array, " B"]
    overlap: Float[Array, "B G"]  # float32, P(a token there is accepted): Σ min(target, draft)
    ratio: Float[Array, "B G"]  # float32, min(1, target/draft) of the drafted token
    confidence: Float[Array, "B G"]  # float32, the belief in the drafted token, a log-probability
    submitted: Bool[Array, "B G"]  # positions that count
    left: Int[Array, " B"]  # tokens that the row may still emit; 0: it has ended
    drafts: Drafts = _UNKNOWN
    target_logprobs: Float[Array, "B K V"] = _UNKNOWN  # before any noise is known, as in `drafts`
    hidden: Float[Array, "B K E"] = (
        _UNKNOWN  # the target's, after the last known token and each draft
    )
    stop: Float[Array, "B K"] = _UNKNOWN  # P(exactly i drafted tokens are accepted)
    next_probs: Float[Array, "B V"] = _UNKNOWN
    next_token: Int[Array, " B"] = _UNKNOWN
    nodes: Any = None  # of a tree, `trees.nodes.Nodes`; `drafts` is unknown then
    node: Int[Array, " B"] | None = None  # at which acceptance ended
    reach: Float[Array, "B C"] | None = None  # P(a node is accepted), given the tokens

    @property
    def gamma_max(self) -> int:
        """G, the longest draft."""
        return self.submitted.shape[1]

    @property
    def tested(self) -> Bool[Array, "B G"]:
        """Positions that were reached: all drafted tokens before them were accepted."""
        slot = jnp.arange(self.gamma_max, dtype=jnp.int32)[None, :]
        return self.submitted & (slot <= self.accepted[:, None])

    @property
    def kept(self) -> Bool[Array, "B G"]:
        """Positions whose token was accepted."""
        slot = jnp.arange(self.gamma_max, dtype=jnp.int32)[None, :]
        return slot < self.accepted[:, None]


def idle(gamma_max: int, rows: int) -> Round:
    """A round of rows that drafted nothing, and have much left."""
    none, nothing = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, gamma_max), jnp.float32)
    return Round(
        active=none == 0,
        drafted=none,
        accepted=none,
        emitted=none + 1,
        overlap=nothing,
        ratio=nothing,
        confidence=nothing,
        submitted=nothing > 0,
        left=none + gamma_max + 1,
    )


def where_active(round_: Round, new: Any, old: Any) -> Any:
    """The new state for rows that are alive, the old one for the rest."""

    def choose(new, old):
        return jnp.where(round_.active.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)
