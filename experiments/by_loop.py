"""Costs by loop: of `POLICIES`, whose passes are shared, of static γ, of policies by name."""

from collections.abc import Mapping, Sequence

import numpy as np

from specjax.measure.costing import POLICIES, static, static_loops
from specjax.policies import Costs


def static_costs(found: Mapping[str, Costs], gamma: int) -> Costs:
    """Costs of the loop of a static γ. The verify pass is interpolated between timed γ.

    Raises:
      ValueError: a γ below or above all that were timed.
    """
    if own := found.get(static(gamma)):
        return own
    timed = static_loops(found)
    known = [of.gamma_max for of in timed]
    if not known[0] <= gamma <= known[-1]:
        raise ValueError(f"γ={gamma} has no cost: those of {known[0]} … {known[-1]} were timed.")
    passes = [np.asarray(of.verify + of.rest) for of in timed]
    first, full = (float(np.interp(gamma, known, [of[at] for of in passes])) for at in (0, -1))
    return Costs(**timed[0].as_row() | {"verify": [first, *[full] * gamma], "rest": 0.0})


def gammas(found: Mapping[str, Costs]) -> range:
    """The range of static γ that `static_costs` covers: from the shortest timed to the longest."""
    timed = static_loops(found)
    return range(timed[0].gamma_max, timed[-1].gamma_max + 1)


def by_formula(
    c: float, verify: Sequence[float], overhead: float, widths: Sequence[int]
) -> dict[str, Costs]:
    """Build costs by the formula γc + v + overhead, in target steps.

    Args:
      verify: cost of the verify pass, by the 0 … γ_max drafted tokens that it has room for.
      widths: passes that policies may choose; see `Speculative`.
    """
    gamma_max = len(verify) - 1
    room = [
        min({w - 1 for w in widths if n < w <= gamma_max} | {gamma_max})
        for n in range(gamma_max + 1)
    ]
    own = {
        static(gamma): Costs(c, [v] * (gamma + 1), rest=overhead)
        for gamma, v in enumerate(verify)
        if gamma
    }
    return {POLICIES: Costs(c, [verify[fits] for fits in room], rest=overhead), **own}
