"""Speculative decoding (Leviathan et al. 2023, Algorithm 1) in one `lax.while_loop`.

A round drafts up to γ tokens with a cheap drafter, scores them all in one call of the target,
keeps the tokens that the acceptance rule lets survive, adds one token of the target's own, and
advances each row by what it gained:

    draft → verify → accept → commit

The output's law is the target's, whatever the drafter and the policy.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Key

from specjax import devices
from specjax import sampling as smp
from specjax.accept import AcceptanceRule, at_tokens
from specjax.draft import Drafter, fed_after, is_silent
from specjax.policies import Observation, Policy, RoundStats
from specjax.pytrees import pytree
from specjax.sampling import Purpose, Sampling
from specjax.state import State, begin, commit, is_finite, unfinished
from specjax.types import Context, Inputs, Model


@pytree
class Speculative:
    """What to decode with. Everything but `gamma_max` is a pytree: new numbers never recompile."""

    target: Model
    drafter: Drafter
    rule: AcceptanceRule
    policy: Policy
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    gamma_max: int = dataclasses.field(metadata={"static": True})  # the verify pass sees γ_max+1
    # Widths < γ_max+1 that the verify pass may have where no row's draft is longer; each is
    # compiled, and on an accelerator each costs a read of the host in every round.
    widths: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})


class Contexts(NamedTuple):
    """What both models only read."""

    target: Context
    drafter: Context


class Drafts(NamedTuple):
    """One round's proposals; entries at or beyond `length` are arbitrary."""

    tokens: Int[Array, "B G"]
    logprobs: Float[Array, "B G V"]  # the laws that the tokens were drawn from
    length: Int[Array, " B"]
    confidence: Float[Array, "B G"]  # float32, see `Observation.belief_logprobs`


class Round(NamedTuple):
    """All that happened in a round: enough to compute its probability. The jitted loop drops it."""

    drafts: Drafts
    target_logprobs: Float[Array, "B K V"]  # before any noise is known, as in `drafts`
    survival: Float[Array, "B G"]
    accepted: Int[Array, " B"]
    next_probs: Float[Array, "B V"]
    next_token: Int[Array, " B"]


class Dice:
    """The loop's draws, from keys that depend on the row, its own round, the purpose and slot.

    Enumeration replaces them by every possible outcome.
    """

    def draft(self, state: State, slot: Int[Array, ""], logprobs: Float[Array, "B V"]):
        """A drafted token for each row, (B,) int32."""
        keys = smp.fold(state.keys, state.rounds, Purpose.DRAFT, slot)
        return smp.draw(keys, jnp.exp(logprobs))

    def accepted(self, state: State, survival: Float[Array, "B G"]):
        """How many drafts survive, (B,) int32: one uniform, since survival never increases."""
        point = smp.uniform(smp.fold(state.keys, state.rounds, Purpose.ACCEPT), survival.dtype)
        return jnp.sum(point[:, None] < survival, axis=1, dtype=jnp.int32)

    def next(self, state: State, probs: Float[Array, "B V"]):
        """The token after the accepted ones, (B,) int32."""
        return smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), probs)


class GreedyDice(Dice):
    """Every law is one-hot: nothing is random."""

    def draft(self, state, slot, logprobs):
        return smp.argmax(logprobs)

    def accepted(self, state, survival):
        return jnp.sum(survival > 0, axis=1, dtype=jnp.int32)

    def next(self, state, probs):
        return smp.argmax(probs)


@partial(jax.jit, static_argnames="buffer_len")
def start(
    method: Speculative,
    inputs: Inputs,
    keys: Key[Array, " B"],
    budget: Int[Array, " B"],
    *,
    buffer_len: int,
) -> tuple[Contexts, State]:
    """Encode and prefill both models. `buffer_len` ≥ prompt + budget + gamma_max + 1."""
    target_context, cache = method.target.start(inputs, buffer_len)
    drafter_context, drafter = method.drafter.start(inputs, buffer_len)
    policy_keys = smp.fold(keys, jnp.zeros_like(budget), Purpose.POLICY)
    state = begin(
        inputs,
        keys,
        budget,
        buffer_len=buffer_len,
        gamma_max=method.gamma_max,
        cache=cache,
        drafter=drafter,
        policy=method.policy.init(policy_keys, method.gamma_max),
    )
    return Contexts(target_context, drafter_context), state


@partial(jax.jit, donate_argnames="state")
def decode(method: Speculative, contexts: Contexts, state: State) -> State:
    """Run rounds until every row is done. Donates `state`."""

    def body(state):
        return step(method, contexts, state)[0]

    return jax.lax.while_loop(unfinished, body, state)


