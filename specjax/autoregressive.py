"""Plain decoding: one token per target call. The oracle of correctness, and the denominator of
every speedup. It is the speculative loop without a drafter, and shares its state, draws and commit.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key

from specjax import sampling as smp
from specjax.accept import AcceptanceRule, TokenRule
from specjax.draft import started
from specjax.pytrees import pytree
from specjax.sampling import Purpose, Sampling
from specjax.state import State, begin, commit, is_finite, unfinished
from specjax.types import Context, Inputs, Model


@pytree
class Autoregressive:
    """What to decode with: a model, how its tokens are chosen, and the ids that end a row.

    Nothing is drafted, so a rule matters by its noise alone: with `GumbelRule` the tokens are those
    of speculative decoding under that rule with the same key. Its noise costs V numbers a token,
    so it is no baseline for the time of other rules.
    """

    target: Model
    sampling: Sampling
    eos_ids: Int[Array, " N"]
    rule: AcceptanceRule = dataclasses.field(default_factory=TokenRule)

    @property
    def gamma_max(self) -> int:
        """No token is drafted."""
        return 0


@partial(jax.jit, static_argnames="buffer_len")
def start(
    method: Autoregressive,
    inputs: Inputs,
    keys: Key[Array, " B"],
    budget: Int[Array, " B"],
    *,
    buffer_len: int,
) -> tuple[Context, State]:
    """Encode, and read the prompt but for its last token. `buffer_len` ≥ prompt + budget + 1."""
    context, cache = started(method.target, inputs, buffer_len)
    return context, begin(inputs, keys, budget, buffer_len=buffer_len, gamma_max=0, cache=cache)


def step(method: Autoregressive, context: Context, state: State) -> State:
    """One token for every live row, drawn as in a speculative round that drafts nothing."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    hidden, cache = method.target(last, state.length - 1, context, state.cache)
    logprobs = smp.standardize(method.target.logits(hidden[:, 0]), method.sampling)
    if method.sampling.kind == "greedy":
        token = smp.argmax(logprobs)
    else:
        rule = method.rule.under(method.sampling)
        probs = jnp.exp(rule.given_noise(logprobs, state.keys, state.length))
        token = smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), probs)
    state = state.replace(
        cache=cache, target_finite=state.target_finite & is_finite(logprobs, ~state.done)
    )
    none = jnp.zeros((token.shape[0], 0), jnp.int32)
    zero = jnp.zeros_like(token)
    return commit(state, none, zero, zero, token, method.eos_ids)


@partial(jax.jit, donate_argnames="state")
def decode(method: Autoregressive, context: Context, state: State) -> State:
    """Run until every row is done. Donates `state`."""
    return jax.lax.while_loop(unfinished, partial(step, method, context), state)
