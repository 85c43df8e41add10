"""The loss of an EAGLE along known tokens, as pure functions; `train_drafter` runs it.

EAGLE-1 is to say the target's next feature, and with its head the next token:

    feature_weight · smooth-L1(h, f) + token_weight · divergence(target ‖ draft)

EAGLE-3 is to say tokens alone, from its own outputs: the layer is unrolled as it is in drafting
("training-time test"). Row t of unrolled step i stands for a draft of i tokens that began at t: it
reads token x_{t+i} beside its own h of step i − 1, at position t + i, and attends to the pairs with
true features of slots ≤ t and to its own earlier steps. With three known tokens a b c and step 1,

    row 0   (h_0, b) at 1   sees (f_{−1}, a) and itself
    row 1   (h_1, c) at 2   sees (f_{−1}, a) (f_0, b) and itself

and each says the token after. Step i counts decay^i. Both versions may be unrolled: an EAGLE-1 then
is a HASS (Zhang et al. 2024, 2408.15766).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from experiments.train import divergences
from experiments.train.divergences import Divergence
from experiments.train.train_drafter import Known, Losses, Trainer
from specjax.drafters import eagle
from specjax.drafters.eagle import Eagle, Source
from specjax.models.attention import KV, MASKED, attend
from specjax.models.checkpoint import Checkpoint
from specjax.models.llama import Rotation
from specjax.support.ranges import number, whole


def smooth_l1(x: Float[Array, "*batch E"], y: Float[Array, "*batch E"]) -> Float[Array, "*batch"]:
    """Mean over the features: ½d² where |d| < 1, else |d| − ½."""
    distance = jnp.abs(x - y)
    return jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(-1)


def noisy(features: Float[Array, "B T E"], amount: float, key: Key[Array, ""]) -> Array:
    """Uniform noise of up to ±amount in units of the features' root mean square.

    EAGLE-1 learns from features that are a little off, as those are that it says itself. It has
    ±0.1·512/length there, for features of its own targets.
    """
    scale = amount * jnp.sqrt(jnp.mean(features**2))
    return features + scale * jax.random.uniform(key, features.shape, features.dtype, -1, 1)


def unrolled(
    drafter: Eagle,
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T E"],
    source: Source | tuple[()],
    steps: int,
) -> list[Float[Array, "B T E"]]:
    """h of each unrolled step; row t of step i stands at position t + i and says token t + i + 1.

    Args:
      tokens: known ones from position 0 on.
      features: those beside them in pairs: the target's of the token before.
      source: of `Eagle.read`.
    """
    module, config, count = drafter.module, drafter.config, tokens.shape[1]
    positions = jnp.arange(count)[None, :]
    causal = module.bias(jnp.zeros((1,), jnp.int32), count, count).within
    own = jnp.where(jnp.eye(count, dtype=bool), 0.0, MASKED)[None, None]
    seen: list[KV] = []
    found = []
    for step in range(steps):
        embedded = drafter.embed(moved(tokens, step))
        residual, x = module.enter(embedded, features)
        rotation = Rotation.at(positions + step, config.layer)
        queries, new = module.attention.project(x, rotation=rotation)
        seen.append(new)
        keys = KV(
            jnp.concatenate([kv.keys for kv in seen], axis=3),
            jnp.concatenate([kv.values for kv in seen], axis=2),
        )
        bias = jnp.concatenate([causal] + [own] * step, axis=3)
        attended = module.attention.merge(attend(queries, keys, bias))
        features = module.leave(residual + attended, source)
        found.append(features)
    return found


def moved(x: Array, steps: int) -> Array:
    """(B, T, …): entry t of the result is entry t + steps, and 0 past the end."""
    rest = ((0, 0), (0, steps)) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x[:, steps:], rest)


@dataclasses.dataclass(frozen=True)
class EagleTrainer(Trainer):
    """What `train_drafter` needs of a kind: how to begin, and the loss."""

    version: int = 1
    heads: int = 0
    inner: int = 0
    taps: tuple[int, ...] = ()
    cross: bool | None = None
    """These five are those of `eagle.fresh`."""
    frequent: int = 0
    """EAGLE-3: ids that its head has, the most frequent ones of the training data; 0: all."""
    steps: int = 0
    """Unrolled; 0: 1 for EAGLE-1 and 4 for EAGLE-3."""
    decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    """Both of EAGLE-1; EAGLE-3 has tokens alone."""
    noise: float = 0.1
    divergence: str = "forward_kl"
    """From the target's distribution: see `divergences.parse`."""

    def __post_init__(self):
        object.__setattr__(self, "taps", tuple(self.taps))
        for name in ("frequent", "steps"):
            whole(name, getattr(self, name), "[0, ∞)")
        for name in ("decay", "feature_weight", "token_weight", "noise"):
            number(name, getattr(self, name), "[0, ∞)")

    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Eagle:
        """A drafter that knows nothing. `counts`: how often each id is in the training data."""
        ids = None
        if self.version == 3 and 0 < self.frequent < len(counts):
            ids = np.sort(np.argsort(-counts, kind="stable")[: self.frequent])
        return eagle.fresh(
            target,
            version=self.version,
            heads=self.heads,
            inner=self.inner,
            taps=self.taps,
            ids=ids,
            cross=self.cross,
            seed=seed,
        )

    def loss(self, drafter: Eagle, known: Known, key: Key[Array, ""] | None) -> Losses:
        """See `losses`; without a key there is no noise."""
        one = self.version == 1
        return losses(
            drafter,
            known,
            key,
            divergence=divergences.parse(self.divergence),
            steps=self.steps or (1 if one else 4),
            decay=self.decay,
            feature_weight=self.feature_weight if one else 0.0,
            token_weight=self.token_weight if one else 1.0,
            noise=self.noise if one else 0.0,
        )


