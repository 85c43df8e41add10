"""How often a drafter's r-th choice is the token that the target says: what trees live on."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax import decoding
from specjax import sampling as smp
from specjax.drafters.base import Drafter, is_silent
from specjax.measure.along import along, batches
from specjax.models.hub import Checkpoint
from specjax.sampling import Sampling
from specjax.speculative import Contexts, Speculative
from specjax.state import State
from specjax.types import Text


@jax.jit
def by_rank(
    method: Speculative,
    contexts: Contexts,
    state: State,
    outputs: Int[Array, "B T"],
    emitted: Int[Array, " B"],
) -> Float[Array, "B T R"]:
    """The target's probability of the drafter's likeliest token, of its second choice, and so on.

    Args: as `metrics.overlaps`.
    """
    chosen = method.sampling

    def visit(state, hidden):
        known = state.tokens, state.length, contexts.drafter, state.drafter
        drafter_hidden, drafter = method.drafter.begin(*known, lags=False)
        logits = method.drafter.logits(drafter_hidden)
        _, best = jax.lax.top_k(logits, min(RANKS, logits.shape[-1]))
        target = jnp.exp(smp.standardize(method.target.logits(hidden), chosen))
        found = jnp.take_along_axis(target, best, axis=1)
        return state.replace(drafter=drafter), jnp.where(is_silent(logits)[:, None], 0.0, found)

    return along(method, contexts, state, outputs, emitted, visit)[1]


RANKS = 10


def acceptance_by_rank(
    target: Checkpoint,
    draft: Checkpoint | Drafter | str,
    texts: Sequence[Text],
    outputs: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    batch_size: int = 8,
    max_source_len: int | None = None,
) -> Float[np.ndarray, " R"]:
    """The chance that a child which is the drafter's r-th choice is accepted, r = 1 … 10.

    The mean over prefixes of the target's outputs of the target's probability of that token, which
    no lossless rule exceeds for tokens that are chosen and not drawn.

    Raises: as `metrics.alpha_of_outputs`.
    """
    method = decoding.speculative(target, draft, gamma=1, sampling=sampling)
    total, count = np.zeros(min(RANKS, method.target.vocab_size)), 0
    for batch in batches(
        method,
        target,
        texts,
        outputs,
        rounds=False,
        max_new_tokens=1,
        key=smp.as_key(None),
        batch_size=batch_size,
        max_source_len=max_source_len,
    ):
        known = batch.contexts, batch.state, batch.outputs, batch.emitted
        found, behind = np.asarray(by_rank(method, *known)), np.asarray(batch.emitted) + 1
        for row in range(batch.live):
            total += found[row, : behind[row]].sum(0)
            count += int(behind[row])
    return total / count
