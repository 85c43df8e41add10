"""Training Kangaroo's adapter towards its target, which stays as it is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.kangaroo import Adapter, adapted
from specjax.models.language_model import LanguageModel
from specjax.tasks import batches
from specjax.tasks.batches import Batch
from specjax.training.train import teacher_forced


def loss(
    adapter: Adapter, target: LanguageModel, layers: int, batch: Batch, divergence
) -> tuple[Array, Array]:
    """Sum over the target tokens of a batch of how far the draft's distribution lies from the
    target's, and their number. Only the adapter has a gradient.

    Args:
      adapter: what is trained, `Kangaroo.adapter` to begin with.
      layers: of the target that run before it.
      divergence: (target_logprobs (N, V), draft_logprobs (N, V), tokens (N,)) → (N,), one of
        `training.divergences`; Kangaroo's own is the cross-entropy, forward KL but for a constant.
    """
    target = jax.lax.stop_gradient(target)
    tokens = jnp.asarray(batch.target).reshape(-1)
    real = (tokens != batches.PAD).astype(jnp.float32)
    draft = adapted(target, layers, adapter)
    logprobs = [
        jax.nn.log_softmax(
            teacher_forced(model.graphdef, model.params, batch)[:, : target.vocab_size]
        )
        for model in (target, draft)
    ]
    return (divergence(*logprobs, tokens) * real).sum(), real.sum()
