"""One draft at one temperature: every static γ and every policy, timed and replayed."""

import dataclasses
import inspect
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import trace
from experiments.replay import Candidate, Timings, evaluate
from experiments.reproduce import gains
from experiments.reproduce.study import NGRAMS, Study
from specjax import decoding, rollouts, timing
from specjax.draft import Drafter
from specjax.policies import Policy, constant, head, load
from specjax.policies.loading import maker
from specjax.pytrees import pytree
from specjax.rollouts import Rollouts
from specjax.speculative import Speculative
from specjax.timing import Timed

PLAIN = "plain decoding"
ORACLE = "oracle"  # in replay only
COST_REPEATS = 15


@pytree
class Counting:
    """A drafter that counts its calls. A policy that stops before a token exists has made one more
    call than tokens."""

    inner: Drafter

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def start(self, inputs, buffer_len):
        context, state = self.inner.start(inputs, buffer_len)
        return context, (state, jnp.int32(0))

    def begin(self, tokens, length, fed, context, state):
        hidden, inner = self.inner.begin(tokens, length, fed, context, state[0])
        return hidden, (inner, state[1] + 1)

    def extend(self, token, position, context, state):
        hidden, inner = self.inner.extend(token, position, context, state[0])
        return hidden, (inner, state[1] + 1)

    def logits(self, hidden):
        return self.inner.logits(hidden)


def static(gamma: int) -> str:
    """The name of a static draft length."""
    return f"γ={gamma}"


def names(on: Study, draft: str) -> list[str]:
    """Of all methods that race with this draft."""
    return [*map(static, on.config.static), *policies(on, draft)]


def policies(on: Study, draft: str) -> dict[str, dict[str, Any]]:
    """Names and settings: a head goes with the draft that it was trained for."""
    chosen = on.config.policies.to_dict()
    if not head_file(on, draft).exists():
        chosen.pop("head", None)
    return chosen


def head_file(on: Study, draft: str) -> pathlib.Path:
    """Where the draft's head lies, if it has one."""
    return pathlib.Path(on.path(draft)) / "head.npz"


def measure(on: Study, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each method."""
    config, draft, temperature = on.config, cell["draft"], cell["temperature"]
    texts = decoding.tokenize(
        on.target, on.texts(config.timed_inputs), config.max_source_len or None
    )
    recorded = record(on, draft, temperature)
    steps = measure_costs(on, draft, temperature, recorded, texts)
    timings = Timings.of_row(steps)
    made = build(on, draft, temperature, timings)
    plain = gains.plain_method(on, temperature)
    timed = timing.side_by_side(
        {PLAIN: plain, **made},
        on.target,
        texts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        repeats=config.repeats,
        names=(config.target, draft),
        note=lambda state: int(state.drafter[1]) if state.drafter else 0,
    )
    alpha = on.alpha(draft, temperature, on.outputs(temperature)).value
    best = max(
        map(static, config.static),
        key=lambda name: timing.gain(timed[PLAIN], timed[name])["gain_decode"],
    )
    replayed = replay_all(on, draft, temperature, made, recorded, timings)
    return [
        {
            "method": name,
            "static": name in map(static, config.static),
            "settings": policies(on, draft).get(name, {}),
            "alpha": alpha,
            **timing.gain(timed[PLAIN], timed[name]),
            **{f"of_{key}": value for key, value in against(timed[best], timed[name]).items()},
            "best_static": best,
            "identical": timing.identical(timed[PLAIN], timed[name]) if not temperature else None,
            **counts(timed[name]),
            **replayed[name],
            "oracle_gain": replayed[ORACLE]["replayed_gain"],
            "timings": steps,
            "gamma_max": config.gamma_max,
            "widths": list(config.widths),
            "batch": 1,
            "timed_inputs": len(texts),
            "replayed_inputs": config.alpha_inputs,
            "repeats": config.repeats,
        }
        for name in made
    ]


def against(best: Timed, other: Timed) -> dict[str, float]:
    """How many times faster than the best static γ, decoding alone: median and quartiles of the
    ratio within a repeat."""
    ratio = best.per_token(best.decode) / other.per_token(other.decode)
    low, median, high = np.quantile(ratio, [0.25, 0.5, 0.75])
    return {"best": float(median), "best_low": float(low), "best_high": float(high)}


def counts(timed: Timed) -> dict[str, Any]:
    """Sums over the inputs."""
    tokens = sum(row.emitted for row in timed.rows)
    calls = sum(row.target_calls for row in timed.rows)
    return {
        "tau": tokens / calls,
        "tokens": tokens,
        "target_calls": calls,
        "draft_calls": sum(timed.notes),
        "drafted": sum(row.drafted for row in timed.rows),
        "accepted": sum(row.accepted for row in timed.rows),
    }


def record(on: Study, draft: str, temperature: float) -> Rollouts:
    """Rollouts along the target's outputs, with hidden states where a head can read them."""
    config, outputs = on.config, on.outputs(temperature)
    return rollouts.record(
        on.target,
        on.draft(draft),
        on.texts(len(outputs)),
        outputs,
        gamma_max=config.gamma_max,
        sampling=on.sampling(temperature),
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        batch_size=config.batch_size,
        max_source_len=config.max_source_len or None,
        hidden=draft not in NGRAMS,
    )


def measure_costs(on: Study, draft, temperature, recorded: Rollouts, texts) -> dict[str, Any]:
    """What a draft step, verify passes, rounds and calls take, in target steps."""
    meter = trace.make_meter(on, draft, temperature, recorded, texts, on.config.widths)
    for _ in range(COST_REPEATS):
        meter.take()
    return trace.in_steps(meter.costs(), on.config.gamma_max)


def build(on: Study, draft: str, temperature: float, timings: Timings) -> dict[str, Speculative]:
    """The loops of all methods, by name."""
    config = on.config
    drafter = gains.method(on, draft, temperature, 1).drafter
    prices = timings.prices(config.widths)

    def loop(policy: Policy, gamma: int, widths: Sequence[int] = ()) -> Speculative:
        made = gains.method(on, draft, temperature, gamma)
        return dataclasses.replace(
            made, drafter=Counting(drafter), policy=policy, widths=tuple(widths)
        )

    made = {static(gamma): loop(constant(gamma), gamma) for gamma in config.static}
    for name, settings in policies(on, draft).items():
        settings = dict(settings)
        if "prices" in inspect.signature(maker(name)).parameters:
            settings["prices"] = prices
        if name == "head":
            settings["params"] = head.load(head_file(on, draft))
        made[name] = loop(load(name, **settings), config.gamma_max, config.widths)
    return made


def replay_all(
    on: Study,
    draft: str,
    temperature: float,
    made: dict[str, Speculative],
    recorded: Rollouts,
    timings: Timings,
) -> dict[str, dict[str, float]]:
    """What each method, and the oracle, would gain on rollouts along the target's outputs, and the
    share of the time between the best static γ and the oracle that it saves."""
    config = on.config
    lines = evaluate(
        [Candidate(name, {}, made[name].policy) for name in policies(on, draft)],
        recorded,
        timings,
        timings.prices(config.widths),
        jax.random.key(config.seed),
        1 if temperature == 0 else config.draws,
    )
    by = {line["policy"]: line for line in lines}
    by |= {static(gamma): by[f"constant gamma={gamma}"] for gamma in config.static}
    return {
        name: {
            "replayed_gain": by[name]["gain"],
            "replayed_tau": by[name]["tau"],
            "closed": by[name]["closed"],
        }
        for name in (*made, ORACLE)
    }
