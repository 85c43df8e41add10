"""Rollouts without models, from a few numbers that say how the chance of acceptance varies; and
those numbers, estimated from any rollouts.

Whether the token drafted at position t of output o is accepted is the sign of a normal variable:

    accepted  ⇔  h + √b · Bₒ + √w · Wₒₜ + √(1 − b − w) · Eₒₜ > 0,     α = Φ(h)

B is of the output, W a first-order autoregression within it, E new at every position; all are
standard normal. The chance of acceptance, given B and W, is Φ((h + √b·B + √w·W)/√(1 − b − w)), and
two chances whose normal variables share r of their variance have the covariance

    V(r) = Φ₂(h, h; r) − α²,     from V(0) = 0 to V(1) = α(1 − α)

with Φ₂ the distribution function of two normal variables of correlation r. So the variance of the
chance between outputs is V(b), in all V(b + w), and the autocovariance at lag k V(b + φᵏ·w). They
are given as shares of α(1 − α), the most that is possible: at 0 all tokens have the chance α, at 1
the fate of each is settled. The share between outputs is the correlation of two acceptances of one
output.

The drafter sees a signal, √s of it the standing √b·B + √w·W and the rest noise that is new at every
position. What the signal shows is the chance Φ((h + √s·S)/√(1 − s)), of the variance V(s).
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import log_ndtr
from jaxtyping import Bool, Float, Key
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri, owens_t

from specjax.replay.rollouts import Rollouts
from specjax.support.ranges import number, whole

OTHERS = 64  # tokens among which a belief's remaining mass is spread, for its entropy


@dataclasses.dataclass(frozen=True)
class Chances:
    """How the chance of acceptance varies, and what the drafter's belief shows of it.

    Raises:
      ValueError: a number out of its range, or shares that add up to more than 1.
    """

    alpha: float  # the mean chance, in (0, 1)
    between: float = 0.0  # variance of the chance between outputs, as a share of α(1 − α)
    within: float = 0.0  # and within outputs
    autocorrelation: float = 0.0  # of the chance within an output, from one position to the next
    informativeness: float = 1.0  # share of the chance's variance that the belief explains
    # A belief of calibrated chance c reads Φ(offset + slope · Φ⁻¹(c)); with slope > 1 the drafter
    # is too sure of itself, be it of success or of failure.
    slope: float = 1.0
    offset: float = 0.0

    def __post_init__(self):
        number("alpha", self.alpha, "(0, 1)")
        for name in ("between", "within", "autocorrelation", "informativeness"):
            number(name, getattr(self, name), "[0, 1]")
        number("slope", self.slope, "[0, ∞)")
        number("offset", self.offset, "(-∞, ∞)")
        number("between + within", self.between + self.within, "[0, 1]",
               "they are shares of α(1 − α)")  # fmt: skip


class Latent(NamedTuple):
    """Parameters of the normal variables: see the module."""

    h: float
    b: float
    w: float
    phi: float
    s: float
    slope: float
    offset: float


def latent(chances: Chances) -> Latent:
    """Shares of the normal variables' variance, from those of the chance's."""
    h, known = float(ndtri(chances.alpha)), chances.between + chances.within
    b = _common(h, chances.between)
    both = _common(h, known)
    next_to = _common(h, chances.between + chances.autocorrelation * chances.within)
    return Latent(
        h,
        b,
        w=both - b,
        phi=(next_to - b) / (both - b) if both > b else 0.0,
        s=_common(h, chances.informativeness * known),
        slope=chances.slope,
        offset=chances.offset,
    )


def covariance(h: float, r: float) -> float:
    """V(r) as a share of α(1 − α): how far two acceptances are correlated."""
    alpha = ndtr(h)
    return float(1 - 2 * owens_t(h, np.sqrt((1 - r) / (1 + r))) / (alpha * (1 - alpha)))


def _common(h: float, share: float) -> float:
    """The r of this covariance, which grows with it."""
    if share <= 0 or share >= 1:
        return float(share >= 1)
    return float(brentq(lambda r: covariance(h, r) - share, 0.0, 1.0, xtol=1e-12))


def rollouts(
    chances: Chances,
    key: Key[Array, ""],
    *,
    outputs: int,
    tokens: int,
    gamma_max: int,
    settled: bool = False,
) -> Rollouts:
    """Rollouts of G = `gamma_max` drafted tokens from every position of N outputs.

    The target is certain of its token, and the draft has it with the chance of the position: that
    is Σ min(p, q), and the chance that a drafted token is accepted. A token that is not accepted
    has no chance at all. What is drafted behind it has the standing of its own path: the output's
    B, and a W that goes on from where the rejection was, with news of its own. So a wrong prefix
    neither lowers nor lifts what a drafter believes.

    The belief is the largest probability, the confidence in whatever token is drafted, and gives
    the entropy of a distribution whose remaining mass is spread evenly over 64 tokens. Hidden
    states are not made.

    Args:
      outputs, tokens: N outputs of T − 1 tokens each, which their budget ends.
      settled: whether every chance is drawn, 0 or 1, as at temperature 0. Beliefs are the same.
    """
    sizes = {"outputs": outputs, "tokens": tokens, "gamma_max": gamma_max}
    sizes = {name: whole(name, value, "[1, ∞)") for name, value in sizes.items()}
    chance, belief = _draw(latent(chances), key, **sizes, settled=settled)
    places = chance.shape[:2]
    own = jnp.log(chance[:, :, 0]).at[:, -1].set(-jnp.inf)  # nothing is accepted behind the end
    count = jnp.full((outputs,), tokens, jnp.int32)
    certain, none = jnp.zeros(chance.shape, jnp.float32), jnp.zeros(places, jnp.int32)
    top1 = jnp.exp(belief)
    return Rollouts(
        input_index=jnp.arange(outputs, dtype=jnp.int32),
        emitted=count,
        budget=count,
        tokens=none,
        own_target=certain[:, :, 0],
        own_draft=own,
        own_belief_logprob=belief[:, :, 0],
        length=jnp.full(places, gamma_max, jnp.int32),
        drafts=jnp.zeros(chance.shape, jnp.int32),
        target=certain.at[:, :, 0].set(-jnp.inf),
        draft=certain,
        belief_logprob=belief,
        overlap=chance,
        entropy=_entropy(top1),
        top1=top1,
        target_entropy=certain,
        hidden=certain[..., None][..., :0],
        accepted=none - 1,
    )


@partial(jax.jit, static_argnames=("outputs", "tokens", "gamma_max", "settled"))
def _draw(of: Latent, key, *, outputs, tokens, gamma_max, settled):
    """Chance and log-belief, (N, T, G), at every slot of every rollout; slot 0 is on the output.

    What does not depend on the signal has keys of its own: chances are the same whatever the
    drafter knows.
    """
    keys = jax.random.split(key, 5)
    shape = outputs, tokens + 1, gamma_max
    level = jax.random.normal(keys[0], (outputs, 1, 1))

    def follow(standing, news):
        after = of.phi * standing + jnp.sqrt(1 - of.phi**2) * news
        return after, after

    first = jax.random.normal(keys[1], shape[:2])
    start, rest = first[:, 0], jnp.moveaxis(first[:, 1:], 1, 0)
    along = jax.lax.scan(follow, start, rest)[1]
    along = jnp.concatenate([start[:, None], jnp.moveaxis(along, 0, 1)], axis=1)
    news = jax.random.normal(keys[2], (gamma_max - 1, *shape[:2]))
    behind = jnp.moveaxis(jax.lax.scan(follow, along, news)[1], 0, 2)
    path = jnp.concatenate([along[:, :, None], behind], axis=2)

    known = jnp.sqrt(of.b) * level + jnp.sqrt(of.w) * path
    both = of.b + of.w
    chance = jnp.exp(log_ndtr((of.h + known) / _root(1 - both)))
    if settled:
        chance = (jax.random.uniform(keys[3], shape) < chance).astype(jnp.float32)
    # Of the signal's variance the standing's share; rounding must not lift it above 1.
    share = jnp.minimum(of.s / jnp.where(both > 0, both, 1.0), 1.0)
    noise = jax.random.normal(keys[4], shape)
    seen = share * known + jnp.sqrt((1 - share) * of.s) * noise
    belief = of.offset + of.slope * (of.h + seen) / _root(1 - of.s)
    return chance.astype(jnp.float32), log_ndtr(jnp.clip(belief, -5.0, None)).astype(jnp.float32)


def _root(left):
    """√left; where nothing is left, chances are 0 or 1."""
    return jnp.sqrt(jnp.maximum(left, 1e-12))


def _entropy(top1: Float[Array, "..."]) -> Float[Array, "..."]:
    """Entropy of a distribution with this largest probability, in nats."""
    rest = 1 - top1
    spread = jnp.where(rest > 0, rest * (np.log(OTHERS) - jnp.log(jnp.maximum(rest, 1e-30))), 0.0)
    return spread - top1 * jnp.log(top1)


# --- the numbers, from rollouts -------------------------------------------------------------------

BINS = 20  # of beliefs, equally full
EDGES = np.arange(1, BINS) / BINS
LEAST = 0.2  # autocorrelation that another estimate is divided by
SURE = 1e-4  # beliefs below it, or above 1 − SURE, have no quantile worth a fit


class Seen(NamedTuple):
    """What the estimates read of N outputs."""

    chance: Float[np.ndarray, "N T"]
    top1: Float[np.ndarray, "N T"]
    there: Bool[np.ndarray, "N T"]  # positions of the output


def seen(found: Rollouts) -> Seen:
    """Σ min(target, draft) and the belief's largest probability along the outputs."""
    there = np.arange(found.tokens.shape[1]) < np.asarray(found.emitted)[:, None]
    chance, top1 = (
        np.where(there, np.asarray(field[:, :, 0], np.float64), 0.0)
        for field in (found.overlap, found.top1)
    )
    return Seen(chance, top1, there)


