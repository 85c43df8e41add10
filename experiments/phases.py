"""Times of a round's phases, one by one: a draft step, a target step, verify passes, rounds.

The library times whole calls (`specjax.measure.costing`). Here a round is taken apart, to see
what it takes beside its draft steps and its verify pass; v, which is 1 in the paper, is measured.
Separate calls measure the fixed time of one (`Costs.overhead`): dispatch, and first rounds on
weights that the encoder has evicted from the caches.
"""

import dataclasses
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
from specjax.policies import Costs, constant
from specjax.sampling import Purpose
from specjax.speculative import Contexts
from specjax.state import State

# Seconds of one step of ("target", 0), ("draft", 0), ("verify", γ) and ("round", γ), and of whole
# calls ("call", γ, rounds).
Sample = Mapping[Hashable, float]
# A loop, a function that encodes and begins, and a number of rounds.
Call = tuple[Method, Callable[[], tuple[Any, State]], int]


def stopwatch(
    method: Method,
    contexts: Contexts,
    state: State,
    gammas: Iterable[int] = (),
    rounds: Iterable[int] = (),
    *,
    steps: int = 20,
    calls: Iterable[Call] = (),
) -> Callable[[], dict[Hashable, float]]:
    """Compile the phases and calls, and return a function that times each of them once.

    Each timing runs `steps` dependent steps inside one jitted loop, so that dispatch does not
    count. The phases take turns, so that a slow spell of the machine hits all of them. Each timing
    hands its caches to the next, since copying a large one takes as long as a step.

    Args:
      contexts, state: from `loop.start`, with a budget and a buffer that leave room for rounds of
        the largest γ; the state is copied once.
      gammas: draft lengths at which to measure v.
      rounds: draft lengths at which to measure a whole round too, as a constant policy runs it.
      calls: loops whose fixed time to measure: plain decoding, and a speculative one whose γ_max is
        among `rounds` and whose policy drafts that many in every round. The function of each
        encodes and returns as `loop.start` does; it runs right before the timing, since the state
        is donated. The number of rounds is about what outputs take, since the first are slower.

    Raises:
      ValueError: a speculative call whose γ_max is not among `rounds`.
    """
    passes, whole = {*gammas}, {*rounds}
    made = {("call", loop.gamma_max, count): (loop, begin) for loop, begin, count in calls}
    for _, gamma, _ in made:
        if gamma and gamma not in whole:
            raise ValueError(f"A call with γ={gamma} needs {gamma} among `rounds`.")
    phases: dict[Hashable, Callable] = {("target", 0): _target_step, ("draft", 0): _draft_step}
    phases |= {("verify", g): partial(_verify, gamma=g) for g in sorted(passes | whole)}
    phases |= {("round", g): partial(_round, gamma=g) for g in sorted(whole)}
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


def medians(samples: Sequence[Sample]) -> Costs:
    """Take medians of a `stopwatch`'s samples as costs.

    `verify` and `rest` are interpolated between the draft lengths that were timed. A pass of one
    position is a target step. Without a round `rest` is NaN, and without calls so are their times.
    """
    took: dict[Any, float] = {
        name: float(np.median([sample[name] for sample in samples])) for name in samples[0]
    }
    doubts.check_clock(took.values())
    token, draft = took["target", 0], took["draft", 0]
    verify = {0: token} | {name[1]: t for name, t in took.items() if name[0] == "verify"}
    rest = {
        gamma: t - gamma * draft - verify[gamma]
        for (kind, gamma, *_), t in took.items()
        if kind == "round"
    }
    fixed = {"call": float("nan"), "plain_call": float("nan")}
    for (kind, gamma, *count), t in took.items():
        if kind == "call":
            step = took["round", gamma] if gamma else token
            fixed["call" if gamma else "plain_call"] = t - count[0] * step
    lengths = range(max(verify) + 1)
    return Costs.measured(
        draft=draft,
        verify=np.interp(lengths, list(verify), list(verify.values())),
        rest=np.interp(lengths, list(rest), list(rest.values())) if rest else float("nan"),
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


def _round(method, contexts, state, *, gamma):
    """Run a round, and return to the state before it: every round has the same work to do."""
    method = dataclasses.replace(method, policy=constant(gamma), gamma_max=gamma)
    after, _ = method.step(contexts, _resized(state, gamma))
    return state.replace(
        tokens=after.tokens, cache=after.cache, drafter=after.drafter, rounds=after.rounds
    )


def _any_round(method, contexts, state):
    """Run a round, or a token of plain decoding, and return to the state before it.

    Only counts and keys advance. Plain decoding's noise goes by position: with the same keys XLA
    would draw it only once.
    """
    after, _ = method.step(contexts, state)
    keys = smp.fold(state.keys, after.rounds, Purpose.POLICY)
    return after.replace(length=state.length, done=state.done, keys=keys)


def _resized(state, gamma):
    """The state with counters for another γ_max, and no policy state."""
    stats = dataclasses.replace(
        state.stats,
        accepted_lengths=jnp.zeros((state.length.shape[0], gamma + 1), jnp.int32),
        tested=jnp.zeros((state.length.shape[0], gamma), jnp.int32),
    )
    return state.replace(stats=stats, policy=())
