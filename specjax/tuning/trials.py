"""What decodes in the end: plain decoding, drafts of one length, or what a policy decides.

Decisions take time: a few percent of a round, more on an accelerator. What they bring depends on
how far tokens and outputs differ, which no α says. So some texts are decoded in turns by plain
decoding, by drafts of one length, and of another if it promises about as much, and by the policy's
decisions if its costs prefer these; and the fastest stays. Where there are few texts, costs and
α alone say which.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import decoding, devices
from specjax.loop import Method
from specjax.measure import timing
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs, constant
from specjax.policies.estimating import Estimating
from specjax.speculative import Speculative
from specjax.tuning import fitting
from specjax.types import Text

# Texts that a trial decodes in each way, or a batch of them. Of a run at most one in so many.
MIN_TRIAL_TEXTS, MAX_TRIAL_TEXTS, TEXTS_PER_TRIAL_TEXT = 4, 16, 32
TIMED_TEXTS = 4  # texts that costs are measured on, or a batch
# Of one length over the policy, where there is no trial: its cost may be a tenth too low
# (`own_costs`), and a policy may gain by the drafter's beliefs, which the costs leave out.
MIN_PROMISE_WITHOUT_TRIAL = 1.25
# Of a policy over drafts of one length in a trial, which has few outputs.
MIN_GAIN_OF_DECISIONS = 1.02
# A second length is tried if it promises this share of what the first does, since costs and α are
# no better known, and if it is longer or shorter by this factor: close lengths differ little.
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
) -> Method:
    """What decodes a run fastest, by what the method's policy knows and by a trial.

    See `faster`. Of 128 texts or more, and 32 batches, a few are for a trial, from all over the
    run: 4 to 16, or one batch where that is more.

    Args:
      texts: of the run.
      key: that of the run, which draws apart from the trial.
      batch_size: rows decoded at once.
    """
    rows = max(1, batch_size)
    given = fitting.not_blank(target, texts)
    count = min(max(MAX_TRIAL_TEXTS, rows), len(given) // TEXTS_PER_TRIAL_TEXT) // rows * rows
    some: list[list[int]] = []
    if count >= MIN_TRIAL_TEXTS and max_new_tokens >= 1 and _estimating(method):
        some = fitting.tokenize(target, timing.spread(given, count), max_source_len)
        decoding.check_room(target, some, max_new_tokens)
    return faster(
        method, target, some, max_new_tokens=max_new_tokens, key=fitting.apart(key),
        batch_size=rows, names=names,
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
    cost: Mapping[int, float] | None = None,
) -> Method:
    """The method, or plain decoding where its policy prefers that; or, if the policy is one of
    `Estimating`, drafts of one length, if these decode the texts in less time for a token, or if
    the policy's decisions save less than `MIN_GAIN_OF_DECISIONS` says.

    The length is the one that α promises most of, or another that promises `MIN_PROMISE_OF_SECOND`
    of it. Plain decoding is in every trial; where it is preferred, lengths that promise more are
    tried too. A trial's batches end with their last row: no row takes the place of another.

    Without a trial drafts of one length must promise `MIN_PROMISE_WITHOUT_TRIAL` times what is
    preferred, by an α that was measured: on a CPU a policy's rounds can be that slow if each has
    the widest verify pass. No clock is read then.

    Args:
      texts: ids from `decoding.tokenize`, none empty, for the trial.
      key: which way decodes must not depend on draws of a run: this is not its key.
      cost: of rounds in loops of their own, by the lengths to choose from, in the unit of the
        policy's costs; default `own_costs`, or on an accelerator, before a trial, `timed_alone`,
        in seconds.
    """
    preferred = decoding.plain_if_preferred(method, max_new_tokens, batch_size)
    policy = _estimating(method)
    if policy is None:
        return preferred
    run: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "key": key, "batch_size": batch_size, "names": names,
    }  # fmt: skip
    if cost is None and len(texts) and devices.is_accelerator(target.model):
        cost = timed_alone(method, target, texts[: max(TIMED_TEXTS, batch_size)], **run)
    cost = cost or own_costs(policy.costs, method.widths)  # type: ignore[attr-defined]
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
    ways = {"preferred": preferred}
    if preferred is method:  # costs may be off by more than they say
        ways[timing.PLAIN] = decoding.plain_of(method)
    ways |= {fitting.static(length): of_length(method, length) for length in tried}
    found = timing.side_by_side(ways, target, texts, repeats=2, **run)
    takes = {name: _per_token(found, name) for name in ways}
    if preferred is method:
        takes["preferred"] *= MIN_GAIN_OF_DECISIONS
    return ways[min(takes, key=lambda name: takes[name])]


def _estimating(method: Method) -> Estimating | None:
    """The policy, if it estimates what chains of each length promise."""
    policy = method.policy
    return policy if isinstance(policy, Estimating) and not method.branches else None


def _per_token(found: timing.Comparison, name: str) -> float:
    """Seconds, by the faster repeat of each batch: programs are slow in their first calls."""
    tokens = sum(row.emitted for row in found.outputs(name))
    return float(found.decode[name].min(axis=0).sum()) / tokens


def of_length(method: Any, length: int) -> Speculative:
    """Drafts of this length in every round, in a loop whose only verify pass is for them."""
    return dataclasses.replace(method, policy=constant(length), gamma_max=length, widths=())


def timed_alone(
    method: Any, target: Checkpoint, texts: Sequence[Sequence[int]], **run: Any
) -> dict[int, float]:
    """Seconds of a round with 1 … γ_max drafted tokens in a loop that drafts as many in every
    round. Two such loops are timed, the shortest and the longest: between them rounds grow evenly.

    For an accelerator. There a policy's drafts wait for the host at each token and those of one
    length do not, so the costs of the one say little of the other.

    Args:
      run: as in `faster`.
    """
    ends = {1, method.gamma_max}
    loops = {fitting.static(length): of_length(method, length) for length in sorted(ends)}
    longest = min(run["max_new_tokens"], 32)
    return fitting.alone(fitting.measure(loops, target, texts, longest=longest, repeats=3, **run))


def own_costs(table: Costs, widths: Sequence[int]) -> dict[int, float]:
    """Of a round with 1 … γ_max drafted tokens whose verify pass has room for no more: between the
    widths of passes that have a cost, the first of which is a token's, it grows evenly. Passes of
    a few positions may take a tenth more than that. What the policy decides is in it."""
    gamma, verify = table.gamma_max, np.asarray(table.verify + table.rest, np.float64)
    known = sorted({width - 1 for width in widths if 1 < width <= gamma} | {gamma})
    first = float(np.fmin(verify[0], float(table.token)))
    passes = np.interp(range(gamma + 1), [0, *known], [first, *verify[known]])
    return {k: float(passes[k] + k * float(table.draft)) for k in range(1, gamma + 1)}
