"""The fastest way to decode: plain decoding, drafts of one length, or a policy's decisions.

Decisions take time: a few percent of a round, more on an accelerator. Their gain depends on how far
tokens and outputs differ, which α does not show. So a trial decodes some texts in turns: by plain
decoding, by drafts of one length, of a second one if it promises about as much, and by the policy
if its costs prefer that. Every other batch chooses the fastest, and the rest measure it. With few
texts, costs and α alone decide.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import devices
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import check_room
from specjax.loop import Method
from specjax.measure import stopwatch, timing
from specjax.measure.stopwatch import of_length, static
from specjax.models.checkpoint import Checkpoint
from specjax.passes import widths
from specjax.policies import Costs
from specjax.policies.estimating import Estimating
from specjax.tuning import fitting
from specjax.tuning.recommendation import EQUAL_WITHIN
from specjax.types import Text

# Texts that a trial decodes in each way, or a batch of them; and a run's texts for each of these.
MIN_TRIAL_TEXTS, MAX_TRIAL_TEXTS, TEXTS_PER_TRIAL_TEXT = 4, 16, 32
# Gain of one length over the policy, without a trial. `own_costs` may be a tenth too low, and a
# policy may gain by the drafter's confidence, which the costs leave out.
MIN_PROMISE_WITHOUT_TRIAL = 1.25
POLICY = "the policy"  # the name of its loop in a trial
Report = Callable[[timing.Comparison], None]
# Gain of a policy over drafts of one length, in a trial, which has few outputs. Plain decoding is
# left for a gain of `EQUAL_WITHIN`.
MIN_GAIN_OF_DECISIONS = 1.02
# A second length is tried if it promises this share of the first one's speedup, since costs and α
# are no better known, and if it differs by this factor, since close lengths are alike.
MIN_PROMISE_OF_SECOND, MIN_RATIO_OF_LENGTHS = 0.95, 4 / 3


def fastest(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Text],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int = 1,
    max_source_len: int | None = None,
    names: tuple[str, str] = ("target", "draft"),
    say: timing.Say = timing.silent,
    report: Report = lambda found: None,
) -> Method:
    """Choose what decodes a run fastest, by the costs of the method's policy and by a trial.

    See `faster`. A trial needs 128 texts or more, and 32 batches. It takes 4 to 16 of them, or one
    batch if that is more, spread over the run.

    Args:
      texts: of the run.
      key: of the run; the trial draws independently of it.
      batch_size: rows decoded at once.
      say, report: see `faster`.
    """
    rows = max(1, batch_size)
    given = fitting.not_blank(target, texts)
    count = min(max(MAX_TRIAL_TEXTS, rows), len(given) // TEXTS_PER_TRIAL_TEXT) // rows * rows
    some: list[list[int]] = []
    if count >= MIN_TRIAL_TEXTS and max_new_tokens >= 1 and _estimating(method):
        some = fitting.tokenize(target, timing.spread(given, count), max_source_len)
        check_room(target, some, max_new_tokens)
    return faster(
        method, target, some, max_new_tokens=max_new_tokens, key=fitting.apart(key),
        batch_size=rows, names=names, say=say, report=report,
    )  # fmt: skip


def faster(
    method: Method,
    target: Checkpoint,
    texts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    key: Key[Array, ""],
    batch_size: int = 1,
    names: tuple[str, str] = ("target", "draft"),
    say: timing.Say = timing.silent,
    report: Report = lambda found: None,
    cost: Mapping[int, float] | None = None,
) -> Method:
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
      texts: ids from `decoding.texts.tokenize`, none empty, for the trial.
      key: independent of the run's key: the choice must not depend on draws of the run.
      say: reports what is compiled and timed.
      report: gets the comparison of a trial, in which `POLICY` is the method and `static`
        names drafts of one length. Every other batch of it chose (`Comparison.halves`).
      cost: costs of rounds in loops of their own, by the lengths to choose from, in the unit of the
        policy's costs. Default: `own_costs`; on an accelerator, before a trial, `timed_alone`, in
        seconds.
    """
    preferred = building.plain_if_preferred(method, max_new_tokens, batch_size)
    policy = _estimating(method)
    if policy is None:
        return preferred
    run: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "key": key, "batch_size": batch_size, "names": names,
        "say": say,
    }  # fmt: skip
    if cost is None and len(texts) and devices.is_accelerator(target.model):
        cost = timed_alone(method, target, texts[: max(stopwatch.TIMED_TEXTS, batch_size)], **run)
    cost = cost or own_costs(policy.costs, widths(method, bucket(batch_size)))
    rows = batch_size if policy.reads_batch else 1
    promised = policy.promised_alone(cost, rows)
    first, *others = promised
    bar = policy.promised_speedup(method.gamma_max, rows) if preferred is method else 1.0
    if not len(texts):
        clear = (
            not np.isnan(policy.costs.alpha) and promised[first] > MIN_PROMISE_WITHOUT_TRIAL * bar
        )
        return of_length(method, first) if clear else preferred
    close = [
        length for length in others
        if promised[length] >= MIN_PROMISE_OF_SECOND * promised[first]
        and max(length, first) >= MIN_RATIO_OF_LENGTHS * min(length, first)
    ]  # fmt: skip
    tried = [first, *close[:1]]
    if preferred is not method:
        tried = [length for length in tried if promised[length] > bar]
    if not tried:
        return preferred
    ways: dict[str, Method] = {POLICY: method} if preferred is method else {}
    ways[timing.PLAIN] = building.plain_of(method)  # costs may be off by more than their error
    ways |= {static(length): of_length(method, length) for length in tried}
    found = timing.side_by_side(ways, target, texts, repeats=2, **run)
    report(found)
    less = {POLICY: MIN_GAIN_OF_DECISIONS, timing.PLAIN: 1 - EQUAL_WITHIN}
    takes = {name: per_token(found.halves()[0], name) * less.get(name, 1) for name in ways}
    return ways[min(takes, key=lambda name: takes[name])]


