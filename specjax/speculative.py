"""Speculative decoding (Leviathan et al. 2023, Algorithm 1) in one `lax.while_loop`.

A round drafts up to γ tokens with a cheap drafter, scores them all in one call of the target,
keeps the tokens that the acceptance rule lets survive, adds one token of the target's own, and
advances each row by what it got. The drafter is shown what the target made of the tokens. Then it
and the policy learn from the same `Round`.

    draft → verify → accept → observe → commit → learn

The output's distribution is the target's, whatever the drafter and the policy.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import devices
from specjax import sampling as smp
from specjax.accept import AcceptanceRule, at_tokens, resolve_rule, surviving
from specjax.drafters.base import Drafter, prefill, proposal
from specjax.policies import Observation, Policy
from specjax.pytrees import pytree
from specjax.rounds import Drafts, Round
from specjax.sampling import Purpose, Sampling
from specjax.state import State, begin, commit, is_finite, left
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

    def __post_init__(self):
        resolve_rule(self)

    @property
    def slots(self) -> int:
        """See `Method.slots`."""
        return self.gamma_max + 1

    def start(self, inputs, keys, budget, buffer_len):
        return start(self, inputs, keys, budget, buffer_len)

    def step(self, context, state, dice=None):
        return step(self, context, state, dice)


class Contexts(NamedTuple):
    """What both models only read."""

    target: Context
    drafter: Context


class Dice:
    """The loop's draws, from keys that depend on the row, its own round, the purpose and slot.

    Enumeration replaces them by every possible outcome.
    """

    def draft(
        self,
        state: State,
        slot: Int[Array, ""],
        logprobs: Float[Array, "B V"],
        best: Int[Array, " B"],
    ):
        """A drafted token for each row, (B,) int32; `best` is the likeliest one."""
        keys = smp.fold(state.keys, state.rounds, Purpose.DRAFT, slot)
        return smp.draw(keys, jnp.exp(logprobs))

    def accepted(self, state: State, stop: Float[Array, "B K"]):
        """How many drafted tokens are accepted, (B,) int32, by one uniform number."""
        point = smp.uniform(smp.fold(state.keys, state.rounds, Purpose.ACCEPT), stop.dtype)
        return jnp.sum(point[:, None] < surviving(stop), axis=1, dtype=jnp.int32)

    def next(self, state: State, probs: Float[Array, "B V"]):
        """The token after the accepted ones, (B,) int32."""
        return smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), probs)


class GreedyDice(Dice):
    """Every distribution is one-hot: nothing is random."""

    def draft(self, state, slot, logprobs, best):
        return best

    def accepted(self, state, stop):
        return smp.argmax(stop)

    def next(self, state, probs):
        return smp.argmax(probs)


def dice_for(method: Any) -> Dice:
    """The loop's own."""
    return GreedyDice() if method.sampling.greedy else Dice()


def start(
    method: Speculative, inputs: Inputs, keys: Key[Array, " B"], budget: Array, buffer_len: int
) -> tuple[Contexts, State]:
    """See `loop.start`. Both models read the prompt, and the drafter what the target made of it."""
    context, cache = method.target.start(inputs, buffer_len)
    hidden, cache = prefill(method.target, inputs, context, cache)
    drafter_context, drafter = method.drafter.start(inputs, buffer_len)
    if hidden is not None:
        read = inputs.prompt[:, :-1], jnp.zeros_like(budget), hidden, inputs.prompt_len - 1
        drafter = method.drafter.observe(*read, drafter_context, drafter)
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
    return Contexts(context, drafter_context), state


