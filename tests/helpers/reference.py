"""What `standardize` and decoding should give, in slow numpy: the oracle of the tests."""

from functools import partial

import numpy as np
from scipy import stats

from specjax.sampling import Truncation
from specjax.testing import enumeration
from specjax.testing.enumeration import total_variation

__all__ = ["chi_square", "distribution", "sequence_distribution", "total_variation"]


def distribution(logits: np.ndarray, sampling) -> np.ndarray:
    """Probabilities of one row of finite or −inf logits, in float64."""
    logits = np.asarray(logits, np.float64)
    if sampling.greedy:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = logits / float(sampling.temperature)
    for one in sampling.filters:
        if isinstance(one, Truncation):
            scaled = _top_p(_top_k(scaled, int(one.top_k)), float(one.top_p))
        else:
            scaled = one.in_numpy(scaled)
    return _softmax(scaled)


def _softmax(scaled):
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def _top_k(scaled, top_k):
    if top_k == 0 or top_k >= len(scaled):
        return scaled
    return np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)


def _top_p(scaled, top_p):
    """Add tokens from the likeliest on until their mass reaches top_p; keep equals of the last."""
    if top_p >= 1:
        return scaled
    probs, mass = _softmax(scaled), 0.0
    for token in np.argsort(-scaled, kind="stable"):
        mass += probs[token]
        if mass >= top_p:
            return np.where(scaled >= scaled[token], scaled, -np.inf)
    return scaled


sequence_distribution = partial(enumeration.sequence_distribution, distribution=distribution)


def chi_square(counts: dict, expected_distribution: dict) -> float:
    """p-value of Pearson's test of counts against a distribution.

    Cells that expect fewer than 5 are pooled, the rarest first. A count where the distribution has
    none gives 0.
    """
    total = sum(counts.values())
    if counts.keys() - {cell for cell, prob in expected_distribution.items() if prob > 0}:
        return 0.0
    cells, pool = [], [0.0, 0.0]
    for cell, prob in sorted(expected_distribution.items(), key=lambda item: item[1]):
        pool = [pool[0] + counts.get(cell, 0), pool[1] + total * prob]
        if pool[1] >= 5:
            cells.append(pool)
            pool = [0.0, 0.0]
    cells[-1] = [cells[-1][0] + pool[0], cells[-1][1] + pool[1]]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))
