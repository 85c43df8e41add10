"""Policies replayed on recorded rollouts, beside every constant γ and the oracle."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from experiments import by_loop
from specjax.measure import costing
from specjax.policies import Costs, Policy, constant
from specjax.replay import replay
from specjax.replay.replay import Score
from specjax.replay.rollouts import Rollouts

CARRIED = ", carried over"


def evaluate(
    chosen: Mapping[str, Policy],
    found: Rollouts,
    known: Mapping[str, Costs],
    key: Key[Array, ""],
    draws: int,
    *,
    carry: bool = False,
) -> list[dict[str, Any]]:
    """A line for each constant γ that has a cost, the oracle and each policy.

    Args:
      chosen: policies by the name that their lines have.
      known: costs by loop, as in `specjax.tuning.fitting`; policies without their own have those
        of the loop that they share.
      carry: and one for each policy that carries over what it learned, CARRIED behind its name.
    """
    table, gammas = known[costing.POLICIES], by_loop.gammas(known)
    own = [by_loop.static_costs(known, gamma) for gamma in gammas]
    decoded = {
        name: replay.as_decoded(policy, found, known.get(name, table))
        for name, policy in chosen.items()
    }
    everyone: dict[str, Policy] = {costing.static(gamma): constant(gamma) for gamma in gammas}
    everyone |= {name: policy for name, (policy, _) in decoded.items()}
    replayed = replay.replay(list(everyone.values()), found, key, draws=draws)
    if carrying := {name: policy for name, policy in chosen.items() if carry and policy.carries}:
        everyone |= {f"{name}{CARRIED}": policy for name, policy in carrying.items()}
        also = replay.replay(list(carrying.values()), found, key, draws=draws, carry=True)
        replayed = jax.tree.map(lambda *counts: np.concatenate(counts), replayed, also)
    lines: list[dict[str, Any]] = []
    # Constants with a verify pass of γ + 1 positions, as they would run.
    own += [costs for _, costs in decoded.values()]
    own += [known.get(name, table) for name in carrying]
    for i, name in enumerate(everyone):
        one = jax.tree.map(lambda counts, i=i: counts[i : i + 1], replayed)
        scored = replay.score(one, found, own[i])
        lines.append({"policy": name, **_numbers(scored)})
    statics = own[: len(gammas)]
    bound = replay.oracle(found, key, [table, *statics], draws=draws)
    lines.insert(len(gammas), {"policy": "oracle", **_numbers(bound)})
    best = max(line["speedup"] for line in lines[: len(gammas)])
    oracle = float(bound.speedup)
    for line in lines:
        line["of_best_static"] = line["speedup"] / best
        line["regret"] = oracle / line["speedup"] - 1
        room = 1 / best - 1 / oracle
        line["closed"] = (1 / best - 1 / line["speedup"]) / room if room > 0 else None
    return lines


def _numbers(scored: Score) -> dict[str, float]:
    return {name: value.item() for name, value in scored._asdict().items()}