def step(
    method: Speculative, contexts: Contexts, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """One round for every live row: the loop's body, which can be stepped from Python as well."""
    if dice is None:
        dice = GreedyDice() if method.sampling.kind == "greedy" else Dice()
    drafts, state = draft(method, contexts.drafter, state, dice)
    target_logprobs, state = verify(method, contexts.target, state, drafts)
    survival, accepted, next_probs, next_token = accept(
        method, state, drafts, target_logprobs, dice
    )
    round_ = Round(drafts, target_logprobs, survival, accepted, next_probs, next_token)
    return learn(method, state, round_), round_


def draft(method: Speculative, context: Context, state: State, dice: Dice) -> tuple[Drafts, State]:
    """Propose up to γ_max tokens for each row, as long as its policy and its budget allow.

    A row with r tokens left drafts at most r − 1: the target adds one of its own.

    Where no row drafts any more, the drafter is left out. On an accelerator, with a policy whose
    drafts are `fixed`, it runs for γ_max tokens in every round, and masks tell which of them count.
    """
    drafter, batch = method.drafter, state.tokens.shape[0]
    rule = method.rule.under(method.sampling)
    policy_state, allowed = method.policy.begin(state.policy)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    cap = jnp.where(state.done, 0, jnp.clip(jnp.asarray(allowed, jnp.int32), 0, room))

    def propose(slot, hidden, drafting, previous, carry):
        """Decide whether to draft, then draw: the decision must not see the token."""
        drafts, policy_state, finite = carry
        logits = drafter.logits(hidden)
        silent = is_silent(logits)
        drafting &= ~silent
        logprobs = smp.standardize(jnp.where(silent[:, None], 0.0, logits), method.sampling)
        finite &= is_finite(logprobs, drafting)
        belief = logprobs
        if method.sampling.kind == "greedy":
            belief = smp.standardize(jnp.where(silent[:, None], 0.0, logits), smp.sampling(1.0))
        seen = Observation(slot, drafting, logprobs, belief, previous, hidden)
        policy_state, more = method.policy.keep_drafting(policy_state, seen)
        drafting &= more
        token = dice.draft(state, slot, rule.given_noise(logprobs, state.keys, state.length + slot))
        trust = jnp.take_along_axis(belief, token[:, None], axis=1)[:, 0].astype(jnp.float32)
        drafts = Drafts(
            jax.lax.dynamic_update_index_in_dim(drafts.tokens, token, slot, 1),
            jax.lax.dynamic_update_index_in_dim(drafts.logprobs, logprobs, slot, 1),
            drafts.length + drafting.astype(jnp.int32),
            jax.lax.dynamic_update_index_in_dim(drafts.confidence, trust, slot, 1),
        )
        policy_state, more = method.policy.go_on(policy_state, drafting, trust)
        return drafting & (drafts.length < cap) & more, trust, (drafts, policy_state, finite)

    # With a fixed policy the drafter lacks two tokens at most, and need not be told how many. A
    # round that leaves it out is the last of all rows: each had one token left. Any other feeds a
    # row's n known tokens, and all but the last of its d drafted ones, of which it keeps a ≤ d:
    # n + a + 1 are known then, and n + a − 1 or more were fed; where d = 0, n of n + 1.
    known = None if method.policy.fixed else state.fed

    def asked(needed, always):
        """Whether to call the drafter once more: where some row needs it, or always."""
        if not method.policy.fixed:
            return needed
        return devices.by_platform(
            needed, always, cpu=lambda needed, _: needed, accelerator=lambda _, always: always
        )

    def some(operand):
        inner, _, carry = operand
        hidden, inner = drafter.begin(state.tokens, state.length, known, context, inner)
        zero = jnp.zeros((batch,), jnp.float32)
        drafting, previous, carry = propose(jnp.int32(0), hidden, cap > 0, zero, carry)

        def more(loop):
            return asked(jnp.any(loop[1]), loop[0] < method.gamma_max)

        def again(loop):
            slot, drafting, previous, inner, carry = loop
            token = jax.lax.dynamic_index_in_dim(carry[0].tokens, slot - 1, 1, keepdims=False)
            hidden, inner = drafter.extend(token, state.length + slot - 1, context, inner)
            drafting, previous, carry = propose(slot, hidden, drafting, previous, carry)
            return slot + 1, drafting, previous, inner, carry

        first = jnp.int32(1), drafting, previous, inner, carry
        *_, inner, carry = jax.lax.while_loop(more, again, first)
        return inner, state.length, carry

    def first_law():
        hidden, _ = drafter.begin(state.tokens, state.length, known, context, state.drafter)
        return smp.standardize(drafter.logits(hidden), method.sampling)

    law = jax.eval_shape(first_law)
    nothing = Drafts(
        jnp.zeros((batch, method.gamma_max), jnp.int32),
        jnp.zeros((batch, method.gamma_max, law.shape[-1]), law.dtype),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, method.gamma_max), jnp.float32),
    )
    operand = state.drafter, state.fed, (nothing, policy_state, state.draft_finite)
    # A round in which no row drafts leaves the drafter behind; `begin` catches up later.
    inner, fed, (drafts, policy_state, finite) = jax.lax.cond(
        asked(jnp.any(cap > 0), jnp.bool_(True)), some, lambda operand: operand, operand
    )
    return drafts, state.replace(drafter=inner, fed=fed, policy=policy_state, draft_finite=finite)


