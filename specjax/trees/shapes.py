"""Shapes of a round's draft: a chain, a fixed tree, or a tree that follows the beliefs.

    chain(), fixed(3, 2, 1, 1), fixed(paths=((0,), (0, 0), (1,))),
    best_first(width=4, depth=4, nodes=16), or by name: parse("fixed(3, 2, 1, 1)")

Shapes are static: each shape is compiled.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from specjax.support import named
from specjax.support.ranges import listed, whole

NAMES = {
    "chain": "specjax.trees.shapes:chain",
    "fixed": "specjax.trees.shapes:fixed",
    "best_first": "specjax.trees.shapes:best_first",
}
DRAWS = ("without", "with", "top")
MAX_NODES = 1024  # nodes and depth of a tree: all are verified in one pass of the target
MAX_CANDIDATES = 16_384  # candidates that a `BestFirst` tree drafts


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of tokens, for `specjax.speculative`."""


chain = Chain


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """A tree that is the same in every round. Made by `fixed`."""

    parents: tuple[int, ...]
    """Parents of nodes 1 … N, each after its parent and its earlier siblings; 0 is the root. A
    round of fewer nodes has the first ones."""
    draw: str = "without"
    """How a node's children are drawn: "without" or "with" replacement, or "top": the likeliest."""

    def __post_init__(self):
        if len(listed("parents", self.parents)) > MAX_NODES:
            raise ValueError(_too_large(f"parents has {len(self.parents):,} entries"))
        for node, parent in enumerate(self.parents):
            whole(f"parents[{node}]", parent, f"[0, {node}]", "a parent comes before its children")
        if self.draw not in DRAWS:
            raise ValueError(f"draw={self.draw!r}: choose one of {', '.join(DRAWS)}.")

    @property
    def nodes(self) -> int:
        """Number N of drafted nodes."""
        return len(self.parents)

    @cached_property
    def parent(self) -> np.ndarray:
        """Parents of all nodes, (N + 1,) int32; the root's parent is the root."""
        return np.array([0, *self.parents], np.int32)

    @cached_property
    def depths(self) -> np.ndarray:
        """Depths of all nodes, (N + 1,) int32."""
        depth = np.zeros(len(self.parent), np.int32)
        for node in range(1, len(depth)):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return int(self.depths.max())

    def children(self, node: int) -> list[int]:
        """The children of a node, in drawn order."""
        return [child for child in range(1, len(self.parent)) if self.parent[child] == node]

    def inner(self, depth: int) -> list[int]:
        """The nodes at a depth that have children."""
        return [int(v) for v in np.flatnonzero(self.depths == depth) if self.children(int(v))]


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """EAGLE-2's tree (Li et al. 2024, 2406.16858): the likeliest nodes by the drafter's beliefs.

    On each level the `width` nodes whose paths have the largest beliefs are expanded. Each gets its
    `width` likeliest children. The `nodes` best of all candidates are verified.

    Raises:
      ValueError: a number out of range, or fewer candidates than nodes.
    """

    width: int
    depth: int
    nodes: int

    def __post_init__(self):
        for name in ("width", "depth", "nodes"):
            whole(name, getattr(self, name), f"[1, {MAX_NODES}]")
        if self.candidates > MAX_CANDIDATES:
            raise ValueError(
                f"width={self.width} and depth={self.depth} give {self.candidates:,} candidates, "
                f"and a tree may draft {MAX_CANDIDATES:,}: lower one of them."
            )
        if self.nodes > self.candidates:
            raise ValueError(
                f"nodes={self.nodes}, but width={self.width} and depth={self.depth} give no more "
                f"than {self.candidates}: lower nodes, or widen the tree."
            )

    @property
    def candidates(self) -> int:
        """Number of drafted nodes to choose from."""
        return self.width + (self.depth - 1) * self.width**2


best_first = BestFirst
Shape = Chain | FixedTree | BestFirst


def fixed(*branches: int, paths: Sequence[Sequence[int]] = (), draw: str = "without") -> FixedTree:
    """Make a tree that is the same in every round, from either description.

    Args:
      branches: children of each node, by depth: fixed(3, 2) has 3 nodes with 2 children each.
      paths: nodes by child ranks along the path: (0,) is the root's first child, and (0, 1) that
        node's second child. A path comes after its parent's and its earlier siblings'.
      draw: see `FixedTree`.

    Raises:
      ValueError: none or both of them, a number below 1, paths that are no tree, or more nodes
        than `MAX_NODES`.
    """
    given = [name for name, value in (("branches", branches), ("paths", paths))
             if not isinstance(value, list | tuple) or value]  # fmt: skip
    if len(given) != 1:
        raise ValueError("fixed needs either branches, fixed(3, 2), or paths=(…).")
    if given == ["branches"]:
        counts = [whole("branches", count, "[1, ∞)") for count in branches]
        level: list[int] = [0]
        parents: list[int] = []
        for count in counts:
            first = len(parents) + 1
            if len(parents) + len(level) * count > MAX_NODES:
                raise ValueError(_too_large(f"branches={branches!r} is too large"))
            parents += [node for node in level for _ in range(count)]
            level = list(range(first, len(parents) + 1))
        return FixedTree(tuple(parents), draw)
    if len(listed("paths", paths)) > MAX_NODES:
        raise ValueError(_too_large(f"paths has {len(paths):,} entries"))
    asked = [
        tuple(whole("paths", rank, "[0, ∞)") for rank in listed(f"paths[{node}]", path))
        for node, path in enumerate(paths)
    ]
    known: set[tuple[int, ...]] = {()}
    for path in asked:
        before = [path[:-1]]
        if path[-1]:
            before.append((*path[:-1], path[-1] - 1))
        missing = [needed for needed in before if needed not in known]
        if path in known or missing:
            raise ValueError(
                f"paths has {path} {'twice' if path in known else f'before {missing[0]}'}: a node "
                "comes once, after its parent and its smaller siblings."
            )
        known.add(path)
    return of_paths(asked, draw)


def _too_large(what: str) -> str:
    return f"{what}: a tree may have at most {MAX_NODES:,} nodes."


def of_paths(paths: Sequence[tuple[int, ...]], draw: str = "without") -> FixedTree:
    """Make the tree of some paths, in this order; see `fixed` for the form of a path."""
    number = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    return FixedTree(tuple(number[path[:-1]] for path in paths), draw)


def text_of(shape: "Shape") -> str:
    """The text from which `parse` makes the shape."""
    if isinstance(shape, Chain):
        return "chain"
    if isinstance(shape, BestFirst):
        return f"best_first(width={shape.width}, depth={shape.depth}, nodes={shape.nodes})"
    path: dict[int, tuple[int, ...]] = {0: ()}
    for node, parent in enumerate(shape.parents, start=1):
        path[node] = (*path[parent], shape.children(parent).index(node))
    return f"fixed(paths={tuple(path[node] for node in range(1, len(path)))}, draw={shape.draw!r})"


def parse(shape: "Shape | str | None") -> "Shape":
    """Make a shape from its name; a shape is returned unchanged, and None is a chain.

    Raises:
      ValueError: no such shape, or settings that it does not take.
    """
    if shape is None:
        return Chain()
    if isinstance(shape, str):
        shape = named.make("tree", NAMES, shape)
    if not isinstance(shape, Chain | FixedTree | BestFirst):
        raise ValueError(f"tree={shape!r} is no shape: choose from {', '.join(NAMES)}.")
    return shape
