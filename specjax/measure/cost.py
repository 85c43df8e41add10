"""What a step costs here: c, the draft's step in units of the target's, and v(γ), the verify pass.

The paper takes v = 1: scoring γ+1 positions costs what one position costs, which holds while
reading the weights is what takes the time. Here it is measured, and enters the predicted speedup
τ/(γc + v(γ) + overhead).

A call also takes a fixed time: dispatch, and first rounds on weights that the encoder has driven
out of the caches. It is measured too, on calls that a `Meter` makes itself (see
`Costs.call_overhead`).
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as smp
from specjax.loop import Method
from specjax.policies import constant
from specjax.sampling import Purpose
from specjax.speculative import Contexts, Speculative, dice_for, step
from specjax.state import State


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds on one machine, at one batch size and buffer length; medians."""

    target_step: (
        float  # one position: call, head, distribution and draw, as in autoregressive decoding
    )
    draft_step: float  # the same for the drafter
    verify: Mapping[int, float]  # by γ: one target call on γ+1 positions, head and distributions
    round: Mapping[int, float]  # by γ: a whole round of the loop, everything included
    plain_fixed: float = 0.0  # an autoregressive call beyond its target steps
    fixed: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """By γ: a speculative call beyond its rounds."""

    @property
    def c(self) -> float:
        """time(draft) / time(target), the paper's c."""
        return self.draft_step / self.target_step

    def v(self, gamma: int) -> float:
        """time(γ+1 positions) / time(1 position)."""
        return self.verify[gamma] / self.target_step

    def overhead(self, gamma: int) -> float:
        """What a round takes beyond γ draft steps and the verify pass, in target steps."""
        return self.round[gamma] / self.target_step - gamma * self.c - self.v(gamma)

    def call_overhead(self, gamma: int, tokens: float, rounds: float) -> float:
        """`overhead` with the fixed time of a call, for outputs of so many tokens and rounds.

        A plain call takes tokens · target_step + plain_fixed, a speculative one rounds · round +
        fixed. Their ratio is the speedup, which this overhead makes equal τ/(γc + v + overhead)
        with τ = tokens/rounds:

            overhead = (round + fixed/rounds) / (target_step + plain_fixed/tokens) − γc − v

        Raw: below 0 where phases timed apart are dearer than within a round.
        """
        token = self.target_step + self.plain_fixed / tokens
        spread = self.round[gamma] + self.fixed[gamma] / rounds
        return spread / token - gamma * self.c - self.v(gamma)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a loop as decoding makes it, to be timed: right after the encoder has run."""

    method: Method  # its policy drafts γ_max tokens in every round
    begin: Callable[[], tuple[Any, State]]  # encodes; what `start` returns. The state is donated
    rounds: int  # about as many as outputs take; the first ones are slower than the rest


class Meter:
    """Times the phases of the loop one by one, compilation excluded.

    Each timing runs `steps` dependent steps inside one jitted loop, so that dispatch does not
    count; the phases take turns, so that a slow spell of the machine hits all of them; medians.
    Caches are handed on from one timing to the next, for copying a large one takes as long as a
    step.
    """

    def __init__(
        self,
        method: Speculative,
        contexts: Contexts,
        state: State,
        gammas: Iterable[int] = (),
        rounds: Iterable[int] = (),
        *,
        steps: int = 20,
        calls: Iterable[Call] = (),
    ):
        """Compiles the phases and the calls.

        Args:
          contexts, state: from `loop.start`, with a budget and a buffer that leave room for
            rounds of the largest γ; the state is copied once.
          gammas: where to measure v.
          rounds: where to measure a whole round, as a constant policy runs it.
          calls: loops of which to measure the fixed time: the autoregressive one, and speculative
            ones of a γ_max that is among `rounds`.

        Raises:
          ValueError: a speculative call whose γ_max is not among `rounds`.
        """
        phases: dict[Any, Callable] = {"target": _target_step, "draft": _draft_step}
        phases |= {
            ("verify", gamma): partial(_verify, gamma=gamma) for gamma in sorted(set(gammas))
        }
        phases |= {("round", gamma): partial(_round, gamma=gamma) for gamma in sorted(set(rounds))}
        self._calls = {("call", call.method.gamma_max): call for call in calls}
        for _, gamma in self._calls:
            if gamma and ("round", gamma) not in phases:
                raise ValueError(f"A call with γ={gamma} needs {gamma} among `rounds`.")
        runs = {name: partial(_repeat, phase, steps) for name, phase in phases.items()}
        runs |= {n: partial(_repeat, _any_round, call.rounds) for n, call in self._calls.items()}
        self._jitted = {name: jax.jit(run, donate_argnames="state") for name, run in runs.items()}
        self._seconds: dict[Any, list[float]] = {name: [] for name in runs}
        self._method, self._contexts, self._steps = method, contexts, steps
        self._state = jax.tree.map(jnp.copy, state)
        at_once(self._compile, self._jitted)
        for name in self._jitted:
            self._time(name)

    def take(self) -> None:
        """One timing of every phase and call."""
        for name, seconds in self._seconds.items():
            seconds.append(self._time(name))

    def _compile(self, name) -> None:
        """What `_time` will call: jit finds what was compiled from the same shapes."""
        method, contexts, state = self._arguments(name)
        self._jitted[name].lower(method, contexts, state=state).compile()

    def _arguments(self, name):
        call = self._calls.get(name)
        return (call.method, *call.begin()) if call else (self._method, self._contexts, self._state)

    def _time(self, name) -> float:
        """Seconds of a step of a phase, or of a whole call."""
        method, contexts, state = jax.block_until_ready(self._arguments(name))
        begin = time.perf_counter()
        state = jax.block_until_ready(self._jitted[name](method, contexts, state=state))
        seconds = time.perf_counter() - begin
        if name in self._calls:
            return seconds
        self._state = state
        return seconds / self._steps

    def costs(self) -> Costs:
        """Medians of what was taken."""
        median = {name: float(np.median(values)) for name, values in self._seconds.items()}
        fixed = {}
        for name, call in self._calls.items():
            gamma = name[1]
            step = median["round", gamma] if gamma else median["target"]
            fixed[gamma] = median[name] - call.rounds * step
        return Costs(
            target_step=median["target"],
            draft_step=median["draft"],
            verify={name[1]: t for name, t in median.items() if name[0] == "verify"},
            round={name[1]: t for name, t in median.items() if name[0] == "round"},
            plain_fixed=fixed.pop(0, 0.0),
            fixed=fixed,
        )


def at_once(function: Callable[[Any], Any], items: Iterable[Any]) -> None:
    """Call a function that compiles on each item: on a CPU in threads, for XLA leaves cores idle.

    Elsewhere one after the other: what compiles may try kernels on the device and time them.
    """
    workers = os.cpu_count() if jax.default_backend() == "cpu" else 1
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(function, items):  # raises what a call raised
            pass


def measure(
    method: Speculative,
    contexts: Contexts,
    state: State,
    gammas: Iterable[int] = (),
    rounds: Iterable[int] = (),
    *,
    steps: int = 20,
    repeats: int = 9,
) -> Costs:
    """What a `Meter` shows after `repeats` timings of every phase."""
    meter = Meter(method, contexts, state, gammas, rounds, steps=steps)
    for _ in range(repeats):
        meter.take()
    return meter.costs()


def _repeat(phase, steps, method, contexts, state):
    """Run a phase `steps` times; each reads what the one before it wrote."""

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
    logprobs = smp.standardize(method.target.logits(hidden[:, 0]), method.sampling)
    if method.sampling.greedy:
        token = smp.argmax(logprobs)
    else:
        token = smp.draw(smp.fold(state.keys, state.rounds, Purpose.NEXT), jnp.exp(logprobs))
    return _with_last(state, token, cache=cache)


def _draft_step(method, contexts, state):
    position = state.length - 1
    hidden, drafter = method.drafter.extend(_last(state), position, contexts.drafter, state.drafter)
    logprobs = smp.standardize(method.drafter.logits(hidden), method.sampling)
    dice = dice_for(method)
    return _with_last(state, dice.draft(state, jnp.int32(0), logprobs), drafter=drafter)


def _verify(method, contexts, state, *, gamma):
    offsets = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    block = (_last(state)[:, None] + offsets) % method.target.vocab_size
    hidden, cache = method.target(block, state.length - 1, contexts.target, state.cache)
    logprobs = smp.standardize(method.target.logits(hidden), method.sampling)
    # All distributions are read to the end, as an acceptance rule may.
    return _with_last(state, smp.argmax(jnp.max(logprobs, axis=1)), cache=cache)


def _round(method, contexts, state, *, gamma):
    method = dataclasses.replace(method, gamma_max=gamma, policy=constant(gamma))
    after, _ = step(method, contexts, _resized(state, gamma))
    # Back to where it was, so that every round has the same work to do.
    return state.replace(
        tokens=after.tokens, cache=after.cache, drafter=after.drafter, rounds=after.rounds
    )


def _any_round(method, contexts, state):
    """A round, or a token of plain decoding. Back to where it was, but for counts and keys.

    Plain decoding's noise goes by position: with the same keys XLA would draw it once for all.
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