def step(
    method: Speculative, contexts: Contexts, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """One round for every live row: the loop's body, which can be stepped from Python as well."""
    dice = dice or dice_for(method)
    drafts, state = draft(method, contexts.drafter, state, dice)
    scores, ending, state = target_pass(method, contexts, state, drafts, dice)
    return conclude(method, contexts.drafter, state, drafts, scores, ending)


class Drafting(NamedTuple):
    """What drafting changes."""

    drafts: Drafts
    drafter: Any  # its state
    policy: Any  # its state
    finite: Bool[Array, ""]


def draft(method: Speculative, context: Context, state: State, dice: Dice) -> tuple[Drafts, State]:
    """Propose up to γ_max tokens for each row, as long as its policy and its budget allow.

    A row with r tokens left drafts at most r − 1: the target adds one of its own.

    Where no row drafts any more, the drafter is left out; `Drafter.begin` catches up later. On an
    accelerator, with a policy whose drafts are `fixed`, it runs for γ_max tokens in every round,
    and masks tell which of them count.
    """
    policy, allowed = method.policy.begin(state.policy, method.gamma_max)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    cap = jnp.where(state.done, 0, jnp.clip(jnp.asarray(allowed, jnp.int32), 0, room))
    nothing = no_drafts(method, context, state)
    # Nothing else goes through the conditional: with one result more, XLA copies the caches.
    drafting = jax.lax.cond(
        _asked(method, jnp.any(cap > 0), jnp.bool_(True)),
        partial(draft_chain, method, context, state, cap, dice),
        lambda nothing: nothing,
        Drafting(nothing, state.drafter, policy, state.draft_finite),
    )
    drafts, drafter, policy, finite = drafting
    return drafts, state.replace(drafter=drafter, policy=policy, draft_finite=finite)


class Turn(NamedTuple):
    """The carry of the loop over drafted tokens."""

    slot: Int[Array, ""]  # the next token's, from 0
    going: Bool[Array, " B"]  # rows that may draft it
    drafting: Drafting


def draft_chain(
    method: Speculative,
    context: Context,
    state: State,
    cap: Int[Array, " B"],
    dice: Dice,
    drafting: Drafting,
) -> Drafting:
    """Drafts of one token or more: each call of the drafter reads the token before."""
    propose = partial(propose_one, method, state, cap, dice)

    def more(turn):
        return _asked(method, jnp.any(turn.going), turn.slot < method.gamma_max)

    def again(turn):
        last, (drafts, drafter, *_) = turn.slot - 1, turn.drafting
        token = jax.lax.dynamic_index_in_dim(drafts.tokens, last, 1, keepdims=False)
        hidden, drafter = method.drafter.extend(token, state.length + last, context, drafter)
        return propose(hidden, turn._replace(drafting=turn.drafting._replace(drafter=drafter)))

    # With a fixed policy the drafter lags by two tokens at most. A round that leaves it out is the
    # last of all rows: each had one token left. Suppose n tokens are known, d are drafted and a are
    # accepted. With d > 0 the round has fed at least n + a − 1 of the n + a + 1 tokens that are
    # known then; with d = 0, n of n + 1.
    lags = not method.policy.fixed
    known = state.tokens, state.length, context, drafting.drafter
    hidden, drafter = method.drafter.begin(*known, lags=lags)
    first = Turn(jnp.int32(0), cap > 0, drafting._replace(drafter=drafter))
    return jax.lax.while_loop(more, again, propose(hidden, first)).drafting


def propose_one(
    method: Speculative,
    state: State,
    cap: Int[Array, " B"],
    dice: Dice,
    hidden: Float[Array, "B E"],
    turn: Turn,
) -> Turn:
    """Decide whether to draft, then draw: the decision must not see the token."""
    slot, drafts, policy = turn.slot, turn.drafting.drafts, turn.drafting.policy
    said = proposal(method.drafter.logits(hidden), method.sampling)
    going = turn.going & said.speaks
    finite = turn.drafting.finite & is_finite(said.logprobs, going)
    observation = Observation(slot, going, said.logprobs, said.belief, hidden)
    policy, more = method.policy.keep_drafting(policy, observation)
    going &= more
    left = method.rule.given_noise(said.logprobs, state.keys, state.length + slot)
    token = dice.draft(state, slot, left, said.best)
    trust = jnp.take_along_axis(said.belief, token[:, None], axis=1)[:, 0].astype(jnp.float32)
    put = partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=1)
    drafts = Drafts(
        put(drafts.tokens, token),
        put(drafts.logprobs, said.logprobs),
        drafts.length + going.astype(jnp.int32),
        put(drafts.confidence, trust),
    )
    policy, more = method.policy.go_on(policy, going, trust)
    going &= (drafts.length < cap) & more
    return Turn(slot + 1, going, Drafting(drafts, turn.drafting.drafter, policy, finite))


def no_drafts(method: Speculative, context: Context, state: State) -> Drafts:
    """Room for γ_max tokens."""

    def first():
        known = state.tokens, state.length, context, state.drafter
        return smp.standardize(
            method.drafter.logits(method.drafter.begin(*known)[0]), method.sampling
        )

    logprobs = jax.eval_shape(first)
    slots = state.length.shape[0], method.gamma_max
    return Drafts(
        jnp.zeros(slots, jnp.int32),
        jnp.zeros((*slots, logprobs.shape[-1]), logprobs.dtype),
        jnp.zeros_like(state.length),
        jnp.zeros(slots, jnp.float32),
    )


