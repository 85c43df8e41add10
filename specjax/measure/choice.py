"""What decodes in the end: plain decoding, drafts of one length, or what a policy decides.

Decisions take time: a few percent of a round, more on an accelerator. What they bring depends on
how far tokens and outputs differ, which no α says. So where plain decoding is not preferred, some
texts are decoded both ways, in turns, and the faster one stays.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jax import Array
from jaxtyping import Key

from specjax import decoding
from specjax.loop import Method
from specjax.measure import pricing, timing
from specjax.models.hub import Checkpoint
from specjax.policies import Prices, constant
from specjax.policies.estimating import Estimating
from specjax.speculative import Speculative
from specjax.types import Text

TEXTS = 16  # that are decoded both ways, or a batch: at least `LEAST`, and one of `PART` at most
LEAST, PART = 4, 32


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

    Plain decoding where the policy prefers it (`decoding.plain_if_preferred`). Else, if there are
    128 texts or more, and 32 batches, a few of them are for a trial (`faster`), from all over the
    run: 4 to 16, or one batch where that is more.

    Args:
      texts: of the run.
      key: that of the run, which draws apart from the trial.
      batch_size: rows decoded at once.
    """
    rows = max(1, batch_size)
    method = decoding.plain_if_preferred(method, max_new_tokens, rows)
    if not isinstance(getattr(method, "policy", None), Estimating):
        return method
    given = pricing.not_blank(target, texts)
    count = min(max(TEXTS, rows), len(given) // PART) // rows * rows
    if count < LEAST:
        return method
    some = pricing.tokenize(target, given[:: len(given) // count][:count], max_source_len)
    decoding.check_room(target, some, max_new_tokens)
    return faster(
        method, target, some, max_new_tokens=max_new_tokens, key=pricing.apart(key),
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
    price: Mapping[int, float] | None = None,
) -> Method:
    """The method or, if its policy is one of `Estimating`, drafts of one length if these decode the
    texts in less time for a token. It is the length of which α promises most. A trial's batches end
    with their last row: no row takes the place of another.

    Args:
      texts: ids from `decoding.tokenize`, none empty. Without any the method stays.
      key: which way decodes must not depend on draws of a run: this is not its key.
      price: of rounds in loops of their own, by the lengths to choose from, in the unit of the
        policy's prices; default `own_prices`.
    """
    policy = getattr(method, "policy", None)
    if not (len(texts) and isinstance(method, Speculative) and isinstance(policy, Estimating)):
        return method
    rows = batch_size if policy.reads_batch else 1
    length = policy.best_length(price or own_prices(policy.prices, method.widths), rows)
    both = {"decides": method, "fixed": of_length(method, length)}
    found = timing.side_by_side(
        both, target, texts, max_new_tokens=max_new_tokens, key=key, repeats=2,
        batch_size=batch_size, names=names,
    )  # fmt: skip
    return min(both.items(), key=lambda way: _per_token(found, way[0]))[1]


def _per_token(found: timing.Comparison, name: str) -> float:
    """Seconds, by the faster repeat of each batch: programs are slow in their first calls."""
    tokens = sum(row.emitted for row in found.outputs(name))
    return float(found.decode[name].min(axis=0).sum()) / tokens


def of_length(method: Speculative, length: int) -> Speculative:
    """Drafts of this length in every round, in a loop whose only verify pass is for them."""
    return dataclasses.replace(method, policy=constant(length), gamma_max=length, widths=())


def own_prices(table: Prices, widths: Sequence[int]) -> dict[int, float]:
    """Of a round with 1 … γ_max drafted tokens whose verify pass has room for no more: between the
    widths of passes that have a price, the first of which is a token's, it grows evenly. What the
    policy decides is in it: it serves to choose a length, and not to foretell a time."""
    gamma, verify = table.gamma_max, np.asarray(table.verify + table.rest, np.float64)
    known = sorted({width - 1 for width in widths if 1 < width <= gamma} | {gamma})
    first = float(np.fmin(verify[0], float(table.token)))
    passes = np.interp(range(gamma + 1), [0, *known], [first, *verify[known]])
    return {k: float(passes[k] + k * float(table.draft)) for k in range(1, gamma + 1)}
