"""What rounds and calls take, for whoever weighs tokens against time: one table, in one unit.

Nothing can read a clock inside a jitted loop. `specjax.pricing.measure` makes the table from timed
calls, in seconds. Policies, replay and its oracle read the same one. Only ratios matter to them, so
that a table in any other unit, target steps for one, does as well.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specjax.pytrees import pytree


@pytree
class Prices:
    """Times on one machine at one batch size, all in one unit; float32."""

    draft: Float[Array, ""]  # c, of one call of the drafter
    verify: Float[Array, " K"]  # of the verify pass and all else, by 0 … γ_max drafted tokens
    call: Float[Array, ""]  # of a call of the loop, beyond its rounds
    token: Float[Array, ""]  # of a token of plain decoding; NaN: not measured
    plain_call: Float[Array, ""]  # of a call of plain decoding, beyond its tokens; or NaN
    # How far the timed calls are from these prices, as shares; 0 where prices are given.
    error: Float[Array, ""]  # of a call in the middle: the median
    largest_error: Float[Array, ""]
    drop: Float[Array, ""]  # by how much a longer draft or a wider pass was timed as cheaper

    @property
    def gamma_max(self) -> int:
        """The longest draft that has a price."""
        return len(self.verify) - 1

    def rounds(self, gamma_max: int) -> Float[Array, " K"]:
        """Of whole rounds, by 0 … γ_max drafted tokens."""
        if self.verify.shape != (gamma_max + 1,):
            raise ValueError(
                f"The prices are for γ_max={len(self.verify) - 1} and not for {gamma_max}: make "
                "them for the γ_max that decodes."
            )
        return self.draft * jnp.arange(gamma_max + 1, dtype=jnp.float32) + self.verify

    def as_row(self) -> dict[str, Any]:
        """For a file of results: `prices(**row)` reads it."""
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}


def prices(
    draft: float,
    verify: Sequence[float],
    *,
    call: float = 0.0,
    token: float = 1.0,
    plain_call: float = 0.0,
    error: float = 0.0,
    largest_error: float = 0.0,
    drop: float = 0.0,
) -> Prices:
    """Prices from plain numbers, all in one unit: by default that of a target step.

    Raises:
      ValueError: a negative price, or verify empty or not positive throughout.
    """
    table = np.asarray(verify, np.float32)
    if not 0 <= draft < np.inf or table.ndim != 1 or not np.all((table > 0) & (table < np.inf)):
        raise ValueError(
            f"draft={draft} must be ≥ 0 and verify={verify} a list of positive numbers, one for "
            "each of 0 … γ_max drafted tokens."
        )
    if call < 0 or token <= 0 or plain_call < 0:
        raise ValueError(
            f"call={call} and plain_call={plain_call} must be ≥ 0, and token={token} be > 0."
        )
    rest = map(jnp.float32, (call, token, plain_call, error, largest_error, drop))
    return Prices(jnp.float32(draft), jnp.asarray(table), *rest)


def round_prices(table: Prices | None, gamma_max: int) -> Float[Array, " K"]:
    """`Prices.rounds`; without a table every round takes one target step, whatever it drafts."""
    return jnp.ones((gamma_max + 1,), jnp.float32) if table is None else table.rounds(gamma_max)
