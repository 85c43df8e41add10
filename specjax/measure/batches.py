"""Times of a batch's rounds by the positions of the target's call, for verify budgets."""

from collections.abc import Callable, Sequence

import jax
from jax import Array
from jaxtyping import Key

from specjax import budgets, decoding
from specjax.batching import bucket
from specjax.defaults import GAMMA, NEW_TOKENS
from specjax.drafters.base import Drafter
from specjax.measure import phases, timing
from specjax.models.checkpoint import Checkpoint
from specjax.policies import Costs
from specjax.sampling import Sampling, as_sampling
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
    repeats: int = 9,
) -> Costs:
    """Measure the times that `specjax.budgets.early_stop` weighs, in seconds.

        from specjax.measure.batches import pass_times

        times = pass_times(target, draft, texts, batch_size=16)
        specjax.generate(target, draft, texts, batch_size=16,
                         budget=specjax.budgets.early_stop(times), sizes=times.positions)

    Args:
      texts: inputs of typical length; the batch repeats them if they are few.
      sizes: positions of all rows together; default `default_sizes`.
      repeats: timings of each pass, of which the median counts.

    Raises:
      ValueError: see `generate`.
    """
    sizes = tuple(sizes) or default_sizes(batch_size, gamma)
    take = stopwatch(
        target, draft, texts, gamma=gamma, rounds=(gamma,), sampling=sampling,
        batch_size=batch_size, sizes=sizes, max_new_tokens=max_new_tokens, key=key,
    )  # fmt: skip
    return phases.pass_times([take() for _ in range(repeats)], bucket(batch_size))


def stopwatch(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    *,
    gamma: int,
    gammas: Sequence[int] = (),
    rounds: Sequence[int] = (),
    sampling: Sampling | None = None,
    batch_size: int,
    sizes: Sequence[int],
    max_new_tokens: int,
    key: Key[Array, ""] | int = 0,
) -> Callable[[], phases.Sample]:
    """Compile phases of a batch's rounds; see `phases.stopwatch`, and `pass_times` for the rest.

    Args:
      gammas: draft lengths whose passes over all positions are timed too.
      rounds: draft lengths at which whole rounds are timed.
    """
    method = decoding.build(target, draft, gamma=gamma, sampling=as_sampling(sampling))
    # A budget that takes all, so that the time of handing out is part of a round.
    method = decoding.with_budget(method, budgets.fixed(batch_size * gamma), sizes)
    ids = decoding.tokenize(target, [text for text in texts if not decoding.is_blank(target, text)])
    if not ids:
        raise ValueError("Nothing to measure: every text is blank.")
    batch = [ids[i % len(ids)] for i in range(batch_size)]
    random = jax.random.key(key) if isinstance(key, int) else key
    context, state = timing.start(
        method, target, batch, range(batch_size), max_new_tokens, random, rows=batch_size
    )
    packed = [size for size in sizes if size < len(state.done) * (gamma + 1)]
    return phases.stopwatch(method, context, state, gammas, rounds, sizes=packed)
