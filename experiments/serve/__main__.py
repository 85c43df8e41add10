"""Rows admitted while others run, beside whole batches one after the other.

    python -m experiments.serve --config=configs/serve.py:parse --workdir=runs/serve-parse

For each temperature of the config, and outputs that end by themselves or at drawn budgets: tokens
per second of plain and of speculative decoding, in whole batches and with admission at so many free
rows, in turns. Then, at given rates of arrival, how long inputs wait for their first token and for
each token. Writes results.jsonl and report.md to the workdir. A run that was cut off goes on where
it was.

Arrivals are simulated on the same loop. Time advances by what its calls take, measured, and jumps
to the next arrival where nothing is left to do. Inputs that have arrived are admitted when the loop
returns. It does so every few rounds, and then the tokens of these rounds are known.
"""

import collections
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from rich.console import Console

from experiments.reproduce import pages
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results
from specjax import decoding
from specjax.decoding import Request, Running
from specjax.loop import Method
from specjax.measure import report
from specjax.measure.timing import Run, in_turns, quartiles
from specjax.results import Row
from specjax.support import command_line
from specjax.support.named import short

PLAIN, LENGTHS = "plain", ("own", "drawn")


def main(_) -> None:
    config = flags.FLAGS.config
    check(config)
    workdir = command_line.make_workdir(flags.FLAGS.workdir)
    on = Study(config, open_results(workdir, config))
    fill(on)
    rows = on.results.done
    sections = [make(rows, cell) for cell in cells(config) for make in (throughput, latency)]
    pages.write(workdir, f"{config.task}: rows admitted while others run", sections, rows)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False)
    pages.show(console, sections, rows)
    console.print(f"Report: {workdir / 'report.md'}", soft_wrap=True)


def check(config) -> None:
    """ValueError for what cannot be measured."""
    if wrong := [name for name in config.lengths if name not in LENGTHS]:
        raise ValueError(f"lengths has {wrong[0]!r}: each is one of {', '.join(LENGTHS)}.")
    if not 1 <= config.shortest <= config.max_new_tokens:
        raise ValueError(f"shortest={config.shortest} must lie in [1, max_new_tokens].")
    if wrong := [rate for rate in config.rates if rate <= 0]:
        raise ValueError(f"rates has {wrong[0]}: inputs per second are above 0.")
    if config.timed_inputs <= config.batch_size:
        raise ValueError(
            f"timed_inputs={config.timed_inputs} must be more than batch_size={config.batch_size}: "
            "nothing would be admitted."
        )


def cells(config) -> list[dict[str, Any]]:
    """What is measured one after the other."""
    each = ((t, name) for t in config.temperatures for name in config.lengths)
    return [{"temperature": temperature, "lengths": name} for temperature, name in each]


def fill(on: Study) -> None:
    """Measure every cell that is missing."""
    done = [{name: row[name] for name in ("temperature", "lengths")} for row in on.results.done]
    for cell in command_line.Steps(
        [cell for cell in cells(on.config) if cell not in done], unit="cell"
    ):
        made = measure(on, **cell)
        for row in made:
            on.results.append({**cell, **row, **identity(on)})


def measure(on: Study, temperature: float, lengths: str) -> list[dict[str, Any]]:
    """Rows of throughput and of latency. A cell is written as a whole."""
    methods = methods_of(on, temperature)
    requests = requests_of(on, lengths)
    return [*in_turn(on, methods, requests), *at_rates(on, methods, requests)]


def methods_of(on: Study, temperature: float) -> dict[str, Method]:
    """Plain decoding, and speculation with each draft."""
    how = on.sampling(temperature)
    made: dict[str, Method] = {PLAIN: decoding.plain(on.target, how)}
    for name in on.config.drafts:
        options: dict[str, Any] = {"gamma": on.config.gamma, "sampling": how}
        made[short(name)] = decoding.build(on.target, on.draft(name), **options)
    return made


def requests_of(on: Study, lengths: str) -> list[Request]:
    """The timed inputs, in their order, with the budgets of a kind."""
    config = on.config
    texts = on.texts(config.timed_inputs)
    ids = decoding.tokenize(on.target, texts, config.max_source_len or None)
    decoding.check_room(on.target, ids, config.max_new_tokens)
    most = np.full(len(ids), config.max_new_tokens)
    if lengths == "drawn":
        most = budgets(len(ids), config.shortest, config.max_new_tokens, config.seed)
    return [Request(i, 0, *each) for i, each in enumerate(zip(ids, most.tolist(), strict=True))]


