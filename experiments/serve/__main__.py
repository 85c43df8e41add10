"""Rows admitted while others run, beside whole batches one after the other.

    python -m experiments.serve --config=configs/serve.py:parse --workdir=runs/serve-parse

For each temperature of the config, and outputs that end by themselves or at drawn budgets: tokens
per second of plain and of speculative decoding, in whole batches and with admission at so many free
rows, in turns. Writes results.jsonl and report.md to the workdir. A run that was cut off goes on
where it was.
"""

import functools
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import command
from experiments.adaptive.board import within
from experiments.reproduce.pages import Section, number
from experiments.reproduce.study import Study, identity, open_results, rows_of
from specjax.decoding import building, streaming
from specjax.decoding.run import Run as Spec
from specjax.decoding.running import Running
from specjax.decoding.starting import Request
from specjax.decoding.texts import check_room, common_width, tokenize
from specjax.loop import Method
from specjax.measure import report
from specjax.measure.timing import Run, in_turns, quartiles
from specjax.results import Row
from specjax.support.named import short

PLAIN, LENGTHS = "plain", ("own", "drawn")


def main(config, workdir: pathlib.Path) -> None:
    check(config)
    on = Study(config, open_results(workdir, config))
    measured = functools.partial(measure, on)
    count = (1 + len(config.drafts)) * len({*config.admits, config.batch_size})

    def complete(cell: dict[str, Any]) -> bool:
        return len(rows_of(on.results.done, cell)) == count

    rows = command.fill(on.results, cells(config), measured, lambda: identity(on), complete)
    sections = [throughput(rows, cell) for cell in cells(config)]
    command.publish(workdir, f"{config.task}: rows admitted while others run", sections, rows)


def check(config) -> None:
    """ValueError for what cannot be measured."""
    if wrong := [name for name in config.lengths if name not in LENGTHS]:
        raise ValueError(f"lengths has {wrong[0]!r}: each is one of {', '.join(LENGTHS)}.")
    if not 1 <= config.shortest <= config.max_new_tokens:
        raise ValueError(f"shortest={config.shortest} must lie in [1, max_new_tokens].")
    if config.timed_inputs <= config.batch_size:
        raise ValueError(
            f"timed_inputs={config.timed_inputs} must be more than batch_size={config.batch_size}: "
            "nothing would be admitted."
        )


def cells(config) -> list[dict[str, Any]]:
    """What is measured one after the other."""
    each = ((t, name) for t in config.temperatures for name in config.lengths)
    return [{"temperature": temperature, "lengths": name} for temperature, name in each]


def measure(on: Study, temperature: float, lengths: str) -> list[dict[str, Any]]:
    """Rows of a cell, which is written as a whole."""
    return in_turn(on, methods_of(on, temperature), requests_of(on, lengths))


def methods_of(on: Study, temperature: float) -> dict[str, Method]:
    """Plain decoding, and speculation with each draft."""
    how = on.sampling(temperature)
    made: dict[str, Method] = {PLAIN: building.plain(on.target, how)}
    for name in on.config.drafts:
        options: dict[str, Any] = {"gamma": on.config.gamma, "sampling": how}
        made[short(name)] = building.build(on.target, on.draft(name), **options)
    return made


def requests_of(on: Study, lengths: str) -> list[Request]:
    """The timed inputs, in their order, with the budgets of a kind."""
    config = on.config
    texts = on.texts(config.timed_inputs)
    ids = tokenize(on.target, texts, config.max_source_len or None)
    check_room(on.target, ids, config.max_new_tokens)
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
        Spec(
            on.config.max_new_tokens,
            jax.random.key(on.config.seed),
            names=(on.config.target, "draft"),
        ),
        rows=on.config.batch_size,
        width=common_width([request.ids for request in requests]),
        at_once=at_once,
    )


def in_turn(
    on: Study, methods: Mapping[str, Method], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Tokens per second of each method and each number of rows admitted at once."""
    config = on.config
    ways = sorted({*config.admits, config.batch_size})

    def run(method: Method, at_once: int, requests: Sequence[Request]) -> Run:
        begin = time.perf_counter()
        found = streaming.decoded(running(on, method, requests, at_once), requests)
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
    names = ("gamma", "timed_inputs", "repeats")
    some = {name: on.config[name] for name in names}
    return {**some, "batch": on.config.batch_size, "load": round(os.getloadavg()[0], 2)}


def title(cell: Mapping[str, Any]) -> str:
    ends = {"own": "outputs end by themselves", "drawn": "budgets drawn for each input"}
    return f"T={cell['temperature']:g}, {ends[cell['lengths']]}"


def throughput(rows: Sequence[dict[str, Any]], cell: Mapping[str, Any]) -> Section:
    """Tokens per second of a cell's rows."""
    mine = rows_of(rows, cell)
    columns: list[report.Column] = [
        ("decoding", lambda row: row["method"]),
        ("admits", lambda row: "batches" if row["admits"] == row["batch"] else str(row["admits"])),
        ("tokens/s", lambda row: number(row["tokens_per_s"], 0)),
        ("of whole batches", lambda row: within(row, "of_batches")),
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


if __name__ == "__main__":
    command.run(main, __doc__, "Rows and inputs.")
