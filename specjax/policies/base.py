"""What a draft-length policy is: pure functions, and a state in the loop's carry.

A policy says how long the next draft may be, whether to draft one token more, and what a round
taught it. Lengths are data: γ_max is static, and nothing recompiles. What a policy may see decides
whether the output's distribution stays the target's: `keep_drafting` is asked before the token
exists, and `go_on` cannot take back the token whose confidence it reads. So a policy cannot look at
a token and drop it. A state's leaves have a row for each row of the batch, and rows do not look at
each other unless the policy says so (`reads_batch`).
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt32

from specjax.pytrees import averaged
from specjax.rounds import Round


class Observation(NamedTuple):
    """What is known before drafted token i exists. What is not read is not computed."""

    slot: Int[Array, ""]  # i, from 0
    drafting: Bool[Array, " B"]  # rows that drafted every token so far
    draft_logprobs: Float[Array, "B V"]  # the distribution that token i would be drawn from
    belief_logprobs: Float[Array, "B V"]  # the same; at temperature 0 softmax(logits), not one-hot
    hidden: Float[Array, "B E"]  # the drafter's state that the distribution was read from

    @property
    def entropy(self) -> Float[Array, " B"]:
        """Of the belief, in nats; float32."""
        probs = jnp.exp(self.belief_logprobs)
        surprise = jnp.where(probs > 0, -self.belief_logprobs, 0.0)
        return jnp.sum(probs * surprise, axis=-1).astype(jnp.float32)

    @property
    def top1(self) -> Float[Array, " B"]:
        """The belief's largest probability; float32."""
        return jnp.exp(jnp.max(self.belief_logprobs, axis=-1)).astype(jnp.float32)


class Policy(Protocol):
    """What the loop needs of a policy. A subclass overrides what it does otherwise: as it stands,
    it drafts γ_max tokens in every round.

    Attributes:
      needs_shorter: whether the policy learns from a round what shorter drafts would have got. It
        then needs an acceptance rule that reveals it.
      fixed: whether the policy drafts equally many tokens in every round, whatever it sees. On an
        accelerator the loop then calls the drafter γ_max times in every round, and never asks
        whether to go on.
      reads_batch: whether what the policy decides for a row depends on past rounds of other rows.
        At temperatures above 0 the row's tokens then depend on its neighbours; its distribution
        does not.
      carries: whether what the policy has learned may begin the next batch of a run (`resume`).
    """

    needs_shorter: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = False
    carries: ClassVar[bool] = False

    def init(self, keys: Key[Array, " B"], gamma_max: int) -> Any:
        """The state before the first round. The keys are the policy's own, one for each row."""
        return ()

    def begin(self, state: Any, gamma_max: int) -> tuple[Any, Int[Array, "*batch"]]:
        """Before a round: the state, and the longest draft allowed, for each row or for all.

        The loop cuts it to 0 … γ_max, and to what the row has left.
        """
        return state, jnp.int32(gamma_max)

    def nodes(self, state: Any, most: int) -> Int[Array, "*batch"]:
        """Of a tree: how many of its nodes to draft, for each row or for all, asked after `begin`.

        `begin` has set the depth. The first nodes count, which are the most promising ones.
        """
        return jnp.int32(most)

    def keep_drafting(self, state: Any, seen: Observation) -> tuple[Any, Bool[Array, " B"]]:
        """Whether each row drafts token i, decided before it is drawn.

        The drafter has run for it: what can be decided earlier belongs in `go_on`.
        """
        return state, seen.drafting

    def go_on(
        self, state: Any, drafting: Bool[Array, " B"], confidence: Float[Array, " B"]
    ) -> tuple[Any, Bool[Array, " B"]]:
        """Whether each row drafts one token more, asked once token i has been drawn.

        Token i stays in any case. Where no row goes on, a call of the drafter is saved.

        Args:
          drafting: rows that drafted token i.
          confidence: float32, the belief in token i, a log-probability.
        """
        return state, drafting

    def update(self, state: Any, round_: Round) -> Any:
        """After a round: what was learned."""
        return state

    def prefers_plain(self, gamma_max: int, rounds: int, rows: int = 1) -> bool:
        """Whether plain decoding promises more than this policy's loop in so many rounds of so many
        rows.

        Asked before decoding, and False where it is not known. If so the same tokens come without
        drafter and loop (`decoding.plain_if_preferred`).
        """
        return False

    def resume(self, fresh: Any, past: Any, rows: Bool[Array, " A"]) -> Any:
        """The state before the first round, where a run carries over what earlier batches taught.

        By default the means over the rows of the last batch, if the policy `carries`.

        Args:
          fresh: what `init` gave for this batch.
          past: the state at the end of the last batch, of A rows.
          rows: of these, the ones that were no padding.
        """
        return averaged(fresh, past, rows) if self.carries else fresh


def within_a_draft(policy: Policy) -> bool:
    """Whether it decides token by token, and not before the draft alone."""
    kind = type(policy)
    return (kind.keep_drafting, kind.go_on) != (Policy.keep_drafting, Policy.go_on)


def counts_nodes(policy: Policy) -> bool:
    """Whether it sets the number of nodes of trees."""
    return type(policy).nodes is not Policy.nodes


def salts(keys: Key[Array, " B"]) -> UInt32[Array, " B"]:
    """A number for each row, which a state can hold in the place of the row's key."""
    return jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)


def noise_keys(salt: UInt32[Array, " B"], count: Int[Array, " B"]) -> Key[Array, " B"]:
    """Keys from `salts` for each row's own count of rounds."""
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(
        salt, count
    )
