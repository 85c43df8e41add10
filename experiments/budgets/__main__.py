"""Which tokens to verify: tokens per time by the number of rows, in replay and by the clock.

    python -m experiments.budgets --config=configs/budgets.py:prose --workdir=runs/budgets_prose
    python -m experiments.budgets --config=configs/budgets.py:parse --workdir=runs/budgets_parse

Along outputs of the target, the draft's tokens and chances are recorded once for each temperature.
Replay then says what plain decoding, static γ and every policy get at each batch size, by times of
passes that are measured here, and by times of accelerators: flat up to a knee. Half of the outputs
choose the best static γ and the settings of policies; all figures are of the other half. Plain
decoding, the best static γ, together and early_stop also decode by the clock. Writes results.jsonl,
report.md and budgets.png to the workdir. A run that was cut off goes on where it was.
"""

import functools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import command, plots
from experiments.reproduce import study
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results
from specjax import policies
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.measure import batches, provenance, report
from specjax.measure.stopwatch import Stopwatch
from specjax.measure.timing import PLAIN
from specjax.policies import Costs, Policy
from specjax.replay.batches import Oracle, serve
from specjax.replay.rollouts import Rollouts
from specjax.sampling import row_keys
from specjax.support import command_line
from specjax.support.named import short

Row = dict[str, Any]
STATIC, EARLY, ORACLE, BY_SIZE = "best γ", "early_stop", "oracle", "by_batch_size"
MEASURED = "measured"
METHODS = (PLAIN, STATIC, BY_SIZE, "together", "fixed", "threshold", EARLY, ORACLE)


class Trace:
    """Rollouts of one temperature, in two halves."""

    def __init__(self, on: Study, temperature: float):
        config = on.config
        outputs = on.outputs(temperature, config.outputs)
        command_line.say(f"recording drafts along {len(outputs)} outputs, T = {temperature:g}")
        self.texts, self.seed = on.texts(len(outputs)), config.seed
        self.found = on.record(config.draft, temperature, outputs, config.gamma_max)

    def draw(self, half: int, number: int) -> tuple[Rollouts, Any]:
        """One half of the outputs in a random order, and keys that settle acceptance."""
        count = len(self.found.emitted)
        order = np.random.default_rng((self.seed, number)).permutation(np.arange(half, count, 2))
        index = jnp.asarray(order, jnp.int32)
        keys = row_keys(jax.random.key(self.seed), index, jnp.full_like(index, number))
        return jax.tree.map(lambda x: x[index], self.found), keys


def main(config, workdir: pathlib.Path) -> None:
    study.check_chain(config, "experiments.budgets compares budgets for chains")
    on = Study(config, open_results(workdir, config))
    rows = fill(on)
    sections = [section(some) for some in study.grouped(rows, "temperature", "times")]
    clocked = [row for row in rows if row.get("clock")]
    if clocked:
        sections.append(by_the_clock(clocked))
    plots.save(workdir / "budgets.png", draw_all(rows), dpi=80)
    title = "Tokens per time, of the better of plain decoding and the best static γ"
    sections.append(Section(title, images=("budgets.png",)))
    command.publish(workdir, f"{config.task}: verify budgets", sections, rows)


# --- what is measured ----------------------------------------------------------------------------


def fill(on: Study) -> list[Row]:
    """Measure every cell that is missing; all rows in order."""
    config = on.config
    cells: list[Row] = [
        {"temperature": t, "times": MEASURED, "batch": batch}
        for t in config.temperatures
        for batch in config.batch_sizes
    ]
    cells += [
        {"temperature": t, "times": f"knee {knee}", "batch": batch}
        for t in config.temperatures
        for knee in config.knees
        for batch in config.accelerator_batch_sizes
    ]
    traces = functools.cache(functools.partial(Trace, on))

    def measured(temperature: float, times: str, batch: int) -> Iterator[Row]:
        trace = traces(temperature)
        at: dict[str, Any] = {"temperature": temperature, "batch": batch}
        return measure(on, trace, times_of(on, trace, times=times, **at), kind=times, **at)

    def complete(cell: Row) -> bool:
        return study.find(on.results.done, {**cell, "method": ORACLE}) is not None

    return command.fill(on.results, cells, measured, lambda: identity(on), complete)


