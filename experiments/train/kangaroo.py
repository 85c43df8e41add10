"""Training Kangaroo's adapter, or a shallow decoder, towards its target, which stays as it is.
`train_drafter` runs it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.train import divergences
from experiments.train.train_drafter import Known, Losses, Trainer, read
from specjax.drafters.kangaroo import Kangaroo, kangaroo
from specjax.drafters.shallow import Shallow, shallow
from specjax.models.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class ModelTrainer(Trainer):
    """The loss of drafters that are models: a divergence from the target."""

    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.parse`. Kangaroo's own is the cross-entropy
    with it, forward KL but for a constant."""

    def loss(self, drafter: Kangaroo | Shallow, known: Known, key: Any) -> Losses:
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


@dataclasses.dataclass(frozen=True)
class KangarooTrainer(ModelTrainer):
    """What `train_drafter` needs of a Kangaroo."""

    layers: int = 2
    """Of the target that run before the adapter."""

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Kangaroo:
        """An early exit of one layer more: nothing in it is random."""
        del counts, seed
        return kangaroo(target, self.layers)


@dataclasses.dataclass(frozen=True)
class ShallowTrainer(ModelTrainer):
    """What `train_drafter` needs of a shallow decoder. The target's encoder is frozen."""

    layers: tuple[int, ...] = (0, 5)
    """Of the target's decoder, with which it starts."""

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Shallow:
        """An early exit of these layers: nothing in it is random."""
        del counts, seed
        return shallow(target, self.layers)
