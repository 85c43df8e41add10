"""What a round takes, for policies that weigh tokens against time: a measured table, as a value.

Nothing can read a clock inside a jitted loop. `cost.Costs.prices` makes the table from timings.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from specjax.pytrees import pytree


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
    table = np.asarray(verify, np.float32)
    if not 0 <= draft < np.inf or table.ndim != 1 or not np.all((table > 0) & (table < np.inf)):
        raise ValueError(
            f"draft={draft} must be ≥ 0 and verify={verify} a list of positive numbers, one for "
            "each of 0 … γ_max drafted tokens."
        )
    return Prices(jnp.float32(draft), jnp.asarray(table))


def round_prices(table: Prices | None, gamma_max: int) -> Float[Array, " K"]:
    """`Prices.rounds`; without a table every round takes one target step, whatever it drafts."""
    return jnp.ones((gamma_max + 1,), jnp.float32) if table is None else table.rounds(gamma_max)
