"""Where a policy's time goes: into deciding, or into rounds of mixed lengths.

Beside the policy, on the same inputs and in turns: a loop that is told the lengths of its rounds,
one that is told those of each output in ascending order, and loops whose rounds all have one
length. The last ones say what a round of each length takes by itself; the sum is what a mixture
should take.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt32
from rich.console import Console

from experiments.adaptive import race
from experiments.reproduce import speedups
from experiments.reproduce.study import Study
from specjax import log, loop
from specjax import sampling as smp
from specjax.measure import report, timing
from specjax.measure.timing import PLAIN
from specjax.policies import Policy
from specjax.policies.base import salts
from specjax.policies.loading import parse_with_costs
from specjax.pytrees import pytree
from specjax.sampling import Purpose
from specjax.tuning import fitting
from specjax.tuning.counting import Always, Counts
from specjax.tuning.fitting import CALL, POLICIES

TOLD, ASCENDING = "told its lengths", "told, ascending"


class Place(NamedTuple):
    """Which output a row is, and how many rounds it has begun."""

    output: Int[Array, " B"]
    round_: Int[Array, " B"]


@pytree
class Told(Policy):
    """Drafts as many tokens as a table says, by output and round."""

    marks: UInt32[np.ndarray, " N"]  # `salts` of each output
    lengths: Int[np.ndarray, "N R"]

    def init(self, keys, gamma_max):
        same = salts(keys)[:, None] == self.marks[None, :]
        return Place(smp.argmax(same.astype(jnp.float32)), jnp.zeros(keys.shape, jnp.int32))

    def begin(self, state, gamma_max):
        at = jnp.minimum(state.round_, self.lengths.shape[1] - 1)
        return state._replace(round_=state.round_ + 1), self.lengths[state.output, at]


def measure(on: Study, cell: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A row for each loop.

    Args:
      name: of the policy, with its settings or without.
    """
    config, texts = on.config, speedups.timed_texts(on)
    of = on, cell["draft"], cell["temperature"]
    costs = race.cost(on, cell)[POLICIES]
    policy = parse_with_costs(name, costs)
    widths = fitting.pruned(config.widths, costs)

    def made(policy: Policy):
        return race.loop(*of, policy, config.gamma_max, widths)

    marks, lengths = record(on, made(policy), texts)
    methods: dict[str, Any] = {
        PLAIN: speedups.plain_method(on, cell["temperature"]),
        name: made(policy),
        TOLD: made(Told(marks, filled(lengths))),
        ASCENDING: made(Told(marks, filled([sorted(each) for each in lengths]))),
    }
    for length in sorted({length for each in lengths for length in each}):
        methods[f"{length} drafted"] = made(Always(jnp.int32(length)))
    found = timing.side_by_side(
        methods,
        on.target,
        texts,
        max_new_tokens=config.max_new_tokens,
        key=jax.random.key(config.seed),
        repeats=config.repeats,
        names=(config.target, cell["draft"]),
        turn=config.turn,
        note=lambda state: (
            state.policy.rounds[0].tolist() if isinstance(state.policy, Counts) else None
        ),
    )
    took = {label: np.median(seconds, axis=0) for label, seconds in found.decode.items()}
    alone = {label: notes for label, notes in found.notes.items() if notes[0] is not None}
    calls = [
        ({CALL: 1, **{(POLICIES, k): n for k, n in enumerate(rounds) if n}}, seconds)
        for label, notes in alone.items()
        for rounds, seconds in zip(notes, took[label], strict=True)
    ]
    table = fitting.fit({POLICIES: fitting.passes(methods[name])}, calls)[POLICIES]
    cost = np.asarray(table.round_times(config.gamma_max))
    rows = []
    for label in methods:
        outputs = found.outputs(label)
        row = {
            "method": label,
            "seconds": float(took[label].sum()),
            "speedup_decode": float(took[PLAIN].sum() / took[label].sum()),
            "rounds": sum(row.target_calls for row in outputs),
            "drafted": sum(row.drafted for row in outputs),
        }
        by_input = alone.get(label)
        if label in (name, TOLD):
            by_input = [np.bincount(each, minlength=len(cost)) for each in lengths]
        if by_input is not None:
            row["sum"] = float(sum(table.call + np.dot(rounds, cost) for rounds in by_input))
        rows.append({**row, "batch": 1, "timed_inputs": len(texts), "repeats": config.repeats})
    return rows


def record(
    on: Study, method: Any, texts: Sequence[Sequence[int]]
) -> tuple[UInt32[np.ndarray, " N"], list[list[int]]]:
    """What a policy drafted in each round of each output, and the outputs' marks."""
    marks, lengths = [], []
    for index in range(len(texts)):
        key, budget = jax.random.key(on.config.seed), on.config.max_new_tokens
        context, state = timing.start(method, on.target, texts, [index], budget, key)
        own = smp.fold(state.keys, jnp.zeros_like(state.length), Purpose.POLICY)
        marks.append(np.asarray(salts(own))[0])
        state = state.replace(log=log.empty(len(state.done), budget, method.gamma_max))
        found = loop.decode(method, context, state).log
        lengths.append(np.asarray(found.drafted)[0, : int(found.written[0])].tolist())
    return np.array(marks), lengths


def filled(lengths: Sequence[Sequence[int]]) -> Int[np.ndarray, "N R"]:
    """A table; a shorter row goes on with its last length."""
    count = max(map(len, lengths))
    return np.array([[*each, *[each[-1]] * (count - len(each))] for each in lengths], np.int32)


def show(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print what each loop took, and what its rounds take by themselves."""
    columns: list[report.Column] = [
        ("", lambda row: row["method"]),
        ("ms", lambda row: f"{1e3 * row['seconds']:.1f}"),
        ("speedup", lambda row: f"{row['speedup_decode']:.3f}"),
        ("rounds", lambda row: str(row["rounds"])),
        ("drafted", lambda row: str(row["drafted"])),
        (
            "over the sum of its rounds",
            lambda row: f"{row['seconds'] / row['sum']:.3f}" if "sum" in row else "–",
        ),
    ]
    console.print(report.table(columns, rows, title))
