"""One run, round by round: which tokens were accepted, rejected, corrected (Figure 1)."""

from typing import NamedTuple

import jax

from specjax import speculative
from specjax.speculative import Contexts, Speculative
from specjax.state import State, unfinished

_step = jax.jit(speculative.step)


class TracedRound(NamedTuple):
    """What one target call did to one row."""

    accepted: list[int]  # drafted tokens that were kept
    rejected: list[int]  # the drafted token that was not, and those after it, never tested
    next_token: list[int]  # the target's own: a correction, or one more after full acceptance


def trace(method: Speculative, contexts: Contexts, state: State, row: int = 0) -> list[TracedRound]:
    """Step the loop's own body from Python and record one row of the batch."""
    rounds = []
    while bool(unfinished(state)) and not bool(state.done[row]):
        after, round_ = _step(method, contexts, state)
        before, gained = int(state.length[row]), int(after.length[row] - state.length[row])
        output = after.tokens[row, before : before + gained].tolist()
        drafted = round_.drafts.tokens[row, : int(round_.drafts.length[row])].tolist()
        kept = min(int(round_.accepted[row]), gained)
        # After an EOS among the drafts nothing was rejected: the rest never happened.
        rejected = drafted[kept:] if gained > kept else []
        rounds.append(TracedRound(output[:kept], rejected, output[kept:]))
        state = after
    return rounds
