"""Speculation beside plain decoding on the same inputs: the speedup, and the costs of a round."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from jax import Array
from jaxtyping import Key

from specjax import drafters
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.decoding.texts import check_texts, common_width, is_blank, tokenize
from specjax.defaults import NEW_TOKENS
from specjax.drafters.base import Drafter
from specjax.loop import Method
from specjax.measure import costing
from specjax.measure.stopwatch import Stopwatch, Texts
from specjax.measure.timing import PLAIN, SPECULATIVE, Comparison
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs
from specjax.sampling import Sampling, as_sampling, key_for
from specjax.settings import Drafting, Fields
from specjax.support import memory_maps
from specjax.support.ranges import whole
from specjax.support.renamed import refuses
from specjax.types import Text


@refuses
def measure_speedup(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int | None = None,
    batch_size: int = 1,
    max_source_len: int | None = None,
    repeats: int = 3,
    costs: Costs | None = None,
    **drafting: Unpack[Fields],
) -> Comparison:
    """Measure and predict the speedup of speculation over plain decoding on these texts.

    Both loops decode every text in turns, `repeats` times after a first time that compiles. Blank
    sources of an encoder-decoder are left out. For other arguments and errors see `generate`.

    Args:
      costs, drafting: fields of `Drafting`; a policy's name that needs costs comes with them.

    Raises:
      ValueError: every text is blank, or repeats < 1.
    """
    whole("repeats", repeats, "[1, ∞)")
    whole("batch_size", batch_size, "[1, ∞)")
    chosen = as_sampling(sampling)
    key = key_for(chosen, key)
    how = Drafting(costs=costs, **drafting)
    building.check_depth(how)
    method: Any = building.with_draft(target, draft, how, chosen)
    check_texts(texts)
    kept = [text for text in texts if not is_blank(target, text)]
    if not kept:
        raise ValueError("Nothing to measure: every text is blank.")
    names = target.name, drafters.name_of(draft)
    watch = Stopwatch(target, max_new_tokens, key, batch_size, repeats, names)
    return compare(watch, method, tokenize(target, kept, max_source_len))


@memory_maps.kept(methods=4)  # both loops, and as many programs for their costs
def compare(watch: Stopwatch, method: Method, sources: Texts) -> Comparison:
    """Decode by plain decoding and by a speculative loop in turns, and measure costs of rounds.

    Costs are of the first batch, with drafts of γ_max tokens or whole trees.

    Args:
      sources: ids from `texts.tokenize`, none empty, one output each.
    """
    watch = dataclasses.replace(watch, width=common_width(sources))
    plain = Autoregressive(method.target, method.sampling, method.eos_ids)  # without a rule's noise
    found = watch.race({PLAIN: plain, SPECULATIVE: method}, sources)
    costs = costing.costs_of(watch, method, sources[: watch.batch_size])
    return dataclasses.replace(found, _costs=costs)
