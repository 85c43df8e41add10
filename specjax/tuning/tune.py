"""`tune` and `select`: the fastest settings for one draft, and the best of several drafts.

Both measure a `Job` within some minutes: whole calls give the costs of rounds, costs and acceptance
say which loops may win, and these race plain decoding. Half of the inputs chooses, and the other
half says how fast the choice is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from specjax import devices, drafters, trees
from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.conditions import conditions
from specjax.defaults import LONGEST
from specjax.drafters.base import Drafter
from specjax.measure import doubts
from specjax.models.checkpoint import Checkpoint
from specjax.policies import check
from specjax.settings import Drafting, Settings
from specjax.support.ranges import shown, whole
from specjax.support.renamed import refuses
from specjax.tuning import fitting, trials
from specjax.tuning.candidates import Candidates
from specjax.tuning.job import Fields, Job
from specjax.tuning.members import smaller_members
from specjax.tuning.recommendation import Selection, recommend
from specjax.types import Text


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
    check_tokens: bool = True,
    **job: Unpack[Fields],
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
      minutes: time for all of it; 0: no limit; default 2.5. Where it is short, shorter drafts and
        fewer texts, tokens and repeats are timed. Compiling may take longer.
      say: is called with a forecast and with each next step, such as "timing … turn 2 of 3".

    Returns:
      Settings for `generate`. `str` of them describes what was found.

    Raises:
      ValueError: as `generate`.
    """
    building.check_models(target, draft)
    whole("gamma", gamma, "[1, ∞)")
    if not isinstance(rule, str):
        raise ValueError(f"rule={shown(rule)} must be a name, since settings are kept in a file.")
    checked = () if passes is None else passes
    drafting = Drafting(gamma, policy, None, tree, rule, checked, check_tokens)
    run = Job(target, texts, **job)
    return tuned(run, draft, with_passes(run, drafting) if passes is None else drafting)


def tuned(job: Job, draft: Checkpoint | Drafter | str, drafting: Drafting) -> Settings:
    """Find the fastest way to decode a job with this draft: see `tune`.

    Args:
      drafting: its policy and rule are names, and γ is the longest that is tried.
    """
    target, branches = job.target, not isinstance(drafting.shape, trees.Chain)
    policy: Any = drafting.policy or ("goodput" if branches else "lookahead")
    check(policy)
    method = building.build(target, draft, drafting, sampling=job.chosen, policy=None)
    name = drafters.name_of(draft)
    costs = fitting.costs_for(job, policy, method, name)
    loop: Any = fitting.with_costs(method, policy, costs, job.rows)
    fastest = trials.fastest(job, loop, name)
    why = trials.reasons(fastest, loop, policy)
    if not branches and costs.gamma_max < method.gamma_max:
        why += f" Drafts of more than {costs.gamma_max} tokens were not tried, for lack of minutes."
    busy = doubts.busy([doubts.load_average()])
    found = Settings(
        fastest.method.gamma_max,
        rule=drafting.rule,
        check_tokens=drafting.check_tokens,
        words=f"{why} {fitting.words(costs)} {busy}".rstrip(),
        tuned_for=conditions(loop, target, draft, job.rows, job.max_new_tokens),
    )
    own: dict[str, Any] = {"policy": policy, "costs": costs, "passes": loop.passes}
    own["tree"] = trees.text_of(drafting.shape)
    return dataclasses.replace(found, **own) if fastest.method is loop else found


def with_passes(job: Job, drafting: Drafting) -> Drafting:
    """Drafting with passes of 1, 2, 4 and so on positions of each row, for chains on a CPU."""
    chains = isinstance(drafting.shape, trees.Chain)
    if not chains or devices.is_accelerator(job.target.model):
        return drafting
    gamma = LONGEST if drafting.gamma is None else drafting.gamma
    rows = bucket(job.rows)
    widths = [1 << power for power in range(max(gamma, 1).bit_length()) if 1 << power <= gamma]
    return dataclasses.replace(drafting, passes=[rows * width for width in widths])


class Options(Fields, total=False):
    """What `select` takes beside the fields of a job."""

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
    **options: Unpack[Options],
) -> Selection:
    """Measure each candidate on these inputs, and choose one, or plain decoding.

        chosen = specjax.select(target, ["google-t5/t5-small", "lookup"], texts)
        print(chosen.words)
        specjax.generate(target, chosen.draft, texts, settings=chosen.settings, batch_size=1)

    Args:
      target: the model whose outputs are to come sooner.
      drafts: what `generate` takes as its draft, names included ("unigram" and "bigram" are counted
        here). Named models are loaded one at a time and freed. None given: the members of the
        target's family that are smaller, see `smaller_members`. Plain decoding is compared with
        all of them.
      texts: inputs of the kind that will be decoded, texts or lists of token ids; some 50 are
        enough.
      sampling, max_new_tokens, key, max_source_len, batch_size, check_tokens: as in `generate`,
        with the values of later use. Timings are at batch 1 all the same.
      gammas: draft lengths to choose from; default 1, 2, 3, 5, 7 and 10.
      nodes: sizes of trees to try too, such as (8, 16, 32).
      timed_inputs: how many of the texts are timed; default 16.
      repeats: repeats of each timing; default 5.
      minutes: time for all of it; 0: no limit; default 2.5. Where it is short, fewer lengths,
        inputs, tokens and repeats are timed, and a draft that cannot win is not timed at all.
        Compiling may take longer.
      dtype: dtype of named drafts, as `specjax.load` takes it.
      say: is called with a forecast and with each next step, such as "timing … turn 2 of 5".

    Raises:
      ValueError: `drafts` is no list, none is known for this target, a number out of range, too
        few texts, or no key where tokens are drawn.
    """
    if isinstance(drafts, str) or not isinstance(drafts, Sequence):
        raise ValueError(f"drafts={drafts!r} should be a list, such as [{drafts!r}].")
    drafts = list(drafts) or smaller_members(target.name)
    given: dict[str, Any] = dict(options)
    run = {name: given.pop(name) for name in Fields.__annotations__.keys() & given.keys()}
    trial = Candidates(Job(target, texts, **run), drafts, **given)
    candidates = [trial.measure(draft, tree) for draft, tree in trial.wanted]
    return trial.ready(recommend(candidates, [draft for draft, _ in trial.wanted]))
