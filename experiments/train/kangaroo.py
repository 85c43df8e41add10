"""Training Kangaroo's adapter towards its target, which stays as it is; `train_drafter` runs it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.train import divergences
from experiments.train.train_drafter import Known, Losses, Trainer, read
from specjax.drafters.kangaroo import Kangaroo, kangaroo
from specjax.models.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class KangarooTrainer(Trainer):
    """What `train_drafter` needs of a kind: how to begin, and the loss."""

    layers: int = 2
    """Of the target that run before the adapter."""
    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.parse`. Kangaroo's own is the cross-entropy
    with it, forward KL but for a constant."""

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Kangaroo:
        """An early exit of one layer more: nothing in it is random."""
        del counts, seed
        return kangaroo(target, self.layers)

    def loss(self, drafter: Kangaroo, known: Known, key: Any) -> Losses:
        """The divergence at each position, and α: Σ min(target, draft)."""
        del key
        _, draft = read(drafter.model, known.tokens, known.source, known.source_len)
        p, q = (x.reshape(-1, x.shape[-1]) for x in (known.logprobs, draft))
        each = divergences.parse(self.divergence)(p, q, known.following.reshape(-1))
        overlap = jnp.minimum(jnp.exp(known.logprobs), jnp.exp(draft)).sum(-1)
        count = known.real.sum()
        alpha = (overlap * known.real).sum() / jnp.maximum(count, 1)
        total = (each.reshape(known.real.shape) * known.real).sum()
        return Losses(total, count, {"alpha_1": alpha})
