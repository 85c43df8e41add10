"""Which drafter: a switch beside each of its drafters, on a stream of inputs of two kinds.

    python -m experiments.switch --config=configs/switch.py --workdir=runs/switch

Free inputs are those of the task. Copied ones hold a text and begin it again. For each temperature
of the config: what rounds cost with each drafter, which switches take; plain decoding, every
drafter and every switch with each γ, on both kinds of inputs in turns; and an oracle that knows
what each drafter would get. The best single drafter is chosen on every other repeat, and so is the
best switch; all figures are of the other repeats. Writes results.jsonl and report.md to the
workdir. A run that was cut off goes on where it was.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments.adaptive import race
from experiments.publish import publish
from experiments.reproduce import speedups
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results
from specjax import decoding
from specjax.drafters.choices import NAMES
from specjax.drafters.switch import Switched, switch
from specjax.loop import Method
from specjax.measure import provenance, report, stopwatch, timing
from specjax.measure.timing import PLAIN, Comparison, quartiles
from specjax.policies import Costs
from specjax.replay import along, rollouts
from specjax.replay.rollouts import Rollouts
from specjax.results import summarize
from specjax.sampling import row_keys
from specjax.speculative import Speculative
from specjax.state import State
from specjax.support import command_line, named
from specjax.support.named import short
from specjax.tasks.examples import Example
from specjax.tasks.prose import OPENING

FREE, COPIED = "free", "copied"


def main(_) -> None:
    config = flags.FLAGS.config
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    fill(on)
    rows = on.results.done
    sections = [section(rows, temperature) for temperature in config.temperatures]
    publish(workdir, f"{config.task}: which drafter", sections, rows)


def fill(on: Study) -> None:
    """Measure every temperature that is missing."""
    done = {row["temperature"] for row in on.results.done}
    for temperature in command_line.Steps([t for t in on.config.temperatures if t not in done]):
        for row in measure(on, temperature):
            on.results.append({"temperature": temperature, **row, **identity(on)})


def stream(on: Study) -> list[str]:
    """Inputs of both kinds in turns, the free ones first."""
    examples = on.examples[: on.config.timed_inputs]
    return [text for one in examples for text in (one.input, copied(one, on.config.copied_words))]


def copied(example: Example, words: int) -> str:
    """The beginning of an example's text, and the first words of it again on a new line."""
    text = (example.input + example.target).split(" ")[:words]
    return f"{' '.join(text)}\n{' '.join(text[:OPENING])}"


def measure(on: Study, temperature: float) -> list[dict[str, Any]]:
    """A row for each method, and one for the oracle."""
    config, texts = on.config, stream(on)
    ids = decoding.tokenize(on.target, texts, config.max_source_len or None)
    key = jax.random.key(config.seed)
    decoded: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "key": key}
    plain = speedups.plain_method(on, temperature)
    drafters = [on.draft(name) for name in config.drafts]
    loops = {
        name: {
            stopwatch.static(gamma): loop(on, made, temperature, gamma) for gamma in config.gammas
        }
        for name, made in zip(config.drafts, drafters, strict=True)
    }
    tables = {
        name: stopwatch.measure(
            each,
            on.target,
            ids,
            plain=plain,
            repeats=config.cost_repeats,
            names=(config.target, name),
            **decoded,
        )
        for name, each in loops.items()
    }
    methods: dict[str, Method] = {PLAIN: plain}
    of: dict[str, dict[str, Any]] = {}
    for gamma in config.gammas:
        costs = [cost(each[stopwatch.static(gamma)]) for each in tables.values()]
        made = {short(name): by[stopwatch.static(gamma)] for name, by in loops.items()}
        for choice in config.choices:
            chosen = switch(drafters, on.target, with_costs(choice, costs))
            made[choice] = loop(on, chosen, temperature, gamma)
        for who, method in made.items():
            name = f"{who}, γ = {gamma}"
            methods[name] = method
            of[name] = {"who": who, "gamma": gamma, "switch": who in config.choices, "costs": costs}
    found = timing.side_by_side(
        methods,
        on.target,
        ids,
        repeats=config.repeats,
        names=(config.target, "drafts"),
        note=drafted_rounds,
        **decoded,
    )
    single, early, timed = race.choose(found, [name for name in of if not of[name]["switch"]])
    best = max((name for name in of if of[name]["switch"]), key=lambda name: early[name])
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            **of[name],
            "best": name in (single, best),
            **figures(timed, name, single),
            "rounds": np.sum(timed.notes[name], axis=0).tolist(),
            "identical": timed.identical(name) if temperature == 0 else None,
            "batch": 1,
            "timed_inputs": len(texts),
            "repeats": config.repeats,
        }
        for name in of
    ]
    outputs = [row.tokens for row in timed.outputs(PLAIN)]
    ways = []
    for name, drafter in zip(config.drafts, drafters, strict=True):
        recorded = rollouts.record(
            on.target,
            drafter,
            texts,
            outputs,
            gamma_max=max(config.gammas),
            sampling=on.sampling(temperature),
            batch_size=config.batch_size,
            max_source_len=config.max_source_len or None,
            **decoded,
        )
        ways += [(recorded, table) for table in tables[name].values()]
    draws = 1 if temperature == 0 else config.draws
    bound = {"method": "oracle", "speedup_decode": oracle(ways, key, draws), "draws": draws}
    return [*rows, {**bound, "batch": 1, "timed_inputs": len(texts)}]


