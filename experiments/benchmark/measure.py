"""What a case of each kind measures: in turns, so that a slow spell of the machine hits all."""

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import phases
from experiments.benchmark import forced, models, peers
from experiments.benchmark.cases import SHAPES, Case, step_bytes
from specjax import formulas, loop
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.decoding.outputs import check_finite, read_rows
from specjax.loop import Method
from specjax.measure import timing
from specjax.measure.timing import PLAIN, SPECULATIVE, Comparison, quartiles
from specjax.models.checkpoint import Checkpoint
from specjax.results import summarize
from specjax.sampling import Sampling, row_keys
from specjax.speculative import Speculative
from specjax.support import memory_maps

Rivals = dict[str, Callable[[], list[list[int]]]]
SILENT = "silent"
PAUSE = 0.2  # seconds after a peer, whose idle threads go on spinning for a while


class Lab:
    """A config, with the models of the case at hand."""

    def __init__(self, config):
        self.config = config
        self._models: dict[tuple, Checkpoint] = {}
        self._peer: tuple[Any, peers.Transformers | None] = (None, None)

    def pair(self, case: Case) -> tuple[Checkpoint, Checkpoint | None]:
        """Target and draft; those of other cases are let go first."""
        names = _names(case)
        self._models = {key: made for key, made in self._models.items() if key in names}
        if self._peer[0] != names:
            self._peer = None, None
        for key in names:
            if key not in self._models:
                name, dtype, weights, share = key
                made = models.make(name, dtype=dtype, weights=weights, share=share)
                jax.block_until_ready(jax.tree.leaves(made.model))
                self._models[key] = made
        found = [self._models[key] for key in names]
        return found[0], found[1] if case.draft else None

    def peer(self, case: Case) -> peers.Transformers:
        """transformers with the same models."""
        pair, (_, peer) = self.pair(case), self._peer
        if peer is None:
            peer = peers.Transformers(pair[0], pair[1] if case.share == 1 else None)
            self._peer = _names(case), peer
        return peer


def _names(case: Case) -> list[tuple[str, str, str, float]]:
    both = (case.target, 1.0), (case.draft, case.share)
    return [(name, case.dtype, case.weights, share) for name, share in both if name]


def measure(lab: Lab, case: Case) -> dict[str, Any]:
    """The fields of the case's row."""
    kinds = {"decode": decode, "silent": silent}
    with memory_maps.kept(methods=2 + case.gamma):  # loops, and programs for phases
        return kinds[case.kind](lab, case)


# --- both loops and their peers ------------------------------------------------------------------


def decode(lab: Lab, case: Case) -> dict[str, Any]:
    """Both loops, the peers, the phases of a round and the bandwidth, taking turns."""
    config, (target, draft) = lab.config, lab.pair(case)
    methods: dict[str, Method] = {PLAIN: plain_of(case, target)}
    take = None
    if draft is not None:
        methods[SPECULATIVE] = build(case, target, draft)
    rivals, note = _rivals(lab, case)
    ours: list[Comparison] = []
    samples: list[phases.Sample] = []
    theirs: dict[str, list[float]] = {name: [] for name in rivals}
    peer_tokens: dict[str, list[list[int]]] = {}
    speeds, order = [], random.Random(0)
    for repeat in range(config.repeats + 1):  # the first compiles
        ours.append(turn(case, target, methods, keys_of(config, repeat), order))
        # Before the rivals: torch's threads wait for more work at full speed for a while.
        if take is not None:
            samples.append(take())
        elif draft is not None:
            typical = case.tokens, round(_rounds(case))
            calls = [
                (by, functools.partial(begin, case, target, by), count)
                for by, count in zip(methods.values(), typical, strict=True)
            ]
            take = _stopwatch(config, case, target, draft, calls)
        for name, run in rivals.items():
            since = time.perf_counter()
            peer_tokens[name] = run()
            theirs[name].append(time.perf_counter() - since)
            time.sleep(PAUSE)
        speeds.append(bandwidth(config.bandwidth_mb))
    theirs, ours = {name: seconds[1:] for name, seconds in theirs.items()}, ours[1:]
    speed = float(np.median(speeds))
    row: dict[str, Any] = {
        "bandwidth_gb_s": speed / 1e9,
        "peer_note": note,
        "autoregressive": _pace(case, ours, PLAIN, 1e3 * _bytes(case, case.target) / speed)
        | _against(ours, PLAIN, theirs.get("generate"), peer_tokens.get("generate")),
    }
    if samples:
        costs, counts = phases.medians(samples, case.gamma), _counts(case, ours)
        read = case.gamma * _bytes(case, case.draft, case.share) + _bytes(case, case.target)
        floor = 1e3 * read / speed / counts["tau"]
        row["speculative"] = _pace(case, ours, SPECULATIVE, floor) | _against(
            ours, SPECULATIVE, theirs.get("assisted"), peer_tokens.get("assisted")
        )
        taken = counts["tau"], counts["gamma_mean"], costs.c, costs.v(case.gamma)
        overhead = costs.overhead(case.gamma, case.tokens, counts["rounds"])
        row |= counts | _speedup(ours, SPECULATIVE)
        row |= forced.expected(case.cell | row)
        row |= {
            "target_step_ms": 1e3 * float(costs.token),
            "c": costs.c,
            "v": costs.v(case.gamma),
            "overhead": overhead,  # with the share of what a call costs beside its rounds
            # Of an iteration, what is neither a draft step nor the verify pass.
            "overhead_share": float(costs.rest[-1] / costs.round_times(case.gamma)[-1]),
            "predicted": formulas.walltime_speedup_from_tau(*taken, overhead),
            "predicted_c_v": formulas.walltime_speedup_from_tau(*taken),
        }
    return row


