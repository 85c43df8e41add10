"""Costs for a policy, measured before a run, and what loops cost by their names."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import check_room, common_width, is_blank
from specjax.decoding.texts import tokenize as ids_of
from specjax.measure import stopwatch, timing
from specjax.measure.fit import pruned
from specjax.measure.stopwatch import TIMED_TEXTS, TIMED_TOKENS
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs, parse_with_costs, with_any_costs
from specjax.policies.base import counts_nodes
from specjax.policies.constant import Undecided
from specjax.speculative import Speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning.pace import Pace, reduced
from specjax.types import Text

ALPHA_TEXTS = 32  # texts from which α is estimated, at most
# Where time is short: the longest draft, whose loop compiles sooner; tokens of a timed call; and
# the share of the time for two repeats of all.
SHORT_GAMMA, MIN_TOKENS, MAX_SHARE_OF_TIMINGS = 4, 16, 0.5
LOOPS = 6  # that `costs_for` compiles, in programs of the size of plain decoding's


def apart(key: Key[Array, ""]) -> Key[Array, ""]:
    """Derive a key for measurements before a run with this key: no input has that index.

    Costs must not depend on draws of the run, or its outputs would not be draws from the target.
    """
    return jax.random.fold_in(key, np.uint32(2**32 - 1))


def not_blank(target: Checkpoint, texts: Sequence[Text]) -> list[Text]:
    """Select texts with at least one token: an empty prompt's output is no sample of the others."""
    return [text for text in texts if len(text) and not is_blank(target, text)]


def tokenize(
    target: Checkpoint, texts: Sequence[Text], max_source_len: int | None
) -> list[list[int]]:
    """Tokenize without warnings: the run will warn about texts that it cuts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ids_of(target, texts, max_source_len)


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
    `ALPHA_TEXTS` in all, are decoded once, for α. A tree is timed by depth, or by nodes if the
    policy sets their number.

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
        check_room(target, sources, max_new_tokens)
        if method.branches:
            return stopwatch.of_tree(
                method, target, sources[:timed], _by_nodes(policy), max_new_tokens=max_new_tokens,
                key=key, longest=min(max_new_tokens, TIMED_TOKENS), batch_size=batch_size,
                names=names, say=say,
            )  # fmt: skip
        run: dict[str, Any] = {"max_new_tokens": max_new_tokens, "key": key}
        plain, longest = building.plain_of(method), min(max_new_tokens, TIMED_TOKENS)
        until = math.inf
        if pace is not None:
            width = common_width(sources)
            size: dict[str, Any] = {"rows": batch_size, "width": width}
            batches = -(-len(sources[:timed]) // batch_size)
            first_pass = partial(pace.first_pass, plain, target, sources[:timed], **run, **size)
            method, longest = _in_time(pace, first_pass, method, batches, longest)
            until = pace.until()
        deciding = with_any_costs(policy, method.gamma_max)
        if deciding.fixed:  # by costs that are not measured yet
            deciding = Undecided()
        loop: Any = dataclasses.replace(method, policy=deciding)
        return stopwatch.measure(
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
