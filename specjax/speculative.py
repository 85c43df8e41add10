"""Speculative decoding: Algorithm 1 of Leviathan et al. 2023, for a batch and with a cache.

A round drafts up to γ tokens, scores them in one call of the target, keeps those that the
acceptance rule accepts, and adds one token of the target's own:

    draft → judge (verify, accept, observe) → conclude (commit, learn)

The output's distribution is the target's, whatever the drafter and the policy. `loop.decode` runs
rounds, `passes` leaves out calls that no row needs; `examples/algorithm1.py` has no cache or batch.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from specjax import passes
from specjax.contracts import watched
from specjax.dice import Dice, dice_for
from specjax.drafters.abilities import learn_from
from specjax.drafters.base import Drafter, Proposal, first_distribution, prefill, proposal
from specjax.drafters.sharing import Contexts, started
from specjax.policies.base import Observation, Policy, by_slot, first_state
from specjax.policies.slots import allocate, rated
from specjax.pytrees import pytree
from specjax.rounds import Drafts, Round, Verdict, judged_rule, round_of
from specjax.rules import AcceptanceRule, at_tokens, given_noise, resolve_rule
from specjax.sampling import Sampling
from specjax.state import State, begin, block, commit, is_finite
from specjax.types import Call, Context, Inputs, Model


@pytree
class Speculative:
    """The method of speculative decoding. `gamma_max` and `passes` are static, the rest traced."""

    target: Model
    drafter: Drafter
    rule: AcceptanceRule
    policy: Policy
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    gamma_max: int = dataclasses.field(metadata={"static": True})
    # Numbers of positions of the batch, of smaller verify passes: see `passes.verified`.
    passes: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    branches = dynamic = False  # drafts are chains
    skips = True  # a round in which no row drafts does not call the drafter

    def __post_init__(self):
        resolve_rule(self)

    @property
    def slots(self) -> int:
        """Number of tokens in a round's target call."""
        return self.gamma_max + 1

    def proposal(self, hidden: Float[Array, "B E"]) -> Proposal:
        """The drafter's proposal at its hidden state."""
        return proposal(self.drafter.logits(hidden), self.sampling)

    def observation(self, slot, drafting, proposed: Proposal, hidden) -> Observation:
        """What the policy sees of a proposal."""
        return Observation(slot, drafting, proposed.logprobs, proposed.belief, hidden)

    def start(self, inputs, keys, max_new, buffer_len):
        return start(self, inputs, keys, max_new, buffer_len)

    def step(self, context, state, dice=None):
        return step(self, context, state, dice)


def start(
    method: Speculative, inputs: Inputs, keys: Key[Array, " B"], max_new: Array, buffer_len: int
) -> tuple[Contexts, State]:
    """Read the prompt with both models; see `loop.start`."""
    method = watched(method, len(keys))
    contexts, cache, drafter = started(method.target, method.drafter, inputs, buffer_len)
    hidden, cache = prefill(method.target, inputs, contexts.target, cache)
    if hidden is not None:
        read = inputs.prompt[:, :-1], jnp.zeros_like(max_new), hidden, inputs.prompt_len - 1
        drafter = method.drafter.observe(*read, contexts.drafter, drafter)
    policy = first_state(method.policy, keys, method.gamma_max)
    own = {"cache": cache, "drafter": drafter, "policy": policy, "gamma_max": method.gamma_max}
    return contexts, begin(inputs, keys, max_new, buffer_len=buffer_len, **own)