def drafted_rounds(state: State) -> list[int]:
    """Rounds in which each drafter of a switch drafted for the first row; [] without a switch."""
    own = state.drafter
    return own.drafted_rounds[0].tolist() if isinstance(own, Switched) else []


def loop(on: Study, draft: Any, temperature: float, gamma: int) -> Speculative:
    """The speculative loop with a drafter."""
    how = on.sampling(temperature)
    return decoding.speculative(on.target, draft, gamma=gamma, sampling=how)


def cost(table: Costs) -> float:
    """What a drafted token adds to a token of plain decoding, in such tokens: a round takes
    1 + γ · cost."""
    longest, token = float(table.round_times(table.gamma_max)[-1]), float(table.token)
    return max(longest / token - 1, 0.0) / table.gamma_max


def with_costs(choice: str, costs: Sequence[float]) -> Any:
    """The choice, with the costs if it takes any and has none."""
    missing = named.takes("choice", NAMES, choice, "costs") and "costs" not in choice
    return named.make("choice", NAMES, choice, **({"costs": tuple(costs)} if missing else {}))


def figures(timed: Comparison, name: str, single: str) -> dict[str, Any]:
    """Speedups on the stream and on each kind, and beside the best single drafter."""
    counts = summarize(timed.outputs(name))
    found = {
        "tau": counts.tokens_per_iteration,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        **counts.acceptance_fields(),
        "tokens": counts.tokens,
        **timed.speedups(name),
        **quartiles("of_best_single", timed.ratio(name, over=single)),
    }
    for first, kind in enumerate((FREE, COPIED)):
        part = some(timed, slice(first, None, 2))
        found[f"speedup_{kind}"] = part.speedups(name)["speedup_decode"]
        found[f"tau_{kind}"] = summarize(part.outputs(name)).tokens_per_iteration
    return found


def some(timed: Comparison, inputs: slice) -> Comparison:
    """The comparison on some of the inputs."""
    return dataclasses.replace(
        timed,
        decode={name: seconds[:, inputs] for name, seconds in timed.decode.items()},
        whole={name: seconds[:, inputs] for name, seconds in timed.whole.items()},
        rows={name: rows[inputs] for name, rows in timed.rows.items()},
        notes={name: notes[inputs] for name, notes in timed.notes.items()},
    )


