"""Costs for a policy, measured before a run."""

import dataclasses
from typing import Any

import numpy as np

from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import check_room, common_width
from specjax.measure import costing
from specjax.measure.costing import TIMED_TEXTS, TIMED_TOKENS, filled
from specjax.measure.fit import pruned
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.policies import Costs, parse_with_costs, with_any_costs
from specjax.policies.base import counts_nodes
from specjax.policies.constant import Undecided
from specjax.speculative import Speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning.job import Job

ALPHA_TEXTS = 32  # texts from which α is estimated, at most
# Where time is short: the longest draft, whose loop compiles sooner; tokens of a timed call; and
# the share of the time for two repeats of all.
SHORT_GAMMA, MIN_TOKENS, MAX_SHARE_OF_TIMINGS = 4, 16, 0.5
LOOPS = 6  # that `costs_for` compiles, in programs of the size of plain decoding's


def costs_for(
    job: Job, policy: str, method: Speculative | TreeSpeculative, draft: str = "draft"
) -> Costs:
    """Measure the costs of this loop and of plain decoding, for a policy.

    Some texts, a batch or four, are decoded up to 32 tokens, three times with drafts of each of a
    few lengths. More texts, up to `ALPHA_TEXTS` in all, are decoded once, for α. A tree is timed by
    depth, or by nodes if the policy sets their number. Where time is short, drafts have at most
    `SHORT_GAMMA` tokens, as the costs show, and fewer tokens are timed.

    Args:
      policy: one that needs costs (`policies.needs_costs`), with or without its other settings.
      method: the loop that is measured; its own policy is not read.
      draft: its name, for errors.
    """
    by_nodes = counts_nodes(with_any_costs(policy))
    timed = max(TIMED_TEXTS, job.rows)
    sources = job.tokenize(job.full[: max(timed, ALPHA_TEXTS)])
    if not sources:  # nothing will be decoded
        return Costs(0.0, [1.0] * (method.slots if by_nodes else method.gamma_max + 1))
    check_room(job.target, sources, job.max_new_tokens)
    watch, longest = job.watch(draft), min(job.max_new_tokens, TIMED_TOKENS)
    if method.branches:
        return costing.of_tree(watch, method, sources[:timed], by_nodes, longest)
    plain: Any = building.plain_of(method)
    watch = dataclasses.replace(watch, width=common_width(sources))
    loop, longest = _in_time(job, watch, plain, method, sources[:timed], longest)
    deciding = with_any_costs(policy, loop.gamma_max)
    if deciding.fixed:  # by costs that are not measured yet
        deciding = Undecided()
    found = costing.measure(
        dataclasses.replace(watch, until=job.pace.until()),
        {"loop": dataclasses.replace(loop, policy=deciding)},
        sources[:timed],
        untimed=sources[timed:],
        plain=plain,
        longest=longest,
    )
    return found["loop"]


def _in_time(
    job: Job, watch: Stopwatch, plain: Any, method: Any, sources: Texts, longest: int
) -> tuple[Any, int]:
    """Shorten the drafts of a loop, and the tokens of a timed call, to fit into the time."""
    batches = -(-len(sources) // job.rows)
    calls = 2 * batches * (2 + method.gamma_max)  # two of each length and of plain decoding
    job.pace.first_pass(watch, plain, filled(sources, job.rows), LOOPS, 2 * calls * longest)
    if job.pace.is_short():
        gamma = min(method.gamma_max, SHORT_GAMMA)
        method = dataclasses.replace(method, gamma_max=gamma)
    most = longest, MIN_TOKENS
    return method, job.pace.afford(calls, MAX_SHARE_OF_TIMINGS, tokens=most)["tokens"]


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