def budgets(count: int, shortest: int, longest: int, seed: int) -> np.ndarray:
    """Log-uniform whole numbers in [shortest, longest]."""
    drawn = np.random.default_rng(seed).uniform(np.log(shortest), np.log(longest + 1), size=count)
    return np.floor(np.exp(drawn)).astype(int)


def running(on: Study, method: Method, requests: Sequence[Request], at_once: int) -> Running:
    """The config's rows, empty."""
    return Running(
        method,
        on.target,
        rows=on.config.batch_size,
        width=decoding.common_width([request.ids for request in requests]),
        max_new_tokens=on.config.max_new_tokens,
        key=jax.random.key(on.config.seed),
        at_once=at_once,
        names=(on.config.target, "draft"),
    )


# --- All inputs are there ------------------------------------------------------------------------


def in_turn(
    on: Study, methods: Mapping[str, Method], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Tokens per second of each method and each number of rows admitted at once."""
    config = on.config
    ways = sorted({*config.admits, config.batch_size})

    def run(method: Method, at_once: int, requests: Sequence[Request]) -> Run:
        begin = time.perf_counter()
        found = decoding.decoded(running(on, method, requests, at_once), requests)
        rows = sorted((row for row in found if isinstance(row, Row)), key=lambda row: row.index)
        seconds = time.perf_counter() - begin
        return seconds, seconds, rows, None

    runs = {
        f"{name}, {at_once}": functools.partial(run, method, at_once)
        for name, method in methods.items()
        for at_once in ways
    }
    for once in runs.values():
        once(requests)  # compiles
    timed = in_turns(runs, [requests], config.repeats)
    made = []
    for name in methods:
        batches = f"{name}, {config.batch_size}"
        for at_once in ways:
            way = f"{name}, {at_once}"
            rows, others = timed.outputs(way), timed.outputs(batches)
            made.append(
                {
                    "part": "throughput",
                    "method": name,
                    "admits": at_once,
                    **quartiles("tokens_per_s", 1 / timed.per_token(way)),
                    **quartiles("of_batches", timed.ratio(way, over=batches)),
                    "tokens": sum(row.emitted for row in rows),
                    "shortest": min(row.emitted for row in rows),
                    "median": float(np.median([row.emitted for row in rows])),
                    "longest": max(row.emitted for row in rows),
                    "differ": sum(a.tokens != b.tokens for a, b in zip(rows, others, strict=True)),
                    **setting(on),
                }
            )
    return made


def setting(on: Study) -> dict[str, Any]:
    """What every row says beside its numbers."""
    names = ("gamma", "timed_inputs", "repeats", "every")
    some = {name: on.config[name] for name in names}
    return {**some, "batch": on.config.batch_size, "load": round(os.getloadavg()[0], 2)}


# --- Inputs arrive -------------------------------------------------------------------------------


class Served(NamedTuple):
    """When what happened to an input, in seconds."""

    arrival: float
    first: float  # its first token is known
    end: float
    tokens: int


def at_rates(
    on: Study, methods: Mapping[str, Method], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Latency at each rate, for each method, in whole batches and with admission."""
    config = on.config
    ways = {"admitted": 1, "batches": config.batch_size}
    made = []
    for rate in config.rates:
        gaps = np.random.default_rng(config.seed).exponential(1 / rate, size=len(requests))
        arrivals = np.cumsum(gaps).tolist()
        for name, method in methods.items():
            for way, at_once in ways.items():
                empty = functools.partial(running, on, method, requests, at_once)
                few = requests[: 2 * config.batch_size]
                simulate(empty(), few, [0.0] * len(few), config.every)  # compiles
                served = simulate(empty(), requests, arrivals, config.every)
                made.append(
                    {
                        "part": "latency",
                        "method": name,
                        "way": way,
                        "rate": rate,
                        **summary(served),
                        **setting(on),
                    }
                )
    return made


def simulate(
    running: Running, requests: Sequence[Request], arrivals: Sequence[float], every: int
) -> list[Served]:
    """Decode requests as they arrive; `arrivals` ascend. In the order of the requests."""
    coming = collections.deque(zip(arrivals, requests, strict=True))
    arrived = {request.index: arrival for arrival, request in coming}
    first: dict[int, float] = {}
    served: dict[int, Served] = {}
    now = 0.0
    while coming or running.live:
        if not running.live:
            now = max(now, coming[0][0])
        begin = time.perf_counter()
        if running.free >= running.at_once:
            due: list[Request] = []
            while coming and coming[0][0] <= now and len(due) < running.free:
                due.append(coming.popleft()[1])
            running.admit(due)
        running.run(ended=1, rounds=every)
        ended, going = running.read()
        now += time.perf_counter() - begin
        for outputs in (ended, going):
            for row, (index, _) in outputs.labels.items():
                if outputs.stats.emitted[row]:
                    first.setdefault(index, now)
        for row, (index, _) in ended.labels.items():
            count = int(ended.stats.emitted[row])
            served[index] = Served(arrived[index], first[index], now, count)
    return [served[request.index] for request in requests]


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Medians and 95th percentiles: seconds to the first token; seconds from the arrival to the end
    for each token, as of Yu et al. (2022, Orca)."""
    first = [one.first - one.arrival for one in served]
    token = [(one.end - one.arrival) / one.tokens for one in served]
    found = {}
    for name, values in (("first", first), ("per_token", token)):
        for share in (50, 95):
            found[f"{name}_{share}"] = float(np.percentile(values, share))
    whole = max(one.end for one in served) - min(one.arrival for one in served)
    return {**found, "tokens_per_s": sum(one.tokens for one in served) / whole}


# --- The report ----------------------------------------------------------------------------------


def part(rows: Sequence[dict[str, Any]], cell: Mapping[str, Any], name: str) -> list[dict]:
    """The rows of a cell."""
    wanted = {**cell, "part": name}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def title(cell: Mapping[str, Any]) -> str:
    ends = {"own": "outputs end by themselves", "drawn": "budgets drawn for each input"}
    return f"T={cell['temperature']:g}, {ends[cell['lengths']]}"


def throughput(rows: Sequence[dict[str, Any]], cell: Mapping[str, Any]) -> Section:
    """Tokens per second when all inputs are there."""
    mine = part(rows, cell, "throughput")

    def ratio(row) -> str:
        low, high = row["of_batches_low"], row["of_batches_high"]
        return f"{row['of_batches']:.2f} ({low:.2f}–{high:.2f})"

    columns: list[report.Column] = [
        ("decoding", lambda row: row["method"]),
        ("admits", lambda row: "batches" if row["admits"] == row["batch"] else str(row["admits"])),
        ("tokens/s", lambda row: number(row["tokens_per_s"], 0)),
        ("of whole batches", ratio),
        ("tokens", lambda row: f"{row['tokens']:,}"),
        (
            "shortest, median, longest",
            lambda row: f"{row['shortest']}, {row['median']:g}, {row['longest']}",
        ),
        ("other tokens", lambda row: str(row["differ"])),
    ]
    return Section(
        f"{title(cell)}: tokens per second",
        columns,
        mine,
        "",
        "admits: free rows at which inputs are admitted; batches: all rows. of whole batches: the "
        "ratio within a repeat, median and quartiles; encoder and prefill are included, "
        "compilation is not. other tokens: outputs that differ from those of whole batches.",
    )


def latency(rows: Sequence[dict[str, Any]], cell: Mapping[str, Any]) -> Section:
    """Seconds at each rate of arrival."""
    mine = part(rows, cell, "latency")

    def both(name: str, scale: float, digits: int):
        return lambda row: " / ".join(
            number(scale * row[f"{name}_{share}"], digits) for share in (50, 95)
        )

    columns: list[report.Column] = [
        ("decoding", lambda row: row["method"]),
        ("rows are", lambda row: row["way"]),
        ("inputs/s", lambda row: f"{row['rate']:g}"),
        ("first token, s", both("first", 1, 3)),
        ("per token, ms", both("per_token", 1e3, 1)),
        ("tokens/s", lambda row: number(row["tokens_per_s"], 0)),
    ]
    return Section(
        f"{title(cell)}: latency",
        columns,
        mine,
        "",
        "Median / 95th percentile over inputs that arrive as a Poisson process. first token: from "
        "the arrival until the loop returns with it. per token: from the arrival to the end, over "
        "the tokens. Time is virtual: it advances by what calls take.",
    )


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "Rows, inputs, rates.", lock_config=True)
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flags_as_required(["config", "workdir"])
    command_line.run(main, __doc__)
