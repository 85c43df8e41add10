"""The fastest way to decode: plain decoding, drafts of one length, or a policy's decisions.

Decisions take time: a few percent of a round, more on an accelerator. Their gain depends on how far
tokens and outputs differ, which α does not show. So a trial decodes some texts in turns: by plain
decoding, by drafts of one length, of a second one if it promises about as much, and by the policy
if its costs prefer that. Every other batch chooses the fastest, and the rest measure it. With few
texts, costs and α alone decide.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specjax import devices
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import check_room
from specjax.loop import Method
from specjax.measure import costing, timing
from specjax.measure.costing import static, with_length
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.passes import widths
from specjax.policies import Costs
from specjax.policies.estimating import Estimating
from specjax.tuning.job import Job
from specjax.tuning.recommendation import EQUAL_WITHIN

# Texts that a trial decodes in each way, or a batch of them; and a run's texts for each of these.
MIN_TRIAL_TEXTS, MAX_TRIAL_TEXTS, TEXTS_PER_TRIAL_TEXT = 4, 16, 32
MAX_LOOPS = 4  # of a trial: with the policy, without a draft, and with two fixed lengths
REPEATS = 2
# Gain of one length over the policy, without a trial. `own_costs` may be a tenth too low, and a
# policy may gain by the drafter's confidence, which the costs leave out.
MIN_PROMISE_WITHOUT_TRIAL = 1.25
POLICY = "the policy"  # the name of its loop in a trial
# Gain of a policy over drafts of one length, in a trial, which has few outputs. Plain decoding is
# left for a gain of `EQUAL_WITHIN`.
MIN_GAIN_OF_DECISIONS = 1.02
# A second length is tried if it promises this share of the first one's speedup, since costs and α
# are no better known, and if it differs by this factor, since close lengths are alike.
MIN_PROMISE_OF_SECOND, MIN_RATIO_OF_LENGTHS = 0.95, 4 / 3


class Fastest(NamedTuple):
    """The loop that decodes, and the trial that chose it, if there was one.

    In a trial `POLICY` is the loop with its policy, and `static` names drafts of one length. Every
    other batch of it chose (`Comparison.halves`).
    """

    method: Method
    trial: timing.Comparison | None = None


def fastest(job: Job, method: Method, draft: str = "draft") -> Fastest:
    """Choose what decodes a job fastest, by the costs of the method's policy and by a trial.

    See `faster`. A trial needs 128 texts or more, and 32 batches. It takes 4 to 16 of them, or one
    batch if that is more, spread over the job; fewer where time is short.

    Args:
      draft: its name, for errors.
    """
    tokens, rows = REPEATS * MAX_LOOPS * job.max_new_tokens, job.rows  # of one text, in all loops
    affordable = job.pace.afford(tokens, texts=(len(job.texts), 2))["texts"]
    given = timing.spread(job.full, affordable)
    count = min(max(MAX_TRIAL_TEXTS, rows), len(given) // TEXTS_PER_TRIAL_TEXT) // rows * rows
    some: list[list[int]] = []
    if count >= MIN_TRIAL_TEXTS and _estimating(method):
        some = job.tokenize(timing.spread(given, count))
        check_room(job.target, some, job.max_new_tokens)
    return faster(job.watch(draft, REPEATS), method, some)


def faster(
    watch: Stopwatch, method: Method, texts: Texts, cost: Mapping[int, float] | None = None
) -> Fastest:
    """Choose the method, plain decoding, or drafts of one length.

    Plain decoding is chosen where the method's policy prefers it, or where nothing is faster by
    `EQUAL_WITHIN` in the trial. Drafts of one length are chosen only for an `Estimating` policy: if
    they take less time per token in the trial, or if the policy's decisions save less than
    `MIN_GAIN_OF_DECISIONS`.

    The length is the one that α promises most of, or another that promises `MIN_PROMISE_OF_SECOND`
    of it. Plain decoding is in every trial; where it is preferred, lengths that promise more are
    tried too. A trial's batches end with their last row: no row takes the place of another.

    Without a trial drafts of one length must promise `MIN_PROMISE_WITHOUT_TRIAL` times what is
    preferred, by a measured α: on a CPU a policy's rounds can be that slow if each has the widest
    verify pass. No clock is read then.

    Args:
      watch: its draws are independent of the run's: the choice must not depend on them.
      texts: for the trial; none: there is no trial.
      cost: costs of rounds in loops of their own, by the lengths to choose from, in the unit of the
        policy's costs. Default: `own_costs`; on an accelerator, before a trial, `timed_alone`, in
        seconds.
    """
    preferred = building.plain_if_preferred(method, watch.max_new_tokens, watch.batch_size)
    policy = _estimating(method)
    if policy is None:
        return Fastest(preferred)
    if cost is None and len(texts) and devices.is_accelerator(watch.target.model):
        cost = timed_alone(watch, method, texts)
    cost = cost or own_costs(policy.costs, widths(method, bucket(watch.batch_size)))
    rows = watch.batch_size if policy.reads_batch else 1
    promised = policy.promised_alone(cost, rows)
    first, *others = promised
    bar = policy.promised_speedup(method.gamma_max, rows) if preferred is method else 1.0
    if not len(texts):
        clear = (
            not np.isnan(policy.costs.alpha) and promised[first] > MIN_PROMISE_WITHOUT_TRIAL * bar
        )
        return Fastest(with_length(method, first) if clear else preferred)
    close = [
        length for length in others
        if promised[length] >= MIN_PROMISE_OF_SECOND * promised[first]
        and max(length, first) >= MIN_RATIO_OF_LENGTHS * min(length, first)
    ]  # fmt: skip
    tried = [first, *close[:1]]
    if preferred is not method:
        tried = [length for length in tried if promised[length] > bar]
    if not tried:
        return Fastest(preferred)
    ways: dict[str, Method] = {POLICY: method} if preferred is method else {}
    ways[timing.PLAIN] = building.plain_of(method)  # costs may be off by more than their error
    ways |= {static(length): with_length(method, length) for length in tried}
    found = watch.race(ways, texts)
    less = {POLICY: MIN_GAIN_OF_DECISIONS, timing.PLAIN: 1 - EQUAL_WITHIN}
    takes = {name: per_token(found.halves()[0], name) * less.get(name, 1) for name in ways}
    return Fastest(ways[min(takes, key=lambda name: takes[name])], found)


def reasons(found: Fastest, tuned: Method, policy: str) -> str:
    """Explain the choice of `fastest` in a sentence or two.

    Args:
      tuned: the loop with the policy of this name and its costs.
    """
    method, timed = found
    name = POLICY if method is tuned else static(method.gamma_max)
    if method.gamma_max == 0:  # plain decoding drafts nothing
        how = f"was {EQUAL_WITHIN:.0%} faster in a trial" if timed else "pays by its costs and α"
        return f"No draft is worth its time: none {how}."
    if method is tuned:
        what = f"{policy} decides how long drafts are, at most {tuned.gamma_max} tokens"
    elif timed:
        what = f"Drafts of {method.gamma_max} in every round were the fastest of a trial"
    else:
        what = f"Drafts of {method.gamma_max} in every round promise more than {policy}"
    if timed is None:
        return f"{what}. No trial timed it: costs and α chose."
    chose, rest = timed.halves()
    speedup = per_token(rest, timing.PLAIN) / per_token(rest, name)
    new = "that did not choose" if len(chose.rows[name]) < len(timed.rows[name]) else "that chose"
    return (
        f"{what}. The loop is {speedup:.2f} times as fast as plain decoding, on "
        f"{len(rest.outputs(name))} inputs {new}."
    )


def _estimating(method: Method) -> Estimating | None:
    """The policy, if it estimates what chains of each length promise."""
    policy = method.policy
    return policy if isinstance(policy, Estimating) and not method.branches else None


def per_token(found: timing.Comparison, name: str) -> float:
    """Seconds per token, by the faster repeat of each batch: a program's first calls are slow."""
    tokens = sum(row.emitted for row in found.outputs(name))
    return float(found.decode[name].min(axis=0).sum()) / tokens


