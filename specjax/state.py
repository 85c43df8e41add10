"""The carry of both loops, and `commit`, the one place where tokens become output."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax.types import Inputs


class Stats(struct.PyTreeNode):
    """Counts for each row. Tokens after EOS are not counted."""

    target_calls: Array  # [B] int32, verify passes while the row was active
    verified: Array  # [B] int32, draft tokens that the target verified, in trees nodes
    draft_calls: Array  # [B] int32, of the drafter: tokens drawn for a chain, levels of a tree
    accepted: Array  # [B] int32, drafted tokens in the output
    emitted: Array  # [B] int32, tokens of the output, EOS included
    accepted_lengths: Array  # [B, γ_max+1] int32, rounds by accepted length
    tested: Array  # [B, γ_max] int32, rounds in which position i was reached: all before it kept


FOREVER = np.iinfo(np.int32).max  # rounds
ROUNDING = 1e-3  # of a sum of float32 over a large vocabulary


class Until(NamedTuple):
    """The loop's end condition, as traced numbers: a new value compiles nothing."""

    done: Array  # [] int32, when this many rows are done, idle ones included
    rounds: Array  # [] int32, or after this many further rounds


def until(done: int, rounds: int = FOREVER) -> Until:
    """An `Until` from plain numbers."""
    return Until(jnp.int32(done), jnp.int32(rounds))


class State(struct.PyTreeNode):
    """The loop's carry, which each round replaces. A finished row is frozen."""

    keys: Array  # [B] keys, one for each (input, sample); never consumed, only folded
    tokens: Array  # [B, T] int32, prompt and output; beyond `length` arbitrary
    length: Array  # [B] int32, tokens known so far, ≥ 1
    limit: Array  # [B] int32, the length at which a row ends at the latest
    done: Array  # [B] bool
    rounds: Array  # [B] int32, the row's own rounds so far
    cache: Any  # the target's; slots ≥ length − 1 are stale
    drafter: Any  # the drafter's own state
    policy: Any  # the policy's own state
    stats: Stats
    target_finite: Array  # [] bool, False once a live row's logits were not finite
    draft_finite: Array  # [] bool
    until: Until
    log: Any = None  # `log.Log` of all rounds, on request
    # [3] bool, False once a user's own rule failed, see `rounds.judged_rule`; None: another rule
    rule_sound: Any = None


def begin(
    inputs: Inputs,
    keys: Key[Array, " B"],
    max_new: Int[Array, " B"],
    *,
    buffer_len: int,
    gamma_max: int,
    cache: Any,
    drafter: Any = (),
    policy: Any = (),
) -> State:
    """The state before the first round; the loop returns when all rows are done.

    Args:
      max_new: new tokens allowed for each row; 0 finishes a row at once (padding of a batch).
      buffer_len: T ≥ prompt + max_new + slots of a round, so that a verify pass never leaves it.
      drafter, policy: first states.
    """
    batch, prompt_len = inputs.prompt.shape
    tokens = jnp.zeros((batch, buffer_len), jnp.int32).at[:, :prompt_len].set(inputs.prompt)
    zeros = jnp.zeros((batch,), jnp.int32)
    return State(
        keys=keys,
        tokens=tokens,
        length=inputs.prompt_len,
        limit=inputs.prompt_len + max_new,
        done=max_new <= 0,
        rounds=zeros,
        cache=cache,
        drafter=drafter,
        policy=policy,
        stats=Stats(
            target_calls=zeros,
            verified=zeros,
            draft_calls=zeros,
            accepted=zeros,
            emitted=zeros,
            accepted_lengths=jnp.zeros((batch, gamma_max + 1), jnp.int32),
            tested=jnp.zeros((batch, gamma_max), jnp.int32),
        ),
        target_finite=jnp.bool_(True),
        draft_finite=jnp.bool_(True),
        until=until(batch),
    )


def unfinished(state: State) -> Bool[Array, ""]:
    """The loop's condition: enough rows are active, and no model or rule has failed."""
    waits = jnp.sum(state.done, dtype=jnp.int32) < state.until.done
    waits = waits & (state.until.rounds > 0) & state.target_finite & state.draft_finite
    return waits if state.rule_sound is None else waits & jnp.all(state.rule_sound)


