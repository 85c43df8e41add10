"""What a round takes, for policies that weigh tokens against time: a measured table, as a value.

Nothing can read a clock inside a jitted loop. `cost.Costs.prices` makes the table from timings.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.pytrees import pytree
from specjax.ranges import listed, number


@pytree
class Prices:
    """Times in target steps, at one batch size."""

    draft: Float[Array, ""]  # c, of one drafted token; float32
    verify: Float[Array, " K"]  # of the verify pass and all else, by 0 … γ_max drafted tokens

    def rounds(self, gamma_max: int) -> Float[Array, " K"]:
        """Of whole rounds, by 0 … γ_max drafted tokens."""
        if self.verify.shape != (gamma_max + 1,):
            raise ValueError(
                f"The prices are for γ_max={len(self.verify) - 1} and not for {gamma_max}: make "
                "them for the γ_max that decodes."
            )
        return self.draft * jnp.arange(gamma_max + 1, dtype=jnp.float32) + self.verify


def prices(draft: float, verify: Sequence[float]) -> Prices:
    """Prices from plain numbers.

    Raises:
      ValueError: draft < 0, or verify empty or not positive throughout.
    """
    why = "one for each of 0 … γ_max drafted tokens"
    table = [number("verify", time, "(0, ∞)", why) for time in listed("verify", verify)]
    return Prices(jnp.float32(number("draft", draft, "[0, ∞)")), jnp.asarray(table, jnp.float32))


def checked(table: Prices | None, *, needed: bool = False) -> Prices | None:
    """The table, if it is one; ValueError otherwise, and where one is `needed` and none given."""
    if isinstance(table, Prices) or (table is None and not needed):
        return table
    raise ValueError(
        f"prices={table!r} must be a table: `specjax.policies.prices` makes one of plain numbers, "
        "and `specjax.cost.Costs.prices` of timings."
    )


def round_prices(table: Prices | None, gamma_max: int) -> Float[Array, " K"]:
    """`Prices.rounds`; without a table every round takes one target step, whatever it drafts."""
    return jnp.ones((gamma_max + 1,), jnp.float32) if table is None else table.rounds(gamma_max)
