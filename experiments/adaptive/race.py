"""One draft at one temperature: every static γ and every policy, timed and replayed."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from experiments import by_loop
from experiments.adaptive import rehearse
from experiments.adaptive.policies import acceptance_head, path
from experiments.adaptive.rehearse import Rehearsed
from experiments.replay.evaluation import evaluate
from experiments.reproduce import speedups
from experiments.reproduce.study import Study, check_counts
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.drafters.abilities import learn
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import costing, doubts, fit
from specjax.measure.costing import static, with_length
from specjax.measure.counting import Undecided
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN, Comparison
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs, Policy, constant
from specjax.policies.constant import Constant
from specjax.policies.costs import mean
from specjax.policies.estimating import Estimating
from specjax.policies.loading import parse_with_costs, takes
from specjax.pytrees import pytree
from specjax.replay.rollouts import Recorder, Rollouts
from specjax.results import summarize
from specjax.speculative import Speculative
from specjax.support import command_line
from specjax.support.ranges import whole
from specjax.tuning.job import apart
from specjax.tuning.ways import fastest

ORACLE = "oracle"  # in replay only


@pytree
class Counting(Drafter):
    """A drafter that counts its calls. A policy that stops before a token exists has made one more
    call than tokens."""

    inner: Drafter

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def start(self, inputs, buffer_len):
        context, state = self.inner.start(inputs, buffer_len)
        return context, (state, jnp.int32(0))

    def observe(self, tokens, start, hidden, count, context, state):
        seen = tokens, start, hidden, count
        return self.inner.observe(*seen, context, state[0]), state[1]

    def learn(self, tokens, length, round_, judge, context, state):
        seen = tokens, length, round_, judge
        return learn(self.inner, *seen, context, state[0]), state[1]

    def begin(self, tokens, length, context, state, *, lags=True):
        hidden, inner = self.inner.begin(tokens, length, context, state[0], lags=lags)
        return hidden, (inner, state[1] + 1)

    def extend(self, token, position, context, state):
        hidden, inner = self.inner.extend(token, position, context, state[0])
        return hidden, (inner, state[1] + 1)

    def logits(self, hidden):
        return self.inner.logits(hidden)


def check(config) -> None:
    """ValueError for fields that do not go together, before anything is loaded or measured."""
    check_counts(config)
    for field, most in (("static", config.gamma_max), ("widths", config.gamma_max + 1)):
        for length in config[field]:
            if whole(field, length, "[1, ∞)") > most:
                raise ValueError(
                    f"{field}={tuple(config[field])} has {length}, and gamma_max="
                    f"{config.gamma_max} allows {most} at most. Raise gamma_max, or leave it out."
                )


def names(on: Study, draft: str) -> list[str]:
    """Names of all methods that race with this draft."""
    return [*map(static, on.config.static), *policies(on, draft)]


def policies(on: Study, draft: str) -> dict[str, dict[str, Any]]:
    """Names and settings: a head goes with the draft that it was trained for.

    Raises:
      ValueError: `only` names one that the config does not have.
    """
    chosen = on.config.policies.to_dict()
    for name in on.config.only:
        if name not in chosen:
            raise ValueError(f"only: {name!r} is none of the policies {', '.join(chosen)}.")
    chosen = {name: chosen[name] for name in on.config.only or chosen}
    if not head_file(on, draft).exists():
        chosen.pop("head", None)
    return chosen


def head_file(on: Study, draft: str) -> pathlib.Path:
    """Where the draft's head lies, if it has one."""
    return pathlib.Path(on.path(draft)) / "head.npz"


def cost(
    on: Study, cell: dict[str, Any], deciding: Mapping[str, Policy] | None = None
) -> dict[str, Costs]:
    """What rounds and calls of all loops take.

    Args:
      deciding: policies, each of which gets costs that its own decisions are part of.
    """
    of, config = (on, cell["draft"], cell["temperature"]), on.config
    shared = loop(*of, Undecided(), config.gamma_max, config.widths)
    own = {
        name: dataclasses.replace(shared, policy=policy)
        for name, policy in (deciding or {}).items()
    }
    loops = {costing.POLICIES: shared, **static_loops(*of), **own}
    return speedups.cost(
        *of,
        loops,
        config.cost_repeats,
        inputs=config.cost_inputs,
        turn=config.turn,
        alpha_inputs=config.alpha_inputs,
        passes_of=dict.fromkeys(own, costing.POLICIES),
        refusals=True,
    )


