"""Times of a batch's rounds by the positions of the target's call, for `early_stop`."""

from collections.abc import Sequence

from jax import Array
from jaxtyping import Key

from specjax.batching import bucket
from specjax.decoding import building
from specjax.decoding.texts import is_blank, tokenize
from specjax.defaults import GAMMA, NEW_TOKENS
from specjax.drafters.base import Drafter
from specjax.measure.costing import of_positions
from specjax.measure.stopwatch import Stopwatch
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs, fixed
from specjax.sampling import Sampling, as_key, as_sampling
from specjax.speculative import Speculative
from specjax.types import Text


def default_sizes(rows: int, gamma: int) -> tuple[int, ...]:
    """Numbers of positions from those of no draft up to those of γ tokens in each row.

    Each is about a third larger than the one before.
    """
    sizes, whole = [rows], rows * (gamma + 1)
    while sizes[-1] * 4 // 3 < whole:
        sizes.append(max(sizes[-1] + 1, sizes[-1] * 4 // 3))
    return tuple(size for size in sizes if size < whole)


def pass_times(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    gamma: int = GAMMA,
    sampling: Sampling | None = None,
    batch_size: int,
    sizes: Sequence[int] = (),
    max_new_tokens: int = NEW_TOKENS,
    key: Key[Array, ""] | int = 0,
    repeats: int = 3,
) -> Costs:
    """Measure the times that `specjax.policies.early_stop` weighs, in seconds.

        from specjax.measure.batches import pass_times

        times = pass_times(target, draft, texts, batch_size=16)
        specjax.generate(target, draft, texts, batch_size=16,
                         policy=specjax.policies.early_stop(times), passes=times.positions)

    Args:
      texts: inputs of typical length; the batch repeats them if they are few.
      sizes: positions of all rows together; default `default_sizes`.
      repeats: timings of each call, of which the median counts.

    Raises:
      ValueError: see `generate`.
    """
    sizes = tuple(sizes) or default_sizes(bucket(batch_size), gamma)
    # A policy that verifies all, so that the time of `allocate` is part of a round.
    method = building.build(
        target, draft, gamma=gamma, sampling=as_sampling(sampling),
        policy=fixed(batch_size * gamma), passes=sizes,
    )  # fmt: skip
    ids = tokenize(target, [text for text in texts if not is_blank(target, text)])
    if not ids:
        raise ValueError("Nothing to measure: every text is blank.")
    assert isinstance(method, Speculative)  # of a budget
    watch = Stopwatch(target, max_new_tokens, as_key(key), batch_size, repeats)
    return of_positions(watch, method, ids)
