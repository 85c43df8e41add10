"""The protocol of policies: pure functions, and a state in the loop's carry.

A policy decides how long the next draft may be, whether to draft one token more and, if it decides
slot by slot, which drafted tokens of the batch are verified. It updates its state after a round.
Lengths are data: γ_max is static, and nothing recompiles. The output keeps the target's
distribution because no policy can drop a token after a look at it: `keep_drafting` decides before
the token exists, `go_on` about later tokens alone, and `verifies` never sees a token
(`policies/slots.py`). A state's leaves have a row for each row of the batch. Rows are independent
unless the policy declares `reads_batch`.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax.pytrees import averaged
from specjax.rounds import Round
from specjax.sampling import Purpose, entropy, fold


class Observation(NamedTuple):
    """Known values before drafted token i exists. Fields that are not read are not computed."""

    slot: Int[Array, ""]  # i, from 0
    drafting: Bool[Array, " B"]  # rows that drafted every token so far
    draft_logprobs: Float[Array, "B V"]  # the distribution that token i would be drawn from
    belief_logprobs: Float[Array, "B V"]  # the same; at temperature 0 softmax(logits), not one-hot
    hidden: Float[Array, "B E"]  # the drafter's state that the distribution was read from

    @property
    def entropy(self) -> Float[Array, " B"]:
        """The entropy of the belief, in nats; float32."""
        return entropy(self.belief_logprobs)

    @property
    def top1(self) -> Float[Array, " B"]:
        """The belief's largest probability; float32."""
        return jnp.exp(jnp.max(self.belief_logprobs, axis=-1)).astype(jnp.float32)


class Slot(NamedTuple):
    """A drafted token that waits for a position of the target's call, and all before it."""

    taken: Int[Array, "..."]  # slots of all rows that have a position already
    gained: Float[Array, "..."]  # tokens that the round then brings: live rows, and chances so far
    chance: Float[Array, "..."]  # of this slot, see `Policy.chance`
    place: Int[Array, "..."]  # i, of the token in its draft, from 0
    rows: Int[Array, "..."]  # live rows, each of which has a position anyway


class Policy(Protocol):
    """The protocol and base of policies. The defaults draft and verify γ_max tokens in every round.

    Attributes:
      needs_shorter: whether the policy learns how many tokens shorter drafts would have got. It
        then needs an acceptance rule that reveals this.
      fixed: whether the policy drafts equally many tokens in every round, whatever it sees. On an
        accelerator the loop then calls the drafter γ_max times in every round, without conditions.
      reads_batch: whether decisions for a row depend on past rounds of other rows. At temperatures
        above 0 the row's tokens then depend on its neighbours; its distribution does not.
      carries: whether the next batch of a run may start from the policy's state (`resume`).
      fills: whether slots that cost nothing are verified too: those up to the compiled size of
        pass that is needed anyway.
    """

    needs_shorter: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    fills: ClassVar[bool] = False

    def init(self, keys: Key[Array, " B"], gamma_max: int) -> Any:
        """The state before the first round. The keys are the policy's own, one for each row."""
        return ()

    def begin(
        self, state: Any, live: Bool[Array, " B"], gamma_max: int
    ) -> tuple[Any, Int[Array, "*batch"]]:
        """Begin a round: the state, and the longest draft allowed, for each row or for all.

        The loop cuts it to 0 … γ_max, and to what the row has left.

        Args:
          live: rows that have not ended.
        """
        return state, jnp.int32(gamma_max)

    def nodes(self, state: Any, most: int) -> Int[Array, "*batch"]:
        """Number of a tree's nodes to draft, for each row or for all; called after `begin`.

        `begin` has set the depth. The first nodes are drafted, which are the most likely ones.
        """
        return jnp.int32(most)

    def keep_drafting(self, state: Any, seen: Observation) -> tuple[Any, Bool[Array, " B"]]:
        """Decide whether each row drafts token i, before it is drawn.

        The drafter has already run for it: earlier decisions, in `go_on`, save that call.
        """
        return state, seen.drafting

    def go_on(
        self, state: Any, drafting: Bool[Array, " B"], logprob: Float[Array, " B"]
    ) -> tuple[Any, Bool[Array, " B"]]:
        """Decide whether each row drafts one token more, after token i has been drawn.

        Token i stays in any case. If no row continues, a call of the drafter is saved.

        Args:
          drafting: rows that drafted token i.
          logprob: float32, the log-probability of token i in the drafter's belief: at most 0.
        """
        return state, drafting

    def chance(self, state: Any, slot: Int[Array, ""]) -> Float[Array, "*batch"]:
        """The chance that token i of each row is reached and accepted, by which slots are ordered.

        Called for policies with a `verifies` of their own, after `keep_drafting` and before the
        draw. A larger value than that of the token before counts as that one.

        Args:
          slot: i, from 0.
        """
        return 1 / (1 + slot.astype(jnp.float32))

    def verifies(self, state: Any, slot: Slot) -> Bool[Array, ""]:
        """Whether a drafted token gets a position. The first that does not ends the round's.

        Fields of `slot` are scalars. The state is that from `begin`.
        """
        return jnp.bool_(True)

    def update(self, state: Any, round_: Round) -> Any:
        """Update the state after a round."""
        return state

    def prefers_plain(self, gamma_max: int, rounds: int, rows: int = 1) -> bool:
        """Whether plain decoding is expected to be faster than `rounds` rounds of `rows` rows.

        Called before decoding; False where it is not known. If True, plain decoding makes the same
        tokens (`decoding.building.plain_if_preferred`).
        """
        return False

    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
        """The state before the first round, in a run that carries over earlier batches.

        By default the means over the rows of the last batch, if the policy `carries`.

        Args:
          fresh: the state from `init` for this batch.
          past: the state at the end of the last batch, of A rows.
          rows: True for the A rows that were no padding.
        """
        return averaged(fresh, past, rows) if self.carries else fresh


def first_state(policy: Policy, keys: Key[Array, " B"], gamma_max: int) -> Any:
    """The state of a policy before the first round, by the keys of the rows."""
    return policy.init(fold(keys, jnp.zeros(keys.shape, jnp.int32), Purpose.POLICY), gamma_max)


def within_a_draft(policy: Policy) -> bool:
    """Whether a policy may stop a draft between tokens, or leave some of it unverified."""
    kind = type(policy)
    own = (kind.keep_drafting, kind.go_on) != (Policy.keep_drafting, Policy.go_on)
    return own or by_slot(policy)


def by_slot(policy: Policy) -> bool:
    """Whether a policy decides slot by slot which drafted tokens are verified."""
    return type(policy).verifies is not Policy.verifies


def counts_nodes(policy: Policy) -> bool:
    """Whether a policy sets the number of nodes of trees."""
    return type(policy).nodes is not Policy.nodes
