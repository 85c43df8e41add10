"""Training Kangaroo's adapter, or a shallow decoder, towards its target, which stays as it is.
`train_drafter` runs it."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.train import divergences
from experiments.train.train_drafter import Known, Losses, Trainer, read
from specjax.drafters import views
from specjax.drafters.views import View
from specjax.models.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True)
class ViewTrainer(Trainer):
    """The start and the loss of a view of its target: a divergence from the target."""

    make: ClassVar[Any]
    """The function of `specjax.drafters.views` that makes the view."""
    layers: Any
    """The argument of `make`."""
    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.parse`. Kangaroo's own is the cross-entropy
    with it, forward KL but for a constant."""

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> View:
        """An early exit: nothing in it is random."""
        del counts, seed
        return type(self).make(target, self.layers)

    def loss(self, drafter: View, known: Known, key: Any) -> Losses:
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
class KangarooTrainer(ViewTrainer):
    """The trainer of a Kangaroo."""

    make = staticmethod(views.kangaroo)
    layers: int = 2
    """The number of the target's layers that run before the adapter."""


@dataclasses.dataclass(frozen=True)
class ShallowTrainer(ViewTrainer):
    """The trainer of a shallow decoder. The target's encoder is frozen."""

    make = staticmethod(views.shallow)
    layers: tuple[int, ...] = (0, 5)
    """The layers of the target's decoder with which it starts."""
