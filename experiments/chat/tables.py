"""Tables of decoded questions: functions from rows of results to figures and their cells.

A row is a method's share of a group (`groups.Decoder.decode`): its batches, the turns of each, and
of each turn the seconds by repeat and the outputs' counts. A block is the rows of one temperature
and batch size.

Intervals are of 95%, by a bootstrap over questions, and of times over batches of them. All methods
are resampled together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.measure.timing import PLAIN
from specjax.policies import Costs

Rows = Sequence[Mapping[str, Any]]
EVERY = "all"
RESAMPLES = 1000
WORDS = (
    "Methods decode the same prompts in turns; those of later turns hold plain decoding's answers. "
    "Prefill: seconds per input, all turns. τ: tokens per target call. Counts are per token of "
    "output. Verified: draft tokens that the target scored. Tested: those of them that the rule "
    "reached, up to the first rejection. Accepted and rejected: the tested ones. "
    "α: the accepted share of tested tokens and of rounds without a draft, which count as "
    "rejections. Speedup: of the loops alone, per token, over the fastest plain decoding. End to "
    "end: the same with the prefill. / best γ: over the best static γ of the same draft, chosen on "
    "one half of the inputs and applied to the other, both ways. Predicted: τ / (γc + v + "
    "overhead) for the rounds of a static γ. In brackets: 95% intervals, by a bootstrap over "
    "inputs, of times over batches; none for a single one."
)


class Estimate(NamedTuple):
    """A figure with its interval; NaN ends: no interval."""

    value: float
    low: float
    high: float


class Unit(NamedTuple):
    """A batch that one method decoded."""

    kind: str
    seconds: float  # of the loop, all turns, the median over repeats
    prefill: float  # NaN where it was not timed
    tokens: int  # of all rows
    waited: int  # tokens of the longest row, summed over turns
    turns: list[list[dict[str, Any]]]  # counts of all rows, by turn
    own: int  # rows that no other batch repeats


@dataclasses.dataclass(frozen=True)
class Block:
    """The batches of one temperature and batch size: for each method the same, in one order."""

    temperature: float
    batch: int
    units: Mapping[str, list[Unit]]
    facts: Mapping[str, Mapping[str, Any]]  # draft, gamma, policy and free of each method

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions, in order."""
        return [*dict.fromkeys(unit.kind for unit in self.units[PLAIN])]

    def of(self, kind: str) -> "Block":
        """Select the batches of one kind; `EVERY`: all."""
        if kind == EVERY:
            return self
        chosen = {name: [u for u in of if u.kind == kind] for name, of in self.units.items()}
        return dataclasses.replace(self, units=chosen)

    def static(self, draft: str) -> list[str]:
        """Names of the methods with a static γ of a draft, by γ."""
        found = [name for name in self.drafting(draft) if not self.facts[name]["policy"]]
        return sorted(found, key=lambda name: self.facts[name]["gamma"])

    def drafting(self, draft: str) -> list[str]:
        """Names of all methods with a draft."""
        return [name for name, facts in self.facts.items() if facts["draft"] == draft]

    @property
    def drafts(self) -> list[str]:
        """The drafts, in order."""
        return [*dict.fromkeys(f["draft"] for f in self.facts.values() if f["draft"])]

    @property
    def plains(self) -> list[str]:
        """Names of plain decoding, of which there may be two."""
        return [name for name, facts in self.facts.items() if not facts["draft"]]


def blocks(rows: Rows) -> list[Block]:
    """Collect rows into blocks, in their order. Groups that some method lacks are left out."""
    found = []
    for temperature, batch in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        some = [r for r in rows if (r["temperature"], r["batch"]) == (temperature, batch)]
        # Rows made before the field `free` was have none.
        facts = {
            r["method"]: {**{f: r[f] for f in ("draft", "gamma", "policy")},
                          "free": r.get("free", False)} for r in some
        }  # fmt: skip
        made: dict[tuple[str, int], dict[str, list[Unit]]] = {}
        for row in some:
            made.setdefault((row["category"], row["group"]), {})[row["method"]] = units(row)
        whole = [group for group in made.values() if group.keys() == facts.keys()]
        by_method = {name: [u for group in whole for u in group[name]] for name in facts}
        found.append(Block(temperature, batch, by_method, facts))
    return found


