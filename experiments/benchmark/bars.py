"""What is demanded of the figures, and whether they meet it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmark.cases import Case, suite

Row = dict[str, Any]
NOISE = 0.03  # by which medians of timings in turns differ though nothing else does


@dataclasses.dataclass(frozen=True)
class Bar:
    """One demand. `figure` takes all rows, and gives None where they lack what it needs."""

    name: str
    demand: float
    figure: Callable[[Sequence[Row]], float | None]
    at_most: bool = False
    goal: float | None = None  # what is aimed at, beyond what is demanded

    def judge(self, rows: Sequence[Row]) -> tuple[float | None, str]:
        """The figure, and met, missed or not measured."""
        value = self.figure(rows)
        if value is None:
            return None, "not measured"
        met = value <= self.demand if self.at_most else value >= self.demand
        return value, "met" if met else "missed"


def bars(config) -> list[Bar]:
    """Those of the config's `bars`, "cpu" or "accelerator"; and that of the baseline, anywhere."""
    known = {"cpu": _cpu, "accelerator": _accelerator}
    if config.bars not in known:
        raise ValueError(f"bars={config.bars!r}: choose one of {', '.join(known)}.")
    return [*known[config.bars](config), *_baseline()]


def _baseline() -> list[Bar]:
    """A loop that drafts nothing is no faster than plain decoding, beyond what timings vary."""
    return [
        Bar(
            f"a loop that drafts nothing, over plain decoding, temperature {temperature:g}: the "
            "largest",
            1 + NOISE,
            largest({"kind": "silent", "temperature": temperature}, "speedup"),
            at_most=True,
        )
        for temperature in (0.0, 1.0)
    ]


def _cpu(config) -> list[Bar]:
    base = Case(**config.base.to_dict())
    plain = {"kind": "decode", "weights": "random", "batch": 1}
    large = {"target": "t5-large", "draft": "t5-small", "gamma": 3}
    few = {"target": base.target, "draft": base.draft, "gamma": 3, "share": 0.25, "alpha": 0.8}
    here = plain | {"target": base.target, "buffer": base.buffer, "source": base.source}
    return [
        Bar(
            f"{base.target}: times transformers' generate",
            1.6,
            one(here, "autoregressive", "times_peer"),
            goal=2.0,
        ),
        Bar(
            f"{base.target}: of the floor", 0.75, one(here, "autoregressive", "of_floor"), goal=0.9
        ),
        Bar(
            "embedded: times transformers' generate",
            3.0,
            one(plain | {"target": "embedded"}, "autoregressive", "times_peer"),
        ),
        Bar(
            "t5-large with t5-small, α=.8, γ=3: speedup over plain decoding",
            1.7,
            one(plain | large | {"alpha": 0.8}, "speedup_at_alpha"),
            goal=2.0,
        ),
        Bar(
            "the same, always agreeing: times transformers' assisted generation",
            2.0,
            one(plain | large | {"weights": "agreeing"}, "speculative", "times_peer"),
        ),
        Bar(
            f"{base.target} with {base.draft}, its head over a quarter of the ids: c",
            0.22,
            one(plain | few, "c"),
            at_most=True,
        ),
        Bar(
            "the same, α=.8, γ=3: speedup over plain decoding",
            1.4,
            one(plain | few, "speedup_at_alpha"),
        ),
        Bar(
            "overhead of the loop, of an iteration: the largest at batch 1",
            0.05,
            largest({"kind": "decode", "batch": 1}, "overhead_share"),
            at_most=True,
        ),
        *(
            Bar(
                f"ms per token, buffer of 2048 over 128, batch {batch}",
                1.15,
                _buffers(base, batch),
                at_most=True,
            )
            for batch in config.buffer_batches
        ),
        Bar("speedup off τ/(γc+v+overhead): the largest at batch 1", 0.1, _surprise, at_most=True),
    ]


def _accelerator(config) -> list[Bar]:
    base = Case(**config.base.to_dict())
    here = {
        "kind": "decode",
        "target": base.target,
        "weights": "random",
        "batch": 1,
        "buffer": base.buffer,
        "source": base.source,
        "temperature": 0.0,
    }
    phases = {"kind": "verify", "target": base.target}
    return [
        Bar(f"{base.target}: of the floor", 0.7, one(here, "autoregressive", "of_floor")),
        Bar(f"{base.target}: v(7)", 1.1, one(phases, "v_by_gamma", "7"), at_most=True),
        Bar(
            f"{base.target} with t5-small: c",
            0.05,
            one(phases | {"draft": "t5-small"}, "c"),
            at_most=True,
        ),
        Bar("Tables 2 and 4: speedup over τ/(γc+v), the smallest", 0.9, _promised(config)),
        Bar(
            f"{base.target}: times transformers' generate",
            3.0,
            one(here, "autoregressive", "times_peer"),
        ),
    ]


def select(rows: Sequence[Row], wanted: Row) -> list[Row]:
    """The rows that have these fields."""
    return [row for row in rows if wanted.items() <= row.items()]


def one(wanted: Row, *path: str) -> Callable[[Sequence[Row]], float | None]:
    """A field, by its path, of the first row that has these fields and it."""

    def figure(rows):
        found = (_at(row, path) for row in select(rows, wanted))
        return next((value for value in found if value is not None), None)

    return figure


def largest(wanted: Row, *path: str) -> Callable[[Sequence[Row]], float | None]:
    """The largest of a field."""

    def figure(rows):
        found = [_at(row, path) for row in select(rows, wanted)]
        return max((value for value in found if value is not None), default=None)

    return figure


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _buffers(base: Case, batch: int) -> Callable[[Sequence[Row]], float | None]:
    """Plain decoding after as many tokens."""

    def figure(rows):
        wanted = dataclasses.asdict(dataclasses.replace(base, batch=batch))
        del wanted["buffer"]
        small, large = (
            one(wanted | {"buffer": buffer}, "autoregressive", "ms")(rows) for buffer in (128, 2048)
        )
        return None if small is None or large is None else large / small

    return figure


def _surprise(rows: Sequence[Row]) -> float | None:
    """How far a measured speedup lies from its prediction."""
    found = [row for row in select(rows, {"kind": "decode", "batch": 1}) if "speedup" in row]
    return max((abs(row["speedup"] / row["predicted"] - 1) for row in found), default=None)


def _promised(config) -> Callable[[Sequence[Row]], float | None]:
    """The smallest share of what c and v promise, once all of the paper's rows are there."""

    def figure(rows):
        cells = [case.cell for case in suite(config)["paper"]]
        found = [row for cell in cells for row in select(rows, cell)[:1]]
        if not found or len(found) < len(cells):
            return None
        return min(row["speedup"] / row["predicted_c_v"] for row in found)

    return figure
