"""Acceptance of the r-th child of a node, which sets the value of a tree."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax import sampling as smp
from specjax.decoding import building
from specjax.defaults import BATCH_SIZE
from specjax.drafters.base import Drafter, is_silent
from specjax.measure.along import along, by_prefix, last
from specjax.models.checkpoint import Checkpoint
from specjax.rules import residual
from specjax.sampling import Purpose, Sampling
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.trees.drafting import without
from specjax.trees.rules import over
from specjax.types import Text

RANKS = 10


@partial(jax.jit, static_argnames=("ranks", "drawn"))
def by_rank(
    method: Speculative,
    contexts: Contexts,
    state: State,
    outputs: Int[Array, "B T"],
    emitted: Int[Array, " B"],
    *,
    ranks: int,
    drawn: bool,
) -> Float[Array, "B T R"]:
    """The chance that the first, second, … child is accepted, at every prefix.

    Args:
      outputs, emitted: like the other arguments as `metrics.overlaps` takes them.
      drawn: whether children are drawn, without replacement, and judged by the sibling rule; else
        they are the likeliest tokens.
    """
    chosen = method.sampling

    def visit(state, hidden):
        known = state.tokens, state.length, contexts.drafter, state.drafter
        drafter_hidden, drafter = method.drafter.begin(*known, lags=False)
        logits = method.drafter.logits(drafter_hidden)
        silent = is_silent(logits)[:, None]
        by = smp.Sampling(1.0) if chosen.greedy else chosen
        draft_logprobs = smp.standardize(jnp.where(silent, 0.0, logits), by)
        left = jnp.exp(smp.standardize(method.target.logits(last(state, hidden)), chosen))
        if not drawn:
            belief, best = jax.lax.top_k(draft_logprobs, ranks)
            found = jnp.take_along_axis(left, best, axis=1)
            found = jnp.where(silent | (belief == -jnp.inf), 0.0, found)
            return state.replace(drafter=drafter), found
        reached, accepted = jnp.ones((len(left), 1), left.dtype), []
        for rank in range(ranks):
            q = jnp.exp(draft_logprobs)  # 0 throughout where no token is left for one more child
            keys = smp.fold(state.keys, state.length, Purpose.DRAFT, rank)
            token = smp.draw(keys, q)[:, None]
            kept = jnp.minimum(1.0, over(*(jnp.take_along_axis(x, token, 1) for x in (left, q))))
            accepted.append(reached * kept)
            reached = reached * (1.0 - kept)
            left, draft_logprobs = residual(left, q), without(draft_logprobs, token[:, 0])
        return state.replace(drafter=drafter), jnp.where(silent, 0.0, jnp.concatenate(accepted, 1))

    return along(method, contexts, state, outputs, emitted, visit)[1]


def acceptance_by_rank(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    outputs: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    drawn: bool = False,
    batch_size: int = BATCH_SIZE,
    max_source_len: int | None = None,
    check_tokens: bool = True,
) -> Float[np.ndarray, " R"]:
    """Measure the chance that a node's r-th child is accepted, and no earlier one, r = 1 … 10.

    The chances are means over prefixes of the target's outputs.

    Args:
      drawn: whether children are drawn without replacement and judged by the sibling rule. If not,
        children are the drafter's likeliest tokens, and chances are the target's probabilities of
        them, which no lossless rule exceeds.

    Raises: as `metrics.alpha_of`.
    """
    method = building.build(target, draft, gamma=1, sampling=sampling, check_tokens=check_tokens)
    ranks = min(RANKS, method.target.vocab_size)
    visit = partial(by_rank, ranks=ranks, drawn=drawn)
    found = by_prefix(visit, method, target, texts, outputs, batch_size, max_source_len)
    return np.concatenate(found).mean(0, dtype=np.float64)
