"""How far a draft is from its target, for training: pure functions of two distributions.

    divergence = parse("kl_ce(weight=0.1)")
    divergence(target_logprobs, draft_logprobs, tokens)  # (N, V), (N, V), (N,) → (N,)

Each row is the distribution of one token, p the target's and q the draft's; `tokens` are those that
stand there in the text. No gradient flows into the target. All values are 0 or more; `tv` is a
probability, the others are nats.

An entry of −inf, a token that cannot be, counts as `SMALLEST` (in `neg_log_beta` as `NEVER`), so
values and gradients are finite also where the distributions are disjoint. Finite entries are taken
as they are, however small.

Acceptance is β = Σ min(p, q) = 1 − TV (Leviathan et al. 2023, Thm 3.5), so `tv` is what a draft is
to make small; the others have a gradient where p and q hardly overlap.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.support import named
from specjax.support.ranges import number

Divergence = Callable[
    [Float[Array, "N V"], Float[Array, "N V"], Int[Array, " N"]], Float[Array, " N"]
]

SMALLEST = float(np.log(np.finfo(np.float32).tiny))  # −87.3: below, exp(x) is 0 in float32
NEVER = -1e3  # where small probabilities are compared with one another

NAMES = {
    name: f"experiments.train.divergences:{maker}"
    for name, maker in {
        "forward_kl": "ForwardKL",
        "reverse_kl": "ReverseKL",
        "jsd": "JSD",
        "tv": "TV",
        "neg_log_beta": "NegLogBeta",
        "kl_tv": "KLTV",
        "kl_ce": "KLCE",
    }.items()
}


def parse(name: str) -> Divergence:
    """The divergence of a name, with settings if need be: "kl_tv(rate=3)".

    An import path "module:attribute" of a function that makes one is code that runs.

    Raises:
      ValueError: no such name, or settings that it does not take.
    """
    return named.make("divergence", NAMES, name)


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """KL(p ‖ q) = Σ p·(log p − log q), not the cross-entropy: 0 where q = p.

    The gradient is that of the cross-entropy with p. It makes q cover all of p: word-level
    distillation (Hinton et al. 2015, 1503.02531; DistillSpec, Zhou et al. 2023, 2310.08461).
    """

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        log_p, log_q = _finite(target_logprobs, draft_logprobs)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


@dataclasses.dataclass(frozen=True)
class ReverseKL:
    """KL(q ‖ p) = Σ q·(log q − log p): keeps q out of where p is small (DistillSpec; MiniLLM, Gu et
    al. 2023, 2306.08543)."""

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        log_p, log_q = _finite(target_logprobs, draft_logprobs)
        return (jnp.exp(log_q) * (log_q - log_p)).sum(-1)


@dataclasses.dataclass(frozen=True)
class JSD:
    """½·KL(p ‖ m) + ½·KL(q ‖ m) with m = ½(p + q), at most log 2 (Lin 1991; JSD[½] in
    DistillSpec)."""

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        log_p, log_q = _finite(target_logprobs, draft_logprobs)
        log_m = jnp.logaddexp(log_p, log_q) - float(np.log(2))
        parts = jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m)
        return 0.5 * parts.sum(-1)


@dataclasses.dataclass(frozen=True)
class TV:
    """½·Σ |p − q| = 1 − β, the chance that a drafted token is rejected (TVD in DistillSpec).

    The gradient by log q is ½·q·sign(q − p): it vanishes where q does, so a draft that gives p's
    tokens next to nothing hardly learns.
    """

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        log_p, log_q = _finite(target_logprobs, draft_logprobs)
        return 0.5 * jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)).sum(-1)


@dataclasses.dataclass(frozen=True)
class NegLogBeta:
    """−log β with β = Σ min(p, q), as a sum of logarithms: the gradient is TV's, divided by β, and
    does not vanish where β does (SpecForge, `lk_loss.py`)."""

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        log_p, log_q = _finite(target_logprobs, draft_logprobs, NEVER)
        log_beta = jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)
        return jnp.maximum(-log_beta, 0.0)  # β exceeds 1 by rounding


@dataclasses.dataclass(frozen=True)
class KLTV:
    """λ·KL(p ‖ q) + (1 − λ)·TV with λ = exp(−rate·β), of each row its own, and no gradient through
    λ: KL where the distributions are apart, TV where they overlap (SpecForge, `lk_loss.py`).

    Args:
      rate: ≥ 0; at 0 it is KL.

    Raises:
      ValueError: the rate is out of range.
    """

    rate: float = 3.0

    def __post_init__(self):
        number("rate", self.rate, "[0, ∞)")

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        distributions = target_logprobs, draft_logprobs, tokens
        tv = TV()(*distributions)
        share = jax.lax.stop_gradient(jnp.exp(-self.rate * (1 - tv)))
        return share * ForwardKL()(*distributions) + (1 - share) * tv


@dataclasses.dataclass(frozen=True)
class KLCE:
    """KL(p ‖ q) + weight·(−log q[token]): the text counts too. With the target's outputs for text
    it is sequence-level distillation beside word-level (Kim and Rush 2016, 1606.07947).

    On the draft's own samples the second part teaches the draft what it does already.

    Args:
      weight: ≥ 0; at 0 it is KL.

    Raises:
      ValueError: the weight is out of range.
    """

    weight: float = 0.1

    def __post_init__(self):
        number("weight", self.weight, "[0, ∞)")

    def __call__(self, target_logprobs, draft_logprobs, tokens):
        _, log_q = _finite(target_logprobs, draft_logprobs)
        # A masked sum: the gradient of a gather is a scatter, which is slow.
        chosen = jnp.arange(log_q.shape[-1], dtype=tokens.dtype)[None, :] == tokens[:, None]
        cross_entropy = -jnp.where(chosen, log_q, 0.0).sum(-1)
        kl = ForwardKL()(target_logprobs, draft_logprobs, tokens)
        return kl + self.weight * cross_entropy


def _finite(
    target_logprobs: Array, draft_logprobs: Array, smallest: float = SMALLEST
) -> tuple[Array, Array]:
    """Both with `smallest` for −inf, and the target's as a constant."""

    def finite(logprobs):
        return jnp.where(jnp.isneginf(logprobs), smallest, logprobs)

    return jax.lax.stop_gradient(finite(target_logprobs)), finite(draft_logprobs)