def times_of(on: Study, trace: Trace, *, temperature: float, times: str, batch: int) -> Costs:
    """Times of a batch's passes, in seconds or in target steps."""
    gamma = on.config.gamma_max
    # Those of each static γ, and between no draft and one token in each row.
    ends = {0, *on.config.static, gamma}
    sizes = sorted({batch * (length + 1) for length in ends} | {batch * 3 // 2})
    if times == MEASURED:
        command_line.say(f"timing passes of {batch} rows")
        return batches.pass_times(
            on.target,
            on.draft(on.config.draft),
            trace.texts,
            gamma=gamma,
            sampling=on.sampling(temperature),
            batch_size=batch,
            sizes=sizes[:-1],
            max_new_tokens=on.config.max_new_tokens,
            repeats=on.config.cost_repeats,
        )
    knee = int(times.removeprefix("knee "))
    passes = [max(1.0, size / knee) for size in sizes]
    return Costs(on.config.accelerator_c * passes[0], passes, positions=sizes)


def measure(
    on: Study, trace: Trace, times: Costs, *, temperature: float, batch: int, kind: str
) -> Iterator[Row]:
    """Rows of all methods in one cell, the oracle's last."""
    config, replayed = on.config, functools.partial(rate, trace, times, batch=batch)
    chosen = choose(config, replayed, times, batch)
    chosen[BY_SIZE] = table(on.results.done, temperature, kind, batch) | {batch: chosen[STATIC]}
    ways = {name: make(config, times, batch, name, chosen) for name in METHODS}
    at = {name: times.of_plain() if name == PLAIN else times for name in ways}
    rates = {
        name: np.array([rate(trace, at[name], way, batch=batch, half=1, draw=d).rate
                        for d in range(config.draws)])
        for name, way in ways.items()
    }  # fmt: skip
    best = max((PLAIN, STATIC), key=lambda name: rates[name].mean())
    clocked = kind == MEASURED and config.clocked
    clock = by_clock(on, trace, ways, times, temperature, batch) if clocked else {}
    for name, way in ways.items():
        found = rate(trace, at[name], way, batch=batch, half=1, draw=0)
        ratio = rates[name] / rates[best]
        yield {
            "method": name,
            "draft": study.relative(config.draft),
            "rate": float(rates[name].mean()),
            "of_better": float(ratio.mean()),
            "of_better_error": float(2 * ratio.std(ddof=1) / math.sqrt(len(ratio))),
            "better": best,
            "setting": setting if isinstance(setting := chosen.get(name), int | float) else None,
            "positions": float(found.positions / found.rounds),
            "tokens": float(found.tokens / found.rounds),
            "calls": float(found.calls / found.rounds),
            "accepted": float(found.accepted / jnp.maximum(found.verified, 1)),
            "draws": config.draws,
            "outputs": len(trace.texts) // 2,
            "sizes": list(times.positions),
            "passes": np.asarray(times.verify).tolist(),
            "draft_time": float(times.draft),
            "rest_time": float(times.rest[0]),
            **({"clock": clock[name]} if name in clock else {}),
        }


def rate(trace: Trace, times: Costs, policy: Policy, *, batch: int, half: int, draw: int):
    """Replay one method over half of the outputs."""
    found, keys = trace.draw(half, draw)
    return serve(policy, found, times, keys, rows=batch)


def choose(config: Any, replayed: Any, times: Costs, batch: int) -> dict[str, Any]:
    """The best static γ and the best settings of policies, on the first half of the outputs."""
    tried: dict[str, dict[Any, Any]] = {
        STATIC: {g: static(g) for g in config.static},
        "fixed": {n: policies.fixed(n) for n in (size - batch for size in times.positions)},
        "threshold": {t: policies.threshold(t) for t in config.thresholds},
        EARLY: {prior: policies.early_stop(times, prior) for prior in config.priors},
    }
    return {
        name: max(each, key=lambda one: float(replayed(each[one], half=0, draw=0).rate))
        for name, each in tried.items()
    }


def make(config: Any, times: Costs, batch: int, name: str, chosen: Mapping[str, Any]) -> Any:
    """The policy of a method."""
    if name == "together":
        return policies.together(times.of_rows(batch, config.gamma_max))
    made = {
        PLAIN: lambda: static(0),
        STATIC: lambda: static(chosen[STATIC]),
        BY_SIZE: lambda: policies.by_batch_size(chosen[BY_SIZE]),
        "fixed": lambda: policies.fixed(chosen["fixed"]),
        "threshold": lambda: policies.threshold(chosen["threshold"]),
        EARLY: lambda: policies.early_stop(times, chosen[EARLY]),
        ORACLE: lambda: Oracle(times),
    }
    return made[name]()


def static(gamma: int) -> policies.Policy:
    """γ tokens of each row, whatever the batch; γ ≥ 0."""
    return policies.by_batch_size({1: gamma})


def table(rows: Sequence[Row], temperature: float, times: str, batch: int) -> dict[int, int]:
    """The best γ of every smaller batch, by its number of rows, as vLLM's table has it."""
    return {
        row["batch"]: row["setting"]
        for row in rows
        if row["method"] == STATIC
        and (row["temperature"], row["times"]) == (temperature, times)
        and row["batch"] < batch
    }


# --- by the clock --------------------------------------------------------------------------------


def by_clock(
    on: Study, trace: Trace, ways: Mapping[str, Any], times: Costs, temperature: float,
    batch: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Tokens per second of some methods that decode the same inputs in turns, and of replay."""
    config = on.config
    count = max(batch, config.timed_inputs // batch * batch)
    if count > len(trace.texts):
        return {}
    texts = tokenize(on.target, trace.texts[:count], config.max_source_len or None)
    how = functools.partial(building.build, on.target, sampling=on.sampling(temperature))
    draft, gamma = on.draft(config.draft), int(ways[STATIC].lengths[-1])
    methods = {
        PLAIN: how(None),
        STATIC: how(draft, gamma=max(gamma, 1)),
        "together": how(draft, gamma=config.gamma_max, policy=ways["together"]),
        EARLY: how(draft, gamma=config.gamma_max, policy=ways[EARLY], passes=times.positions),
    }
    key = jax.random.key(config.seed)
    watch = Stopwatch(on.target, config.max_new_tokens, key, batch, config.repeats)
    found = watch.race(methods, texts)
    rates = {name: 1 / found.per_token(name) for name in methods}
    index = jnp.arange(count, dtype=jnp.int32)
    keys = row_keys(key, index, 0 * index)
    said = {}
    for name in methods:
        if name == STATIC and gamma == 0:
            continue
        time = tokens = 0.0
        for at in range(0, count, batch):
            some = slice(at, at + batch)
            trail = jax.tree.map(lambda x, some=some: x[some], trace.found)
            own = times.of_plain() if name == PLAIN else times
            replayed = serve(ways[name], trail, own, keys[some], rows=batch)
            time, tokens = time + float(replayed.time), tokens + int(replayed.tokens)
        said[name] = {
            "rate": float(np.median(rates[name])),
            "of_plain": float(np.median(rates[name] / rates[PLAIN])),
            "of_plain_range": [float(end(rates[name] / rates[PLAIN])) for end in (np.min, np.max)],
            "replayed": tokens / time,
            "identical": bool(found.identical(name)) if temperature == 0 else None,
        }
    return said


# --- what it says --------------------------------------------------------------------------------


def section(rows: Sequence[Row]) -> Section:
    """A line for each batch size."""
    first = rows[0]
    lines = [{row["method"]: row for row in some} for some in study.grouped(rows, "batch")]

    def of(name: str):
        def cell(line):
            row = line[name]
            return f"{row['of_better']:.2f} ± {row['of_better_error']:.2f}"

        return cell

    unit = "tokens/s" if first["times"] == MEASURED else "tokens/step"
    shown = [name for name in METHODS if name not in (PLAIN, STATIC)]
    columns: list[report.Column] = [
        ("rows", lambda line: str(line[PLAIN]["batch"])),
        (f"plain, {unit}", lambda line: f"{line[PLAIN]['rate']:.3g}"),
        ("best γ", lambda line: f"{line[STATIC]['setting']}: "
                                f"{line[STATIC]['rate'] / line[PLAIN]['rate']:.2f}"),
        *((name, of(name)) for name in shown),
        ("positions", lambda line: number(line[EARLY]["positions"])),
        ("accepted", lambda line: number(line[EARLY]["accepted"])),
    ]  # fmt: skip
    worst = min(line[EARLY]["of_better"] for line in lines)
    most = max(line[EARLY]["of_better"] for line in lines)
    return Section(
        f"{short(first['draft'])}, T={first['temperature']:g}, {first['times']}",
        columns,
        lines,
        f"{EARLY}: {worst:.2f} to {most:.2f} of the better of plain decoding and the best γ.",
        "Replay. best γ: of static ones, chosen on other outputs, and its speed relative to plain "
        "decoding. All others: tokens per time relative to the better of the two, with twice the "
        "standard error over orders of the outputs and draws. positions: verified by early_stop "
        "in a round of all rows. accepted: share of its drafted tokens.",
        measured=rows,
    )


def by_the_clock(rows: Sequence[Row]) -> Section:
    """Replay beside the clock."""
    plain = {
        (row["temperature"], row["batch"]): row["clock"]["rate"]
        for row in rows
        if row["method"] == PLAIN
    }

    def by_rates(row):
        rate = plain.get((row["temperature"], row["batch"]))
        return number(rate and row["clock"]["rate"] / rate)

    def repeats(row):
        return " to ".join(map(number, row["clock"]["of_plain_range"]))

    ranged = [("repeats", repeats)] if all("of_plain_range" in r["clock"] for r in rows) else []
    columns: list[report.Column] = [
        ("T", lambda row: f"{row['temperature']:g}"),
        ("rows", lambda row: str(row["batch"])),
        ("method", lambda row: row["method"]),
        ("tokens/s", lambda row: f"{row['clock']['rate']:.0f}"),
        ("of plain", lambda row: number(row["clock"]["of_plain"])),
        *ranged,
        ("by rates", by_rates),
        ("replayed / clock", lambda row: number(row["clock"]["replayed"] / row["clock"]["rate"])),
        ("identical", lambda row: {None: "–", True: "yes"}.get(row["clock"]["identical"], "NO")),
    ]
    return Section(
        "By the clock",
        columns,
        list(rows),
        provenance.busy(rows),
        "Tokens per second of the loops alone, medians, methods in turns; batches are decoded one "
        "after the other. of plain: the median ratio within a repeat. by rates: the ratio of the "
        "median rates; where both differ, the repeats do. replayed: what replay says for the same "
        "batches.",
    )


def draw_all(rows: Sequence[Row]) -> Figure:
    """A panel for each temperature and table of times."""
    panels = study.grouped(rows, "times", "temperature")
    across = len({row["temperature"] for row in rows})
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(1.5 + 4 * across, 0.6 + 2.6 * down), layout="constrained")
    each = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, some in zip(each.ravel(), panels, strict=True):
        sizes = sorted({row["batch"] for row in some})
        for i, name in enumerate(name for name in METHODS if name != PLAIN):
            mine = [row for size in sizes for row in some
                    if row["batch"] == size and row["method"] == name]  # fmt: skip
            middle = np.array([row["of_better"] for row in mine])
            error = np.array([row["of_better_error"] for row in mine])
            axes.plot(sizes, middle, label=name, **plots.line(i))
            axes.fill_between(sizes, middle - error, middle + error, alpha=0.15,
                              color=plots.line(i)["color"])  # fmt: skip
        axes.axhline(1, **plots.PLAIN)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        plots.bare(axes)
        axes.set_title(f"T = {some[0]['temperature']:g}, {some[0]['times']}", fontsize=9)
    each[-1][0].set_xlabel("rows")
    each[0][0].set_ylabel("tokens per time")
    figure.legend(*each[0][0].get_legend_handles_labels(), frameon=False, fontsize=8,
                  loc="outside right upper")  # fmt: skip
    return figure


if __name__ == "__main__":
    command.run(main, __doc__, "Sizes, methods, inputs.")