def timed_alone(watch: Stopwatch, method: Method, texts: Texts) -> dict[int, float]:
    """Time rounds with 1 … γ_max drafted tokens, each in a loop of that length; in seconds.

    Only the shortest and the longest are timed; rounds between are interpolated. For an
    accelerator: a policy's drafts wait for the host at each token and those of one length do not,
    so costs of the one do not hold for the other.
    """
    watch = dataclasses.replace(watch, repeats=3)
    some = texts[: max(costing.TIMED_TEXTS, watch.batch_size)]
    table = costing.costs_of(watch, method, some, [1, method.gamma_max])
    return dict(enumerate(table.round_times(method.gamma_max).tolist()[1:], 1))


def own_costs(table: Costs, widths: tuple[int, ...] | list[int]) -> dict[int, float]:
    """Costs of a round with 1 … γ_max drafted tokens whose verify pass has room for no more.

    They are interpolated between the widths of passes that have a cost, from a token's on.
    Passes of a few positions may take a tenth more. The policy's time is included.
    """
    gamma, verify = table.gamma_max, np.asarray(table.verify + table.rest, np.float64)
    known = sorted({width - 1 for width in widths if 1 < width <= gamma} | {gamma})
    first = float(np.fmin(verify[0], float(table.token)))
    passes = np.interp(range(gamma + 1), [0, *known], [first, *verify[known]])
    return {k: float(passes[k] + k * float(table.draft)) for k in range(1, gamma + 1)}
