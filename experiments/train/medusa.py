"""Training of Medusa's and Hydra's heads: their first values, and the loss of a batch.

Pure functions. The target is frozen: what it says along known tokens comes in as arrays, and
gradients are taken by the heads alone. Only `MedusaTrainer` can train the target's last layers
along with them, as Medusa-2 does: then the heads belong to the target that comes of it.

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

from experiments.train import divergences, train_drafter
from experiments.train.divergences import Divergence
from experiments.train.train_drafter import Losses, Trainer, read
from specjax.drafters.eagle import head_rows
from specjax.drafters.medusa import Block, Head, Medusa, width_of
from specjax.drafters.views import places
from specjax.models.checkpoint import Checkpoint, decoder_of
from specjax.models.language_model import LanguageModel
from specjax.pytrees import pytree
from specjax.support.ranges import number, whole
from specjax.types import Params

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
        # Not `logits` of unit vectors: those of a Gemma are capped.
        rows = head_rows(target.module())[: target.vocab_size] if own_head else None
        linear = None if rows is None else rows.T.astype(dtype)
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
    for k, logits in enumerate(along(drafter, known.tokens, known.hidden)):
        tokens, counts = (x[:, 2 + k :].reshape(-1) for x in (known.tokens, known.counts))
        target = known.logits[:, 1 + k :][:, : logits.shape[1]]
        target, draft = (
            jax.nn.log_softmax(x.reshape(-1, x.shape[-1]).astype(logits.dtype), axis=-1)
            for x in (target, logits)
        )
        each = jnp.where(counts, divergence(target, draft, tokens), 0.0)
        means.append(jnp.sum(each) / jnp.maximum(jnp.sum(counts), 1).astype(each.dtype))
    each = jnp.stack(means)
    weights = decay ** jnp.arange(1, len(means) + 1, dtype=each.dtype)
    return jnp.sum(weights * each), each


@pytree
class WithLayers:
    """Heads, and the last layers of their target, while both are trained."""

    target: LanguageModel  # as it was
    heads: tuple[Head, ...]
    layers: dict[int, Params]  # of the target, as they have become, by their number
    norm: Params  # that follows them, likewise

    def drafter(self) -> Medusa:
        """The drafter of the trained target, whose other parameters are still the same arrays."""
        params = self.target.params
        stack, norm = places(params)
        params = {**params, stack: {**params[stack], **self.layers}, norm: self.norm}
        return Medusa(dataclasses.replace(self.target, params=params), self.heads)


def with_layers(drafter: Medusa, count: int) -> WithLayers:
    """To train the last `count` layers of the target too, and the norm after them."""
    params = drafter.target.params
    stack, norm = places(params)
    last = sorted(params[stack])[-count:]
    layers = {number: params[stack][number] for number in last}
    return WithLayers(drafter.target, drafter.heads, layers, params[norm])


@dataclasses.dataclass(frozen=True)
class MedusaTrainer(Trainer):
    """What `train_drafter` needs of a kind: how to begin, and the loss."""

    heads: int = 4
    layers: int = 1
    hydra: bool = False
    own_head: bool = False
    """These four are those of `init`."""
    decay: float = DECAY
    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.parse`."""
    train_layers: int = 0
    """How many of the target's last layers are trained along; 0: the target stays as it is."""
    heads_weight: float = 0.2
    """Of the heads' loss where the target has one, too."""

    def __post_init__(self):
        whole("train_layers", self.train_layers, "[0, ∞)")
        number("heads_weight", self.heads_weight, "[0, ∞)")

    def init(
        self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int
    ) -> Medusa | WithLayers:
        """Heads that say what the target's own says: nothing in them is random."""
        del counts, seed
        model: Any = target.model
        begun = init(
            model, self.heads, layers=self.layers, hydra=self.hydra, own_head=self.own_head
        )
        if not self.train_layers:
            return begun
        most = decoder_of(target, "train_layers").cache_shape()[0]
        return with_layers(begun, whole("train_layers", self.train_layers, f"[0, {most}]"))

    def loss(self, drafter: Medusa | WithLayers, known: train_drafter.Known, key: Any) -> Losses:
        """See `loss`, per token; `loss_k` is the mean of head k.

        Where the target is trained too, with p its distribution as it was and p' as it has become,

            KL(p ‖ p') + heads_weight · the loss of heads that learn p' from the hidden states of p'

        and `target_kl` is the mean of the first. The heads' gradient reaches the trained layers by
        those states, and not by p'.
        """
        del key
        count = known.real.sum()
        if isinstance(drafter, Medusa):
            value, seen = self._heads(drafter, known)
            return Losses(value * count, count, seen)
        own = drafter.drafter()
        hidden, logprobs = read(own.target, known.tokens, known.source, known.source_len)
        apart = (jnp.exp(known.logprobs) * (known.logprobs - logprobs)).sum(-1)
        kl = (apart * known.real).sum()
        known = known._replace(hidden=hidden, logprobs=jax.lax.stop_gradient(logprobs))
        value, seen = self._heads(own, known)
        total = kl + self.heads_weight * value * count
        return Losses(total, count, {"target_kl": kl / jnp.maximum(count, 1), **seen})

    def _heads(self, drafter: Medusa, known: train_drafter.Known) -> tuple[Array, dict[str, Array]]:
        """Their loss per token, and that of each."""
        start = jnp.zeros((len(known.tokens), 1), bool)
        text = Known(
            tokens=jnp.concatenate([known.tokens, known.following[:, -1:]], axis=1),
            counts=jnp.concatenate([start, known.real > 0], axis=1),
            hidden=known.hidden,
            logits=known.logprobs,
        )
        divergence = divergences.parse(self.divergence)
        value, each = loss(drafter, text, divergence, self.decay)
        return value, {f"loss_{k}": x for k, x in enumerate(each, start=1)}

    def result(self, drafter: Medusa | WithLayers, target: Checkpoint) -> tuple[Medusa, Checkpoint]:
        """The heads, and the target as it has become."""
        if isinstance(drafter, Medusa):
            return drafter, target
        own = drafter.drafter()
        return own, dataclasses.replace(target, model=own.target)
