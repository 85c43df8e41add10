"""Structures of different classes differ, whatever finds programs by them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from specjax.drafters import ngram
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.policies.heuristic import heuristic
from specjax.pytrees import pytree
from specjax.rules import Block, Gumbel, Token
from table_models import MarkovModel, TableModel
from toy_policies import library


def registered():
    """A class as users may write it."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Theirs:
        x: int

    return Theirs


def test_classes_of_equal_fields_have_different_structures():
    policies = library(2, 3).values()
    for values in (policies, [Token(), Block(), Gumbel()]):
        for left, right in itertools.combinations(
            {type(value): value for value in values}.values(), 2
        ):
            assert jax.tree.structure(left) != jax.tree.structure(right)
    assert jax.tree.structure(constant(3)) == jax.tree.structure(constant(4))
    assert jax.tree.structure(constant(3)) != jax.tree.structure(heuristic(3))


@pytest.mark.parametrize("classes", [(TableModel, MarkovModel), (registered(), registered())])
def test_within_another(classes):
    left, right = (jax.tree.structure(ModelDrafter(made(0))) for made in classes)
    assert left != right
    assert left == jax.tree.structure(ModelDrafter(classes[0](1)))


@pytree
class Pair:
    """Two fields of data and one of structure."""

    first: int
    kind: str = dataclasses.field(metadata={"static": True})
    second: tuple = (2, 3)


def test_a_repr_is_one_line():
    """Arrays by shape, whatever they are held in."""
    array = jnp.ones((300, 2))
    assert repr(Pair(1, "a")) == "Pair(first=1, kind='a', second=(2, 3))"
    assert repr(Pair(array, "a", {"w": array})) == (
        "Pair(first=float32[300, 2], kind='a', second=<1 arrays>)"
    )
    assert repr(Pair(1, "a", (array,))) == "Pair(first=1, kind='a', second=<tuple>)"
    drafter = ngram.bigram(ngram.count([[1, 2, 3]], 4, 0))
    assert "\n" not in repr(drafter)
    assert len(repr(drafter)) < 300


def test_there_and_back():
    value = Pair(1, "a")
    leaves, structure = jax.tree.flatten(value)
    assert leaves == [1, 2, 3]
    assert jax.tree.unflatten(structure, leaves) == value
    assert structure != jax.tree.structure(Pair(1, "b"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(value)]
    assert paths == [".first", ".second[0]", ".second[1]"]
    assert jax.jit(lambda x: dataclasses.replace(x, first=x.first + 1))(value).kind == "a"
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.first = 2
