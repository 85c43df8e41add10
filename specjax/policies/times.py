"""Times of a batch's rounds, by the positions of the target's call."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.pytrees import pytree, set_fields
from specjax.support.ranges import listed, number, whole


@pytree
class PassTimes:
    """Times at one batch size, all in one unit; float32.

    Positions beyond the last size cost the slope of the last step of `smooth` each, or the mean
    time of a position where that is not positive.

    For example, in seconds, of eight rows:

        PassTimes([8, 16, 40], [0.011, 0.013, 0.024], draft=0.002)
    """

    positions: Int[Array, " M"]  # N, ascending: the compiled sizes of the target's call
    passes: Float[Array, " M"]  # times of calls of these sizes
    smooth: Float[Array, " M"]  # the largest convex function below them
    draft: Float[Array, ""]  # of one call of the drafter
    rest: Float[Array, ""]  # of all else in a round
    token: Float[Array, ""]  # of a step of plain decoding, and of a round without a draft

    def __init__(
        self,
        positions: Sequence[int],
        passes: Sequence[float],
        *,
        draft: float = 0.0,
        rest: float = 0.0,
        token: float | None = None,
    ):
        """Make a table from plain numbers.

        Args:
          token: None: that of a round without a draft.

        Raises:
          ValueError: a time below 0, no sizes, sizes that do not ascend, or unequal lengths.
        """
        sizes = [whole("positions", size, "[1, ∞)") for size in listed("positions", positions)]
        times = [number("passes", time, "(0, ∞)") for time in listed("passes", passes)]
        if not sizes or len(sizes) != len(times) or sizes != sorted({*sizes}):
            raise ValueError(
                f"positions={sizes} and passes={times}: give ascending sizes and a time for each."
            )
        set_fields(
            self,
            positions=jnp.asarray(sizes, jnp.int32),
            passes=jnp.asarray(times, jnp.float32),
            smooth=jnp.asarray(convex(sizes, times), jnp.float32),
            draft=jnp.float32(number("draft", draft, "[0, ∞)")),
            rest=jnp.float32(number("rest", rest, "[0, ∞)")),
            token=jnp.float32(number("token", token or times[0] + rest, "(0, ∞)")),
        )

    def of_plain(self) -> "PassTimes":
        """The times of plain decoding, in the form of a loop whose rounds draft nothing."""
        made = object.__new__(PassTimes)  # `__init__` takes plain numbers
        same, none = jnp.full_like(self.passes, self.token), jnp.zeros_like(self.rest)
        plain = {"passes": same, "smooth": same, "draft": none, "rest": none}
        set_fields(made, **vars(self) | plain)
        return made

    @property
    def sizes(self) -> tuple[int, ...]:
        """The compiled sizes as plain numbers, as `generate` takes them."""
        return tuple(np.asarray(self.positions).tolist())

    def smoothed(self, positions: Int[Array, "..."], depth: int | Array) -> Float[Array, "..."]:
        """Time of a round without the steps between sizes.

        A size that is hardly used for one token more is worth it for many, so the steps would stop
        a budget too early.

        Args:
          depth: calls of the drafter.
        """
        at = self.positions.astype(jnp.float32)
        passes = jnp.interp(positions.astype(jnp.float32), at, self.smooth)
        return self._round(passes + self._beyond(positions), depth)

    def exact(self, positions: Int[Array, "..."], depth: int | Array) -> Float[Array, "..."]:
        """Time of a round whose call has the smallest size that holds these positions."""
        at = jnp.searchsorted(self.positions, positions)
        passes = self.passes[jnp.minimum(at, len(self.passes) - 1)]
        return self._round(passes + self._beyond(positions), depth)

    def _beyond(self, positions: Int[Array, "..."]) -> Float[Array, "..."]:
        """Time of positions beyond the last size."""
        at = self.positions.astype(jnp.float32)
        each = self.smooth[-1] / at[-1]
        if len(self.smooth) > 1:
            slope = (self.smooth[-1] - self.smooth[-2]) / (at[-1] - at[-2])
            each = jnp.where(slope > 0, slope, each)
        return each * jnp.maximum(positions.astype(jnp.float32) - at[-1], 0.0)

    def _round(self, passes: Float[Array, "..."], depth: int | Array) -> Float[Array, "..."]:
        drafting = jnp.asarray(depth, jnp.float32) * self.draft
        return jnp.where(jnp.asarray(depth) == 0, self.token, drafting + self.rest + passes)


def convex(sizes: Sequence[int], times: Sequence[float]) -> np.ndarray:
    """The largest convex function that is nowhere above the times, at the same sizes."""
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1 and _slope(sizes, times, hull[-2], hull[-1]) >= _slope(
            sizes, times, hull[-2], i
        ):
            hull.pop()
        hull.append(i)
    return np.interp(sizes, [sizes[i] for i in hull], [times[i] for i in hull])


def _slope(sizes: Sequence[int], times: Sequence[float], i: int, j: int) -> float:
    return (times[j] - times[i]) / (sizes[j] - sizes[i])
