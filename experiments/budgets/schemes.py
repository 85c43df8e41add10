"""Rules that choose which drafted slots of a batch are verified, and the first token that follows.

A slot's survival is the chance that it is reached and accepted; it falls along a row. The slots of
all rows are ranked by it, and the best N are verified. `N_RULES` find N from `rates`: entry n is
the expected number of tokens over the cost if the best n slots are verified.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Cost = Callable[[np.ndarray], np.ndarray]  # from positions of a pass to its time


def costs(knee: float) -> dict[str, Cost]:
    """Costs of a pass: `knee` positions take as long as everything else in it."""
    return {
        "affine": lambda positions: 1 + positions / knee,
        "steps": lambda positions: 1 + 2.0 ** np.ceil(np.log2(positions)) / knee,  # compiled sizes
    }


def fixed(rates: Float[np.ndarray, "*batch n"], rows: int) -> int:
    """One slot for each row on average."""
    return rows


def early_stop(rates: Float[np.ndarray, "*batch n"], rows: int) -> Int[np.ndarray, "*batch"]:
    """End where one more slot lowers tokens per time."""
    falls = np.diff(rates) < 0
    return np.where(falls.any(axis=-1), falls.argmax(axis=-1), falls.shape[-1])


def global_maximum(rates: Float[np.ndarray, "*batch n"], rows: int) -> Int[np.ndarray, "*batch"]:
    """Take the N with the most tokens per time, the smallest of equals."""
    return rates.argmax(axis=-1)


N_RULES = {"fixed N": fixed, "early stop": early_stop, "global maximum": global_maximum}


class Ranked(NamedTuple):
    """The slots of a batch in falling order, for each draft of a row beside each of the others."""

    rows: int
    tokens: Float[np.ndarray, "R M n"]  # expected, if the best 0, 1, … slots are verified
    before: Int[np.ndarray, "R M"]  # slots that are taken before the row's first one

    def verified(self, rule: Callable, cost: Cost) -> Bool[np.ndarray, "R M"]:
        """Whether the row's first slot is verified."""
        rates = self.tokens / cost(self.rows + np.arange(self.tokens.shape[-1]))
        return self.before < rule(rates, self.rows)


def ranked(own: Float[np.ndarray, "R G"], others: Float[np.ndarray, "M n"]) -> Ranked:
    """Rank the slots; between equals the row's own come first.

    Args:
      own: survival of the row's slots, falling.
      others: survival of the slots of all other rows, n = (rows − 1)·G of them.
    """
    shape = len(own), len(others)
    mine = np.broadcast_to(own[:, None], (*shape, own.shape[1]))
    slots = np.concatenate([mine, np.broadcast_to(others, (*shape, others.shape[1]))], axis=-1)
    rows = slots.shape[-1] // own.shape[1]
    gained = np.cumsum(-np.sort(-slots, axis=-1), axis=-1)
    tokens = rows + np.concatenate([np.zeros((*shape, 1)), gained], axis=-1)
    return Ranked(rows, tokens, (others > own[:, :1, None]).sum(axis=-1))


def by_token(
    chance: Float[np.ndarray, " R"],
    tokens: Int[np.ndarray, " R"],
    weights: Float[np.ndarray, " R"],
    q: Float[np.ndarray, " V"],
) -> Float[np.ndarray, " V"]:
    """The chance that slot 1 is verified, given its token; the mean for tokens that no draft has.

    Args:
      chance: for each draft of the row, the chance over the others' drafts.
      tokens: the first token of each draft.
      weights: of the drafts that share a first token, up to a factor.
    """
    seen = np.bincount(tokens, weights, len(q))
    there = seen > 0
    given = np.bincount(tokens, weights * chance, len(q)) / np.where(there, seen, 1)
    return np.where(there, given, (q * given).sum() / q[there].sum())


def emitted(
    p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], verified: Float[np.ndarray, " V"]
) -> Float[np.ndarray, " V"]:
    """The distribution of a round's first token.

    A verified token is accepted with chance min(1, p/q) and replaced by the residual otherwise. A
    round whose slot 1 is not verified emits a token of p.

    Args:
      verified: the chance that slot 1 is verified, by the token that was drafted there.
    """
    accepted = np.minimum(p, q)
    left = p - accepted
    residual = left / left.sum() if left.sum() > 0 else p
    rejected = verified @ (q - accepted)
    return verified * accepted + rejected * residual + (1 - verified @ q) * p


def total_variation(a: Float[np.ndarray, " V"], b: Float[np.ndarray, " V"]) -> float:
    """Half the absolute difference."""
    return float(np.abs(a - b).sum() / 2)


def gain(
    chosen: Float[np.ndarray, " V"], law: Float[np.ndarray, " V"], p: Float[np.ndarray, " V"]
) -> float:
    """How much oftener than p a law emits the tokens that `chosen` emits oftener than p.

    It is never above the total variation of `law` and p. If `chosen` is an estimate that is
    independent of an unbiased estimate of `law`, the mean stays a lower bound.
    """
    return float((law - p)[chosen > p].sum())
