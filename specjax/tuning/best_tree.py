"""The best fixed tree for a pair, by measured acceptance (Sequoia's programme, 2402.12374).

Let p_r be the chance that the r-th child of a node is accepted, the same at every node. A node is
accepted with the product of the chances on its path. A tree's expected number of accepted tokens is
the sum over its nodes. A dynamic programme over nodes, depths and ranks finds the best tree of n
nodes and depth d.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specjax.support.ranges import number, whole
from specjax.trees.shapes import MAX_NODES, FixedTree, of_paths


class Choice(NamedTuple):
    """A tree with its expected tokens and speedup."""

    shape: FixedTree
    tokens: float  # per call of the target, its own one included
    speedup: float  # tokens / (depth · draft + verify(nodes))


def best_trees(
    by_rank: Sequence[float], sizes: Sequence[int], depth: int, draw: str = "without"
) -> dict[tuple[int, int], tuple[FixedTree, float]]:
    """Find the best tree and its tokens for each number of nodes and each depth up to `depth`.

    Args:
      by_rank: the chance that a node's first, second, … child is accepted, and no earlier one.
      sizes: numbers of nodes.
      depth: the largest depth of a tree.
      draw: how children are drawn, see `FixedTree`.

    Raises:
      ValueError: a chance outside [0, 1], or a size or depth below 1.
    """
    chances = [number("by_rank", p, "[0, 1]") for p in by_rank]
    counts = sorted({whole("sizes", size, f"[1, {MAX_NODES}]") for size in sizes})
    most, depth = counts[-1], whole("depth", depth, "[1, ∞)")
    # gain[d][r, n]: from at most n nodes below a node, in children of rank ≥ r, d levels deep.
    gain = [np.zeros((len(chances) + 1, most + 1))]
    taken = []  # how many of the n go to child r and below it
    for _ in range(depth):
        best = np.zeros((len(chances) + 1, most + 1))
        part = np.zeros(best.shape, int)
        for rank in reversed(range(len(chances))):
            for count in range(1, most + 1):
                share = np.arange(1, count + 1)
                below = gain[-1][0, share - 1]
                value = chances[rank] * (1 + below) + best[rank + 1, count - share]
                at = int(value.argmax())
                best[rank, count], part[rank, count] = value[at], share[at]
        gain.append(best)
        taken.append(part)

    def paths(levels: int, count: int, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        found, rank = [], 0
        while levels and count and rank < len(chances):
            size = int(taken[levels - 1][rank, count])
            found += [(*prefix, rank), *paths(levels - 1, size - 1, (*prefix, rank))]
            count, rank = count - size, rank + 1
        return found

    found: dict[tuple[int, int], tuple[FixedTree, float]] = {}
    for size in counts:
        for levels in range(1, min(depth, size) + 1):
            ranks = paths(levels, size, ())
            if len(ranks) == size:  # otherwise too few levels and ranks for such a tree
                tree = of_paths(_best_first(ranks, chances), draw)
                found[size, levels] = tree, float(1 + gain[levels][0, size])
    return found


def _best_first(
    paths: Sequence[tuple[int, ...]], chances: Sequence[float]
) -> list[tuple[int, ...]]:
    """Order nodes by value, so that the first n of them are a good tree too."""
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        worth[path] = worth[path[:-1]] * chances[path[-1]]
        if path[-1]:  # an earlier sibling comes first, whatever the chances
            worth[path] = min(worth[path], worth[*path[:-1], path[-1] - 1])
    return sorted(paths, key=lambda path: (-worth[path], len(path), path))


def choose(
    by_rank: Sequence[float],
    sizes: Sequence[int],
    depth: int,
    draft: float,
    verify: Callable[[int], float],
    draw: str = "without",
) -> list[Choice]:
    """Choose the tree with the largest expected speedup for each number of nodes.

    Args:
      draft: cost of a level, in target steps.
      verify: cost of a target call over a number of tokens, in target steps.
    """
    made = best_trees(by_rank, sizes, depth, draw)
    found: dict[int, Choice] = {}
    for (size, levels), (shape, tokens) in made.items():
        one = Choice(shape, tokens, tokens / (levels * draft + verify(size + 1)))
        if size not in found or one.speedup > found[size].speedup:
            found[size] = one
    return [found[size] for size in sorted(found)]