def verify(
    method: Speculative, context: Context, state: State, drafts: Drafts
) -> tuple[Float[Array, "B K V"], State]:
    """The target's law at γ_max+1 positions, in one call: of fewer where `widths` has enough.

    With known tokens a b c and drafts [d e], the call feeds [c d e] at positions 2, 3, 4 and
    returns the laws of the tokens after c, after d and after e.
    """
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    rule, full = method.rule.under(method.sampling), method.gamma_max + 1

    def score(width, turn, carry):
        block = jnp.concatenate([last + turn, drafts.tokens[:, : width - 1]], axis=1)
        hidden, cache = method.target(block, state.length - 1 + turn, context, carry[1])
        logprobs = rule.target_law(method.target.logits(hidden), method.sampling)
        # Laws past the end of every draft are never read.
        return jnp.pad(logprobs, ((0, 0), (0, full - width), (0, 0))), cache

    # Slots that a narrower pass leaves stale lie beyond every query, as after a rejection.
    widths = [*sorted({width for width in method.widths if width < full}), full]
    if len(widths) == 1:
        logprobs, cache = score(full, 0, (None, state.cache))
    else:
        # Loops of one turn or none: a `lax.switch` copies the caches, and these do not. The turn is
        # 0, but XLA does not know: it would compute, before the loop and for every width, all that
        # does not depend on the cache, and that is half of the first layer.
        longest = jnp.max(drafts.length)
        law = jax.eval_shape(partial(score, full, 0), (None, state.cache))[0]
        carry = jnp.zeros(law.shape, law.dtype), state.cache
        for narrower, width in zip([0, *widths[:-1]], widths, strict=True):
            fits = (narrower <= longest) & (longest < width)
            carry = jax.lax.fori_loop(0, fits.astype(jnp.int32), partial(score, width), carry)
        logprobs, cache = carry
    finite = is_finite(logprobs, ~state.done)
    return logprobs, state.replace(cache=cache, target_finite=state.target_finite & finite)


def accept(
    method: Speculative,
    state: State,
    drafts: Drafts,
    target_logprobs: Float[Array, "B K V"],
    dice: Dice,
) -> tuple[Array, Array, Array, Array]:
    """How far the drafts survive, and the token that follows: the rule's laws, the loop's draws."""
    rule = method.rule.under(method.sampling)
    slots = jnp.arange(target_logprobs.shape[1], dtype=jnp.int32)
    position = state.length[:, None] + slots[None, :]
    over_positions = jax.vmap(rule.given_noise, in_axes=(1, None, 1), out_axes=1)
    target_laws = over_positions(target_logprobs, state.keys, position)
    laws = target_laws, drafts.logprobs, drafts.tokens, drafts.length
    survival = rule.survival(*laws)
    accepted = dice.accepted(state, survival)
    next_probs = rule.next_probs(*laws, accepted)
    return survival, accepted, next_probs, dice.next(state, next_probs)


def learn(method: Speculative, state: State, round_: Round) -> State:
    """Commit the round's tokens, and let the policy see what happened."""
    drafts, accepted, was_live = round_.drafts, round_.accepted, ~state.done
    new = commit(state, drafts.tokens, drafts.length, accepted, round_.next_token, method.eos_ids)
    gamma = drafts.tokens.shape[1]
    acceptance = method.rule.under(method.sampling).acceptance
    # Policies read float32, whatever the laws' dtype.
    target_logprobs, draft_logprobs = round_.target_logprobs[:, :gamma], drafts.logprobs
    gained = at_tokens(target_logprobs, drafts.tokens) - at_tokens(draft_logprobs, drafts.tokens)
    stats = RoundStats(
        active=was_live,
        drafted=drafts.length,
        accepted=accepted,
        emitted=new.length - state.length,
        overlap=acceptance(target_logprobs, draft_logprobs).astype(jnp.float32),
        ratio=jnp.exp(jnp.minimum(gained, 0.0)).astype(jnp.float32),
        confidence=drafts.confidence,
        submitted=jnp.arange(gamma, dtype=jnp.int32)[None, :] < drafts.length[:, None],
    )
    return new.replace(
        policy=method.policy.update(state.policy, stats),
        fed=jnp.where(
            drafts.length > 0, fed_after(state.length, accepted, drafts.length), state.fed
        ),
    )
