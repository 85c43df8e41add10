"""Costs of a policy's loop: measured before a run, or as a part of `tune`."""

import dataclasses
from typing import Any

import numpy as np

from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import check_room, common_width
from specjax.measure import costing
from specjax.measure.costing import TIMED_TEXTS, TIMED_TOKENS
from specjax.measure.fit import pruned
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.policies import Costs, Policy, parse_with_costs, with_any_costs
from specjax.policies.base import counts_nodes
from specjax.policies.constant import Undecided
from specjax.speculative import Speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning.job import Job

ALPHA_TEXTS = 32  # texts from which α is estimated, at most


def costs_for(
    job: Job, policy: str, method: Speculative | TreeSpeculative, draft: str = "draft"
) -> Costs:
    """Measure the costs of this loop and of plain decoding before a run, for a policy.

    Some texts, a batch or four, are decoded up to 32 tokens, three times with drafts of each of a
    few lengths. More texts, up to `ALPHA_TEXTS` in all, are decoded once, for α.

    Args:
      policy: one that needs costs (`policies.needs_costs`), with or without its other settings.
      method: the loop that is measured; its own policy is not read.
      draft: its name, for errors.
    """
    timed = max(TIMED_TEXTS, job.rows)
    sources = job.tokenize(job.full[: max(timed, ALPHA_TEXTS)])
    if not sources:  # nothing will be decoded
        by_nodes = counts_nodes(with_any_costs(policy))
        return Costs(0.0, [1.0] * (method.slots if by_nodes else method.gamma_max + 1))
    check_room(job.target, sources, job.max_new_tokens)
    watch = dataclasses.replace(job.watch(draft), width=common_width(sources))
    return costs_of(watch, policy, method, sources[:timed], sources[timed:])


def costs_of(
    watch: Stopwatch,
    policy: str,
    method: Speculative | TreeSpeculative,
    texts: Texts,
    untimed: Texts = (),
    longest: int = TIMED_TOKENS,
) -> Costs:
    """Measure the costs of the loop that a policy decides in, by timed calls of `longest` tokens.

    A tree is timed by depth, or by nodes if the policy sets their number. α is of `untimed` too.
    """
    longest = min(longest, watch.max_new_tokens)
    if method.branches:
        by_nodes = counts_nodes(with_any_costs(policy))
        return costing.of_tree(watch, method, texts, by_nodes, longest)
    loop: Any = dataclasses.replace(method, policy=deciding(policy, method.gamma_max))
    plain = building.plain_of(method)
    found = costing.measure(
        watch, {"loop": loop}, texts, untimed=untimed, plain=plain, longest=longest
    )
    return found["loop"]


def deciding(policy: str, gamma_max: int) -> Policy:
    """The policy before its costs are known."""
    made = with_any_costs(policy, gamma_max)
    return Undecided() if made.fixed else made


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
    return building.with_policy(method, made)


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