def _asked(method: Speculative, needed: Array, always: Array) -> Array:
    """Whether to call the drafter once more: where some row needs it, or always."""
    if not method.policy.fixed:
        return needed
    return devices.by_platform(
        needed, always, cpu=lambda needed, _: needed, accelerator=lambda _, always: always
    )


class Scores(NamedTuple):
    """What the target says of the last known token and each drafted one, K = γ + 1."""

    logprobs: Float[Array, "B K V"]  # entry i: of the token after i drafted ones
    hidden: Float[Array, "B K E"]
    overlap: Float[Array, "B G"]  # as in `Round`
    ratio: Float[Array, "B G"]


def target_pass(
    method: Speculative, contexts: Contexts, state: State, drafts: Drafts, dice: Dice
) -> tuple[Scores, "Ending", State]:
    """Verify, accept and observe: at γ_max+1 positions, or at fewer where `widths` has enough for
    all rows.

    What lies past the width is 0, and nothing is computed there.
    """
    full = method.gamma_max + 1

    def run(width, turn, carried):
        # Whatever is read of state and drafts depends on the turn (`narrowest`).
        length, rounds = state.length + turn, state.rounds + turn
        cache, drafter = carried
        now = state.replace(length=length, rounds=rounds, cache=cache, drafter=drafter)
        some = Drafts(
            drafts.tokens[:, : width - 1] + turn,
            drafts.logprobs[:, : width - 1],
            drafts.length + turn,
            drafts.confidence[:, : width - 1],
        )
        scores, now = verify(method, contexts.target, now, some)
        ending = accept(method, now, some, scores, dice)
        now = observe(method, contexts.drafter, now, some, scores, ending)
        ending = ending._replace(stop=padded(ending.stop, full - width))
        scores = jax.tree.map(lambda x: padded(x, full - width), scores)
        return (scores, ending, now.target_finite), (now.cache, now.drafter)

    needed = jnp.max(drafts.length) + 1
    carried = state.cache, state.drafter
    found, carried = narrowest(method.widths, full, needed, run, carried)
    scores, ending, finite = found
    cache, drafter = carried
    return scores, ending, state.replace(cache=cache, drafter=drafter, target_finite=finite)


def padded(x: Array, more: int) -> Array:
    """With zeros behind the second axis."""
    return jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))


def narrowest(
    widths: Sequence[int],
    full: int,
    needed: Int[Array, ""],
    run: Callable[[int, Array | int, Any], tuple[Any, Any]],
    carried: Any,
) -> tuple[Any, Any]:
    """What one pass of the target gives, and its caches: the narrowest that has enough positions.

    Slots of a cache that a narrower pass leaves stale lie beyond every query, as after a rejection.

    Args:
      widths, full: of the passes that there may be, and of the one that there always is.
      needed: positions at the beginning that anyone will read.
      run: a pass of a width, on caches; its result has the same shapes for all. It is told 0, the
        turn of a loop, which what it reads has to depend on: what does not change within a loop XLA
        computes before it, for every width.
    """
    each = [*sorted({width for width in widths if width < full}), full]
    if len(each) == 1:
        return run(full, 0, carried)
    # A loop of zero or one turns for each width: `lax.switch` would copy the caches. What nobody
    # reads of the results XLA leaves out.
    shapes = jax.eval_shape(partial(run, full, 0), carried)[0]
    carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), carried
    for narrower, width in zip([0, *each[:-1]], each, strict=True):
        fits = (narrower < needed) & (needed <= width)

        def once(turn, carry, width=width):
            return run(width, turn, carry[1])

        carry = jax.lax.fori_loop(0, fits.astype(jnp.int32), once, carry)
    return carry


