"""Records of a round: its drafts, the target's verdict, and the round that others read."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.state import State, is_distribution, left
from specjax.support import renamed


class Drafts(NamedTuple):
    """One round's proposals; entries at or beyond `length` are arbitrary."""

    tokens: Int[Array, "B G"]
    logprobs: Float[Array, "B G V"]  # the distributions that the tokens were drawn from
    belief_logprob: Float[Array, "B G"]  # float32, of the token, see `Observation.belief_logprobs`
    entropy: Float[Array, "B G"]  # float32, of the same belief, in nats
    length: Int[Array, " B"]  # tokens that the target verifies
    allowed: Int[Array, " B"]  # the longest draft that the policy allowed
    drawn: Int[Array, " B"]  # tokens before `allocate` left some out; all decisions may read them
    chance: Any = ()  # (B, G) float32, of slots, for policies that decide by slot
    packing: Any = None  # positions that the pass computes, see `passes`; None: all

    @classmethod
    def empty(
        cls,
        allowed: Int[Array, " B"],
        gamma: int,
        like: jax.ShapeDtypeStruct | Array,
        by_slot: bool = False,
    ) -> "Drafts":
        """Empty drafts with room for γ tokens.

        Args:
          like: shape (B, V) and dtype of a distribution.
          by_slot: whether slots have chances.
        """
        none = jnp.zeros(allowed.shape, jnp.int32)
        slots = jnp.zeros((len(allowed), gamma), jnp.float32)
        return cls(
            tokens=jnp.zeros((len(allowed), gamma), jnp.int32),
            logprobs=jnp.zeros((len(allowed), gamma, like.shape[-1]), like.dtype),
            belief_logprob=slots,
            entropy=slots,
            length=none,
            allowed=allowed,
            drawn=none,
            chance=slots if by_slot else (),
        )

    def put(
        self,
        slot: Array,
        proposed: Any,
        drafted: Bool[Array, " B"],
        token: Array,
        belief_logprob: Array,
    ) -> "Drafts":
        """Add one token, which counts in the rows that `drafted` it.

        Args:
          proposed: the `Proposal` that it was drawn from.
        """
        columns = token, proposed.logprobs, belief_logprob, proposed.entropy
        put = partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=1)
        added = [put(old, new) for old, new in zip(self[:4], columns, strict=True)]
        length = self.length + drafted.astype(jnp.int32)
        columns_ = dict(zip(Drafts._fields[:4], added, strict=True))
        return self._replace(**columns_, length=length, drawn=length)

    def within(self, width: int) -> "Drafts":
        """The drafts that a pass of `width` positions verifies: the first is the known token's."""
        columns = zip(Drafts._fields[:4], self[:4], strict=True)
        return self._replace(**{name: column[:, : width - 1] for name, column in columns})


class Verdict(NamedTuple):
    """The target's verdict on the drafts; entry i is about the token after i drafted ones."""

    target_logprobs: Float[Array, "B K V"]  # before any noise is known
    hidden: Float[Array, "B K E"]
    overlap: Float[Array, "B G"]  # see `Round`
    ratio: Float[Array, "B G"]
    stop: Float[Array, "B K"]  # P(exactly i drafted tokens are accepted)
    accepted: Int[Array, " B"]
    next_probs: Float[Array, "B V"]
    next_token: Int[Array, " B"]


_UNKNOWN: Any = None