def step(
    method: Speculative, contexts: Contexts, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """Run one round for every live row: the loop's body, which Python may call too."""
    method, dice = watched(method, len(state.done)), dice or dice_for(method)
    drafts, state = draft(method, contexts.drafter, state, dice)
    verdict, state = passes.verified(method, partial(judge, method, contexts, dice), state, drafts)
    return conclude(method, contexts.drafter, judged_rule(state, drafts, verdict), drafts, verdict)


# --- Lines 1 to 3: sample γ guesses from the draft model -----------------------------------------


class Chain(NamedTuple):
    """The carry of the loop over drafted tokens."""

    slot: Int[Array, ""]  # of the next token, from 0
    going: Bool[Array, " B"]  # rows that may draft it
    drafts: Drafts
    drafter: Any  # the drafter's state
    policy: Any  # the policy's state
    finite: Bool[Array, ""]


def draft(method: Speculative, context: Context, state: State, dice: Dice) -> tuple[Drafts, State]:
    """Draft up to γ_max tokens for each row, as far as its policy allows.

    A row with r tokens left drafts at most r − 1, because the target adds one token.
    """
    begun, allowed = method.policy.begin(state.policy, ~state.done, method.gamma_max)
    room = jnp.minimum(state.limit - state.length - 1, method.gamma_max)
    allowed = jnp.broadcast_to(jnp.clip(allowed, 0, method.gamma_max), room.shape)
    cap = jnp.where(state.done, 0, jnp.minimum(allowed, room))
    known = state.tokens, state.length, context, state.drafter
    like = jax.eval_shape(partial(first_distribution, method.drafter, method.sampling), *known)
    drafts = Drafts.empty(allowed, method.gamma_max, like, by_slot(method.policy))
    chain = partial(draft_chain, method, context, state, cap, dice)
    changed = drafts, state.drafter, begun, state.draft_finite
    changed = passes.unless_idle(method, jnp.any(cap > 0), chain, changed)
    drafts, drafter, policy, finite = changed
    drafts = allocate(method.policy, begun, drafts, ~state.done, passes.sizes(method, len(cap)))
    return drafts, state.replace(drafter=drafter, policy=policy, draft_finite=finite)


def draft_chain(method, context, state, cap, dice, changed) -> tuple:
    """Draft 1 to `cap` (B,) tokens for each row; each call reads the token before.

    `changed` holds empty drafts, the states of drafter and policy, and whether logits were finite.
    """

    def more(chain):
        return passes.runs(method.policy.fixed, jnp.any(chain.going), chain.slot < method.gamma_max)

    def again(chain):
        last = chain.slot - 1
        token = jax.lax.dynamic_index_in_dim(chain.drafts.tokens, last, 1, keepdims=False)
        hidden, drafter = method.drafter.extend(token, state.length + last, context, chain.drafter)
        return propose(method, state, cap, dice, hidden, chain._replace(drafter=drafter))

    drafts, drafter, policy, finite = changed
    known = state.tokens, state.length, context, drafter
    # With fixed lengths all rounds but a row's last draft, so the drafter never lags behind.
    hidden, drafter = method.drafter.begin(*known, lags=not method.policy.fixed)
    chain = Chain(jnp.int32(0), cap > 0, drafts, drafter, policy, finite)
    chain = jax.lax.while_loop(more, again, propose(method, state, cap, dice, hidden, chain))
    return chain.drafts, chain.drafter, chain.policy, chain.finite


def propose(method, state, cap, dice, hidden: Any, chain: Chain) -> Chain:
    """Decide whether to draft a token, then draw it: the decision must not see the token."""
    slot, policy = chain.slot, chain.policy
    proposed = method.proposal(hidden)
    going = chain.going & proposed.proposes
    finite = chain.finite & is_finite(proposed.logprobs, going)
    seen = method.observation(slot, going, proposed, hidden)
    policy, more = method.policy.keep_drafting(policy, seen)
    going &= more
    noisy = method.rule.given_noise(proposed.logprobs, state.keys, state.length + slot)
    token = dice.draft(state, slot, noisy, proposed.best)
    logprob = at_tokens(proposed.belief, token).astype(jnp.float32)
    drafts = chain.drafts.put(slot, proposed, going, token, logprob)
    drafts = rated(method.policy, policy, drafts, slot)
    policy, more = method.policy.go_on(policy, going, logprob)
    going &= (drafts.length < cap) & more
    return Chain(slot + 1, going, drafts, chain.drafter, policy, finite)


# --- Lines 4 to 9: run the target in parallel, determine the number of accepted guesses -----------


def judge(
    method: Speculative, contexts: Contexts, dice: Dice, state: State, drafts: Drafts
) -> tuple[Verdict, State]:
    """Verify, accept, and let the drafter observe, in one pass of the target."""
    logprobs, hidden, state = verify(method, contexts.target, state, drafts)
    verdict = accept(method, state, drafts, logprobs, hidden, dice)
    return verdict, observe(method, contexts.drafter, state, drafts, verdict)


def verify(
    method: Speculative, context: Context, state: State, drafts: Drafts
) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], State]:
    """Run the target at the last known token and at each drafted one, in one call.

    With known tokens a b c and drafts [d e], the call feeds [c d e] at positions 2, 3, 4. It
    returns log-probabilities of the tokens after c, d and e, and the hidden states.
    """
    call = Call(state.length - 1, packing=drafts.packing)
    return passes.scored(method, block(state, drafts.tokens), call, state, context)


def accept(
    method: Speculative, state: State, drafts: Drafts, logprobs: Array, hidden: Array, dice: Dice
) -> Verdict:
    """Decide where acceptance ends and what follows, by the rule's distributions and the dice."""
    rule, judged = method.rule, logprobs[:, :-1]
    position = state.length[:, None] + jnp.arange(logprobs.shape[1], dtype=jnp.int32)[None, :]
    noisy = given_noise(rule, logprobs, state.keys, position)
    known = noisy, drafts.logprobs, drafts.tokens, drafts.length
    stop = rule.stop(*known)
    accepted = dice.accepted(state, stop)
    next_probs = rule.next_probs(*known, accepted)
    over = at_tokens(judged, drafts.tokens) - at_tokens(drafts.logprobs, drafts.tokens)
    return Verdict(
        target_logprobs=logprobs,
        hidden=hidden,
        overlap=rule.acceptance(judged, drafts.logprobs).astype(jnp.float32),
        ratio=jnp.exp(jnp.minimum(over, 0.0)).astype(jnp.float32),
        stop=stop,
        accepted=accepted,
        next_probs=next_probs,
        next_token=dice.next(state, next_probs),
    )


def observe(
    method: Speculative, context: Context, state: State, drafts: Drafts, verdict: Verdict
) -> State:
    """Pass the drafter the tokens that the target read, and how many of them are now text."""
    read = block(state, drafts.tokens), state.length - 1, verdict.hidden, verdict.accepted + 1
    return state.replace(drafter=method.drafter.observe(*read, context, state.drafter))


# --- Lines 10 to 12: return one token of the target's own after the accepted guesses --------------


def conclude(
    method: Speculative, context: Context, state: State, drafts: Drafts, verdict: Verdict
) -> tuple[State, Round]:
    """Commit the round's tokens, and update drafter and policy by the round."""
    tokens = drafts.tokens, drafts.length, verdict.accepted, verdict.next_token
    after = commit(state, *tokens, method.eos_ids, work=(drafts.length, drafts.drawn))
    round_ = round_of(state, after, drafts, verdict)
    drafter = learn_from(method, after.tokens, state.length, round_, context, after.drafter)
    policy = method.policy.update(after.policy, round_)
    return after.replace(drafter=drafter, policy=policy), round_
