"""Costs of rounds and calls, fitted to whole calls that are known sums.

    plain call + tokens · token
    call + Σ over rounds of k drafted tokens of  pass(width) + [k > 0] · begin + k · draft

A first call of the drafter that yields no token takes begin + draft. Calls of one token are among
them: outputs of one length fit any split between the fixed time of a call and that of its rounds.
The parts are fitted by non-negative least squares. `Costs` also holds the error of the fit, and by
how much a longer draft was cheaper.

On an accelerator a loop with `fixed` drafts runs without waiting for the host. A round that the
budget cuts short takes as long as any other. So its rounds have one cost, valid for no other loop.

A wider pass can be the faster one: a matrix product has sizes that suit the machine. Costs assume
only passes that are faster than all wider ones, and `pruned` leaves a loop only these. So no draft
is cheaper than a shorter one.
"""

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from specjax.measure import doubts
from specjax.policies import Costs

CALL, PLAIN_CALL, TOKEN, BEGIN, DRAFT = "call", "plain call", "token", "begin", "draft"
DECIDE, DECIDE_TOKEN = "decide", "decide on a token"  # by loop
REFUSED = "refused"  # beyond a round that calls no drafter: the beginning of a draft, and a step
# The share of a round that a narrower pass must save: changing between passes costs as much.
SAVING = 0.02

# A call in units of work: `CALL`, `PLAIN_CALL`, `TOKEN`, `REFUSED`, and (loop, drafted tokens) for
# rounds.
Work = Mapping[Hashable, float]


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
    # Where no round drafts two tokens, a draft's beginning is part of its step.
    begins = any(kind[1] > 1 for work in works for kind in work if isinstance(kind, tuple))
    for name, widths in loops.items():
        for k in range(widths[-1]):
            own = _pass(name, widths, min(width for width in widths if width > k))
            parts[name, k] = {own: 1.0, BEGIN: float(k > 0 and begins), DRAFT: float(k)}
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
        "refused": took.get(BEGIN, 0.0) + took[DRAFT] if refusals else float("nan"),
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
