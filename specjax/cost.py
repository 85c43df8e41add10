"""What a step costs here: c, the draft's step in units of the target's, and v(γ), the verify pass.

The paper takes v = 1: scoring γ+1 positions costs what one position costs, which holds while
reading the weights is what takes the time. Here it is measured, and enters the predicted gain
τ/(γc + v(γ) + overhead).
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as smp
from specjax.policy import constant
from specjax.sampling import Purpose
from specjax.speculative import Contexts, Dice, GreedyDice, Speculative, step
from specjax.state import State


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds on one machine, at one batch size and buffer length; medians."""

    target_step: float  # one position: call, head, law and draw, as in autoregressive decoding
    draft_step: float  # the same for the drafter
    verify: Mapping[int, float]  # by γ: one target call on γ+1 positions, head and laws
    round: Mapping[int, float]  # by γ: a whole round of the loop, everything included

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


class Meter:
    """Times the phases of the loop one by one, compilation excluded.

    Each timing runs `steps` dependent steps inside one jitted loop, so that dispatch does not
    count; the phases take turns, so that a slow spell of the machine hits all of them; medians.
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
    ):
        """Compiles the phases.

        Args:
          contexts, state: from `speculative.start`, with a budget and a buffer that leave room for
            rounds of the largest γ; not donated.
          gammas: where to measure v.
          rounds: where to measure a whole round, as a constant policy runs it.
        """
        phases: dict[Any, Callable] = {"target": _target_step, "draft": _draft_step}
        phases |= {
            ("verify", gamma): partial(_verify, gamma=gamma) for gamma in sorted(set(gammas))
        }
        phases |= {("round", gamma): partial(_round, gamma=gamma) for gamma in sorted(set(rounds))}
        self._jitted = {n: jax.jit(partial(_repeat, phase, steps)) for n, phase in phases.items()}
        self._seconds: dict[Any, list[float]] = {name: [] for name in phases}
        self._arguments, self._steps = (method, contexts, state), steps
        for run in self._jitted.values():
            jax.block_until_ready(run(*self._arguments))

    def take(self) -> None:
        """One timing of every phase."""
        for name, run in self._jitted.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*self._arguments))
            self._seconds[name].append((time.perf_counter() - begin) / self._steps)

    def costs(self) -> Costs:
        """Medians of what was taken."""
        median = {name: float(np.median(values)) for name, values in self._seconds.items()}
        return Costs(
            target_step=median["target"],
            draft_step=median["draft"],
            verify={name[1]: t for name, t in median.items() if name[0] == "verify"},
            round={name[1]: t for name, t in median.items() if name[0] == "round"},
        )


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
    if method.sampling.kind == "greedy":
        token = smp.argmax(logprobs)
    else:
        token = smp.draw_by_gumbel(smp.fold(state.keys, state.rounds, Purpose.POSITION), logprobs)
    return _with_last(state, token, cache=cache)


def _draft_step(method, contexts, state):
    position = state.length - 1
    logits, drafter = method.drafter.extend(_last(state), position, contexts.drafter, state.drafter)
    logprobs = smp.standardize(logits, method.sampling)
    dice = GreedyDice() if method.sampling.kind == "greedy" else Dice()
    return _with_last(state, dice.draft(state, jnp.int32(0), logprobs), drafter=drafter)


def _verify(method, contexts, state, *, gamma):
    offsets = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    block = (_last(state)[:, None] + offsets) % method.target.vocab_size
    hidden, cache = method.target(block, state.length - 1, contexts.target, state.cache)
    logprobs = smp.standardize(method.target.logits(hidden), method.sampling)
    # All laws are read to the end, as an acceptance rule may.
    return _with_last(state, smp.argmax(jnp.max(logprobs, axis=1)), cache=cache)


def _round(method, contexts, state, *, gamma):
    method = dataclasses.replace(method, gamma_max=gamma, policy=constant(gamma))
    after, _ = step(method, contexts, _resized(state, gamma))
    # Back to where it was, so that every round has the same work to do.
    return state.replace(
        tokens=after.tokens, cache=after.cache, drafter=after.drafter, rounds=after.rounds
    )


def _resized(state, gamma):
    """The state with counters for another γ_max, and no policy state."""
    stats = dataclasses.replace(
        state.stats,
        accepted_lengths=jnp.zeros((state.length.shape[0], gamma + 1), jnp.int32),
        tested=jnp.zeros((state.length.shape[0], gamma), jnp.int32),
    )
    return state.replace(stats=stats, policy=())