def verify(
    method: Speculative, context: Context, state: State, drafts: Drafts
) -> tuple[Scores, State]:
    """The target at the last known token and at each drafted one, in one call.

    With known tokens a b c and drafts [d e], the call feeds [c d e] at positions 2, 3, 4 and
    returns the distributions of the tokens after c, after d and after e.
    """
    block, rule = block_of(state, drafts), method.rule
    hidden, cache = method.target(block, state.length - 1, context, state.cache)
    logprobs = rule.target_distribution(method.target.logits(hidden), method.sampling)
    judged = logprobs[:, :-1]
    over = at_tokens(judged, drafts.tokens) - at_tokens(drafts.logprobs, drafts.tokens)
    # Policies read float32, whatever the dtype of the distributions.
    overlap = rule.acceptance(judged, drafts.logprobs).astype(jnp.float32)
    ratio = jnp.exp(jnp.minimum(over, 0.0)).astype(jnp.float32)
    finite = state.target_finite & is_finite(logprobs, ~state.done)
    after = state.replace(cache=cache, target_finite=finite)
    return Scores(logprobs, hidden, overlap, ratio), after


def block_of(state: State, drafts: Drafts) -> Int[Array, "B K"]:
    """What the target reads in a round: the last known token and the drafted ones."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    return jnp.concatenate([last, drafts.tokens], axis=1)


class Ending(NamedTuple):
    """Where acceptance ends, and what follows."""

    stop: Float[Array, "B K"]
    accepted: Int[Array, " B"]
    next_probs: Float[Array, "B V"]
    next_token: Int[Array, " B"]


def accept(method: Speculative, state: State, drafts: Drafts, scores: Scores, dice: Dice) -> Ending:
    """Where acceptance ends and what follows: distributions by the rule, draws by the loop."""
    rule = method.rule
    slots = jnp.arange(scores.logprobs.shape[1], dtype=jnp.int32)
    position = state.length[:, None] + slots[None, :]
    over_positions = jax.vmap(rule.given_noise, in_axes=(1, None, 1), out_axes=1)
    target_logprobs = over_positions(scores.logprobs, state.keys, position)
    known = target_logprobs, drafts.logprobs, drafts.tokens, drafts.length
    stop = rule.stop(*known)
    accepted = dice.accepted(state, stop)
    next_probs = rule.next_probs(*known, accepted)
    return Ending(stop, accepted, next_probs, dice.next(state, next_probs))


def observe(
    method: Speculative,
    context: Context,
    state: State,
    drafts: Drafts,
    scores: Scores,
    ending: Ending,
) -> State:
    """Show the drafter what the target read, and what of it is text from now on."""
    read = block_of(state, drafts), state.length - 1, scores.hidden, ending.accepted + 1
    return state.replace(drafter=method.drafter.observe(*read, context, state.drafter))


def conclude(
    method: Speculative,
    context: Context,
    state: State,
    drafts: Drafts,
    scores: Scores,
    ending: Ending,
) -> tuple[State, Round]:
    """Commit the round's tokens, and let drafter and policy learn from what happened."""
    tokens = drafts.tokens, drafts.length, ending.accepted, ending.next_token
    after = commit(state, *tokens, method.eos_ids)
    round_ = round_of(method, state, drafts, scores, ending, after)
    told = after.tokens, state.length, round_, partial(chances, method, scores)
    drafter = method.drafter.learn(*told, context, after.drafter)
    after = after.replace(drafter=drafter, policy=method.policy.update(after.policy, round_))
    return after, round_


def chances(
    method: Speculative, scores: Scores, logits: Float[Array, "B K V"], *, certain: bool = False
) -> Float[Array, "B K"]:
    """`judge` of `Drafter.learn`."""
    said = proposal(logits.astype(scores.logprobs.dtype), method.sampling)
    logprobs = logits.astype(scores.logprobs.dtype) if certain else said.logprobs
    found = method.rule.acceptance(scores.logprobs, logprobs)
    return jnp.where(said.speaks, found, 0.0).astype(jnp.float32)


def round_of(
    method: Speculative,
    before: State,
    drafts: Drafts,
    scores: Scores,
    ending: Ending,
    after: State,
) -> Round:
    """The round, as everyone sees it."""
    return Round(
        active=~before.done,
        drafted=drafts.length,
        accepted=ending.accepted,
        emitted=after.length - before.length,
        overlap=scores.overlap,
        ratio=scores.ratio,
        confidence=drafts.confidence,
        submitted=jnp.arange(method.gamma_max, dtype=jnp.int32)[None, :] < drafts.length[:, None],
        left=left(after),
        drafts=drafts,
        target_logprobs=scores.logprobs,
        hidden=scores.hidden,
        stop=ending.stop,
        next_probs=ending.next_probs,
        next_token=ending.next_token,
    )
