"""The state before the first round: requests as arrays, and what an earlier batch learned."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Key

from specjax import loop
from specjax.batching import bucket
from specjax.contracts import watched
from specjax.decoding.run import Run
from specjax.decoding.texts import check_budget, pack_for
from specjax.drafters import carrying
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.sampling import row_keys
from specjax.state import State
from specjax.support import memory_maps
from specjax.types import Inputs


@dataclasses.dataclass(frozen=True)
class Request:
    """The work of one row."""

    index: int  # number of the input; noise depends on index, sample and key alone
    sample: int  # number of the draw
    ids: Sequence[int]  # of the source or prompt
    budget: int  # new tokens at most

    @property
    def label(self) -> tuple[int, int]:
        """Input and draw, which name the row."""
        return self.index, self.sample


def prepare(
    method: Method,
    target: Checkpoint,
    sources: Sequence[Sequence[int]],
    labels: Sequence[tuple[int, int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    rows: int,
    width: int | None = None,
    budgets: Sequence[int] | None = None,
):
    """Prepare (context, state) before the first round, in bucketed shapes.

    Args:
      labels: (input index, sample) of each source. With the key, all that its noise depends on.
      rows: rows of the batch; those beyond the sources have no budget. On a mesh there may be
        more, so that its data axis divides them.
      width: width of the sources or prompts; default: the bucket of the longest.
      budgets: new tokens of each source at most, where that is fewer than max_new_tokens.
    """
    most = [max_new_tokens] * len(sources) if budgets is None else budgets
    each = zip(labels, sources, most, strict=True)
    requests = [Request(*label, ids, min(limit, max_new_tokens)) for label, ids, limit in each]
    return start(method, target, requests, Run(max_new_tokens, key), rows, width)


def start(
    method: Method,
    target: Checkpoint,
    requests: Sequence[Request],
    run: Run,
    rows: int,
    width: int | None,
):
    """Start requests as `prepare` does; with `run.log_rounds` the state holds a log of rounds."""
    memory_maps.make_room()
    inputs, keys, budget = arguments(target, requests, rows=rows, width=width, key=run.key)
    room = room_of(method, inputs, run.max_new_tokens)
    logged = run.max_new_tokens if run.log_rounds else 0
    if watched(method, len(keys)) is not method:  # own parts fail here, before anything is compiled
        shapes = loop.start.eval_shape(method, inputs, keys, budget, buffer_len=room, logged=logged)
        loop.decode.eval_shape(method, *shapes)
    return loop.start(method, inputs, keys, budget, buffer_len=room, logged=logged)


def arguments(
    target: Checkpoint,
    requests: Sequence[Request],
    *,
    rows: int,
    width: int | None,
    key: Key[Array, ""],
) -> tuple[Inputs, Key[Array, " B"], Int[Array, " B"]]:
    """Build inputs, keys and budgets of requests, as `loop.start` and `loop.admit` take them.

    Args:
      rows, width: as in `prepare`.
    """
    placement = sharding.placement_of(target.model)
    rows = sharding.padded_rows(rows, placement)
    inputs = pack_for(target, [request.ids for request in requests], rows=rows, width=width)
    numbers = np.zeros((3, rows), np.int32)
    for row, request in enumerate(requests):
        numbers[:, row] = request.index, request.sample, request.budget
    index, sample, budget = map(jnp.asarray, numbers)
    return sharding.place_rows((inputs, _row_keys(key, index, sample), budget), placement)


_row_keys = jax.jit(row_keys)


def room_of(method: Method, inputs: Inputs, max_new_tokens: int) -> int:
    """Compute T, the slots of the buffers: a prompt, its output, and the slots of a round's call.

    Raises:
      ValueError: max_new_tokens beyond `MAX_NEW_TOKENS`.
    """
    check_budget(max_new_tokens)
    room = inputs.prompt.shape[1] + max_new_tokens + method.slots
    return bucket(room, smallest=32)


class Past(NamedTuple):
    """Learned state that a batch passes to the next one of a run."""

    policy: Any
    """The policy's state."""
    drafter: Any
    """The part of the drafter's state that `carrying.carry_over` took."""
    rows: Bool[Array, " A"]
    """Whether each row held an input; False: padding."""


@partial(jax.jit, donate_argnames="state")
def resume(method: Any, state: State, past: Past) -> State:
    """Add to the state before the first round what the last batch learned. Donates `state`."""
    method = watched(method, len(state.done))
    state = state.replace(
        policy=method.policy.resume(state.policy, past.policy, past.rows),
        drafter=carrying.resume(method.drafter, state.drafter, past.drafter, past.rows),
    )
    return sharding.keep_rows(method, state, len(state.done))
