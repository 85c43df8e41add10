"""Trees of every kind of drafter: the output's distribution, enumerated through the real step."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import test_eagle
import test_loops
import test_medusa
from reference import sequence_distribution, total_variation
from specjax import sampling as smp
from specjax.dice import dice_for
from specjax.drafters import ngram
from specjax.policies import constant
from specjax.rules import Block, Token
from specjax.testing.enumeration import output_distribution
from specjax.trees import BestFirst, drafting, fixed, speculative
from specjax.trees.speculative import TreeSpeculative
from table_models import inputs_of, random_table
from tiny_models import quick, slow

pytestmark = pytest.mark.sweep

EOS, PROMPT, RULE = 2, [1, 0], Token()
SHAPES = {
    "with": (fixed(paths=((0,), (1,), (0, 0)), draw="with"), Block()),
    "without": (fixed(paths=((0,), (1,), (1, 0))), RULE),
    "best first": (BestFirst(width=2, depth=2, nodes=4), RULE),
}


@pytest.fixture
def double():
    """With JAX's ordinary casts: positions become int64 here and there in the families."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def counted(kind):
    counts = ngram.count([[0, 1, 1, 2], [0, 0, 1, 2], [0, 2]], 3, 1)
    made = getattr(ngram, kind)(counts)
    return jax.tree.map(lambda x: x.astype(float) if x.dtype == jnp.float32 else x, made)


# A target with its drafter, made when double precision is on.
PAIRS = {
    "unigram": lambda: (random_table(1), counted("unigram")),
    "bigram": lambda: (random_table(1), counted("bigram")),
    "lookup": lambda: (random_table(1), ngram.PromptLookup(3, max_ngram=2, matches=2)),
    "medusa": lambda: of_target(test_medusa.on_table(2, hydra=False)),
    "hydra": lambda: of_target(test_medusa.on_table(2, hydra=True)),
    "eagle 1": lambda: eagle_of("t5", 1),
    "eagle 3": lambda: eagle_of("gpt", 3),
}


def of_target(drafter):
    return drafter.target, drafter


def eagle_of(kind, version):
    target, drafter = test_eagle.pair_of(kind, version, jnp.float64)
    return drafter.sees(target.model), drafter


def method_of(target, drafter, tree, chosen, rule=RULE, eos=EOS):
    eos_ids, policy = jnp.array([eos], jnp.int32), constant(tree.depth)
    return TreeSpeculative(target, drafter, rule, policy, chosen, eos_ids, tree)


@pytest.mark.parametrize(
    ("kind", "shape"),
    quick(
        itertools.product(PAIRS, SHAPES),
        *(("unigram", "with"), ("lookup", "without"), ("hydra", "best first")),
        ("eagle 3", "without"),
    ),
)
def test_enumerated_distribution_is_the_targets(kind, shape, double):
    """All outputs of up to 4 tokens over 3, EOS and the limit included: TV < 1e-6."""
    target, drafter = PAIRS[kind]()
    (tree, rule), chosen = SHAPES[shape], smp.Sampling(0.7)
    # A T5 begins with its start token alone, and lookups find their matches in the source.
    inputs = inputs_of([PROMPT], [[1, 1, 0, 1, 2, 0]]) if kind == "lookup" else inputs_of([PROMPT])
    if kind == "eagle 1":
        inputs = inputs_of([[0]], [[1, 0, 1]])
    method = method_of(target, drafter, tree, chosen, rule)
    wanted = sequence_distribution(target, inputs, chosen, {EOS}, 4)
    assert len(wanted) > 6
    found = output_distribution(method, inputs, 4, step=TreeSpeculative.step)
    assert total_variation(found, wanted) < 1e-6


@pytest.mark.parametrize(("kind", "version"), [slow(("t5", 1)), ("gpt", 3)])
def test_a_round_begins_from_true_features(kind, version):
    """An EAGLE's, also those of an accepted path: as a plain pass over the text says it."""
    target = test_eagle.target_of(kind)
    drafter = test_eagle.eagle_of(target, version)
    tree = fixed(2, 2)
    method = method_of(drafter.sees(target.model), drafter, tree, smp.Sampling(1.0), eos=-1)
    assert test_eagle.disagreement(target, drafter, method=method) < test_eagle.CLOSE


def test_nodes_share_what_extend_leaves_alone():
    """The target's features, which an EAGLE keeps: no node has a copy."""
    target = test_eagle.target_of("gpt")
    drafter, tree = test_eagle.eagle_of(target, 1), fixed(2, 2)
    method = method_of(drafter.sees(target.model), drafter, tree, smp.Sampling(1.0), eos=-1)
    contexts, state = test_loops.begin(method, inputs_of([PROMPT] * 2), 9)
    _, allowed = speculative.begin(method, state)

    def draft(state):
        dice = dice_for(method)
        return drafting.fixed(method, contexts.drafter, state, allowed, dice)

    drafted = jax.eval_shape(draft, state)
    kept = drafted.rest.shape
    assert kept == state.drafter.features.shape
    inner = [leaf.shape for one in drafted.levels[1:] for leaf in jax.tree.leaves(one.states)]
    assert inner
    assert all(shape[1:2] == (2,) and shape[2:] != kept[1:] for shape in inner)
