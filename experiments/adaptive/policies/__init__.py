"""Policies of the leaderboard that the library leaves out.

By import path: policy="experiments.adaptive.policies:hedge(rate=8.0)".
"""

from experiments.adaptive.policies.acceptance_head import head
from experiments.adaptive.policies.bandits import exp3, hedge, tapout, ucb
from experiments.adaptive.policies.learned import learned, online
from experiments.adaptive.policies.lengths import average, first_descent, gammatune, given
from specjax.support.named import name_in

__all__ = [
    "average",
    "exp3",
    "first_descent",
    "gammatune",
    "given",
    "head",
    "hedge",
    "learned",
    "online",
    "tapout",
    "ucb",
]


def path(text: str) -> str:
    """Complete a short name of this package, with or without settings, to its import path."""
    return f"{__name__}:{text}" if name_in(text) in __all__ else text
