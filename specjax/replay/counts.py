"""Rollouts from counts alone: drafted and accepted tokens of each step, as vLLM logs them.

A step that drafted d tokens and accepted a < d shows that a tokens of the output were accepted and
the next one was not. A step that accepted all is censored: its last token is the target's own, and
nothing shows whether a draft would have been accepted there. A run of the same lengths tests none
of these positions again, so its replay is that run. Other lengths begin their rounds elsewhere and
meet censored positions. `censored` says what is assumed there, by default the share of all tested
tokens that were accepted, drawn anew in each draw; 0 and 1 bound the rounds of every constant γ.

Two things are assumed. A draft's chance at a position does not depend on where its round began,
which holds for draft models under the paper's rule (`replay.py`), and not for n-grams, EAGLE or
Medusa: those promise too much for long drafts. And the drafter never falls silent.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specjax.measure.formats import Steps
from specjax.replay.rollouts import Rollouts
from specjax.support.ranges import number


def tested_share(steps: Sequence[Steps]) -> float:
    """Share of tested tokens that were accepted: the mean conditional acceptance; NaN: none was."""
    accepted = sum(sum(one.accepted) for one in steps)
    rejected = sum(np.sum(np.less(one.accepted, one.drafted)) for one in steps)
    return float(accepted / (accepted + rejected)) if accepted + rejected else float("nan")


def censored_share(steps: Sequence[Steps]) -> float:
    """Share of the outputs' tokens at which no draft was tested."""
    censored = sum(np.sum(np.equal(one.accepted, one.drafted)) for one in steps)
    return float(censored / sum(sum(one.accepted) + len(one.accepted) for one in steps))


def from_counts(steps: Sequence[Steps], *, censored: float | None = None) -> Rollouts:
    """Make rollouts of the longest draft's length, in which nothing but acceptance is known.

    An output has the tokens of its steps. Everything that a policy might read beside counts is NaN,
    and `replay` refuses policies that read it.

    Args:
      censored: chance of acceptance where no draft was tested, in [0, 1]; None: `tested_share`.

    Raises:
      ValueError: no step drafted anything, or `censored` is no chance.
    """
    gamma_max = max((one.longest for one in steps), default=0)
    share = tested_share(steps)
    if np.isnan(share):
        raise ValueError("No step drafted a token, so there is nothing to replay.")
    chance = share if censored is None else number("censored", censored, "[0, 1]")
    emitted = np.array([sum(one.accepted) + len(one.accepted) for one in steps], np.int32)
    rows, width = len(steps), int(emitted.max()) + 1
    # A last step that ended the output left these drafted tokens behind it.
    beyond = [one.drafted[-1] - one.accepted[-1] if one.drafted else 0 for one in steps]
    chances = np.zeros((rows, width), np.float32)
    for row, one in zip(chances, steps, strict=True):
        ends = np.cumsum(np.array(one.accepted, int) + 1) - 1  # the target's own tokens
        row[: ends[-1] + 1 if len(ends) else 0] = 1
        row[ends] = np.where(np.less(one.accepted, one.drafted), 0, chance)
    with np.errstate(divide="ignore"):
        own_draft = np.log(chances)
    zeros = jnp.zeros((rows, width), jnp.float32)
    ids = jnp.zeros((rows, width), jnp.int32)
    unknown = jnp.full((rows, width, gamma_max), jnp.nan, jnp.float32)
    return Rollouts(
        input_index=jnp.arange(rows, dtype=jnp.int32),
        emitted=jnp.asarray(emitted),
        budget=jnp.asarray(emitted + np.array(beyond, np.int32)),
        tokens=ids,
        own_target=zeros,
        own_draft=jnp.asarray(own_draft),
        own_belief_logprob=zeros * jnp.nan,
        length=ids + gamma_max,
        drafts=jnp.zeros((rows, width, gamma_max), jnp.int32),
        target=unknown,
        draft=unknown,
        belief_logprob=unknown,
        overlap=unknown,
        entropy=unknown[..., :0],
        top1=unknown[..., :0],
        target_entropy=unknown[..., :0],
        hidden=unknown[..., None][..., :0],
        accepted=ids - 1,
    )
