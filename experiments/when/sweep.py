"""Rows of the sweep: a simulated trace, a cost, and what every method would have done there."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from experiments import by_loop
from experiments.when import synthetic
from experiments.when.synthetic import Chances
from specjax.measure import costing
from specjax.measure.provenance import Results
from specjax.policies import Costs, Policy, constant, parse
from specjax.policies.loading import takes
from specjax.replay import replay
from specjax.replay.rollouts import Rollouts
from specjax.support import command_line

CHANCES = ("alpha", "between", "within", "autocorrelation", "informativeness", "slope", "offset")
ORACLE = "oracle"
Tables = Mapping[str, Costs]  # by loop, as in `specjax.tuning.fitting`
Times = Float[np.ndarray, " N"]  # of each output
Bound = tuple[Times, Times]  # of plain decoding and the oracle


def fill(results: Results, config, facts: Mapping[str, Any]) -> None:
    """Simulate what is missing: a row for each cost at each point of each sweep."""
    done = {(row["sweep"], *(row.get(name) for name in CHANCES)) for row in results.done}
    costs = list(cost_grid(config))
    tables = [table(**cost, gamma_max=config.gamma_max) for cost in costs]
    missing = [(s, p) for s, p in points(config) if (s, *(p[name] for name in CHANCES)) not in done]
    bounds: dict[tuple[float, ...], list[Bound]] = {}  # whatever the drafter knows
    for sweep, point in command_line.Steps(missing, disable=not missing):
        chances = Chances(**point)
        found = simulated(chances, config, config.outputs, config.tokens, config.gamma_max)
        text = tuple(point[name] for name in CHANCES[:4])
        if text not in bounds:
            bounds[text] = bound(found, tables, config)
        rows = compare(found, tables, config, bounds[text])
        spread = {
            "sd_between": round(chances.sd_between, 3),
            "sd_within": round(chances.sd_within, 3),
        }
        for cost, row in zip(costs, rows, strict=True):
            results.append({"sweep": sweep, **point, **spread, **cost, **row, **facts})


def simulated(chances: Chances, config, outputs: int, tokens: int, gamma_max: int) -> Rollouts:
    """Rollouts of one key: points differ by their settings, and not by luck."""
    key = jax.random.key(config.seed)
    return synthetic.rollouts(chances, key, outputs=outputs, tokens=tokens, gamma_max=gamma_max)


def points(config) -> Iterator[tuple[str, dict[str, float]]]:
    """The points of all sweeps: their names and `Chances`, those that can be.

    Where the chance does not vary there is nothing to be informed of, and one point stands for all.
    """
    for sweep, axes in config.sweeps.to_dict().items():
        for values in itertools.product(*axes.values()):
            point = {**config.base.to_dict(), **dict(zip(axes, values, strict=True))}
            known = point["between"] + point["within"]
            informed = axes.get("informativeness", (point["informativeness"],))
            if known <= 1 and (known > 0 or point["informativeness"] == informed[0]):
                yield sweep, point


def cost_grid(config) -> Iterator[dict[str, Any]]:
    """Every combination of costs. A pass that grows by nothing cannot be narrower."""
    for c, verify, narrow in itertools.product(config.c, config.verify, config.narrow):
        if verify > 0 or not narrow:
            yield {"c": c, "verify": verify, "narrow": narrow}


def table(*, c: float, verify: float, narrow: bool, gamma_max: int) -> Tables:
    """v(γ) = 1 + verify · γ; with narrow passes a round pays for the tokens that it drafted."""
    passes = [1 + verify * gamma for gamma in range(gamma_max + 1)]
    return by_loop.by_formula(c, passes, 0.0, range(1, gamma_max + 1) if narrow else ())


def bound(found: Rollouts, tables: Sequence[Tables], config, draws: int = 1) -> list[Bound]:
    """For each table of costs: what plain decoding and the oracle take."""
    key, bounds = jax.random.key(config.seed), []
    for costs in tables:
        loops = [costs[costing.POLICIES], *static_costs(found, costs).values()]
        plain, ways = replay.oracle_ways(found, key, loops, draws=draws)
        bounds.append((plain * draws, ways[..., 0].sum(axis=0)))
    return bounds


def static_costs(found: Rollouts, costs: Tables) -> dict[int, Costs]:
    """By γ: each in a loop of its own."""
    gammas = range(1, found.gamma_max + 1)
    return {gamma: by_loop.static_costs(costs, gamma) for gamma in gammas}


def compare(
    found: Rollouts, tables: Sequence[Tables], config, bounds: Sequence[Bound], draws: int = 1
) -> list[dict[str, Any]]:
    """For each table of costs: the best static γ, and each method's speedup over it.

    The best γ, 0 for plain decoding, and the best policy are chosen on every other output. All
    speedups are of the other outputs, with standard errors by bootstrap over these.
    """
    made: list[Policy] = [constant(gamma) for gamma in range(1, found.gamma_max + 1)]
    where: list[dict[str, int]] = [{} for _ in tables]
    for name, settings in config.policies.to_dict().items():
        for at, costs in zip(where, tables, strict=True):
            with_costs = {"costs": costs[costing.POLICIES]} if takes(name, "costs") else {}
            if with_costs or at is where[0]:  # without costs it does the same at all
                made.append(parse(name, **settings, **with_costs))
            at[name] = len(made) - 1
    replayed = replay.replay(made, found, jax.random.key(config.seed), draws=draws)

    def took(i: int, costs: Costs) -> Times:
        return replay.times(jax.tree.map(lambda counts: counts[i], replayed), costs)

    rows = []
    for costs, at, (plain, oracle) in zip(tables, where, bounds, strict=True):
        static = {g: took(g - 1, table) for g, table in static_costs(found, costs).items()}
        policies = {name: took(i, costs[costing.POLICIES]) for name, i in at.items()}
        rows.append(judge({0: plain, **static}, policies, oracle, config))
    return rows


def judge(
    static: Mapping[int, Times], policies: Mapping[str, Times], oracle: Times, config
) -> dict[str, Any]:
    """Speedups from the times of each output: see `compare`."""
    gamma = min(static, key=lambda gamma: static[gamma][::2].sum())
    best = min(policies, key=lambda name: policies[name][::2].sum())
    count = len(oracle[1::2])
    rng = np.random.default_rng(config.seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=config.resamples)

    def speedup(over: Times, time: Times) -> tuple[float, float]:
        """And its standard error."""
        drawn = (weights @ over[1::2]) / (weights @ time[1::2])
        whole = over[1::2].sum() / time[1::2].sum()
        return round(float(whole), 3), round(float(drawn.std(ddof=1)), 4)

    everyone = {**policies, ORACLE: oracle}
    return {
        "static": gamma,
        "static_speedup": speedup(static[0], static[gamma]),
        "best": best,
        "of_static": {name: speedup(static[gamma], time) for name, time in everyone.items()},
    }


def foretold(row: Mapping[str, Any]) -> float:
    """The share of α(1 − α) that can be known before a token is tested: the output's own level,
    which past rounds show, and what the belief shows of the rest."""
    return row["between"] + row["informativeness"] * row["within"]


def closed(found: Mapping[str, Any]) -> float:
    """The share of the time between the best static γ and the oracle that the best policy saves."""
    best, oracle = (found["of_static"][name][0] for name in (found["best"], ORACLE))
    return (1 - 1 / best) / (1 - 1 / oracle)
