"""Times of a round's phases, one by one: a draft step, a target step, verify passes, rounds.

The library times whole calls (`specjax.measure.costing`). Here a round is taken apart, to see
what it takes beside its draft steps and its verify pass; v, which is 1 in the paper, is measured.
Separate calls measure the fixed time of one (`Costs.overhead`): dispatch, and first rounds on
weights that the encoder has evicted from the caches.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as smp
from specjax.dice import dice_for
from specjax.drafters.base import proposal
from specjax.loop import Method
from specjax.measure import doubts
from specjax.measure.compiling import at_once
from specjax.policies import Costs
from specjax.sampling import Purpose
from specjax.speculative import Contexts
from specjax.state import State

# Seconds of one step of "target", "draft", "verify" and "round", and of whole calls
# ("call", γ, rounds).
Sample = Mapping[Hashable, float]
# A loop, a function that encodes and begins, and a number of rounds.
Call = tuple[Method, Callable[[], tuple[Any, State]], int]


def stopwatch(
    method: Method,
    contexts: Contexts,
    state: State,
    gamma: int,
    *,
    steps: int = 20,
    calls: Iterable[Call] = (),
) -> Callable[[], dict[Hashable, float]]:
    """Compile the phases and calls, and return a function that times each of them once.

    Each timing runs `steps` dependent steps inside one jitted loop, so that dispatch does not
    count. The phases take turns, so that a slow spell of the machine hits all of them. Each timing
    hands its caches to the next, since copying a large one takes as long as a step.

    Args:
      contexts, state: from `loop.start`, with room for a round; the state is copied once.
      gamma: what the method drafts in every round.
      calls: loops whose fixed time to measure: plain decoding, and a speculative one that drafts γ
        tokens in every round. The function of each encodes and returns as `loop.start` does; it
        runs right before the timing, since the state is donated. The number of rounds is about what
        outputs take, since the first are slower.
    """
    made = {("call", loop.gamma_max, count): (loop, begin) for loop, begin, count in calls}
    phases: dict[Hashable, Callable] = {"target": _target_step, "draft": _draft_step}
    phases |= {"verify": partial(_verify, gamma=gamma), "round": _any_round}
    runs = {name: partial(_repeat, phase, steps) for name, phase in phases.items()}
    runs |= {name: partial(_repeat, _any_round, name[2]) for name in made}
    jitted = {name: jax.jit(run, donate_argnames="state") for name, run in runs.items()}
    held = [jax.tree.map(jnp.copy, state)]

    def arguments(name):
        if name not in made:
            return method, contexts, held[0]
        loop, begin = made[name]
        return loop, *begin()

    def compile_(name):
        """Compile what `once` calls: jit finds it again by its shapes."""
        by, context, state = arguments(name)
        jitted[name].lower(by, context, state=state).compile()

    def once(name) -> float:
        by, context, state = jax.block_until_ready(arguments(name))
        begin = time.perf_counter()
        state = jax.block_until_ready(jitted[name](by, context, state=state))
        seconds = time.perf_counter() - begin
        if name in made:
            return seconds
        held[0] = state
        return seconds / steps

    at_once(compile_, jitted)

    def take() -> dict[Hashable, float]:
        return {name: once(name) for name in jitted}

    take()
    return take


def medians(samples: Sequence[Sample], gamma: int) -> Costs:
    """Take medians of a `stopwatch`'s samples as costs of drafts of γ tokens.

    A pass of one position is a target step; between both `verify` grows evenly. Without calls
    their times are NaN.
    """
    took: dict[Any, float] = {
        name: float(np.median([sample[name] for sample in samples])) for name in samples[0]
    }
    doubts.check_clock(took.values())
    token, draft = took["target"], took["draft"]
    fixed = {"call": float("nan"), "plain_call": float("nan")}
    for name in took.keys() - {"target", "draft", "verify", "round"}:
        step = took["round"] if name[1] else token
        fixed["call" if name[1] else "plain_call"] = took[name] - name[2] * step
    return Costs.measured(
        draft=draft,
        verify=np.linspace(token, took["verify"], gamma + 1),
        rest=took["round"] - gamma * draft - took["verify"],
        token=token,
        **fixed,
        **dict.fromkeys(("error", "largest_error", "drop"), 0.0),
    )


def _repeat(phase, steps, method, contexts, state):
    """Run a phase `steps` times; each run reads the output of the one before."""

    def body(_, state):
        return phase(method, contexts, state)

    return jax.lax.fori_loop(0, steps, body, state)


def _last(state):
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]


def _with_last(state, token, **changes):
    rows = jnp.arange(token.shape[0])
    tokens = state.tokens.at[rows, state.length - 1].set(token)
    return state.replace(tokens=tokens, rounds=state.rounds + 1, **changes)


def _target_step(method, contexts, state):
    last = _last(state)[:, None]
    hidden, cache = method.target(last, state.length - 1, contexts.target, state.cache)
    logits = method.target.logits(hidden[:, 0])
    logprobs = smp.standardize(logits, method.sampling)
    if method.sampling.greedy:
        token = smp.argmax(logits.astype(logprobs.dtype))
    else:
        token = smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), jnp.exp(logprobs))
    return _with_last(state, token, cache=cache)


def _draft_step(method, contexts, state):
    position = state.length - 1
    hidden, drafter = method.drafter.extend(_last(state), position, contexts.drafter, state.drafter)
    proposed = proposal(method.drafter.logits(hidden), method.sampling)
    token = dice_for(method).draft(state, jnp.int32(0), proposed.logprobs, proposed.best)
    return _with_last(state, token, drafter=drafter)


def _verify(method, contexts, state, *, gamma):
    offsets = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    block = (_last(state)[:, None] + offsets) % method.target.vocab_size
    hidden, cache = method.target(block, state.length - 1, contexts.target, state.cache)
    logprobs = smp.standardize(method.target.logits(hidden), method.sampling)
    # All distributions are read to the end, as an acceptance rule may.
    return _with_last(state, smp.argmax(jnp.max(logprobs, axis=1)), cache=cache)


def _any_round(method, contexts, state):
    """Run a round, or a token of plain decoding, and return to the state before it.

    Only counts and keys advance. Plain decoding's noise goes by position: with the same keys XLA
    would draw it only once.
    """
    after, _ = method.step(contexts, state)
    keys = smp.fold(state.keys, after.rounds, Purpose.POLICY)
    return after.replace(length=state.length, done=state.done, keys=keys)