def units(row: Mapping[str, Any]) -> list[Unit]:
    """The batches of a row."""
    made = []
    for batch in row["batches"]:
        turns = [turn["outputs"] for turn in batch["turns"]]
        lengths = [[one["tokens"] for one in outputs] for outputs in turns]

        def took(what: str, batch: Mapping[str, Any] = batch) -> float:
            each = [turn.get(what) for turn in batch["turns"]]
            return np.nan if None in each else float(np.median(np.sum(each, axis=0)))

        made.append(
            Unit(
                row["category"],
                took("decode"),
                took("prefill"),
                sum(map(sum, lengths)),
                sum(map(max, lengths)),
                turns,
                len(batch["questions"]) - batch["filled"],
            )
        )
    return made


def questions(some: Sequence[Unit]) -> list[list[dict[str, Any]]]:
    """The outputs of each question, without repeated ones: its turns."""
    return [[turn[i] for turn in unit.turns] for unit in some for i in range(unit.own)]


def resamples(count: int, parts: int = 1) -> Int[np.ndarray, "B N"]:
    """How often each of `count` items is drawn, by resample; the first row is the items once.

    Args:
      parts: items i, i + parts, … are drawn among themselves.
    """
    generator = np.random.default_rng(0)
    drawn = np.ones((RESAMPLES + 1, count), np.int64)
    for part in range(parts):
        if some := len(range(part, count, parts)):
            share = np.full(some, 1 / some)
            drawn[1:, part::parts] = generator.multinomial(some, share, RESAMPLES)
    return drawn


def estimate(values: Float[np.ndarray, " B"], count: int) -> Estimate:
    """The figure of all items, with the interval of its resamples; none of a single item."""
    kept = values[1:][np.isfinite(values[1:])]
    if count < 2 or not len(kept):
        return Estimate(float(values[0]), np.nan, np.nan)
    return Estimate(float(values[0]), *np.quantile(kept, [0.025, 0.975]).tolist())


def acceptance(some: Sequence[Unit]) -> list[Estimate | None]:
    """P(position i is accepted | it was reached), i = 1 … γ; None where none was reached."""
    each = questions(some)
    lengths, tested = (
        np.array([np.sum([turn[name] for turn in turns], axis=0) for turns in each])
        for name in ("accepted_lengths", "tested")
    )
    drawn = resamples(len(each))
    reached = drawn @ tested
    passed = np.cumsum((drawn @ lengths)[:, ::-1], axis=1)[:, ::-1][:, 1:]
    rates = np.divide(passed, reached, out=np.full(reached.shape, np.nan), where=reached > 0)
    return [None if np.isnan(of[0]) else estimate(of, len(each)) for of in rates.T]


def times(some: Sequence[Unit], *, whole: bool = False) -> Float[np.ndarray, "2 N"]:
    """Seconds and tokens of each batch; with the prefill if `whole`."""
    took = [unit.seconds + (unit.prefill if whole else 0) for unit in some]
    return np.array([took, [unit.tokens for unit in some]], np.float64)


def per_token(some: Sequence[Unit], *, whole: bool = False) -> float:
    """Seconds of the loop for each token; with the prefill if `whole`."""
    seconds, tokens = times(some, whole=whole).sum(axis=1)
    return float(seconds / tokens)


def fastest_plain(block: Block, *, whole: bool = False) -> str:
    """The name of the faster plain decoding; with the prefill if `whole`."""
    return min(block.plains, key=lambda name: per_token(block.units[name], whole=whole))


def speedup(block: Block, name: str, *, whole: bool = False) -> Estimate:
    """Speedup per token over the fastest plain decoding; with the prefill if `whole`."""
    drawn = resamples(len(block.units[name]))
    plain = block.units[fastest_plain(block, whole=whole)]
    seconds, tokens = (drawn @ of for of in times(plain, whole=whole))
    own_seconds, own_tokens = (drawn @ of for of in times(block.units[name], whole=whole))
    return estimate(seconds / tokens / (own_seconds / own_tokens), drawn.shape[1])


