"""Both programs of a run, compiled ahead of it, and the bytes that they need."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax import loop
from specjax.batching import bucket
from specjax.decoding.starting import room_of
from specjax.decoding.texts import pack_for
from specjax.loop import Method
from specjax.models import sharding
from specjax.models.checkpoint import Checkpoint
from specjax.models.memory import Need, nbytes, temporaries
from specjax.sampling import row_keys
from specjax.state import State
from specjax.support import memory_maps
from specjax.types import Inputs


class Programs(NamedTuple):
    """Both programs of a run, compiled and not run, and the shapes that pass between them."""

    start: jax.stages.Compiled
    decode: jax.stages.Compiled
    context: Any
    state: State  # shapes, like the context; on a mesh with their shardings

    @property
    def temporary(self) -> tuple[int, int]:
        """Bytes per device that each program holds beside its arguments and the state."""
        # The results of `start` are the loop's state; its other temporaries are freed by then.
        begun = temporaries(self.start) - nbytes((self.context, self.state))
        return begun, temporaries(self.decode)


def compiled(
    method: Method,
    target: Checkpoint,
    longest: int,
    *,
    rows: int,
    max_new_tokens: int,
    options: dict[str, Any] | None = None,
) -> Programs:
    """Compile both programs of a run, in the shapes that `prepare` makes.

    A run of these shapes in this process compiles no more, unless there are options.

    Args:
      options: options of the compiler. Others: see `needed`.
    """
    memory_maps.make_room()
    given = blank_arguments(target, longest, bucket(rows))
    room = room_of(method, given[0], max_new_tokens)
    # As `starting.start` calls it: jit keeps a program for each way to write the static arguments.
    start = loop.start.lower(method, *given, buffer_len=room, logged=0).compile(options)
    kept = jax.eval_shape(partial(loop.start, buffer_len=room), method, *given)
    context, state = sharding.results_of(start, kept, sharding.placement_of(target.model))
    decode = loop.decode.lower(method, context, state).compile(options)
    return Programs(start, decode, context, state)


def needed(
    method: Method,
    target: Checkpoint,
    longest: int,
    *,
    rows: int,
    max_new_tokens: int,
    admits: int = 0,
) -> Need:
    """Compute the bytes that decoding takes at most, by the compiler's report.

    On a mesh the bytes are those of each device. Nothing is decoded. The programs of the run are
    compiled in the shapes that `prepare` makes; a run of these shapes in this process compiles no
    more.

    Args:
      method: of loaded models, or of outlines.
      longest: tokens of the longest text.
      rows: decoded at once: `batch_size`, or all if they are fewer.
      admits: where there are more inputs than rows, how many one call admits (`at_once`).
    """
    programs = compiled(method, target, longest, rows=rows, max_new_tokens=max_new_tokens)
    context, state = programs.context, programs.state
    admitted = 0
    if 0 < admits < len(state.done):
        some = blank_arguments(target, longest, admits)
        at = jnp.zeros(some[-1].shape, jnp.int32)
        admitted = temporaries(loop.admit.lower(method, context, state, at, *some).compile())
    return Need(nbytes(method), nbytes((context, state)), max(*programs.temporary, admitted))


def blank_arguments(target: Checkpoint, longest: int, rows: int) -> tuple[Inputs, Any, Array]:
    """Shape arguments as `starting.arguments` does, but without a program: keys are shapes."""
    placement = sharding.placement_of(target.model)
    rows = sharding.padded_rows(rows, placement)
    inputs = pack_for(target, [[0] * longest], rows=rows)
    zeros = jnp.zeros((rows,), jnp.int32)
    keys = jax.eval_shape(row_keys, jax.random.key(0), zeros, zeros)
    return sharding.place_rows((inputs, keys, zeros), placement)
