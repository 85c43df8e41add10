"""Plain decoding: one token per target call.

It is the reference for correctness and for every speedup: the speculative loop without a drafter,
with the same state, draws and commit.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from specjax import sampling as smp
from specjax.contracts import watched
from specjax.dice import Dice
from specjax.drafters.base import started
from specjax.pytrees import pytree
from specjax.rounds import Drafts, Round, Verdict, judged_rule, round_of
from specjax.rules import AcceptanceRule, Token, resolve_rule
from specjax.sampling import Sampling
from specjax.state import State, begin, block, commit, is_finite
from specjax.types import Context, Model


@pytree
class Autoregressive:
    """The method of plain decoding: a model, its sampling, and the ids that end a row.

    Nothing is drafted, so a rule has an effect only if it defines noise. With `rules.Gumbel` the
    tokens are those of speculative decoding under that rule with the same key. Its noise costs V
    numbers a token, so it is no baseline for the time of other rules.
    """

    target: Model
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    rule: AcceptanceRule = dataclasses.field(default_factory=Token)

    drafter: ClassVar[None] = None
    policy: ClassVar[None] = None
    branches: ClassVar[bool] = False
    gamma_max: ClassVar[int] = 0
    slots: ClassVar[int] = 1

    def __post_init__(self):
        resolve_rule(self)

    def start(self, inputs, keys, max_new, buffer_len):
        context, cache = started(self.target, inputs, buffer_len)
        room = {"buffer_len": buffer_len, "gamma_max": 0}
        return context, begin(inputs, keys, max_new, cache=cache, **room)

    def step(self, context, state, dice=None):
        return step(self, context, state, dice)


def step(
    method: Autoregressive, context: Context, state: State, dice: Dice | None = None
) -> tuple[State, Round]:
    """Decode one token for every live row, drawn as in a speculative round without a draft."""
    method = watched(method, len(state.done))
    none = jnp.zeros((len(state.length), 0), jnp.int32)
    hidden, cache = method.target(block(state, none), state.length - 1, context, state.cache)
    logits = method.target.logits(hidden[:, 0])
    logprobs = smp.standardize(logits, method.sampling)
    probs = jnp.exp(method.rule.given_noise(logprobs, state.keys, state.length))
    if method.sampling.greedy:
        # The argmax of the one-hot logprobs too; `standardize` has computed it.
        token = smp.argmax(logits.astype(logprobs.dtype))
    else:
        token = (dice or Dice()).next(state, probs)
    finite = state.target_finite & is_finite(logprobs, ~state.done)
    drafts = Drafts.empty(jnp.zeros_like(state.length), 0, logprobs)
    verdict = Verdict(
        target_logprobs=logprobs[:, None],
        hidden=hidden,
        overlap=drafts.belief_logprob,
        ratio=drafts.belief_logprob,
        stop=jnp.ones_like(probs[:, :1]),
        accepted=drafts.length,
        next_probs=probs,
        next_token=token,
    )
    state = judged_rule(state.replace(cache=cache, target_finite=finite), drafts, verdict)
    after = commit(state, none, drafts.length, drafts.length, token, method.eos_ids)
    return after, round_of(state, after, drafts, verdict)
