"""What rounds and calls take, for whoever weighs tokens against time: one table, in one unit.

Nothing can read a clock inside a jitted loop. `measure.pricing.measure` makes the table from timed
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
from specjax.support.ranges import listed, number


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
    why = "one for each of 0 … γ_max drafted tokens"
    table = [number("verify", time, "(0, ∞)", why) for time in listed("verify", verify)]
    for name, value in {"call": call, "token": token, "plain_call": plain_call}.items():
        if value < 0:  # NaN: not known
            raise ValueError(f"{name}={value} must be ≥ 0.")
    rest = {
        "call": call,
        "token": token,
        "plain_call": plain_call,
        "error": error,
        "largest_error": largest_error,
        "drop": drop,
    }
    return Prices(
        jnp.float32(number("draft", draft, "[0, ∞)")),
        jnp.asarray(table, jnp.float32),
        **{name: jnp.float32(value) for name, value in rest.items()},
    )


def checked(table: Prices | None, *, needed: bool = False) -> Prices | None:
    """The table, if it is one; ValueError otherwise, and where one is `needed` and none given."""
    if isinstance(table, Prices) or (table is None and not needed):
        return table
    raise ValueError(
        f"prices={table!r} must be a table: `specjax.policies.prices` makes one of plain numbers, "
        "and `specjax.measure.pricing.measure` of timings."
    )


def round_prices(table: Prices | None, gamma_max: int) -> Float[Array, " K"]:
    """`Prices.rounds`; without a table every round takes one target step, whatever it drafts."""
    return jnp.ones((gamma_max + 1,), jnp.float32) if table is None else table.rounds(gamma_max)
