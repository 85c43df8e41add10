"""`tune` and `select`: the fastest way to decode, with one draft or with the best of several.

Both measure a `Job` within some minutes: whole calls give the costs of rounds, costs and acceptance
along the target's outputs say which loops may win, and these race plain decoding. Half of the
inputs chooses, and the other half says how fast the choice is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack, cast, overload

from specjax import devices, drafters, settings, trees
from specjax.batching import bucket
from specjax.decoding import building
from specjax.defaults import LONGEST
from specjax.drafters.base import Drafter
from specjax.models.checkpoint import Checkpoint
from specjax.policies import check
from specjax.settings import Drafting, Settings
from specjax.support.ranges import shown, whole
from specjax.support.renamed import refuses
from specjax.tuning import fitting
from specjax.tuning.candidates import Candidates, Draft
from specjax.tuning.job import Fields, Job
from specjax.tuning.members import smaller_members
from specjax.tuning.recommendation import Selection, counts_ngrams
from specjax.types import Text


class Options(Fields, settings.Fields, total=False):
    """What `tune` takes beside a target, drafts and texts."""


@overload
def tune(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    **how: Unpack[Options],
) -> Settings: ...


@overload
def tune(
    target: Checkpoint,
    draft: list[Any] | tuple[Any, ...],
    texts: Sequence[Text],
    **how: Unpack[Options],
) -> Selection: ...


@refuses
def tune(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str | Sequence[Draft],
    texts: Sequence[Text],
    **how: Unpack[Options],
) -> Settings | Selection:
    """Measure what rounds cost on this machine, and find the fastest way to decode such texts.

    Some texts are decoded with drafts of a few lengths, which gives the costs of rounds. With the
    acceptance along the target's outputs they promise a speedup for each length and for a policy.
    The best length and the policy race plain decoding. Half of the timed batches choose, and the
    speedup in `words` is of the others; a single batch does both.

    Args:
      draft: as in `generate`; or a list of drafts, as `select` takes it.
      gamma: the longest draft that is tried; default 8.
      policy: name of a draft-length policy, with any settings that it needs; default "lookahead",
        and "goodput" for trees. A rule is a name too.
      passes: smaller verify passes, as in `generate`; those that do not pay are left out. Default:
        1, 2, 4 and so on positions of each row for chains on a CPU, and none elsewhere.
      key: as in `generate`. A run may have the same key: it draws independently.
      minutes: time for all of it; 0: no limit; default 2.5. Where it is short, less is timed.
      say: is called with a forecast and with each next step, such as "timing … turn 2 of 3".
      others: as in `generate`, with the values of later use.

    Returns:
      Settings for `generate`, with `words`. For a list a `Selection`, which also has the draft.

    Raises:
      ValueError: as `generate`, or no text.
    """
    given: dict[str, Any] = {"gamma": LONGEST, "rule": "", **how}
    run = {name: given.pop(name) for name in Fields.__annotations__.keys() & given.keys()}
    whole("gamma", given["gamma"], "[1, ∞)")
    if not isinstance(given["rule"], str):
        rule = shown(given["rule"])
        raise ValueError(f"rule={rule} must be a name, since settings are kept in a file.")
    drafting = Drafting(**given)
    several, one = isinstance(draft, list | tuple), cast(Draft, draft)
    if not several:
        building.check_models(target, draft)
    job = Job(target, texts, **run)
    drafting = drafting if "passes" in given else with_passes(job, drafting)
    if not several:
        return tuned(job, one, drafting)
    return _several(job, cast(list, draft) or smaller_members(target.name), drafting)


def tuned(job: Job, draft: Draft, drafting: Drafting) -> Settings:
    """Find the fastest way to decode a job with this draft: see `tune`."""
    if counts_ngrams(draft):
        draft = drafters.load(str(draft), job.target)  # with the counts beside it, as it decodes
    found = _several(job, [draft], drafting)
    (one,) = found.candidates
    if one.problem:
        raise ValueError(one.problem)
    more = [f"{remark[0].upper()}{remark[1:]}." for remark in one.remarks]
    if "costs" in one.settings:
        more.append(fitting.words(one.settings["costs"]))
    words = " ".join([found.settings.words, *more])
    return dataclasses.replace(found.settings, words=words)


def _several(job: Job, drafts: Sequence[Draft], drafting: Drafting) -> Selection:
    branches = not isinstance(drafting.shape, trees.Chain)
    policy: Any = drafting.policy or ("goodput" if branches else "lookahead")
    check(policy)
    how = dataclasses.replace(drafting, policy=policy, gamma=None if branches else drafting.gamma)
    tokens = drafting.check_tokens
    found = Candidates(job, drafts, repeats=3, check_tokens=tokens, drafting=how).chosen()
    settings = dataclasses.replace(found.settings, rule=drafting.rule)
    return dataclasses.replace(found, settings=settings)


def with_passes(job: Job, drafting: Drafting) -> Drafting:
    """Drafting with passes of 1, 2, 4 and so on positions of each row, for chains on a CPU."""
    chains = isinstance(drafting.shape, trees.Chain)
    if not chains or devices.is_accelerator(job.target.model):
        return drafting
    gamma = LONGEST if drafting.gamma is None else drafting.gamma
    rows = bucket(job.rows)
    widths = [1 << power for power in range(max(gamma, 1).bit_length()) if 1 << power <= gamma]
    return dataclasses.replace(drafting, passes=[rows * width for width in widths])


class Measured(Fields, total=False):
    """What `select` takes beside a target, drafts and texts."""

    gammas: Sequence[int]
    nodes: Sequence[int]
    timed_inputs: int
    repeats: int
    dtype: Any
    check_tokens: bool


@refuses
def select(
    target: Checkpoint,
    drafts: Sequence[str | Checkpoint | Drafter],
    texts: Sequence[Text],
    **options: Unpack[Measured],
) -> Selection:
    """Measure each candidate on these inputs, and choose one, or plain decoding.

        chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
        print(chosen.words)
        specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)

    It is `tune` over several drafts, with one length or a fixed tree for each, at batch 1.

    Args:
      drafts: what `generate` takes as its draft, names included ("unigram" and "bigram" are counted
        here). Named models are loaded one at a time and freed. None given: the members of the
        target's family that are smaller, see `smaller_members`.
      texts: inputs of the kind that will be decoded; some 50 are enough.
      gammas: draft lengths to choose from; default 1, 2, 3, 5, 7 and 10.
      nodes: sizes of trees to try too, such as (8, 16, 32).
      timed_inputs: how many of the texts are timed; default 16.
      repeats: repeats of each timing; default 5.
      minutes: as in `tune`. A draft that cannot win is not timed at all, unless there is no limit.
      dtype: dtype of named drafts, as `specjax.load` takes it.

    Raises:
      ValueError: as `tune`; `drafts` is no list, or none is known for this target.
    """
    if isinstance(drafts, str) or not isinstance(drafts, Sequence):
        raise ValueError(f"drafts={drafts!r} should be a list, such as [{drafts!r}].")
    drafts = list(drafts) or smaller_members(target.name)
    given: dict[str, Any] = dict(options)
    run = {name: given.pop(name) for name in Fields.__annotations__.keys() & given.keys()}
    return Candidates(Job(target, texts, **run), drafts, **given).chosen()
