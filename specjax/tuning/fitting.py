"""Costs of rounds and calls on this machine, in seconds: fitted to whole calls of the loops.

A round timed by itself takes another time than within a call, whose first rounds find cold caches.
So whole calls are timed, on real inputs, in loops that draft the same number of tokens in every
round. Each call is a known sum:

    plain call + tokens · token
    call + Σ over rounds of k drafted tokens of  pass(width) + [k > 0] · begin + k · draft

A first call of the drafter that yields no token takes begin + draft.

Calls of one token are timed too: outputs of one length fit any split between the fixed time of a
call and the time of its rounds. Drafts have fixed lengths, but the loop's policy still decides,
since deciding takes time. The parts are fitted by non-negative least squares on medians over
interleaved repeats. `Costs` also holds the error of the fit, and by how much a longer draft was
cheaper.

On an accelerator a loop with `fixed` drafts runs without waiting for the host. A round that the
budget cuts short takes as long as any other. So its rounds have one cost, valid for no other loop.

A wider pass can be the faster one: a matrix product has sizes that suit the machine. Costs assume
only passes that are faster than all wider ones, and `pruned` leaves a loop only these. So no draft
is cheaper than a shorter one.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key
from scipy.optimize import nnls

from specjax import decoding, devices
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.loop import Method, decode
from specjax.measure import doubts, timing
from specjax.measure.timing import PLAIN
from specjax.models.checkpoint import Checkpoint
from specjax.passes import widths as widths_of
from specjax.policies import Costs, parse_with_costs, with_any_costs
from specjax.policies.base import counts_nodes
from specjax.speculative import Speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import counting, tree_costs
from specjax.tuning.counting import Always, Undecided
from specjax.tuning.pace import Pace, reduced
from specjax.types import Text

POLICIES = "policies"  # the loop that all policies share
CALL, PLAIN_CALL, TOKEN, BEGIN, DRAFT = "call", "plain call", "token", "begin", "draft"
DECIDE, DECIDE_TOKEN = "decide", "decide on a token"  # by loop
REFUSED = "refused"  # beyond a round that calls no drafter: the beginning of a draft, and a step
# The share of a round that a narrower pass must save: changing between passes costs as much.
SAVING = 0.02

ALPHA_TEXTS = 32  # texts from which α is estimated, at most
TIMED_TEXTS = 4  # texts that costs are measured on, or one batch
# Where time is short: the longest draft, whose loop compiles sooner; tokens of a timed call; and
# the share of the time for two repeats of all.
SHORT_GAMMA, MIN_TOKENS, MAX_SHARE_OF_TIMINGS = 4, 16, 0.5
LOOPS = 6  # that `costs_for` compiles, in programs of the size of plain decoding's

# A call in units of work: `CALL`, `PLAIN_CALL`, `TOKEN`, `REFUSED`, and (loop, drafted tokens) for
# rounds.
Work = Mapping[Hashable, float]


def measure(
    loops: Mapping[str, Speculative],
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    passes_of: Mapping[str, str] | None = None,
    plain: Autoregressive | None = None,
    longest: int | None = None,
    repeats: int = 5,
    batch_size: int = 1,
    turn: int = 1,
    untimed: Sequence[Sequence[int]] = (),
    refusals: bool = False,
    names: tuple[str, str] = ("target", "draft"),
    until: float = math.inf,
    say: timing.Say = timing.silent,
) -> dict[str, Costs]:
    """Time calls of the loops in turns, and fit their costs.

    α is counted by output, in the first loop, with drafts of medium length.

    Args:
      loops: by name, of one target and one drafter; each with its own γ_max and widths. Their
        policies decide, but draft lengths are given: those of `lengths_of`; γ_max alone where
        drafts are `fixed`, so these costs hold for no shorter draft; 1 and γ_max in a loop that
        shares the passes of another.
      texts: ids from `decoding.tokenize`, none empty. They are repeated to fill a batch.
      max_new_tokens: the budget of real calls, which sets the shapes.
      passes_of: loops that differ from another in their policy alone, and that other.
      plain: the plain loop, to time its tokens; without it `token` is NaN.
      longest: the budget of timed calls of more than one token; default max_new_tokens.
      batch_size: rows of a call; a batch lasts as long as the row with the most rounds.
      turn: calls of a turn, as in `timing.in_turns`.
      untimed: ids of more texts, which are decoded once each, for α alone.
      refusals: also time drafter calls that yield no token, in the first loop, as replay needs
        them. The policy of that loop is not `fixed`.
      until: the time of `time.monotonic` after which no more repeats or untimed texts begin.
      say: reports what is compiled and timed.
    """
    longest, width = longest or max_new_tokens, decoding.common_width([*texts, *untimed])
    whole = -(-len(texts) // batch_size) * batch_size
    filled = [texts[i % len(texts)] for i in range(whole)]
    passes_of = passes_of or {}
    made: dict[str, Method] = {PLAIN: plain} if plain else {}
    loop_of: dict[str, str] = {}
    for name, loop in loops.items():
        policy, usual = loop.policy, lengths_of(passes(loop, batch_size))
        if name in passes_of:
            policy, usual = Undecided() if policy.fixed else policy, [1, loop.gamma_max]
        for length in [loop.gamma_max] if policy.fixed else usual:
            label = f"{name}, {length} drafted"
            made[label] = dataclasses.replace(loop, policy=Always(jnp.int32(length), policy))
            loop_of[label] = name
    refusing = "a refused call"
    if refusals:
        name, loop = next(iter(loops.items()))
        always = Always(jnp.int32(loop.gamma_max), loop.policy, refuses=True)
        made[refusing] = dataclasses.replace(loop, policy=always)
        loop_of[refusing] = name
    found = timing.side_by_side(
        made,
        target,
        filled * 2,
        max_new_tokens=max_new_tokens,
        budgets=[1] * whole + [longest] * whole,
        key=key,
        repeats=repeats,
        batch_size=batch_size,
        turn=turn,
        width=width,
        names=names,
        note=counting.note,
        until=until,
        say=say,
    )
    half = whole // batch_size
    calls = [
        (_work(loop_of.get(label), done.rounds, label == refusing and budget), seconds)
        for label, notes in found.notes.items()
        for done, budget, seconds in zip(
            notes,
            [1] * half + [longest] * half,
            np.median(found.decode[label], axis=0),
            strict=True,
        )
    ]
    first = [label for label, name in loop_of.items() if name == next(iter(loops))]
    middle = first[(len(first) - refusals) // 2]
    counted = [done.tokens[:, :batch_size] for done in found.notes[middle][half:]]
    counted = [np.hstack(counted)[:, : len(texts)]]  # without those that fill a batch
    begin = partial(
        timing.start, made[middle], target, untimed, max_new_tokens=max_new_tokens, key=key,
        rows=batch_size, budgets=[longest] * len(untimed), width=width,
    )  # fmt: skip
    if untimed:
        say(f"decoding {len(untimed)} more texts for α")
    for at in range(0, len(untimed), batch_size):
        if monotonic() > until:
            break
        batch = range(len(untimed))[at : at + batch_size]
        done = counting.note(decode(made[middle], *begin(batch=batch)))
        counted.append(done.tokens[:, : len(batch)])
    shares = acceptance(*np.hstack(counted))
    widths = {
        name: passes(loop, batch_size) for name, loop in loops.items() if name not in passes_of
    }
    waits = devices.is_accelerator(target.model)
    steady = {name for name in widths if waits and loops[name].policy.fixed}
    return fit(widths, calls, *shares, passes_of=passes_of, steady=steady)


TYPICAL = 0.05  # prior of `Costs.between`, since few outputs may hide how far they differ
FEW = 2  # outputs that the prior counts as


def acceptance(accepted: np.ndarray, tested: np.ndarray) -> tuple[float, float, float]:
    """Estimate α, how far outputs differ (`Costs.between`), and the standard error of α.

    All are NaN if nothing was tested. How far outputs differ is the correlation b of two
    acceptances of one output, from mean squares between and within outputs. b is shrunk towards a
    typical value, since few outputs show little of it.

    With n tested tokens in each output, α has the variance

        α(1 − α) · Σ n² (b + (1 − b)/n) / (Σ n)²

    Args:
      accepted, tested: tokens of each output.
    """
    accepted, tested = accepted[tested > 0], tested[tested > 0]
    count, total = len(tested), tested.sum()
    if not count:
        return float("nan"), float("nan"), float("nan")
    rates, alpha = accepted / tested, accepted.sum() / total
    correlation, weight = 0.0, 0
    if 1 < count < total:
        apart = np.sum(tested * (rates - alpha) ** 2) / (count - 1)
        within = np.sum(accepted * (1 - rates)) / (total - count)
        size = (total - np.sum(tested**2) / total) / (count - 1)  # mean size of an output
        weight = count
        if apart > within:
            correlation = (apart - within) / (apart + (size - 1) * within)
    between = (FEW * TYPICAL + weight * correlation) / (FEW + weight)
    spread = np.sum(tested * (between * tested + 1 - between)) / total**2
    return float(alpha), float(between), float(np.sqrt(alpha * (1 - alpha) * spread))


def _work(loop: str | None, rounds: Sequence[int], refusing: int = 0) -> Work:
    """Describe a call in units of work.

    Args:
      loop: a name; None for plain decoding.
      rounds: as in `counting.Note`.
      refusing: the budget of a call whose rounds draft nothing. Its last token has no room for a
        draft, so the drafter is not called for it.
    """
    if loop is None:
        return {PLAIN_CALL: 1, TOKEN: rounds[0]}
    refused: Work = {REFUSED: rounds[0] - (rounds[0] == refusing)} if refusing > 1 else {}
    return {CALL: 1, **refused, **{(loop, k): count for k, count in enumerate(rounds) if count}}


def passes(loop: Speculative, batch_size: int = 1) -> tuple[int, ...]:
    """Widths of the verify passes that a loop of so many rows chooses from, ascending."""
    return tuple(widths_of(loop, bucket(batch_size)))


def lengths_of(widths: Sequence[int]) -> list[int]:
    """Choose draft lengths that determine all costs.

    They are 0, 1, and for each pass the shortest draft, the longest, and one between.
    """
    shortest = [0, *widths[:-1]]
    ends = zip(shortest, widths, strict=True)
    found = {n for least, width in ends for n in (least, (least + width - 1) // 2, width - 1)}
    return sorted(found | {0, 1})


def fit(
    loops: Mapping[str, Sequence[int]],
    calls: Sequence[tuple[Work, float]],
    alpha: float = float("nan"),
    between: float = float("nan"),
    alpha_error: float = float("nan"),
    passes_of: Mapping[str, str] | None = None,
    steady: Collection[str] = (),
) -> dict[str, Costs]:
    """Fit the costs of each loop to calls that are known sums.

    Args:
      loops: the widths of their verify passes, ascending, γ_max + 1 the last. Loops of a single
        pass share it where it is as wide.
      calls: the work of each call, and its seconds.
      alpha, between, alpha_error: see `Costs`.
      passes_of: more loops, each with the loop whose costs it shares, except for the time of its
        policy by call, by round and by drafted token.
      steady: those of `loops` whose rounds all take the same time, whatever they draft.

    Raises:
      ValueError: no call with a round of one of the loops, or one that took no time.
    """
    works, seconds = [work for work, _ in calls], [took for _, took in calls]
    doubts.check_clock(seconds)
    passes_of = passes_of or {}
    parts: dict[Hashable, Work] = {name: {name: 1.0} for name in (CALL, PLAIN_CALL, TOKEN)}
    parts[REFUSED] = {BEGIN: 1.0, DRAFT: 1.0}
    for name, widths in loops.items():
        for k in range(widths[-1]):
            own = _pass(name, widths, min(width for width in widths if width > k))
            parts[name, k] = {own: 1.0, BEGIN: float(k > 0), DRAFT: float(k)}
            if name in steady:
                parts[name, k] = {(name, "round"): 1.0}
    # A loop may have a fixed time of its own: a policy's state begins and ends with the call. A
    # first round also finds a wide pass cold, which calls of one round overstate. It can be
    # separated from the beginning of a draft only where refused calls were timed.
    own_call = set(passes_of)
    if refusals := any(REFUSED in work for work in works):
        own_call |= {name for name, widths in loops.items() if len(widths) == 1}
    parts |= {(CALL, name): {(CALL, name): 1.0} for name in own_call}
    for name, other in passes_of.items():
        for k in range(loops[other][-1]):
            decided: Work = {(DECIDE, name): 1.0, (DECIDE_TOKEN, name): float(k)}
            parts[name, k] = {**parts[other, k], **decided}
    sums = []
    for work in works:
        whose = {kind[0] for kind in work if isinstance(kind, tuple)}
        whose |= {passes_of[name] for name in whose if name in passes_of}
        begun: Work = {(CALL, name): 1.0 for name in own_call if name in whose}
        sums.append(_sum(parts, {**work, **begun}))
    took = unit_times(sums, seconds)
    fitted = np.array([sum(n * took[part] for part, n in work.items()) for work in sums])
    errors = np.abs(fitted / seconds - 1)
    facts: dict[str, Any] = {
        "error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "drop": _drop(loops, works, seconds),
        "token": max(took.get(TOKEN, float("nan")), float(np.finfo(np.float32).tiny)),
        "plain_call": took.get(PLAIN_CALL, float("nan")),
        "refused": took[BEGIN] + took[DRAFT] if refusals else float("nan"),
        "alpha": alpha,
        "between": between,
        "alpha_error": alpha_error,
    }
    found = {}
    for name, widths in loops.items():
        # Noise may leave nothing for a round beside calls and draft steps; `error` shows it.
        least = 0.01 * _mean_round(name, works, seconds)
        facts["call"] = took.get(CALL, 0.0) + took.get((CALL, name), 0.0)
        if name in steady:
            found[name] = Costs(0.0, [max(took[name, "round"], least)] * widths[-1], **facts)
            continue
        took_by = {width: took.get(_pass(name, widths, width)) for width in widths}
        verify = [max(time, least) for time in _verify(took_by, took.get(BEGIN, 0.0))]
        found[name] = Costs(took.get(DRAFT, 0.0), verify, **facts)
    for name, other in passes_of.items():
        each, once, call = (took.get((what, name), 0.0) for what in (DECIDE_TOKEN, DECIDE, CALL))
        row = found[other].as_row()
        row["draft"] += each
        row["verify"] = [verify + once for verify in row["verify"]]
        row["call"] += call
        found[name] = Costs(**row)
    return found


def _pass(loop: str, widths: Sequence[int], width: int) -> Hashable:
    """The kind of work of a verify pass. Loops of a single pass share it if it is as wide."""
    return "pass", "" if len(widths) == 1 else loop, width


def _verify(took: Mapping[int, float | None], begin: float) -> list[float]:
    """Compute the costs of rounds by 0 … γ_max drafted tokens, for a `pruned` loop.

    Args:
      took: time of each pass, by width, ascending. None: it never ran, and takes as much per
        position as the next narrower pass, or else as the next wider one.
    """
    first, *wider = took
    known = next(time for time in took.values() if time is not None)
    rounds: dict[int, float] = {}  # with a draft, without its steps
    for width, time in took.items():
        near = max(rounds, default=width)
        if time is not None:
            rounds[width] = time + begin
        else:
            rounds[width] = rounds.get(near, known + begin) * width / near
    left: list[int] = []  # ascending
    for width in reversed(wider):
        if not left or rounds[width] < (1 - SAVING) * rounds[left[0]]:
            left.insert(0, width)
    drafts = [rounds[min(w for w in (first, *left) if w > k)] for k in range(1, max(took))]
    return [rounds[first] - begin, *drafts]


def pruned(widths: Sequence[int], table: Costs) -> tuple[int, ...]:
    """Select the passes of a loop that its costs hold for: those that no wider pass undercuts.

    Args:
      widths: positions of each row, of the timed loop.
    """
    verify = np.asarray(table.verify)
    return tuple(w for w in widths if w > table.gamma_max or w == 1 or verify[w - 1] < verify[w])


def _mean_round(loop: str, works: Sequence[Work], seconds: Sequence[float]) -> float:
    """Compute the mean time of a round, from calls of this loop."""
    rounds = [
        sum(n for kind, n in work.items() if isinstance(kind, tuple) and kind[0] == loop)
        for work in works
    ]
    if not any(rounds):
        raise ValueError(f"No timed call has a round of {loop!r}.")
    return sum(took for took, n in zip(seconds, rounds, strict=True) if n) / sum(rounds)


def _sum(parts: Mapping[Hashable, Work], work: Work) -> dict[Hashable, float]:
    found: dict[Hashable, float] = {}
    for kind, count in work.items():
        for part, n in parts[kind].items():
            found[part] = found.get(part, 0.0) + count * n
    return found


def _drop(
    loops: Mapping[str, Sequence[int]], works: Sequence[Work], seconds: Sequence[float]
) -> float:
    """The largest share by which a longer draft, or a wider pass, is cheaper.

    Each kind of round may have any cost. Kinds that make up little of every call are left out. So
    are rounds without a draft: some contain a search in vain, which takes its own time.
    """
    free = unit_times(works, seconds, ordered=False)
    rounds = [{kind: n for kind, n in work.items() if isinstance(kind, tuple)} for work in works]
    main = {max(work, key=work.__getitem__) for work in rounds if work}
    orders = [[(name, k) for k in range(1, widths[-1])] for name, widths in loops.items()]
    alone = [(widths[0], name) for name, widths in loops.items() if len(widths) == 1]
    orders.append([(name, width - 1) for width, name in sorted(alone)])
    drops = [0.0]
    for order in orders:
        known = [free[kind] for kind in order if kind in main]
        drops += [
            1 - longer / shorter
            for shorter, longer in itertools.pairwise(known)
            if longer < shorter
        ]
    return max(drops)


def unit_times(
    works: Sequence[Work], seconds: Sequence[float], *, ordered: bool = True
) -> dict[Any, float]:
    """Estimate the time of a unit of each kind of work, from calls that are known sums.

    Least squares of the relative errors: a long call does not count for more than a short one.

    Args:
      works: for each call, the number of units of each kind.
      seconds: the time of each call, > 0.
      ordered: True: no unit takes a negative time. False: any sign.
    """
    kinds = list(dict.fromkeys(kind for work in works for kind in work))
    amounts = np.array([[work.get(kind, 0.0) for kind in kinds] for work in works])
    shares, ones = amounts / np.asarray(seconds)[:, None], np.ones(len(works))
    # Columns of one size: a draft step is a hundredth of a call.
    scale = np.maximum(np.linalg.norm(shares, axis=0), np.finfo(float).tiny)
    if ordered:
        found = nnls(shares / scale, ones)[0]
    else:
        found = np.linalg.lstsq(shares / scale, ones, rcond=None)[0]
    return dict(zip(kinds, (found / scale).tolist(), strict=True))


def apart(key: Key[Array, ""]) -> Key[Array, ""]:
    """Derive a key for measurements before a run with this key: no input has that index.

    Costs must not depend on draws of the run, or its outputs would not be draws from the target.
    """
    return jax.random.fold_in(key, np.uint32(2**32 - 1))


def not_blank(target: Checkpoint, texts: Sequence[Text]) -> list[Text]:
    """Select texts with at least one token: an empty prompt's output is no sample of the others."""
    return [text for text in texts if len(text) and not decoding.is_blank(target, text)]