def losses(
    drafter: Eagle,
    known: Known,
    key: Key[Array, ""] | None,
    *,
    divergence: Divergence,
    steps: int,
    decay: float,
    feature_weight: float,
    token_weight: float,
    noise: float,
) -> Losses:
    """The loss of a batch, and α of each unrolled step: Σ min(target, draft).

    A head over frequent ids is compared with the target's distribution over them, each position
    weighed by the mass that the target gives them: for forward KL this is the exact one, less the
    part that no such head can change.
    """
    features = drafter.features(known.hidden)
    first = drafter.module.first[...] if drafter.config.first_learned else 0 * features[0, 0]
    first = jnp.broadcast_to(first[None, None, :], (len(features), 1, features.shape[2]))
    before = jnp.concatenate([first, features[:, :-1]], axis=1)
    if noise and key is not None:
        before = noisy(before, noise, key)
    source = drafter.read(known.source, known.source_len)
    total, seen = jnp.float32(0), {}
    outputs = unrolled(drafter, known.tokens, before, source, steps)
    target, tokens, mass = _of_head(drafter, known)
    for step, hidden in enumerate(outputs):
        real = moved(known.real, step)
        draft = jax.nn.log_softmax(_logits(drafter, hidden), axis=-1)
        wanted, weight = moved(target, step), moved(mass, step) * real
        flat = wanted.shape[0] * wanted.shape[1]
        each = divergence(
            wanted.reshape(flat, -1), draft.reshape(flat, -1), moved(tokens, step).reshape(-1)
        )
        loss = token_weight * (each.reshape(weight.shape) * weight).sum()
        if feature_weight:
            apart = smooth_l1(hidden, moved(features, step)).astype(jnp.float32)
            loss += feature_weight * (apart * real).sum()
        total += decay**step * loss
        overlap = jnp.minimum(jnp.exp(wanted) * moved(mass, step)[..., None], jnp.exp(draft))
        seen[f"alpha_{step + 1}"] = (overlap.sum(-1) * real).sum() / jnp.maximum(real.sum(), 1)
    return Losses(total, known.real.sum(), seen)


def _logits(drafter: Eagle, hidden: Float[Array, "B T E"]) -> Float[Array, "B T R"]:
    """Over the ids that the drafter's head has."""
    return drafter.logits(hidden) if drafter.ids is None else drafter.module.few(hidden)


def _of_head(drafter: Eagle, known: Known) -> tuple[Array, Array, Array]:
    """The target's distribution over those ids, the tokens' places among them, and their mass."""
    if drafter.ids is None or drafter.row_of is None:
        return known.logprobs, known.following, jnp.ones_like(known.real)
    some = known.logprobs.at[..., drafter.ids].get(mode="fill", fill_value=-jnp.inf)
    mass = jax.nn.logsumexp(some, axis=-1)
    rows = jnp.minimum(drafter.row_of[known.following], drafter.config.rows - 1)
    return some - mass[..., None], rows, jnp.exp(mass)
