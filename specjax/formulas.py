"""The formulas of Leviathan et al. 2023, as functions of numbers: no model is run here.

α (`alpha`) is the chance that a drafted token is accepted, γ (`gamma`) the drafted tokens per
target call, c time(draft step) / time(target step), v time(verify call) / time(target step).
Speedups are factors of walltime over plain decoding at batch 1: 2.0 is twice as fast.

Every argument may be an array; arrays broadcast. Floats in give a float out, in float64. The
assumptions, and where they fail, are in experiments/theory/README.md.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Num

Numbers = Num[ArrayLike, "..."]
Probs = Float[ArrayLike, "*batch V"]
VerifyCost = float | Sequence[float] | Num[ArrayLike, " G"]
"""v by γ: one number for all γ, or a table with entry γ at index γ."""

Floats = Any
"""A float where every argument is a number, otherwise a float64 array (Any: callers know which)."""
Ints = Any
"""An int where every argument is a number, otherwise an int64 array."""

_TIE = 1e-12  # speedups that differ by less, relatively, differ by rounding only


def expected_tokens(alpha: Numbers, gamma: Numbers) -> Floats:
    """Tokens per target call, (1 − α^(γ+1)) / (1 − α): Eq. (1).

    The mean of a geometric variable that is cut off at γ+1. γ may be infinite: 1 / (1 − α).
    """
    return _plain(_expected_tokens(_alpha(alpha), _gamma(gamma, infinite=True)))


def rounds_distribution(
    alpha: float, gamma: int, tokens: int, rows: int = 1
) -> Float[np.ndarray, " K"]:
    """Distribution of the rounds until all rows are done: entry k is P(k), k = 0 … tokens; float64.

    Every output has `tokens` tokens, and drafted tokens are accepted independently with chance α. A
    row with r tokens left drafts min(γ, r − 1). If a of them are accepted, r − 1 − a are left. Rows
    are independent, and the slowest ends the batch: P(≤ k rounds) is one row's to the power `rows`.

    With R = Σ k·P(k), τ = tokens / R. It is below Eq. (1), whose rounds all draft γ tokens.

    Raises:
      ValueError: α outside [0, 1], or numbers that are not whole: γ ≥ 0, tokens ≥ 1, rows ≥ 1.
    """
    alpha, gamma = float(_alpha(alpha)), int(_gamma(gamma))
    for name, value in (("tokens", tokens), ("rows", rows)):
        if value < 1 or value != int(value):
            raise ValueError(f"{name}={value} must be a whole number ≥ 1.")
    drafted = np.minimum(gamma, np.arange(tokens))  # with 1 … tokens left
    stops = [
        np.where(a < drafted, alpha**a * (1 - alpha), np.where(a == drafted, alpha**a, 0.0))[a:]
        for a in range(drafted[-1] + 1)
    ]
    left = np.zeros(tokens + 1)  # P(r tokens are left)
    left[tokens] = 1.0
    ended = [0.0]
    for _ in range(tokens):
        after = np.zeros(tokens + 1)
        after[0] = left[0]
        for a, chance in enumerate(stops):
            after[: tokens - a] += left[1 + a :] * chance
        left = after
        ended.append(left[0])
    return np.diff(np.array(ended) ** rows, prepend=0.0)


def walltime_speedup(alpha: Numbers, gamma: Numbers, c: Numbers, v: VerifyCost = 1.0) -> Floats:
    """Factor of walltime, (1 − α^(γ+1)) / ((1 − α)(γc + v)): Thm 3.8, where v = 1.

    Args:
      v: relative cost of the verify call over γ+1 positions. The paper assumes 1, which holds while
        memory traffic and not arithmetic bounds the target.
    """
    gamma = _gamma(gamma)
    return _plain(_expected_tokens(_alpha(alpha), gamma) / _round_cost(gamma, c, v))


def walltime_speedup_from_tau(
    tau: Numbers, gamma: Numbers, c: Numbers, v: VerifyCost = 1.0, overhead: Numbers = 0.0
) -> Floats:
    """Factor of walltime, τ / (γc + v + overhead), from a measured τ.

    Unlike Thm 3.8 it needs no α, so acceptances may depend on each other.

    Args:
      tau: measured tokens per target call, ≥ 0; at most γ+1.
      gamma: drafted tokens per target call. The mean over rounds where the length varies and v is
        a number; otherwise whole.
      overhead: the rest of a round (sampling, acceptance, bookkeeping), in target steps. As a
        measured difference it may be negative; the whole round may not.
    """
    tau = _nonnegative(tau, "tau", "it is emitted tokens / target calls")
    gamma = _nonnegative(gamma, "gamma", "it counts drafted tokens per target call")
    cost = _round_cost(gamma, c, v) + np.asarray(overhead, np.float64)
    demand = "makes γc + v + overhead ≤ 0; it is a time in units of one target step"
    _check(
        np.broadcast_to(overhead, cost.shape), (cost > 0) & np.isfinite(cost), "overhead", demand
    )
    if np.any(tau > (gamma + 1) * (1 + _TIE)):
        raise ValueError(
            f"tau={_first(tau, tau > gamma + 1)} must be ≤ gamma + 1, all that one target call "
            "emits; pass tokens per target call, not tokens per output."
        )
    return _plain(tau / cost)


def operations_factor(alpha: Numbers, gamma: Numbers, c_hat: Numbers) -> Floats:
    """Factor of arithmetic operations, (1 − α)(γĉ + γ + 1) / (1 − α^(γ+1)): Thm 3.11.

    Args:
      c_hat: ĉ, operations per token of the draft over those of the target.
    """
    gamma = _gamma(gamma)
    c_hat = _nonnegative(c_hat, "c_hat", "it is a ratio of operations, draft over target")
    return _plain((gamma * c_hat + gamma + 1) / _expected_tokens(_alpha(alpha), gamma))


def optimal_gamma(alpha: Numbers, c: Numbers, v: VerifyCost = 1.0) -> Ints:
    """The smallest γ that maximises `walltime_speedup`: §3.5.

    0 means that no γ ≥ 1 is faster than plain decoding (for v = 1: α ≤ c, Cor 3.9). The search
    covers every γ up to the end of the table v, or up to 1000. If the speedup still rises there,
    as for c = 0, that limit and rounding bound the answer, not the formula.
    """
    longest = 1000 if np.ndim(v) == 0 else len(np.asarray(v)) - 1
    if longest < 1:
        raise ValueError(
            f"v={v} ends at γ = {longest}; a table needs an entry for γ = 0 and one for each γ "
            "that may be chosen."
        )
    gamma = np.arange(1, longest + 1)
    speedups = np.asarray(walltime_speedup(np.asarray(alpha)[..., None], gamma, _last_axis(c), v))
    first = np.argmax(speedups >= speedups.max(-1, keepdims=True) * (1 - _TIE), axis=-1)
    best = np.where(speedups.max(-1) > 1 + _TIE, gamma[first], 0)
    return int(best) if best.ndim == 0 else best


def d_lk(target_probs: Probs, draft_probs: Probs) -> Floats:
    """D_LK = Σ |p − (p+q)/2| = 1 − Σ min(p, q), p the target's and q the draft's distribution.

    Def 3.2, Lemma 3.3: symmetric, in [0, 1], the total variation distance. β = 1 − D_LK is the
    chance that one drafted token is accepted (Thm 3.5), and α its mean over prefixes (Cor 3.6).
    """
    target, draft = _distributions(target_probs, draft_probs)
    return _plain(np.abs(target - draft).sum(-1) / 2)


def non_iterative_acceptance(target_probs: Probs, draft_probs: Probs) -> Floats:
    """The chance that classical rejection sampling keeps a drafted token: A.2.

    Σ_x p(x) · min_y q(y)/p(y) = min q/p over the target's support, which is ≤ Σ min(p, q): one
    token that the draft underrates lowers the acceptance of all.
    """
    target, draft = _distributions(target_probs, draft_probs)
    ratio = np.divide(draft, target, out=np.full_like(target, np.inf), where=target > 0)
    return _plain(ratio.min(-1))


def _expected_tokens(alpha: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    # expm1 keeps the digits that 1 − α^(γ+1) loses near α = 1.
    certain = alpha == 1
    inner = np.where(certain, 0.5, alpha)
    with np.errstate(divide="ignore"):  # log 0
        capped = -np.expm1((gamma + 1) * np.log(inner)) / (1 - inner)
    return np.where(certain, gamma + 1, capped)


def _round_cost(gamma: np.ndarray, c: Numbers, v: VerifyCost) -> np.ndarray:
    """γc + v(γ), in target steps."""
    return gamma * _c(c) + _verify_cost(v, gamma)


def _verify_cost(v: VerifyCost, gamma: np.ndarray) -> np.ndarray:
    cost = np.asarray(v, np.float64)
    if cost.ndim > 1:
        raise ValueError(f"v has shape {cost.shape}; a table has one axis, with v(γ) at index γ.")
    if cost.ndim == 1:
        whole = "must be whole where v depends on γ; pass v as a number, its mean over the rounds"
        _check(gamma, gamma == np.floor(gamma), "gamma", whole)
        last = len(cost) - 1
        _check(gamma, gamma <= last, "gamma", f"is outside the table v, which ends at γ = {last}")
        cost = cost[gamma.astype(np.int64)]
    _check(
        cost,
        (cost > 0) & np.isfinite(cost),
        "v",
        "must be > 0 and finite; it is the time of a "
        "verify call over that of one target step, 1 in the paper",
    )
    return cost


def _alpha(alpha: Numbers) -> np.ndarray:
    alpha = np.asarray(alpha, np.float64)
    _check(
        alpha,
        (alpha >= 0) & (alpha <= 1),
        "alpha",
        "must lie in [0, 1]; it is the mean of "
        "Σ min(target, draft), a probability and not a percentage",
    )
    return alpha


def _gamma(gamma: Numbers, infinite: bool = False) -> np.ndarray:
    gamma = np.asarray(gamma, np.float64)
    way_out = "for a length that varies, use walltime_speedup_from_tau with the measured tau"
    valid = (gamma >= 0) & (gamma == np.floor(gamma))
    if not infinite:
        valid &= np.isfinite(gamma)
    _check(gamma, valid, "gamma", f"must be a whole number ≥ 0; {way_out}")
    return gamma


def _c(c: Numbers) -> np.ndarray:
    return _nonnegative(c, "c", "it is time(draft step) / time(target step)")


def _nonnegative(value: Numbers, name: str, meaning: str) -> np.ndarray:
    value = np.asarray(value, np.float64)
    _check(value, (value >= 0) & np.isfinite(value), name, f"must be ≥ 0 and finite; {meaning}")
    return value


def _distributions(target_probs: Probs, draft_probs: Probs) -> tuple[np.ndarray, np.ndarray]:
    distributions = []
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        probs = np.asarray(probs, np.float64)
        total = probs.sum(-1)
        _check(probs, probs >= 0, name, "must be ≥ 0; pass probabilities, not logits")
        _check(
            total,
            np.abs(total - 1) < 1e-3,
            f"the sum of {name}",
            "must be 1 over the last axis; normalise it, with a softmax if these are logits",
        )
        distributions.append(probs)
    if distributions[0].shape[-1] != distributions[1].shape[-1]:
        raise ValueError(
            f"target_probs and draft_probs have {distributions[0].shape[-1]} and "
            f"{distributions[1].shape[-1]} tokens; both models need the same vocabulary."
        )
    return distributions[0], distributions[1]


def _check(value: np.ndarray, valid: np.ndarray, name: str, demand: str) -> None:
    """Raise ValueError with the first value that is not valid."""
    if not np.all(valid):
        raise ValueError(f"{name}={_first(value, ~valid)} {demand}.")


def _first(value: np.ndarray, where: np.ndarray) -> float:
    return np.broadcast_to(value, where.shape)[where][0].item()


def _last_axis(value: Numbers) -> np.ndarray:
    return np.asarray(value)[..., None]


def _plain(value) -> Floats:
    value = np.asarray(value)
    return float(value) if value.ndim == 0 else value
