"""Methods side by side on the same inputs, compilation excluded."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import decoding, drafters, loop
from specjax.accept import AcceptanceRule
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import cost
from specjax.measure.cost import Costs
from specjax.models.hub import Checkpoint
from specjax.paper.formulas import walltime_speedup_from_tau
from specjax.policies import Policy
from specjax.results import Row, summarize
from specjax.sampling import as_key, sampling
from specjax.speculative import Speculative
from specjax.state import State
from specjax.support.ranges import whole

# How plain decoding draws: rows that do not say it are of a time when it drew by Gumbel noise, V
# numbers a token, which inflated every speedup at temperatures above 0.
BASELINE = "draws as speculation does"


class Timed:
    """Seconds of one method, by repeat, summed over inputs; and the rows of the last repeat."""

    def __init__(self):
        self.batches: list[list[float]] = []  # of each batch, the loop alone
        self.end_to_end: list[float] = []  # with the encoder and prefill
        self.rows: list[Row] = []
        self.notes: list[Any] = []  # of the last repeat too

    def start_repeat(self) -> None:
        """Begin a new pass over the inputs."""
        self.batches.append([])
        self.end_to_end.append(0.0)
        self.rows, self.notes = [], []

    def add(self, decode: float, end_to_end: float, rows: Sequence[Row], note: Any) -> None:
        """One batch."""
        self.batches[-1].append(decode)
        self.end_to_end[-1] += end_to_end
        self.rows += rows
        self.notes.append(note)

    @property
    def decode(self) -> list[float]:
        """The loop alone."""
        return [sum(batches) for batches in self.batches]

    def part(self, repeats: slice) -> "Timed":
        """Some of the repeats, with the rows of the last of all."""
        some = Timed()
        some.batches, some.end_to_end = self.batches[repeats], self.end_to_end[repeats]
        some.rows, some.notes = self.rows, self.notes
        return some

    def by_batch(self) -> list[float]:
        """The loop alone, of each batch: medians over repeats."""
        return np.median(self.batches, axis=0).tolist()

    def per_token(self, seconds: list[float]) -> np.ndarray:
        """Seconds per emitted token, for each repeat."""
        return np.array(seconds) / sum(row.emitted for row in self.rows)


def side_by_side(
    methods: Mapping[str, Method],
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    repeats: int,
    batch_size: int = 1,
    budgets: Sequence[int] | None = None,
    names: tuple[str, str] = ("target", "draft"),
    between: Callable[[], None] = lambda: None,
    note: Callable[[State], Any] = lambda state: None,
) -> dict[str, Timed]:
    """Decode every text by every method, batch by batch, methods taking turns at each batch.

    Their order is drawn anew for each batch: a program is some percent faster if it was the last
    one that ran.

    Args:
      texts: ids from `decoding.tokenize`, none empty.
      batch_size: texts decoded at once.
      budgets: new tokens for each text, where it is to have fewer than max_new_tokens.
      names: of target and draft, for errors.
      between: is called after each batch; what is timed there meets the same machine.
      note: what to keep of each batch's final state.
    """
    batches = [range(len(texts))[at : at + batch_size] for at in range(0, len(texts), batch_size)]

    def once(timed: Timed, method: Method, batch: range) -> None:
        begin = time.perf_counter()
        context, state = jax.block_until_ready(
            start(
                method,
                target,
                texts,
                batch,
                max_new_tokens,
                key,
                rows=len(batches[0]),
                budgets=budgets,
            )
        )
        middle = time.perf_counter()
        state = jax.block_until_ready(loop.decode(method, context, state))
        end = time.perf_counter()
        decoding.check_finite(state, names)
        rows = decoding.read_rows(state, [(index, 0) for index in batch], target)
        timed.add(end - middle, end - begin, rows, note(state))

    def compile_(method: Method) -> None:
        compiled = Timed()
        compiled.start_repeat()
        once(compiled, method, batches[0])

    cost.at_once(compile_, methods.values())
    timed = {name: Timed() for name in methods}
    turns, order = list(methods), random.Random(0)
    for _ in range(repeats):
        for name in methods:
            timed[name].start_repeat()
        for batch in batches:
            order.shuffle(turns)
            for name in turns:
                once(timed[name], methods[name], batch)
            between()
    return timed


def start(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    batch: Sequence[int],
    max_new_tokens: int,
    key: Key[Array, ""],
    *,
    rows: int = 1,
    budgets: Sequence[int] | None = None,
):
    """(context, state) of some of the texts before the first round, in the shapes of them all."""
    context, state = decoding.prepare(
        method,
        target,
        [texts[index] for index in batch],
        [(index, 0) for index in batch],
        max_new_tokens=max_new_tokens,
        key=key,
        rows=bucket(rows),
        width=decoding.common_width(texts),
    )
    if budgets is not None:
        own = np.zeros(state.length.shape, np.int32)
        own[: len(batch)] = [budgets[index] for index in batch]
        state = state.replace(limit=jnp.minimum(state.limit, state.length + own))
    return context, state


def race(
    plain: Autoregressive,
    spec: Speculative,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    typical: tuple[float, float],
    max_new_tokens: int,
    key: Key[Array, ""],
    repeats: int,
    names: tuple[str, str] = ("target", "draft"),
) -> tuple[Timed, Timed, Costs]:
    """Both loops at batch 1 on the same inputs; phases and calls are timed in turns with them.

    Args:
      typical: tokens and rounds of a typical output.
    """
    gamma = spec.gamma_max
    methods: dict[str, Method] = {"autoregressive": plain, "speculative": spec}

    def begin(method: Method):
        return start(method, target, texts, [0], max_new_tokens, key)

    calls = [
        cost.Call(method, partial(begin, method), max(1, round(rounds)))
        for method, rounds in zip(methods.values(), typical, strict=True)
    ]
    contexts, state = begin(spec)
    meter = cost.Meter(spec, contexts, state, [gamma], [gamma], calls=calls)
    timed = side_by_side(
        methods,
        target,
        texts,
        max_new_tokens=max_new_tokens,
        key=key,
        repeats=repeats,
        names=names,
        between=meter.take,
    )
    return timed["autoregressive"], timed["speculative"], meter.costs()


def outcome(plain: Timed, spec: Timed, costs: Costs, gamma: int) -> dict[str, Any]:
    """What a `race` showed, as a row: counts, costs, and the speedup measured and predicted by τ.

    `predicted` is τ / (γc + v + overhead), γ being what was drafted: the budget or the drafter may
    end a draft. None where noise in the timings leaves an iteration no time at all.
    """
    counts, texts = summarize(spec.rows), len(spec.rows)
    tau, drafted = counts.tokens_per_iteration, counts.drafted / counts.iterations
    overhead = costs.call_overhead(gamma, counts.tokens / texts, counts.iterations / texts)
    lasts = drafted * costs.c + costs.v(gamma) + overhead > 0
    return {
        "tau": tau,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_by_position": [
            None if rate is None else round(rate, 4) for rate in counts.acceptance
        ],
        "c": costs.c,
        "v": costs.v(gamma),
        "round_overhead": costs.overhead(gamma),
        "overhead": overhead,
        "target_step_ms": 1e3 * costs.target_step,
        "draft_step_ms": 1e3 * costs.draft_step,
        "predicted": walltime_speedup_from_tau(tau, drafted, costs.c, costs.v(gamma), overhead)
        if lasts
        else None,
        **speedup(plain, spec),
        "autoregressive_ms_per_token": float(1e3 * np.median(plain.per_token(plain.decode))),
        "speculative_ms_per_token": float(1e3 * np.median(spec.per_token(spec.decode))),
        "tokens": counts.tokens,
        "target_calls": counts.iterations,
        "baseline": BASELINE,
    }


@dataclasses.dataclass(frozen=True)
class Times:
    """Where the time goes, and what speculation brings: beside plain decoding, without prefill."""

    phases: Mapping[str, float]
    """Seconds over all batches, by phase of the loop: an estimate, from phases that were timed by
    themselves, since within the jitted loop nothing can be."""
    c: float  # time(draft step) / time(target step), at this batch size
    v: float  # time(verify pass) / time(target step)
    expected_speedup: float | None
    """From the measured c, v and round. None: lost in noise."""
    measured_speedup: float = float("nan")  # of both loops in turns; NaN: only estimated
    measured_speedup_end_to_end: float = float("nan")  # the same with prefill


class Comparison(NamedTuple):
    """Both loops on the same inputs."""

    plain: Timed
    spec: Timed
    times: Times


def measure_speedup(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[str],
    *,
    gamma: int = 4,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = 1,
    max_source_len: int | None = None,
    rule: AcceptanceRule | str | None = None,
    policy: Policy | str | None = None,
    widths: Sequence[int] = (),
    repeats: int = 3,
) -> Times:
    """What speculation brings over plain decoding on these texts, measured and expected.

    Both loops decode every text in turns, `repeats` times after a first time that compiles. Blank
    sources of an encoder-decoder are left out. For the arguments and errors see `specjax.generate`;
    a policy that needs prices must be given them.

    Raises:
      ValueError: every text is blank, or repeats < 1.
    """
    whole("repeats", repeats, "[1, ∞)")
    chosen = sampling(temperature, top_k, top_p)
    how: dict[str, Any] = {"rule": rule, "policy": policy, "widths": widths}
    method = decoding.speculative(target, draft, gamma=gamma, sampling=chosen, **how)
    decoding.check_texts(texts)
    kept = [text for text in texts if not decoding.is_blank(target, text)]
    if not kept:
        raise ValueError("Nothing to measure: every text is blank.")
    return compare(
        method,
        target,
        decoding.tokenize(target, kept, max_source_len),
        max_new_tokens=max_new_tokens,
        key=as_key(key),
        batch_size=batch_size,
        names=(target.name, drafters.name_of(draft)),
        repeats=repeats,
    ).times


def compare(
    method: Speculative,
    target: Checkpoint,
    sources: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int,
    names: tuple[str, str] = ("target", "draft"),
    repeats: int = 3,
) -> Comparison:
    """Decode by both loops in turns, and estimate what the phases take.

    Args:
      sources: ids from `decoding.tokenize`, none empty, one output each.
    """
    plain = Autoregressive(method.target, method.sampling, method.eos_ids)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "key": key, "batch_size": batch_size
    }  # fmt: skip
    timed = side_by_side(
        {"plain": plain, "spec": method}, target, sources, repeats=repeats, names=names, **options
    )
    found = speedup(timed["plain"], timed["spec"])
    times = dataclasses.replace(
        estimate(method, target, sources, timed["spec"].rows, **options),
        measured_speedup=found["speedup_decode"],
        measured_speedup_end_to_end=found["speedup_end_to_end"],
    )
    return Comparison(timed["plain"], timed["spec"], times)


def estimate(
    method: Speculative,
    target: Checkpoint,
    sources: Sequence[Sequence[int]],
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int,
) -> Times:
    """Where a run of the jitted loop spent its time, and the speedup to expect.

    c, v and the round are timed on the first batch, with drafts of γ_max tokens, and multiplied by
    the rounds that each batch took.

    Args:
      sources: as in `compare`.
      rows: what the run gave.
    """
    gamma, first = method.gamma_max, range(min(batch_size, len(sources)))
    contexts, state = start(method, target, sources, first, max_new_tokens, key, rows=len(first))
    costs = cost.measure(method, contexts, state, [gamma], [gamma])
    # A batch lasts as long as its slowest row, and a round's drafting as long as its longest draft:
    # that is at least what the row that drafts most takes.
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    calls = sum(max(row.target_calls for row in batch) for batch in batches)
    tokens = sum(max(row.emitted for row in batch) for batch in batches)
    draft_steps = sum(max(row.drafted for row in batch) for batch in batches)
    drafting, verifying = draft_steps * costs.draft_step, calls * costs.verify[gamma]
    rest = calls * costs.overhead(gamma) * costs.target_step
    lasts = drafting + verifying + rest
    return Times(
        phases={"draft": drafting, "verify": verifying, "rest": max(rest, 0.0)},
        c=costs.c,
        v=costs.v(gamma),
        expected_speedup=tokens * costs.target_step / lasts if lasts > 0 else None,
    )


def speedup(plain: Timed, other: Timed) -> dict[str, float]:
    """How many times faster per token: medians over repeats of the ratio within one repeat.

    `speedup_decode` is that of the loops alone, with its quartiles as the noise.
    """
    decode_only = plain.per_token(plain.decode) / other.per_token(other.decode)
    whole = plain.per_token(plain.end_to_end) / other.per_token(other.end_to_end)
    low, median, high = np.quantile(decode_only, [0.25, 0.5, 0.75])
    return {
        "speedup_decode": float(median),
        "speedup_decode_low": float(low),
        "speedup_decode_high": float(high),
        "speedup_end_to_end": float(np.median(whole)),
    }


def identical(plain: Timed, other: Timed) -> bool:
    """Whether both gave the same tokens for every input."""
    both = zip(plain.rows, other.rows, strict=True)
    return all(one.tokens == another.tokens for one, another in both)
