"""Policies that verify some of a batch's slots, without times: a number, a threshold, a table."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.policies.base import Policy
from specjax.policies.calibrated import Calibrated
from specjax.pytrees import pytree
from specjax.support.ranges import number, whole

MAX_ROWS = 65536  # of a table by batch size, which has an entry for each number of rows


@pytree
class Fixed(Calibrated):
    """The best `slots` of all rows in each round, as TETRIS (2502.15197) has it, but by chances
    that do not read the slot's own token."""

    slots: Int[Array, ""]

    def verifies(self, state, slot):
        return slot.taken < self.slots


def fixed(slots: int, prior: float = 0.7) -> Fixed:
    """Verify this many drafted tokens of the whole batch in each round, the likeliest ones."""
    count = jnp.int32(whole("slots", slots, "[0, ∞)"))
    return Fixed(jnp.float32(number("prior", prior, "(0, 1)")), count)


@pytree
class Threshold(Calibrated):
    """All slots whose chance is above a threshold."""

    least: Float[Array, ""]

    def verifies(self, state, slot):
        return slot.chance > self.least


def threshold(least: float = 0.4, prior: float = 0.7) -> Threshold:
    """Verify the drafted tokens that are reached and accepted with more than this chance."""
    bound = jnp.float32(number("least", least, "[0, 1]"))
    return Threshold(jnp.float32(number("prior", prior, "(0, 1)")), bound)


@pytree
class ByBatchSize(Policy):
    """The first γ tokens of each row, γ by the number of rows that have not ended."""

    reads_batch = True

    lengths: Int[Array, " R"]  # γ of 0, 1, … rows; the last for all larger batches

    def begin(self, state, live, gamma_max):
        return state, jnp.minimum(self.length(jnp.sum(live, dtype=jnp.int32)), gamma_max)

    def verifies(self, state, slot):
        return slot.place < self.length(slot.rows)

    def length(self, rows: Int[Array, "..."]) -> Int[Array, "..."]:
        """The draft length of a batch."""
        return self.lengths[jnp.minimum(rows, len(self.lengths) - 1)]


def by_batch_size(table: Mapping[int, int]) -> ByBatchSize:
    """Draft and verify γ tokens of each row, by the number of live rows, as vLLM's table does.

    Args:
      table: γ by the smallest number of rows that it holds for, at most `MAX_ROWS`:
        {1: 8, 4: 4, 16: 1}.

    Raises:
      ValueError: no such table, or a number out of range.
    """
    if not isinstance(table, Mapping) or not table:
        raise ValueError(f"table={table!r} must map numbers of rows to draft lengths.")
    rows = f"[1, {MAX_ROWS}]"
    known = {whole("rows", start, rows): whole("γ", k, "[0, ∞)") for start, k in table.items()}
    starts = np.array(sorted(known))
    place = np.searchsorted(starts, np.arange(starts[-1] + 1), side="right") - 1
    lengths = np.array([known[start] for start in starts.tolist()], np.int32)
    return ByBatchSize(jnp.asarray(lengths[np.maximum(place, 0)]))