def tried_costs(on: Study, cell: dict[str, Any]) -> tuple[dict[str, Costs], str]:
    """The first costs of `cost_tries` that fit well enough, or the last; and what is wrong with
    them (`doubts.poor_fit`)."""
    config, deciding = on.config, deciding_policies(on, cell["draft"])
    of = f"{cell['draft']} at T={cell['temperature']:g}"
    for _ in range(config.cost_tries):
        found = cost(on, cell, deciding)
        if not (wrong := doubts.poor_fit(of, found[costing.POLICIES], config.cost_error)):
            break
        command_line.say(f"{wrong} {doubts.busy([doubts.load_average()])}".rstrip())
    return found, wrong


def measure(on: Study, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method.

    Costs are measured before the race, for the policies, and again behind it, since a machine is
    not as fast in one minute as in the next. Replay is by their mean.

    Raises:
      ValueError: costs that fit poorly, before anything is raced.
    """
    config, draft, temperature = on.config, cell["draft"], cell["temperature"]
    texts = speedups.timed_texts(on)
    before, wrong = tried_costs(on, cell)
    if wrong:
        raise ValueError(
            f"{wrong} Policies would decide by noise, so nothing is raced. Run again on a machine "
            "that does nothing else, with more repeats or timed_inputs, or raise cost_error."
        )
    recorded = record(on, draft, temperature)
    made = build(on, draft, temperature, before)
    key = jax.random.key(config.seed)
    plain = speedups.plain_method(on, temperature)
    racing, decide = prefer(on, made)
    methods: dict[str, Any] = {PLAIN: plain, **static_loops(on, draft, temperature), **racing}
    if temperature:
        drawn = rehearse.script(recorded, key)
        methods = {name: Rehearsed(method, drawn) for name, method in methods.items()}
    watch = Stopwatch(
        on.target, config.max_new_tokens, key, repeats=config.repeats,
        names=(config.target, draft), turn=config.turn,
    )  # fmt: skip
    everything = watch.race(
        methods, texts, note=lambda state: int(state.drafter[1]) if state.drafter else 0
    )
    after, _ = tried_costs(on, cell)
    known = {loop: mean(of, after[loop]) for loop, of in before.items()}
    table, own = known[costing.POLICIES], costs_of(decide, made, known)
    best, early, timed = choose(everything, [static(gamma) for gamma in config.static])
    alpha = on.alpha(draft, temperature, on.outputs(temperature)).value
    draws = 1 if temperature == 0 else config.draws
    replayed = replay_all(on, decide, recorded, own, key, draws)
    # Of the timed inputs alone, and at all temperatures of the very rounds that were timed.
    same = jax.tree.map(lambda field: field[: len(texts)], recorded)
    foretold = replay_all(on, decide, same, own, key, 1)
    rows = [
        {
            "method": name,
            "static": name not in made,
            "settings": policies(on, draft).get(name, {}),
            "alpha": alpha,
            **timed.speedups(name),
            **interval("speedup_decode", timed, name, over=PLAIN),
            "speedup_choosing": early[name],  # on the repeats that nothing else is taken from
            **interval("of_best", timed, name, over=best),
            # As on a machine that nothing disturbs: of each call the fastest repeat.
            **interval("speedup_fastest", timed, name, over=PLAIN, typical=np.min),
            **interval("of_best_fastest", timed, name, over=best, typical=np.min),
            "best_static": best,
            "identical": timed.identical(name),
            **counts(timed, name),
            "tau_replayed": foretold[name]["replayed_tau"],
            **replayed[name],
            "predicted": foretold[name]["replayed_speedup"],
            "oracle_speedup": replayed[ORACLE]["replayed_speedup"],
            "c": table.c,
            # In seconds: of the loop that policies share, and the method's own. As policies got
            # them before the race, and as they were behind it.
            "costs": costs_row(before, name),
            "costs_after": costs_row(after, name),
            "cost_error": float(before[costing.POLICIES].error),
            "cost_drift": drift(before, after, name),
            "gamma_max": config.gamma_max,
            "widths": list(fit.pruned(config.widths, before[costing.POLICIES])),
            "plain": isinstance(racing.get(name), Autoregressive),  # by costs or by trial
            # Or drafts of so many tokens in every round.
            "fixed": 0
            if decide.get(name) is made.get(name) or drafts_nothing(decide[name])
            else decide[name].gamma_max,
            "batch": 1,
            "timed_inputs": len(texts),
            "replayed_inputs": config.alpha_inputs,
            "repeats": config.repeats,
        }
        for name in names(on, draft)
    ]
    bound = foretold[ORACLE]["replayed_speedup"]
    still = next(row for row in rows if row["method"] == best)
    for row in rows:
        row["oracle_timed"] = bound
        row["closed_timed"] = closed(still, row, bound)
        if row["closed_timed"] is None:
            row["closed"] = None
    return rows


def costs_row(found: Mapping[str, Costs], name: str) -> dict[str, dict[str, Any]]:
    """Costs of the loop that policies share, and of the method's own."""
    return {loop: of.as_row() for loop, of in found.items() if loop in (costing.POLICIES, name)}


def drift(before: Mapping[str, Costs], after: Mapping[str, Costs], name: str) -> float:
    """By how much a round with the method's longest draft became dearer over the race, in tokens of
    plain decoding, as a share."""
    was, now = (found.get(name, found[costing.POLICIES]) for found in (before, after))
    full = [float(of.round_times(of.gamma_max)[-1] / of.token) for of in (was, now)]
    return full[1] / full[0] - 1


def prefer(
    on: Study, made: Mapping[str, Speculative]
) -> tuple[dict[str, Method], dict[str, Speculative]]:
    """What decodes for each policy, and its loop in replay: plain decoding where it prefers that.

    An estimating policy gives way to what is faster on the last inputs of α, none of the race.
    """
    config, decide = on.config, dict[str, Any](made)
    racing: dict[str, Method] = {}
    texts = speedups.ids(on, config.alpha_inputs)[config.timed_inputs :][-16:]
    key, most = apart(jax.random.key(config.seed)), config.max_new_tokens
    watch = Stopwatch(on.target, most, key, repeats=2)
    for name, loop in made.items():
        found = building.plain_if_preferred(loop, most)
        if texts and isinstance(loop.policy, Estimating):
            ways: Any = {static(gamma): with_length(loop, gamma) for gamma in config.static}
            ways |= {PLAIN: building.plain_of(loop)}
            ways |= {name: loop} if found is loop else {}
            found = ways[fastest(watch.race(ways, texts).halves()[0], ways, name)]
        racing[name] = found
        if found.drafter is None:
            decide[name] = dataclasses.replace(loop, policy=Constant(jnp.int32(0)))
        elif found is not loop:
            decide[name] = found
    return racing, decide


def drafts_nothing(loop: Speculative) -> bool:
    """Whether it stands for plain decoding in replay."""
    return isinstance(loop.policy, Constant) and int(loop.policy.gamma) == 0


def costs_of(
    decide: Mapping[str, Speculative],
    made: Mapping[str, Speculative],
    known: Mapping[str, Costs],
) -> dict[str, Costs]:
    """By name, with those of the static loops and of plain decoding that decode in the place of
    policies."""
    others = {
        name: (known.get(name) or known[costing.POLICIES]).of_plain()
        if drafts_nothing(loop)
        else by_loop.static_costs(known, loop.gamma_max)
        for name, loop in decide.items()
        if loop is not made[name]
    }
    return {**known, **others}


def closed(still: dict[str, Any], row: dict[str, Any], bound: float) -> float | None:
    """The share of the time between the best static γ and the oracle that a method saved by the
    clock; None where all of that is no more than the noise of the comparison.

    Args:
      bound: the oracle's speedup in replay of the same inputs.
    """
    best, noise = still["speedup_decode"], (row["of_best_high"] - row["of_best_low"]) / 2
    if bound / best - 1 <= noise:
        return None
    return (1 / best - 1 / row["speedup_decode"]) / (1 / best - 1 / bound)


def interval(
    field: str,
    timed: Comparison,
    name: str,
    over: str,
    typical: Callable[..., np.ndarray] = np.median,
) -> dict[str, float]:
    """For a row: how many times faster than another method, and the 95% interval by bootstrap over
    inputs, as field_low and field_high.

    Of each input a method has the median of its repeats, or what is `typical` of them: what differs
    from repeat to repeat is the clock, and what another text would change is seen over inputs.
    """
    mine, other = (typical(timed.decode[method], axis=0) for method in (name, over))
    drawn = np.random.default_rng(0).integers(len(mine), size=(2000, len(mine)))
    low, high = np.quantile(other[drawn].sum(1) / mine[drawn].sum(1), [0.025, 0.975])
    ratio = other.sum() / mine.sum()
    return {field: float(ratio), f"{field}_low": float(low), f"{field}_high": float(high)}


def choose(
    timed: Comparison, candidates: Sequence[str]
) -> tuple[str, dict[str, float], Comparison]:
    """The fastest of the candidates by every other repeat, which was lucky in them; the speedups of
    all methods on these; and the other repeats, which judge it.

    Raises:
      ValueError: a single repeat.
    """
    if len(timed.decode[PLAIN]) < 2:
        raise ValueError("repeats must be ≥ 2: some choose the best static γ, the others judge it.")
    first, rest = timed.part(slice(0, None, 2)), timed.part(slice(1, None, 2))
    early = {name: first.speedups(name)["speedup_decode"] for name in timed.decode}
    return max(candidates, key=lambda name: early[name]), early, rest


def counts(timed: Comparison, name: str) -> dict[str, Any]:
    """Sums over the inputs."""
    found = summarize(timed.outputs(name))
    return {
        "tau": found.tokens_per_iteration,
        "tokens": found.tokens,
        "target_calls": found.iterations,
        "draft_calls": sum(timed.notes[name]),
        "verified": found.verified,
        "accepted": found.accepted,
        **found.acceptance_fields(),
    }


def record(on: Study, draft: str, temperature: float) -> Rollouts:
    """Rollouts along the target's outputs, with hidden states where a head can read them."""
    outputs, hidden = on.outputs(temperature), isinstance(on.draft(draft), Checkpoint)
    return on.record(draft, temperature, outputs, on.config.gamma_max, recorder=Recorder(hidden))


def loop(
    on: Study, draft: str, temperature: float, policy: Policy, gamma: int, widths: Sequence[int]
) -> Speculative:
    """One that counts the drafter's calls; at batch 1, where a width is a number of positions."""
    made = speedups.method(on, draft, temperature, gamma)
    return dataclasses.replace(
        made, drafter=Counting(made.drafter), policy=policy, passes=tuple(widths)
    )


def static_loops(on: Study, draft: str, temperature: float) -> dict[str, Speculative]:
    """The loop of every static γ, by name: its verify passes have γ + 1 positions."""
    return {
        static(gamma): loop(on, draft, temperature, constant(gamma), gamma, ())
        for gamma in on.config.static
    }


def build(
    on: Study, draft: str, temperature: float, known: Mapping[str, Costs]
) -> dict[str, Speculative]:
    """The loops of the policies, by name."""
    config, table = on.config, known[costing.POLICIES]
    widths = fit.pruned(config.widths, table)
    made = {name: policy(on, draft, name, known.get(name, table)) for name in policies(on, draft)}
    return {
        name: loop(on, draft, temperature, decides, config.gamma_max, widths)
        for name, decides in made.items()
    }


def deciding_policies(on: Study, draft: str) -> dict[str, Policy]:
    """The policies that take costs, before there are any: their own decisions are part of them."""
    none, those = Costs(0.0, [1.0] * (on.config.gamma_max + 1)), policies(on, draft)
    return {name: policy(on, draft, name, none) for name in those if takes(path(name), "costs")}


def policy(on: Study, draft: str, name: str, table: Costs) -> Policy:
    """The policy with its settings, its costs and its trained head, where it takes them."""
    settings = dict(policies(on, draft)[name])
    if takes(path(name), "params"):
        settings["params"] = acceptance_head.load(head_file(on, draft))
    return parse_with_costs(path(name), table, **settings)


def replay_all(
    on: Study,
    made: dict[str, Speculative],
    recorded: Rollouts,
    known: Mapping[str, Costs],
    key: Key[Array, ""],
    draws: int,
) -> dict[str, dict[str, float]]:
    """What each method, and the oracle, would bring on rollouts along the target's outputs, and the
    share of the time between the best static γ and the oracle that it saves."""
    lines = evaluate(
        {name: loop.policy for name, loop in made.items()}, recorded, known, key, draws
    )
    by = {line["policy"]: line for line in lines}
    return {
        name: {
            "replayed_speedup": by[name]["speedup"],
            "replayed_tau": by[name]["tau"],
            "closed": by[name]["closed"],
        }
        for name in (*map(static, on.config.static), *made, ORACLE)
    }