class Round(NamedTuple):
    """One round of every row. The jitted loop computes only the fields that are read.

    Entries after the first rejection describe a prefix that was discarded, and not the output.

    For a tree, entry i is about the node at depth i of the accepted path. `ratio` and `overlap` are
    the chance that one of its children is accepted, given the tokens. `belief_logprob` is that of
    its children together, and `verified` the depth.

    The fields from `drafts` on hold distributions and states of the models: enough to compute the
    round's probability. In replay these are None.
    """

    active: Bool[Array, " B"]  # False: the row had finished, learn nothing from it
    verified: Int[Array, " B"]  # draft tokens of the target's call
    accepted: Int[Array, " B"]  # before a cut at EOS; `in_output` counts what is left
    emitted: Int[Array, " B"]
    overlap: Float[Array, "B G"]  # float32, P(a token there is accepted): Σ min(target, draft)
    ratio: Float[Array, "B G"]  # float32, min(1, target/draft) of the drafted token
    belief_logprob: Float[Array, "B G"]  # float32, of the drafted token in the drafter's belief
    submitted: Bool[Array, "B G"]  # positions with a submitted token
    left: Int[Array, " B"]  # tokens that the row may still emit; 0: it has ended
    drafts: Drafts = _UNKNOWN
    target_logprobs: Float[Array, "B K V"] = _UNKNOWN  # before any noise is known, as in `drafts`
    hidden: Float[Array, "B K E"] = _UNKNOWN  # the target's, after the known token and each draft
    stop: Float[Array, "B K"] = _UNKNOWN  # P(exactly i drafted tokens are accepted)
    next_probs: Float[Array, "B V"] = _UNKNOWN
    next_token: Int[Array, " B"] = _UNKNOWN
    nodes: Any = None  # of a tree: `trees.nodes.Nodes`; `drafts` is unset then
    node: Int[Array, " B"] | None = None  # the node at which acceptance ended
    reach: Float[Array, "B C"] | None = None  # P(a node is accepted), given the tokens

    @property
    def gamma_max(self) -> int:
        """G, the length of the longest draft."""
        return self.submitted.shape[1]

    @property
    def tested(self) -> Bool[Array, "B G"]:
        """Positions that were reached: all tokens before are in the output, and none is EOS."""
        slot = jnp.arange(self.gamma_max, dtype=jnp.int32)[None, :]
        reached = (slot <= self.accepted[:, None]) & (slot < self.emitted[:, None])
        return self.submitted & reached

    @property
    def kept(self) -> Bool[Array, "B G"]:
        """Positions whose token is in the output."""
        slot = jnp.arange(self.gamma_max, dtype=jnp.int32)[None, :]
        return slot < self.in_output[:, None]

    @property
    def in_output(self) -> Int[Array, " B"]:
        """Drafted tokens that are in the output: the accepted ones up to an EOS."""
        return jnp.minimum(self.accepted, self.emitted)

    @property
    def uncut(self) -> "Round":
        """The round without rows that an EOS among the drafted tokens ended. How far a draft of
        theirs would have been accepted is not known."""
        return self._replace(active=self.active & (self.emitted > self.accepted))


Round.drafted = renamed.refused("drafted")  # type: ignore[attr-defined]  # it is no field


def round_of(before: State, after: State, drafts: Drafts, verdict: Verdict) -> Round:
    """The round that led from one state to the next."""
    slot = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)[None, :]
    return Round(
        active=~before.done,
        verified=drafts.length,
        emitted=after.length - before.length,
        belief_logprob=drafts.belief_logprob,
        submitted=slot < drafts.length[:, None],
        left=left(after),
        drafts=drafts,
        **verdict._asdict(),
    )


def judged_rule(state: State, drafts: Drafts, verdict: Verdict) -> State:
    """Note whether `stop` is a distribution, ends with the draft, and `next_probs` is one.

    For rules of a user's own, whose states have `rule_sound`.
    """
    if state.rule_sound is None:
        return state
    slot = jnp.arange(verdict.stop.shape[1], dtype=jnp.int32)[None, :]
    drafted = jnp.where(slot <= drafts.length[:, None], verdict.stop, 0.0)
    each = verdict.stop, drafted, verdict.next_probs
    sound = jnp.stack([is_distribution(one, ~state.done) for one in each])
    return state.replace(rule_sound=state.rule_sound & sound)


def idle(gamma_max: int, rows: int) -> Round:
    """A round without drafts, of rows with many tokens left."""
    none, nothing = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, gamma_max), jnp.float32)
    return Round(
        active=none == 0,
        verified=none,
        accepted=none,
        emitted=none + 1,
        overlap=nothing,
        ratio=nothing,
        belief_logprob=nothing,
        submitted=nothing > 0,
        left=none + gamma_max + 1,
    )


def where_rows(rows: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """The new state for the marked rows, the old one for the rest."""

    def choose(new, old):
        return jnp.where(rows.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)


def where_active(round_: Round, new: Any, old: Any) -> Any:
    """The new state for active rows, the old one for the rest."""
    return where_rows(round_.active, new, old)
