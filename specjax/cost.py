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
from specjax.sampling import Purpose
from specjax.speculative import Contexts, Dice, GreedyDice, Speculative
from specjax.state import State


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds on one machine, at one batch size and buffer length; medians."""

    target_step: float  # one position: call, head, law and draw, as in autoregressive decoding
    draft_step: float  # the same for the drafter
    verify: Mapping[int, float]  # by γ: one target call on γ+1 positions, head and laws

    @property
    def c(self) -> float:
        """time(draft) / time(target), the paper's c."""
        return self.draft_step / self.target_step

    def v(self, gamma: int) -> float:
        """time(γ+1 positions) / time(1 position)."""
        return self.verify[gamma] / self.target_step


def measure(
    method: Speculative,
    contexts: Contexts,
    state: State,
    gammas: Iterable[int],
    *,
    steps: int = 20,
    repeats: int = 9,
    progress: Callable[[], None] = lambda: None,
) -> Costs:
    """Time the phases of the loop one by one, compilation excluded.

    Each timing runs `steps` dependent steps inside one jitted loop, so that dispatch does not
    count; the phases take turns, so that a slow spell of the machine hits all of them; medians.

    Args:
      contexts, state: from `speculative.start`; not donated.
      gammas: where to measure v.
      progress: called after each compilation and each timing round.
    """
    gammas = sorted(set(gammas))
    phases: dict[Any, Callable] = {"target": _target_step, "draft": _draft_step}
    phases |= {gamma: partial(_verify, gamma=gamma) for gamma in gammas}
    jitted = {name: jax.jit(partial(_repeat, phase, steps)) for name, phase in phases.items()}
    for run in jitted.values():
        jax.block_until_ready(run(method, contexts, state))
        progress()
    seconds: dict[Any, list[float]] = {name: [] for name in phases}
    for _ in range(repeats):
        for name, run in jitted.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(method, contexts, state))
            seconds[name].append((time.perf_counter() - begin) / steps)
        progress()
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    return Costs(median["target"], median["draft"], {gamma: median[gamma] for gamma in gammas})


def _repeat(phase, steps, method, contexts, state):
    """Run a phase `steps` times; each reads the tokens that the one before it wrote."""

    def body(_, tokens_and_caches):
        return phase(method, contexts, state, *tokens_and_caches)

    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    return jax.lax.fori_loop(0, steps, body, (last, state.cache, state.drafter))


def _target_step(method, contexts, state, token, cache, drafter):
    hidden, cache = method.target(token[:, None], state.length - 1, contexts.target, cache)
    logprobs = smp.standardize(method.target.logits(hidden[:, 0]), method.sampling)
    if method.sampling.kind == "greedy":
        return smp.argmax(logprobs), cache, drafter
    keys = smp.fold(state.keys, token, Purpose.POSITION)
    return smp.draw_by_gumbel(keys, logprobs), cache, drafter


def _draft_step(method, contexts, state, token, cache, drafter):
    logits, drafter = method.drafter.extend(token, state.length - 1, contexts.drafter, drafter)
    logprobs = smp.standardize(logits, method.sampling)
    dice = GreedyDice() if method.sampling.kind == "greedy" else Dice()
    return dice.draft(state.replace(rounds=token), jnp.int32(0), logprobs), cache, drafter


def _verify(method, contexts, state, token, cache, drafter, *, gamma):
    offsets = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    block = (token[:, None] + offsets) % method.target.vocab_size
    hidden, cache = method.target(block, state.length - 1, contexts.target, cache)
    logprobs = smp.standardize(method.target.logits(hidden), method.sampling)
    # The whole law is read, as an acceptance rule would.
    return smp.argmax(jnp.max(logprobs, axis=1)), cache, drafter