def oracle(ways: Sequence[tuple[Rollouts, Costs]], key: Any, draws: int) -> float:
    """The speedup that no choice of drafters and lengths can exceed.

    It follows from costs and from what each drafter would get at each position: with a_i(t) of its
    tokens accepted at t of n,

        time(t) = min over drafters i, k ≤ a_i(t) of  cost_i(k) + time(min(t + k + 1, n))

    An idle drafter catches up for nothing.

    Args:
      ways: of the same outputs, for each drafter and each of its loops.
      draws: of the chances that decide about acceptance; by common numbers for all drafters.
    """
    first, table = ways[0]
    emitted = np.asarray(first.emitted).tolist()
    # Of a drafter that guesses, silence elsewhere is that of other rounds.
    silent = [np.asarray((one.length == 0) & (one.accepted < 0)) for one, _ in ways]
    times = [np.asarray(loop.round_times(loop.gamma_max), np.float64) for _, loop in ways]
    call = min(float(loop.call) for _, loop in ways)
    plain = draws * sum(n * float(table.token) + float(table.plain_call) for n in emitted)
    time = draws * len(emitted) * call
    for draw in range(draws):
        keys = row_keys(key, first.input_index, jnp.full(len(emitted), draw, jnp.int32))
        rejected = [np.asarray(along.first_rejections(one, keys)) for one, _ in ways]
        for row, count in enumerate(emitted):
            left = np.zeros(count + 1)
            for t in reversed(range(count)):
                found = []
                for quiet, spent, reject in zip(silent, times, rejected, strict=True):
                    most = min(len(spent) - 1, reject[row, t] - t)
                    says = int(np.argmax(np.append(quiet[row, t : t + most], True)))
                    for k in range(says + 1):
                        found.append(spent[k] + left[min(t + k + 1, count)])
                left[t] = min(found)
            time += left[0]
    return plain / time


def section(rows: Sequence[dict[str, Any]], temperature: float) -> Section:
    """A line for each method of a temperature."""
    mine = [row for row in rows if row["temperature"] == temperature]
    timed = [row for row in mine if row["method"] != "oracle"]
    columns: list[report.Column] = [
        ("method", lambda row: row["method"] + (" *" if row.get("best") else "")),
        ("τ", lambda row: number(row.get("tau"))),
        ("τ, free", lambda row: number(row.get("tau_free"))),
        ("τ, copied", lambda row: number(row.get("tau_copied"))),
        *report.acceptance(mine),
        ("rounds by", lambda row: "/".join(map(str, row.get("rounds", ()))) or "–"),
        ("speedup", lambda row: number(row["speedup_decode"])),
        ("free", lambda row: number(row.get("speedup_free"))),
        ("copied", lambda row: number(row.get("speedup_copied"))),
        ("of best single", between),
        ("identical", lambda row: {None: "–", True: "yes", False: "NO"}[row.get("identical")]),
    ]
    return Section(
        f"T={temperature:g}",
        columns,
        mine,
        provenance.busy(timed) or words(mine),
        "rounds by: each drafter of a switch, in their order. "
        "Speedups over plain decoding of the loops alone, on the whole stream and on each kind of "
        "inputs; medians of repeats in turns. of best single: ratio within a repeat to the best "
        "drafter by itself, with quartiles. *: the best single drafter and the best switch on the "
        "repeats that chose. oracle: by costs and replay, the best drafter and the best length in "
        "every round.",
        measured=timed,
    )


def between(row: Mapping[str, Any]) -> str:
    """A ratio with its quartiles."""
    if "of_best_single" not in row:
        return "–"
    low, high = row["of_best_single_low"], row["of_best_single_high"]
    return f"{row['of_best_single']:.2f} ({low:.2f}–{high:.2f})"


def words(rows: Sequence[dict[str, Any]]) -> str:
    """Whether a switch is worth it."""
    single, best = (
        next(row for row in rows if row.get("best") and row["switch"] is kind)
        for kind in (False, True)
    )
    bound = next(row for row in rows if row["method"] == "oracle")
    return (
        f"Best single drafter: {single['method']}, {single['speedup_decode']:.2f} times plain "
        f"decoding. Best switch: {best['method']}, {best['speedup_decode']:.2f}, "
        f"{between(best)} times the single one. The oracle: {bound['speedup_decode']:.2f}."
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Drafters, choices, inputs.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