def _estimating(method: Method) -> Estimating | None:
    """The policy, if it estimates what chains of each length promise."""
    policy = method.policy
    return policy if isinstance(policy, Estimating) and not method.branches else None


def per_token(found: timing.Comparison, name: str) -> float:
    """Seconds per token, by the faster repeat of each batch: a program's first calls are slow."""
    tokens = sum(row.emitted for row in found.outputs(name))
    return float(found.decode[name].min(axis=0).sum()) / tokens


def timed_alone(
    method: Any, target: Checkpoint, texts: Sequence[Sequence[int]], **run: Any
) -> dict[int, float]:
    """Time rounds with 1 … γ_max drafted tokens, each in a loop of that length; in seconds.

    Only the shortest and the longest are timed; rounds between are interpolated. For an
    accelerator: a policy's drafts wait for the host at each token and those of one length do not,
    so costs of the one do not hold for the other.

    Args:
      run: as in `faster`.
    """
    table = stopwatch.costs_of(method, target, texts, [1, method.gamma_max], repeats=3, **run)
    return dict(enumerate(table.round_times(method.gamma_max).tolist()[1:], 1))


def own_costs(table: Costs, widths: Sequence[int]) -> dict[int, float]:
    """Costs of a round with 1 … γ_max drafted tokens whose verify pass has room for no more.

    They are interpolated between the widths of passes that have a cost, from a token's on.
    Passes of a few positions may take a tenth more. The policy's time is included.
    """
    gamma, verify = table.gamma_max, np.asarray(table.verify + table.rest, np.float64)
    known = sorted({width - 1 for width in widths if 1 < width <= gamma} | {gamma})
    first = float(np.fmin(verify[0], float(table.token)))
    passes = np.interp(range(gamma + 1), [0, *known], [first, *verify[known]])
    return {k: float(passes[k] + k * float(table.draft)) for k in range(1, gamma + 1)}
