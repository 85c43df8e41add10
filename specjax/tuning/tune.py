"""`tune`: measure costs on this machine, try ways to draft, and return the best as `Settings`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array
from jaxtyping import Key

from specjax import devices, drafters, trees
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.conditions import conditions
from specjax.decoding.texts import check_texts
from specjax.defaults import BATCH_SIZE, LONGEST, MINUTES, NEW_TOKENS
from specjax.drafters.base import Drafter
from specjax.measure import doubts, timing
from specjax.measure.stopwatch import static
from specjax.models.checkpoint import Checkpoint
from specjax.policies import check
from specjax.sampling import Sampling, as_sampling, key_for
from specjax.settings import Settings
from specjax.support.ranges import has, whole
from specjax.support.renamed import refuses
from specjax.tuning import fitting, trials
from specjax.tuning.pace import Pace, reduced
from specjax.tuning.recommendation import EQUAL_WITHIN
from specjax.types import Text

MAX_LOOPS = 4  # of a trial: with the policy, without a draft, and with two fixed lengths


@refuses
def tune(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    gamma: int = LONGEST,
    policy: str | None = None,
    tree: trees.Shape | str | None = None,
    rule: str = "",
    passes: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    check_tokens: bool = True,
    minutes: float = MINUTES,
    say: timing.Say = timing.silent,
) -> Settings:
    """Measure what rounds cost on this machine, and find the fastest way to decode such texts.

    Some texts are decoded with drafts of a few lengths, which gives the costs of rounds and α. Then
    the policy with these costs, drafts of one length and plain decoding are compared: in a trial
    from 128 texts on, else by the costs and α alone. Half of the trial's texts choose, and the
    speedup in `words` is of the others. Compiling the loops takes most of the time.

    Args:
      target, draft, texts, rule, max_new_tokens, batch_size, max_source_len, check_tokens: as in
        `generate`, with the values of later use. The rule is a name.
      gamma: the longest draft that is tried.
      policy: name of a draft-length policy, with any settings that it needs; default "lookahead",
        and "goodput" for trees. "lookahead" and "together" are compared with drafts of one length.
      passes: smaller verify passes, as in `generate`; those that do not pay are left out. Default:
        1, 2, 4 and so on positions of each row for chains on a CPU, and none elsewhere.
      sampling: default `Greedy()`.
      key: as in `generate`. A run may have the same key: it draws independently.
      minutes: time for all of it; 0: no limit. Where it is short, shorter drafts and fewer texts,
        tokens and repeats are timed. Compiling may take longer.
      say: is called with a forecast and with each next step, such as "timing … turn 2 of 3".

    Returns:
      Settings for `generate`. `str` of them describes what was found.

    Raises:
      ValueError: as `generate`.
    """
    check_texts(texts)
    building.check_models(target, draft)
    found = Settings(gamma, rule=rule)  # checks both before anything is measured
    whole("batch_size", batch_size, "[1, ∞)")
    whole("max_new_tokens", max_new_tokens, "[1, ∞)")
    has("say", say, ("__call__",), "a function of a text")
    pace = Pace(minutes, say)
    chosen = as_sampling(sampling)
    key = key_for(chosen, key)
    shape = trees.parse(tree)
    branches = not isinstance(shape, trees.Chain)
    policy = policy or ("goodput" if branches else "lookahead")
    check(policy)
    if passes is None:
        on_cpu = not devices.is_accelerator(target.model)
        rows = bucket(min(batch_size, max(1, len(texts))))
        passes = [] if branches or not on_cpu else [rows * width for width in _doubling(gamma)]
    method: Any = building.build(
        target,
        draft,
        gamma=gamma,
        sampling=chosen,
        rule=rule or None,
        passes=passes,
        tree=shape,
        check_tokens=check_tokens,
    )
    run: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "key": key,
        "batch_size": min(batch_size, max(1, len(texts))),
        "max_source_len": max_source_len,
        "names": (target.name, drafters.name_of(draft)),
        "say": say,
    }
    costs = fitting.costs_for(policy, method, target, texts, pace=pace, **run)
    tuned: Any = fitting.with_costs(method, policy, costs, run["batch_size"])
    timed: list[timing.Comparison] = []
    tokens = 2 * MAX_LOOPS * max_new_tokens  # of one text, in both repeats of the loops of a trial
    count = reduced(
        {"texts": len(texts)}, {"texts": 2}, lambda texts: texts * tokens * pace.token, pace.left()
    )["texts"]
    tried = timing.spread(texts, count)
    fastest: Any = trials.fastest(tuned, target, tried, report=timed.append, **run)
    why = reasons(fastest, tuned, policy, timed[0] if timed else None)
    if not branches and costs.gamma_max < gamma:
        why += f" Drafts of more than {costs.gamma_max} tokens were not tried, for lack of minutes."
    busy = doubts.busy([doubts.load_average()])
    found = dataclasses.replace(
        found,
        gamma=fastest.gamma_max,
        words=f"{why} {fitting.words(costs)} {busy}".rstrip(),
        tuned_for=conditions(tuned, target, draft, run["batch_size"], max_new_tokens),
    )
    if fastest is not tuned:
        return found
    own: dict[str, Any] = {"costs": costs, "tree": trees.text_of(shape), "passes": tuned.passes}
    return dataclasses.replace(found, policy=policy, **own)


def reasons(fastest: Any, tuned: Any, policy: str, timed: timing.Comparison | None) -> str:
    """Explain the choice of `trials.fastest` in a sentence or two.

    Args:
      fastest: plain decoding, drafts of one length, or `tuned` itself.
      tuned: the loop with the policy and its costs.
      timed: of a trial, if there was one.
    """
    name = trials.POLICY if fastest is tuned else static(fastest.gamma_max)
    if fastest.gamma_max == 0:  # plain decoding drafts nothing
        how = f"was {EQUAL_WITHIN:.0%} faster in a trial" if timed else "pays by its costs and α"
        return f"No draft is worth its time: none {how}."
    if fastest is tuned:
        what = f"{policy} decides how long drafts are, at most {tuned.gamma_max} tokens"
    elif timed:
        what = f"Drafts of {fastest.gamma_max} in every round were the fastest of a trial"
    else:
        what = f"Drafts of {fastest.gamma_max} in every round promise more than {policy}"
    if timed is None:
        return f"{what}. No trial timed it: costs and α chose."
    chose, rest = timed.halves()
    speedup = trials.per_token(rest, timing.PLAIN) / trials.per_token(rest, name)
    new = "that did not choose" if len(chose.rows[name]) < len(timed.rows[name]) else "that chose"
    return (
        f"{what}. The loop is {speedup:.2f} times as fast as plain decoding, on "
        f"{len(rest.outputs(name))} inputs {new}."
    )


def _doubling(gamma: int) -> list[int]:
    """1, 2, 4, … below γ + 1."""
    return [1 << power for power in range(max(gamma, 1).bit_length()) if 1 << power <= gamma]