def left(state: State) -> Int[Array, " B"]:
    """Tokens that each row may still emit; 0: it has ended."""
    return jnp.where(state.done, 0, state.limit - state.length)


def block(state: State, tokens: Int[Array, "B G"]) -> Int[Array, "B K"]:
    """The tokens of a round's target call, K = G + 1: the last known one and the drafted ones."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    return jnp.concatenate([last, tokens], axis=1)


def commit(
    state: State,
    drafts: Int[Array, "B G"],
    draft_len: Int[Array, " B"],
    accepted: Int[Array, " B"],
    next_token: Int[Array, " B"],
    eos_ids: Int[Array, " N"],
    work: tuple[Int[Array, " B"], Int[Array, " B"]] | None = None,
) -> State:
    """Append each row's accepted drafts and next token, up to the first EOS or its limit.

    With drafts [a b c], accepted 2 and next token x a row gets [a b x]; if b is EOS it gets
    [a b] and is done, and x counts nowhere. Finished rows get nothing.

    Args:
      drafts: for a tree, the accepted path.
      draft_len: submitted tokens, on the longest path.
      work: verified tokens, in trees nodes, and calls of the drafter; None: both are draft_len.
    """
    verified, calls = work or (draft_len, draft_len)
    gamma = drafts.shape[1]
    slot = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    slot = jnp.broadcast_to(slot, (drafts.shape[0], gamma + 1))
    block = jnp.where(
        slot < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), next_token[:, None]
    )
    is_eos = jnp.any(block[:, :, None] == eos_ids[None, None, :], axis=-1)
    stop = is_eos & (slot <= accepted[:, None])
    ended = jnp.any(stop, axis=1)
    first_stop = jnp.argmax(stop, axis=1).astype(jnp.int32)
    gained = jnp.where(ended, first_stop + 1, accepted + 1)
    gained = jnp.where(state.done, 0, jnp.minimum(gained, state.limit - state.length))
    kept = jnp.minimum(accepted, gained)

    # Slots that are not gained go past the buffer, where the write is dropped.
    target = jnp.where(slot < gained[:, None], state.length[:, None] + slot, state.tokens.shape[1])
    put = jax.vmap(lambda row, at, block: row.at[at].set(block, mode="drop"))
    tokens = put(state.tokens, target, block)

    length = state.length + gained
    live = ~state.done
    active = live.astype(jnp.int32)
    reached = (slot < draft_len[:, None]) & (slot <= kept[:, None]) & (slot < gained[:, None])
    stats = state.stats
    return state.replace(
        tokens=tokens,
        length=length,
        done=state.done | ended | (length >= state.limit),
        rounds=state.rounds + active,
        stats=Stats(
            target_calls=stats.target_calls + active,
            verified=stats.verified + active * verified,
            draft_calls=stats.draft_calls + active * calls,
            accepted=stats.accepted + active * kept,
            emitted=stats.emitted + gained,
            accepted_lengths=stats.accepted_lengths
            + active[:, None] * (slot == kept[:, None]).astype(jnp.int32),
            tested=stats.tested + active[:, None] * reached[:, :gamma].astype(jnp.int32),
        ),
        until=state.until._replace(rounds=state.until.rounds - 1),
    )


def is_finite(logprobs: Array, live: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether every live row of (B, …, V) standardized log-probabilities is a distribution.

    `standardize` spreads NaN over the whole distribution, so the first entry is enough.
    """
    first = logprobs[..., 0].reshape(logprobs.shape[0], -1)
    return ~jnp.any(jnp.isnan(first) & live[:, None])


def is_distribution(probs: Float[Array, "B N"], live: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether every live row has probabilities: finite, not negative, of sum 1 up to rounding."""
    off = jnp.abs(jnp.sum(probs, axis=1) - 1)
    return jnp.all(((jnp.min(probs, axis=1) >= -ROUNDING) & (off <= ROUNDING)) | ~live)
