"""Small distributions that verifiers are enumerated on, with probabilities in hundredths."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

Prefix = tuple[int, ...]
Distributions = dict[Prefix, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Table:
    """Target and draft after every prefix of up to `gamma` tokens.

    Attributes:
      kind: what the table tests, such as "one-hot draft".
      size: V, the number of ids.
      gamma: γ, the number of drafted tokens.
      target: prefix → probabilities (V,).
      draft: prefix → probabilities (V,).
    """

    kind: str
    size: int
    gamma: int
    target: Distributions
    draft: Distributions

    def rest(self, prefix: Prefix) -> np.ndarray:
        """The target's distribution of the tokens after a prefix, up to γ + 1: (V, …, V)."""
        law = np.asarray(self.target[prefix], np.float64)
        law = law / law.sum()
        if len(prefix) == self.gamma:
            return law
        longer = [self.rest((*prefix, token)) for token in range(self.size)]
        return np.stack([chance * rest for chance, rest in zip(law, longer, strict=True)])

    def completed(self, tokens: Prefix) -> np.ndarray:
        """The distribution of γ + 1 tokens that begin with some and go on by the target."""
        law = np.zeros((self.size,) * (self.gamma + 1))
        law[tokens] = self.rest(tokens) if len(tokens) <= self.gamma else 1.0
        return law


def chains(seed: int = 0) -> list[Table]:
    """Tables for a verifier of one draft: V of 2 to 5, γ of 1 to 4."""
    rng = np.random.default_rng(seed)
    hand = [
        _constant("by hand", 1, [0.7, 0.3], [0.5, 0.5]),
        _constant("by hand", 1, [0.6, 0.4], [0.8, 0.2]),
        _constant("by hand", 1, [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]),
        _constant("by hand", 2, [0.7, 0.3], [0.5, 0.5]),
    ]
    shapes = ((2, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 1), (3, 2), (3, 2), (4, 1), (5, 1))
    random = [_table("random", *shape, _any(rng), _any(rng)) for shape in shapes]
    zeros = [
        _table("ids of probability 0", *shape, _some(rng), _some(rng))
        for shape in ((3, 1), (3, 1), (3, 2), (4, 1), (5, 1))
    ]
    equal = [
        _alike(_table("draft = target", *shape, _any(rng), _any(rng))) for shape in ((2, 2), (4, 1))
    ]
    apart = [
        _table("nothing in common", *shape, _half(rng, 0), _half(rng, 1))
        for shape in ((3, 1), (4, 1), (2, 2))
    ]
    one_hot = [
        _table("one-hot draft", *shape, _any(rng), _one(rng)) for shape in ((2, 2), (3, 2), (5, 1))
    ]
    greedy = [
        _table("T = 0", *shape, _one(rng), _one(rng)) for shape in ((2, 2), (2, 3), (3, 2), (5, 1))
    ]
    random += [_table("random", *shape, _any(rng), _any(rng)) for shape in ((2, 4), (4, 2))]
    return [*hand, *random, *zeros, *equal, *apart, *one_hot, *greedy]


def batches(seed: int = 0) -> list[tuple[Table, ...]]:
    """Tables for the rows of a batch: two or three, V of 2 and 3, γ of 1 to 3."""
    rng = np.random.default_rng(seed)
    hand = [_constant("by hand", gamma, [0.7, 0.3], [0.5, 0.5]) for gamma in (1, 2)]
    kinds: list[tuple[str, tuple[Callable, Callable]]] = [
        *[("random", (_any(rng), _any(rng)))] * 3,
        ("one-hot draft", (_any(rng), _one(rng))),
        ("T = 0", (_one(rng), _one(rng))),
    ]
    made = [
        (_table(kind, *shape, *draws), _table(kind, *shape, *draws))
        for shape in ((2, 1), (2, 2), (3, 1))
        for kind, draws in kinds
    ]
    larger = [
        tuple(_table("random", *shape, _any(rng), _any(rng)) for _ in range(rows))
        for rows, shape in ((2, (3, 2)), (2, (2, 3)), (3, (2, 1)))
    ]
    return [*((table, table) for table in hand), *made, *larger]


def _table(kind: str, size: int, gamma: int, target: Callable, draft: Callable) -> Table:
    prefixes = [p for n in range(gamma + 1) for p in itertools.product(range(size), repeat=n)]
    law = {prefix: target(size) for prefix in prefixes}
    return Table(kind, size, gamma, law, {prefix: draft(size) for prefix in law})


def _constant(kind: str, gamma: int, target: list[float], draft: list[float]) -> Table:
    p, q = np.array(target), np.array(draft)
    return _table(kind, len(p), gamma, lambda _: p, lambda _: q)


def _alike(table: Table) -> Table:
    return dataclasses.replace(table, draft=table.target)


def _any(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Distributions without zeros."""
    return lambda size: (1 + rng.multinomial(100 - size, rng.dirichlet(np.ones(size)))) / 100


def _some(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Distributions over all ids but one or two."""

    def draw(size: int) -> np.ndarray:
        law = np.zeros(size)
        kept = rng.permutation(size)[: max(2, size - 2)]
        law[kept] = _any(rng)(len(kept))
        return law

    return draw


def _half(rng: np.random.Generator, part: int) -> Callable[[int], np.ndarray]:
    """Distributions over the first or the last half of the ids."""

    def draw(size: int) -> np.ndarray:
        law = np.zeros(size)
        kept = np.array_split(np.arange(size), 2)[part]
        law[kept] = _any(rng)(len(kept)) if len(kept) > 1 else 1.0
        return law

    return draw


def _one(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """One-hot distributions."""
    return lambda size: np.eye(size)[rng.integers(size)]