def silent(lab: Lab, case: Case) -> dict[str, Any]:
    """Plain decoding and a speculative loop that drafts nothing, taking turns.

    Its verify pass has one position, as plain decoding's call has: it does the same work, and what
    a round needs besides. If it is faster, then plain decoding is slower than it could be, and
    every speedup over it is too high.
    """
    config, (target, draft) = lab.config, lab.pair(case)
    assert draft is not None, "a case of two models"
    methods: dict[str, Method] = {
        PLAIN: plain_of(case, target),
        SILENT: building.build(
            target,
            draft,
            gamma=case.gamma,
            sampling=Sampling(case.temperature),
            policy=forced.Silent(),
            passes=(1,),
        ),
    }
    order = random.Random(0)
    ours = [
        turn(case, target, methods, keys_of(config, repeat), order)
        for repeat in range(config.repeats + 1)  # the first compiles
    ][1:]
    floor_ms = 1e3 * _bytes(case, case.target) / bandwidth(config.bandwidth_mb)
    return {
        "autoregressive": _pace(case, ours, PLAIN, floor_ms),
        "silent": _pace(case, ours, SILENT, floor_ms),
        "verified": sum(row.verified for one in ours for row in one.outputs(SILENT)),
        "keys": config.repeats * config.keys_per_repeat,
        **_speedup(ours, SILENT),
    }


def keys_of(config, repeat: int) -> range:
    """Numbers of the keys that a repeat decodes with: no two repeats share one, and the first
    repeat, which compiles, has one."""
    if not repeat:
        return range(1)
    return range((repeat - 1) * config.keys_per_repeat, repeat * config.keys_per_repeat)


def turn(
    case: Case,
    target: Checkpoint,
    methods: Mapping[str, Method],
    keys: Sequence[int],
    order: random.Random,
) -> Comparison:
    """One repeat: every method once for each key, in an order drawn anew for each."""
    runs = {name: functools.partial(call, case, target, by) for name, by in methods.items()}
    return timing.in_turns(runs, keys, 1, order=order)


def build(case: Case, target: Checkpoint, draft: Checkpoint) -> Speculative:
    """The speculative loop with the case's rule."""
    rule = None if case.weights == "agreeing" else forced.ForcedRule(jnp.float32(case.alpha))
    chosen = Sampling(case.temperature)
    return building.build(target, draft, gamma=case.gamma, sampling=chosen, rule=rule)


def plain_of(case: Case, target: Checkpoint) -> Autoregressive:
    """The loop that it is compared with."""
    return building.plain(target, Sampling(case.temperature))


def begin(case: Case, target: Checkpoint, method: Method, key: int = 0):
    """Contexts and state before the first round, with the case's own buffer and a numbered key."""
    rows = jnp.arange(case.batch, dtype=jnp.int32)
    return loop.start(
        method,
        models.inputs(case, target),
        row_keys(jax.random.key(key), rows, jnp.zeros_like(rows)),
        jnp.full((case.batch,), case.tokens, jnp.int32),
        buffer_len=case.buffer,
    )


def call(case: Case, target: Checkpoint, method: Method, key: int = 0) -> timing.Run:
    """Decode the case's inputs once."""
    forces = isinstance(method.rule, forced.ForcedRule)
    first = time.perf_counter()
    context, state = jax.block_until_ready(begin(case, target, method, key))
    middle = time.perf_counter()
    run = forced.decode if forces else loop.decode
    state = jax.block_until_ready(run(method, context, state))
    end = time.perf_counter()
    check_finite(state, (case.target, case.draft))
    rows = read_rows(state, [(b, 0) for b in range(case.batch)], target)
    return end - middle, end - first, rows, None


def _rivals(lab: Lab, case: Case) -> tuple[Rivals, str]:
    """What transformers runs beside us, by name; or why it does not."""
    if not lab.config.peers:
        return {}, "skipped: --config.peers is off"
    if note := peers.absent():
        return {}, note
    if case.temperature > 0:
        return {}, "skipped: peers decode greedily"
    peer, ids = lab.peer(case), models.sources(case)
    rivals: Rivals = {"generate": functools.partial(peer.generate, ids, case.tokens)}
    # With random weights its assistant would be right once in 32,000 times.
    if case.draft and case.weights == "agreeing" and case.batch == case.share == 1:
        rivals["assisted"] = functools.partial(peer.generate, ids, case.tokens, case.gamma)
    return rivals, ""