def tokenize(
    target: Checkpoint, texts: Sequence[Text], max_source_len: int | None
) -> list[list[int]]:
    """Tokenize without warnings: the run will warn about texts that it cuts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return decoding.tokenize(target, texts, max_source_len)


def costs_for(
    policy: str,
    method: Speculative | TreeSpeculative,
    target: Checkpoint,
    texts: Sequence[Text],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int = 1,
    max_source_len: int | None = None,
    names: tuple[str, str] = ("target", "draft"),
    pace: Pace | None = None,
    say: timing.Say = timing.silent,
) -> Costs:
    """Measure the costs of this loop and of plain decoding, for a policy.

    Some texts, `batch_size` or four, are decoded up to 32 tokens, three times with drafts of each
    of a few lengths, after the compilation of two loops. More texts, up to
    `ALPHA_TEXTS` in all, are decoded once, for α. For a tree, single rounds are timed
    (`tree_costs.measure`), by depth, or by nodes if the policy sets their number.

    Args:
      policy: one that needs costs (`policies.needs_costs`), with or without its other settings.
      method: the loop that is measured; its own policy is not read.
      key: of the run; the measurements draw independently of the run.
      batch_size: rows decoded at once.
      pace: limits the time and reports a forecast. Where it is short, drafts have at most
        `SHORT_GAMMA` tokens, as the costs show, and fewer tokens are timed. Default: no limit and
        no forecast.
    """
    key, batch_size = apart(key), max(1, batch_size)
    given = not_blank(target, texts)
    timed = max(TIMED_TEXTS, batch_size)
    some = given[: max(timed, ALPHA_TEXTS)]
    sources = tokenize(target, some, max_source_len)
    if sources and max_new_tokens >= 1:
        decoding.check_room(target, sources, max_new_tokens)
        if method.branches:
            say("timing rounds of the tree, which compile first")
            return _costs_of_a_tree(policy, method, target, sources, key, batch_size)
        run: dict[str, Any] = {"max_new_tokens": max_new_tokens, "key": key}
        plain, longest, until = decoding.plain_of(method), min(max_new_tokens, 32), math.inf
        if pace is not None:
            width = decoding.common_width(sources)
            size: dict[str, Any] = {"rows": batch_size, "width": width}
            batches = -(-len(sources[:timed]) // batch_size)
            first_pass = partial(pace.first_pass, plain, target, sources[:timed], **run, **size)
            method, longest = _in_time(pace, first_pass, method, batches, longest)
            until = pace.until()
        deciding = with_any_costs(policy, method.gamma_max)
        if deciding.fixed:  # by costs that are not measured yet
            deciding = Undecided()
        loop: Any = dataclasses.replace(method, policy=deciding)
        return measure(
            {"loop": loop},
            target,
            sources[:timed],
            untimed=sources[timed:],
            plain=plain,
            longest=longest,
            repeats=3,
            batch_size=batch_size,
            names=names,
            until=until,
            say=say,
            **run,
        )["loop"]
    # Nothing will be decoded.
    return Costs(0.0, [1.0] * (method.slots if _by_nodes(policy) else method.gamma_max + 1))


def _in_time(
    pace: Pace, first_pass: Callable[..., None], method: Any, batches: int, longest: int
) -> tuple[Any, int]:
    """Shorten the drafts of a loop, and the tokens of a timed call, to fit into the time.

    Args:
      first_pass: takes numbers of loops and tokens, as in `Pace`.
      longest: tokens of a timed call.
    """
    calls = 2 * batches * (2 + method.gamma_max)  # two of each length and of plain decoding
    first_pass(LOOPS, 2 * calls * longest)
    if pace.is_short():
        gamma = min(method.gamma_max, SHORT_GAMMA)
        method = dataclasses.replace(method, gamma_max=gamma)
    counts = reduced(
        {"tokens": longest},
        {"tokens": MIN_TOKENS},
        lambda tokens: calls * tokens * pace.token,
        pace.left(MAX_SHARE_OF_TIMINGS),
    )
    return method, counts["tokens"]


def _costs_of_a_tree(policy, method, target, sources, key, batch_size) -> Costs:
    """Measure the costs of a tree, as `costs_for`. Sources are repeated to fill the batch."""
    contexts, state = decoding.prepare(
        method,
        target,
        [sources[index % len(sources)] for index in range(batch_size)],
        [(index, 0) for index in range(batch_size)],
        max_new_tokens=method.slots + 1,
        key=key,
        rows=bucket(batch_size),
    )
    return tree_costs.measure(method, contexts, state, _by_nodes(policy))


def _by_nodes(policy: str) -> bool:
    return counts_nodes(with_any_costs(policy))


def with_costs(
    method: Speculative | TreeSpeculative, policy: str, table: Costs, batch_size: int = 1
) -> Speculative | TreeSpeculative:
    """Build the loop with a policy by name, its costs, and the drafts and passes they hold for."""
    made = parse_with_costs(policy, table)
    if not method.branches:
        gamma = min(method.gamma_max, table.gamma_max)
        rows = bucket(batch_size)
        widths = {size: -(-size // rows) for size in method.passes}
        kept = pruned([width for width in widths.values() if width <= gamma], table)
        sizes = tuple(size for size, width in widths.items() if width in kept)
        method = dataclasses.replace(method, gamma_max=gamma, passes=sizes)  # type: ignore[arg-type]
    return decoding.with_policy(method, made)


# --- costs by loop: of `POLICIES`, whose passes are shared, of static γ, of policies by name -----


def static(gamma: int) -> str:
    """The name of the loop of a static draft length, whose only verify pass has γ + 1 positions."""
    return f"γ={gamma}"


def static_costs(found: Mapping[str, Costs], gamma: int) -> Costs:
    """Costs of the loop of a static γ. The verify pass is interpolated between timed γ.

    Raises:
      ValueError: a γ below or above all that were timed.
    """
    if own := found.get(static(gamma)):
        return own
    timed = _timed(found)
    known = [of.gamma_max for of in timed]
    if not known[0] <= gamma <= known[-1]:
        raise ValueError(f"γ={gamma} has no cost: those of {known[0]} … {known[-1]} were timed.")
    passes = [np.asarray(of.verify + of.rest) for of in timed]
    first, full = (float(np.interp(gamma, known, [of[at] for of in passes])) for at in (0, -1))
    return Costs(**timed[0].as_row() | {"verify": [first, *[full] * gamma], "rest": 0.0})


def alone(found: Mapping[str, Costs]) -> dict[int, float]:
    """Costs of a fully drafted round, by static γ, each in its own loop."""
    return {k: float(static_costs(found, k).round_times(k)[k]) for k in gammas(found)}


def gammas(found: Mapping[str, Costs]) -> range:
    """The range of static γ that `static_costs` covers: from the shortest timed to the longest."""
    timed = _timed(found)
    return range(timed[0].gamma_max, timed[-1].gamma_max + 1)


def _timed(found: Mapping[str, Costs]) -> list[Costs]:
    """Costs of the timed static γ, ascending."""
    timed = [of for name, of in found.items() if name == static(of.gamma_max)]
    return sorted(timed, key=lambda of: of.gamma_max)


def by_formula(
    c: float, verify: Sequence[float], overhead: float, widths: Sequence[int]
) -> dict[str, Costs]:
    """Build costs by the formula γc + v + overhead, in target steps.

    Args:
      verify: cost of the verify pass, by the 0 … γ_max drafted tokens that it has room for.
      widths: positions of each row of the passes that policies may choose.
    """
    gamma_max = len(verify) - 1
    room = [
        min({w - 1 for w in widths if n < w <= gamma_max} | {gamma_max})
        for n in range(gamma_max + 1)
    ]
    own = {
        static(gamma): Costs(c, [v] * (gamma + 1), rest=overhead)
        for gamma, v in enumerate(verify)
        if gamma
    }
    return {POLICIES: Costs(c, [verify[fits] for fits in room], rest=overhead), **own}


# --- in words ------------------------------------------------------------------------------------


def words(table: Costs) -> str:
    """Describe what rounds take, if costs are in seconds, and how good the fit is."""
    first, *_, last = (1e3 * table.round_times(table.gamma_max)).tolist()
    rounds = f"{first:.3g} ms for the smallest round, {last:.3g} for the largest."
    return rounds if np.isnan(table.error) else f"{rounds} {goodness(table)}"


def goodness(table: Costs) -> str:
    """Describe how good a fit is, in a sentence."""
    return (
        f"A timed call is {float(table.error):.1%} from its cost in the middle and at most "
        f"{float(table.largest_error):.0%}; a longer draft was timed as cheaper by at most "
        f"{float(table.drop):.0%}."
    )
