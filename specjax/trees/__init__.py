"""Drafts that branch: shapes, how they are drafted, and the rules that verify them."""

from specjax.trees.shapes import (
    BestFirst,
    Chain,
    FixedTree,
    Shape,
    best_first,
    chain,
    fixed,
    parse,
    text_of,
)

__all__ = [
    "BestFirst",
    "Chain",
    "FixedTree",
    "Shape",
    "best_first",
    "chain",
    "fixed",
    "parse",
    "text_of",
]
