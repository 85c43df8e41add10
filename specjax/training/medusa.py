"""Training of Medusa's and Hydra's heads: their first values, and the loss of a batch.

Pure functions. The target is frozen: what it says along known tokens comes in as arrays, and
gradients are taken by the heads alone.

    drafter = init(target, heads=4)

    def loss_of(heads):
        return loss(dataclasses.replace(drafter, heads=heads), known, divergence)

    (value, each), gradients = jax.value_and_grad(loss_of, has_aux=True)(drafter.heads)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from specjax.drafters.medusa import Block, Head, Medusa, width_of
from specjax.models.hub import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.support.ranges import whole
from specjax.training import divergences, train_drafter
from specjax.training.divergences import Divergence
from specjax.training.train_drafter import Losses

DECAY = 0.8  # the loss of head k has the weight .8^k


class Known(NamedTuple):
    """Known tokens, and what the target made of them."""

    tokens: Int[Array, "B T"]  # prompt and output, as the target reads them; right-padded
    counts: Bool[Array, "B T"]  # tokens to be predicted: those of the output, EOS included
    hidden: Float[Array, "B T E"]  # the target's, after each token; that of the last is not read
    logits: Float[Array, "B T V"]  # the target's, of the token after each, likewise


def init(
    target: LanguageModel,
    heads: int = 4,
    *,
    layers: int = 1,
    hydra: bool = False,
    own_head: bool = False,
) -> Medusa:
    """Heads that say what the target's own head says of the feature, in the target's dtype.

    Blocks start at W = 0 and b = 0, linear heads as copies of the target's.

    Args:
      heads: the most tokens that a round can draft.
      layers: blocks of each head.
      hydra: whether head k reads the embeddings of k tokens too.
      own_head: whether each head has a linear head of its own: E·V parameters; otherwise it reads
        the target's, and stores nothing.

    Raises:
      ValueError: heads or layers < 1.
    """
    heads, layers = whole("heads", heads, "[1, ∞)"), whole("layers", layers, "[1, ∞)")
    width, dtype = width_of(target)

    def block(inputs: int) -> Block:
        return Block(jnp.zeros((inputs, width), dtype), jnp.zeros((width,), dtype))

    def head(k: int) -> Head:
        first = width * (k + 2) if hydra else width
        linear = target.logits(jnp.eye(width, dtype=dtype)).astype(dtype) if own_head else None
        return Head((block(first), *(block(width) for _ in range(layers - 1))), linear)

    return Medusa(target, tuple(map(head, range(heads))))


def along(
    drafter: Medusa, tokens: Int[Array, "B T"], hidden: Float[Array, "B T E"]
) -> Iterator[Float[Array, "B T' V"]]:
    """What each head says along known tokens, T' = T − 1 − k for head k, from 1.

    With tokens a b c d, head 1 reads the feature after a and says what follows b, then after b what
    follows c; head 2 says after a what follows c, and Hydra's reads b and c for it.
    """
    length = tokens.shape[1]
    for k, head in enumerate(drafter.heads):
        count = max(length - 2 - k, 0)
        read = None
        if drafter.hydra:
            path = [tokens[:, 1 + i : 1 + i + count] for i in range(k + 1)]
            read = drafter.read(jnp.stack(path, axis=-1))
        yield head.logits(head(hidden[:, :count], read), drafter.target)


def loss(
    drafter: Medusa, known: Known, divergence: Divergence, decay: float = DECAY
) -> tuple[Float[Array, ""], Float[Array, " N"]]:
    """Σ decay^k · (the mean divergence of head k), and those means for each of the N heads.

    Heads are taught at every place whose token `counts`, and as far as the text goes.
    """
    means = []
    for k, said in enumerate(along(drafter, known.tokens, known.hidden)):
        tokens, counts = (x[:, 2 + k :].reshape(-1) for x in (known.tokens, known.counts))
        target = known.logits[:, 1 + k :][:, : said.shape[1]]
        target, draft = (
            jax.nn.log_softmax(x.reshape(-1, x.shape[-1]).astype(said.dtype), axis=-1)
            for x in (target, said)
        )
        each = jnp.where(counts, divergence(target, draft, tokens), 0.0)
        means.append(jnp.sum(each) / jnp.maximum(jnp.sum(counts), 1).astype(each.dtype))
    each = jnp.stack(means)
    weights = decay ** jnp.arange(1, len(means) + 1, dtype=each.dtype)
    return jnp.sum(weights * each), each


@dataclasses.dataclass(frozen=True)
class MedusaTrainer:
    """What `train_drafter` needs of a kind: how to begin, and the loss."""

    heads: int = 4
    layers: int = 1
    hydra: bool = False
    own_head: bool = False
    """These four are those of `init`."""
    decay: float = DECAY
    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.load`."""

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Medusa:
        """Heads that say what the target's own says: nothing in them is random."""
        del counts, seed
        model: Any = target.model
        return init(model, self.heads, layers=self.layers, hydra=self.hydra, own_head=self.own_head)

    def loss(self, drafter: Medusa, known: train_drafter.Known, key: Any) -> Losses:
        """See `loss`, per token; `loss_k` is the mean of head k."""
        del key
        start = jnp.zeros((len(known.tokens), 1), bool)
        text = Known(
            tokens=jnp.concatenate([known.tokens, known.following[:, -1:]], axis=1),
            counts=jnp.concatenate([start, known.real > 0], axis=1),
            hidden=known.hidden,
            logits=known.logprobs,
        )
        divergence = divergences.load(self.divergence)
        value, each = loss(drafter, text, divergence, self.decay)
        count = known.real.sum()
        return Losses(value * count, count, {f"loss_{k}": x for k, x in enumerate(each, start=1)})