def describe(found: Rollouts | Seen) -> Chances:
    """The `Chances` of rollouts, by moments.

    Between outputs: the covariance of chances far apart in one output, by at least a quarter of the
    mean length. Where chances are known (T > 0: they are Σ min(p, q)), their variance beyond that
    is the one within outputs, and their covariance at lag 1 gives the autocorrelation. The belief
    explains the variance of the mean chance in 20 bins of it, which are equally full.

    At T = 0 a chance is 0 or 1, and its variance shows nothing. A chance is then what neighbours
    and beliefs predict, and what neither does counts as luck. Noise in beliefs is taken to be new
    at every position. So the covariance of acceptance with the belief falls from lag 0 to lag 1 as
    the autocorrelation a of the chance does, and the covariance of neighbours, beyond the one
    between outputs, is a times the variance within outputs. Where beliefs show less than neighbours
    do, a is the fall of the acceptances' own covariance from lag 1 to lag 2. The variance is at
    least what beliefs explain within outputs, and is taken for that where a is below .2.

    Raises:
      ValueError: fewer than two outputs, no output of two tokens, or acceptance that never varies.
    """
    at = found if isinstance(found, Seen) else seen(found)
    counts = at.there.sum(axis=1)
    if len(counts) < 2 or counts.max() < 2:
        raise ValueError(
            f"{len(counts)} outputs of at most {counts.max(initial=0)} tokens do not show how "
            "chances vary: trace at least two outputs of two tokens."
        )
    alpha = at.chance[at.there].mean()
    if not 0 < alpha < 1:
        raise ValueError(
            f"α={alpha:g}: where acceptance never varies there is nothing to adapt to."
        )
    most = alpha * (1 - alpha)
    bins, explained = _explained(at)
    far = max(1, int(counts.mean()) // 4)
    between = _moment(at, at.chance, at.chance, far, counts.max())
    near = _moment(at, at.chance, at.chance, 1, 2) - between
    if np.isin(at.chance, (0, 1)).all():
        predicted = np.where(at.there, bins.chance[bins.which], 0.0)
        apart = _moment(at, at.chance, predicted, far, counts.max())
        within = explained - apart
        # The autocorrelation by lags 0 and 1 of the belief, or 1 and 2 of acceptances.
        next_to = _moment(at, at.chance, predicted, 1, 2) - apart
        if within < near:
            within, next_to = near, _moment(at, at.chance, at.chance, 2, 3) - between
        auto = next_to / within if within > 0 else 0.0
        if auto >= LEAST:
            within = max(explained - apart, near / auto)
    else:
        within = _moment(at, at.chance, at.chance, 0, 1) - between
        auto = near / within if within > 0 else 0.0
    between = float(np.clip(between / most, 0, 1))
    within = float(np.clip(within / most, 0, 1 - between))
    known = between + within
    slope, offset = _line(bins)
    return Chances(
        float(alpha),
        between,
        within,
        float(np.clip(auto, 0, 1)),
        float(np.clip(explained / most / known, 0, 1)) if known > 0 else 1.0,
        slope,
        offset,
    )


def _moment(at: Seen, left, right, first: int, beyond: int) -> float:
    """Covariance of two quantities of one output at lags first … beyond − 1, in both orders.

    The product of means is that of pairs of different outputs, at the same positions and weights:
    so long outputs, and the ends of outputs, may differ from others without being taken for a
    covariance.
    """
    products, sums, others, pairs = np.zeros((4, len(at.there)))
    for lag in range(first, beyond):
        end = at.there.shape[1] - lag
        both = at.there[:, lag:]  # an output has no gaps
        for one, other in ((left, right), (right, left)):
            early, late = np.where(both, one[:, :end], 0.0), np.where(both, other[:, lag:], 0.0)
            products += (early * late).sum(axis=1)
            sums += early.sum(axis=1)
            others += late.sum(axis=1)
            pairs += both.sum(axis=1)
    apart = pairs.sum() ** 2 - pairs @ pairs
    if apart == 0:  # of one output at most
        return 0.0
    means = (sums.sum() * others.sum() - sums @ others) / apart
    return float(products.sum() / pairs.sum() - means)


class Bins(NamedTuple):
    """Positions by their belief."""

    which: np.ndarray  # (N, T)
    chance: np.ndarray  # means, by bin
    belief: np.ndarray  # medians of top1
    sizes: np.ndarray


def _explained(at: Seen) -> tuple[Bins, float]:
    """The variance of the chance that beliefs explain; not what noise in the bins' means adds."""
    top1, chance = at.top1[at.there], at.chance[at.there]
    edges = np.unique(np.quantile(top1, EDGES))
    which = np.searchsorted(edges, at.top1, side="right")
    inside = which[at.there]
    there, inside = np.unique(inside, return_inverse=True)
    count = np.bincount(inside).astype(float)
    mean = np.bincount(inside, chance) / count
    belief = np.array([np.median(top1[inside == i]) for i in range(len(count))])
    left = ((chance - mean[inside]) ** 2).sum() / max(len(chance) - len(count), 1)
    noise = left * (len(count) - 1) / len(chance)
    explained = count @ (mean - chance.mean()) ** 2 / len(chance) - noise
    back = np.searchsorted(there, which).clip(0, len(there) - 1)
    return Bins(back, mean, belief, count), float(max(explained, 0.0))


def _line(bins: Bins) -> tuple[float, float]:
    """Slope and offset of beliefs against what they stand for, as quantiles.

    Beliefs that float32 or a clip has cut are left out, if others are there.
    """
    known = (bins.belief > SURE) & (bins.belief < 1 - SURE)
    known |= not known.any()
    count = bins.sizes[known]
    acceptance = ndtri(np.clip(bins.chance[known], 0.5 / count, 1 - 0.5 / count))
    belief, weight = ndtri(np.clip(bins.belief[known], SURE, 1 - SURE)), count / count.sum()
    x, y = acceptance - weight @ acceptance, belief - weight @ belief
    spread = weight @ x**2
    slope = float(max(weight @ (x * y) / spread, 0.0)) if spread > 1e-6 else 1.0
    return slope, float(weight @ belief - slope * (weight @ acceptance))