def over_best(block: Block, name: str) -> Estimate | None:
    """Speedup over the best static γ of the same draft, chosen on other batches.

    None with fewer than two batches, or for plain decoding.
    """
    draft, count = block.facts[name]["draft"], len(block.units[name])
    if count < 2 or draft is None or not (rivals := block.static(draft)):
        return None
    took = [times(block.units[rival]) for rival in rivals]
    return over_fastest(np.array(took), times(block.units[name]))


def over_fastest(took: Float[np.ndarray, "R 2 N"], own: Float[np.ndarray, "2 N"]) -> Estimate:
    """Speedup over the fastest of R rivals, chosen on other items: seconds and tokens of each.

    A rival is the fastest on one half of the items, and its times on the other half count, both
    ways. Each resample chooses again.
    """
    count = took.shape[2]
    if count < 2:
        return Estimate(np.nan, np.nan, np.nan)
    drawn = resamples(count, parts=2)
    half = np.arange(count) % 2 == 0
    sums = [np.einsum("bn,rxn->brx", drawn * of, took) for of in (half, ~half)]
    best = [np.argmin(of[..., 0] / of[..., 1], axis=1) for of in sums]
    every = np.arange(len(drawn))
    chosen = sums[1][every, best[0]] + sums[0][every, best[1]]
    own_seconds, own_tokens = (drawn @ of for of in own)
    return estimate(chosen[:, 0] / chosen[:, 1] / (own_seconds / own_tokens), count)


def predicted(block: Block, name: str, costs: Costs) -> float | None:
    """Speedup over the fastest plain decoding that the costs promise; None of policies.

    Costs give it over `PLAIN`, and measured times make it one over the fastest.
    """
    facts = block.facts[name]
    if facts["policy"] or not facts["draft"]:
        return None
    waited = [
        [max(one[field] for one in outputs) for field in ("tokens", "target_calls", "draft_calls")]
        for unit in block.units[name]
        for outputs in unit.turns
    ]
    promised = costs.speedup(facts["gamma"], *np.mean(waited, axis=0).tolist())
    faster = per_token(block.units[fastest_plain(block)]) / per_token(block.units[PLAIN])
    return None if promised is None else promised * faster


def figures(
    block: Block, kind: str, name: str, costs: Mapping[str, Costs] | None = None
) -> dict[str, Any]:
    """All figures of a method on one kind of questions.

    Args:
      costs: by draft, of this temperature and batch size.
    """
    some = block.of(kind)
    each = questions(some.units[name])
    outputs = [one for turns in each for one in turns]
    facts = block.facts[name]
    total = {
        field: sum(one[field] for one in outputs)
        for field in ("tokens", "target_calls", "verified", "accepted")
    }
    tested = sum(sum(one["tested"]) for one in outputs)
    idle = sum(one["target_calls"] - sum(one["tested"][:1]) for one in outputs)  # without a draft
    prefill = sum(unit.prefill for unit in some.units[name]) / len(each)
    whole = speedup(some, name, whole=True)
    known = (costs or {}).get(facts["draft"] or "")
    return {
        **facts,
        "method": name,
        "kind": kind,
        "inputs": len(each),
        "tau": total["tokens"] / total["target_calls"],
        "acceptance": acceptance(some.units[name]) if facts["draft"] else [],
        "tested": np.sum([one["tested"] for one in outputs], axis=0).tolist(),
        **{
            field: count / total["tokens"] if facts["draft"] else None
            for field, count in {
                "verified": total["verified"],
                "tested_per_token": tested,
                "accepted": total["accepted"],
                "rejected": tested - total["accepted"],
            }.items()
        },
        "ms_per_token": 1e3 * per_token(some.units[name]),
        "alpha": total["accepted"] / (tested + idle) if facts["draft"] else None,
        "prefill": None if np.isnan(prefill) else prefill,
        "speedup": speedup(some, name),
        "end_to_end": None if np.isnan(whole.value) else whole,
        "over_best": over_best(some, name),
        "predicted": predicted(some, name, known) if known else None,
        "same": sum(all(one["same"] for one in turns) for turns in each),
    }


def table(block: Block, costs: Mapping[str, Costs] | None = None) -> list[dict[str, Any]]:
    """The figures of all methods, by kind and in all."""
    kinds = [*block.kinds, EVERY] if len(block.kinds) > 1 else block.kinds
    return [figures(block, kind, name, costs) for kind in kinds for name in block.units]