def _pace(case: Case, ours: Sequence[Comparison], name: str, floor_ms: float) -> dict[str, Any]:
    """Milliseconds from one token of a row to its next, and tokens per second of all rows."""
    per_token = [1e3 * one.decode[name].mean() / case.tokens for one in ours]
    ms = float(np.median(per_token))
    return {
        **quartiles("ms", per_token),
        "whole_ms": float(np.median([1e3 * one.whole[name].mean() / case.tokens for one in ours])),
        "tokens_per_s": 1e3 * case.batch / ms,
        "floor_ms": floor_ms,
        "of_floor": floor_ms / ms,
    }


def _speedup(ours: Sequence[Comparison], name: str) -> dict[str, float | list[float]]:
    """Plain decoding's time over the other's, each over a repeat's keys; by repeat too."""
    speedups = [float(one.ratio(name)[0]) for one in ours]
    return {"speedups": speedups, **quartiles("speedup", speedups)}


def _against(
    ours: Sequence[Comparison],
    name: str,
    seconds: Sequence[float] | None,
    peer_tokens: list[list[int]] | None,
) -> dict[str, Any]:
    """The peer's whole call beside ours, encoders included; nothing where there is no peer."""
    if not seconds:
        return {}
    tokens = [row.tokens for row in ours[-1].rows[name][-1]]
    ratios = [theirs / one.whole[name].mean() for theirs, one in zip(seconds, ours, strict=True)]
    return {
        **quartiles("peer_ms", [1e3 * s / len(tokens[0]) for s in seconds]),
        **quartiles("times_peer", ratios),
        "peer_tokens_equal": peer_tokens == tokens,
    }


def _counts(case: Case, ours: Sequence[Comparison]) -> dict[str, Any]:
    """How many tokens a round gave over all keys, in the batch as a whole and by itself."""
    # The loop's own rounds: a finished row waits for the others.
    rounds = [
        [max(row.target_calls for row in batch) for batch in one.rows[SPECULATIVE]] for one in ours
    ]
    counts = summarize([row for one in ours for row in one.outputs()])
    mean = float(np.mean(rounds))
    low, high = np.quantile(case.tokens / np.array(rounds, float), [0.25, 0.75])
    return {
        "rounds_by_key": rounds,
        "rounds": mean,
        "tau": case.tokens / mean,
        "tau_low": float(low),
        "tau_high": float(high),
        "tau_rows": counts.tokens_per_iteration,
        "gamma_mean": counts.verified / counts.iterations,
        "alpha_seen": counts.mean_acceptance or 0.0,
        **counts.acceptance_fields(),
    }


def _rounds(case: Case) -> float:
    """That an output is expected to take."""
    alpha = 1.0 if case.weights == "agreeing" else case.alpha
    return forced.rounds(alpha, case.gamma, case.tokens, case.batch)[0]


# --- phases --------------------------------------------------------------------------------------


def _stopwatch(
    config, case: Case, target: Checkpoint, draft: Checkpoint, calls
) -> Callable[[], phases.Sample]:
    """Samples phases in the middle of an output, where a step costs what the mean one does."""
    method = build(case, target, draft)
    contexts, state = begin(case, target, method)
    length = jnp.full_like(state.length, 1 + case.tokens // 2)
    drafter = state.drafter._replace(end=length - 1)
    state = state.replace(length=length, drafter=drafter, limit=length + case.gamma + 1)
    return phases.stopwatch(method, contexts, state, case.gamma, steps=config.steps, calls=calls)


def _bytes(case: Case, name: str, share: float = 1.0) -> float:
    return step_bytes(
        SHAPES[name],
        batch=case.batch,
        source=case.source,
        slots=(case.tokens + 1) / 2,  # the mean over an output
        itemsize=jnp.dtype(case.dtype).itemsize,
        share=share,
    )


# --- the machine ---------------------------------------------------------------------------------


def bandwidth(megabytes: int) -> float:
    """Bytes per second that all cores read together: the better of a sum and of vector · matrix."""
    vector, matrix = _buffer(megabytes)
    best = 0.0
    for run in (_sum, _product):
        jax.block_until_ready(run(vector, matrix))
        first = time.perf_counter()
        jax.block_until_ready(run(vector, matrix))
        best = max(best, matrix.nbytes / (time.perf_counter() - first))
    return best


@functools.cache
def _buffer(megabytes: int):
    """Far larger than any cache, if megabytes is."""
    rows = max(1, megabytes * 2**20 // (4 * 4096))
    return jnp.ones((1, rows)), jnp.ones((rows, 4096))


@jax.jit
def _sum(vector, matrix):
    return jnp.sum(matrix, axis=1)


@jax.jit
def _product(vector, matrix):
    return vector @ matrix
