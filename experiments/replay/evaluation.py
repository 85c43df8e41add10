"""Policies replayed on recorded rollouts, beside every constant γ and the oracle."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Key

from experiments import by_loop
from experiments.adaptive.policies.learned import fit
from experiments.chat import tables
from specjax.measure import costing
from specjax.policies import Costs, Policy, constant
from specjax.replay import replay
from specjax.replay.replay import Replayed, Score
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
    kinds: Sequence[str] = (),
    folds: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """A line for each constant γ that has a cost, the oracle and each policy.

    Args:
      chosen: policies by the name that their lines have.
      known: costs by loop, as in `specjax.tuning.fitting`; policies without their own have those
        of the loop that they share.
      carry: and one for each policy that carries over what it learned, CARRIED behind its name.
      kinds: of text, for each output: lines then have speedups for each of them.
      folds: by the name of a line, parts of the outputs, each for a policy fitted to the others.

    A line's `of_chosen` is its speedup over the best constant γ, or plain decoding, as it was
    chosen on other outputs, with a 95% interval over outputs.
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
    for name, parts in folds.items():
        everyone |= {name: constant(1)}  # of which only the name is read from here on
        also = _fitted_elsewhere(found, parts, table, key, draws)
        replayed = jax.tree.map(lambda *counts: np.concatenate(counts), replayed, also)
    lines: list[dict[str, Any]] = []
    spent = []  # by output
    # Constants with a verify pass of γ + 1 positions, as they would run.
    own += [costs for _, costs in decoded.values()]
    own += [known.get(name, table) for name in (*carrying, *folds)]
    for i, name in enumerate(everyone):
        one = jax.tree.map(lambda counts, i=i: counts[i : i + 1], replayed)
        scored = replay.score(one, found, own[i])
        lines.append({"policy": name, **_numbers(scored)})
        spent.append(replay.times(one, own[i])[0])
    statics = own[: len(gammas)]
    bound = replay.oracle(found, key, [table, *statics], draws=draws)
    lines.insert(len(gammas), {"policy": "oracle", **_numbers(bound)})
    plain, ways = replay.oracle_ways(found, key, [table, *statics], draws=draws)
    spent.insert(len(gammas), ways[..., 0].sum(axis=0))
    lengths = draws * np.asarray(found.emitted)
    took = np.stack([[x, lengths] for x in (draws * plain, *spent)]).astype(np.float64)
    for line, own_took in zip(lines, took[1:], strict=True):
        line["by"] = {
            kind: _beside(took[: len(gammas) + 1, :, there], own_took[:, there])
            for kind in dict.fromkeys(kinds)
            for there in [np.array([other == kind for other in kinds])]
        }
        line["of_chosen"] = tables.over_fastest(took[: len(gammas) + 1], own_took)._asdict()
    best = max(line["speedup"] for line in lines[: len(gammas)])
    oracle = float(bound.speedup)
    for line in lines:
        line["of_best_static"] = line["speedup"] / best
        line["regret"] = oracle / line["speedup"] - 1
        room = 1 / best - 1 / oracle
        line["closed"] = (1 / best - 1 / line["speedup"]) / room if room > 0 else None
    return lines


def _fitted_elsewhere(
    found: Rollouts, parts: Sequence[np.ndarray], costs: Costs, key: Key[Array, ""], draws: int
) -> Replayed:
    """Replay each part of the outputs by a policy that was fitted to those of the other parts."""
    every, replayed = np.concatenate(parts), []
    for part in parts:
        rest: Any = np.setdiff1d(every, part)
        policy = fit(jax.tree.map(lambda x, at=rest: x[at], found), costs)
        own = jax.tree.map(lambda x, at=part: x[at], found)
        replayed.append(replay.replay([policy], own, key, draws=draws))
    back = np.argsort(every)
    return jax.tree.map(lambda *counts: np.concatenate(counts, axis=1)[:, back], *replayed)


def _beside(rivals: Float[np.ndarray, "R 2 N"], own: Float[np.ndarray, "2 N"]) -> dict[str, Any]:
    """Speedups over plain decoding, the first rival, and over the best one, chosen elsewhere."""
    of_chosen = tables.over_fastest(rivals, own)._asdict()
    return {"speedup": float(rivals[0, 0].sum() / own[0].sum()), "of_chosen": of_chosen}


def _numbers(scored: Score) -> dict[str, float]:
    return {name: value.item() for name, value in scored._asdict().items()}
