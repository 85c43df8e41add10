"""Trees: rules that are enumerated, rounds of the real loop, caches, and what is refused."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import chi_square, sequence_distribution, total_variation
from specjax import autoregressive, loop, rules, trees
from specjax import sampling as smp
from specjax.dice import Dice
from specjax.drafters.base import ModelDrafter
from specjax.policies import constant
from specjax.testing.enumeration import output_distribution
from specjax.trees import BestFirst, FixedTree, fixed
from specjax.trees.nodes import comes_before, layout, lineage, path_to
from specjax.trees.shapes import text_of
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning.best_tree import best_trees, choose
from table_models import hopeless, inputs_of, one_hot, random_table, repeat
from tiny_models import slow

EOS = 2
PROMPT = [1, 0]


# --- shapes ---------------------------------------------------------------------------------------


def test_how_nodes_hang_together():
    shape = fixed(2, 2)
    assert shape.parents == (0, 0, 1, 1, 2, 2)
    assert (shape.nodes, shape.depth, shape.inner(1)) == (6, 2, [1, 2])
    lines = lineage(jnp.asarray(shape.parent)[None], jnp.asarray(shape.depths)[None], 2)
    assert lines[0].tolist() == [
        [0, 7, 7], [0, 1, 7], [0, 2, 7], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6],
    ]  # fmt: skip
    seen = np.asarray(layout(lines, jnp.asarray(shape.depths)[None]).seen)[0]
    assert [np.flatnonzero(row).tolist() for row in seen] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6],
    ]  # fmt: skip
    before = np.asarray(comes_before(lines))[0]
    order = np.argsort(before.sum(0), kind="stable")
    assert order.tolist() == [3, 4, 1, 5, 6, 2, 0]
    path = path_to(lines, jnp.array([5, 1, 0]))
    assert path.tolist() == [[2, 5], [1, 1], [0, 0]]


def test_paths_of_ranks():
    by_paths = fixed(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))
    assert by_paths == fixed(2, 2)
    assert trees.parse("fixed(paths=((0,), (0, 0), (1,)))").parents == (0, 1, 0)
    for tree in (by_paths, trees.parse("fixed(paths=((0,), (0, 0), (1,)), draw='with')")):
        assert trees.parse(text_of(tree)) == tree
    assert trees.parse("best_first(width=2, depth=3, nodes=4)") == BestFirst(2, 3, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fixed", "either branches"),
        ("fixed(2, paths=((0,),))", "either branches"),
        ("fixed(2, 0)", "branches=0"),
        ("fixed(paths=((1,),))", r"\(1,\) before \(0,\): a node comes once"),
        ("fixed(paths=((0, 0), (0,)))", r"\(0, 0\) before \(0,\): a node comes once"),
        ("fixed(paths=((0,), (0,)))", r"\(0,\) twice"),
        ("fixed(paths=((),))", r"paths\[0\]=\(\) must be a list"),
        ("fixed(2, draw='best')", "without, with, top"),
        ("best_first(width=2, depth=1, nodes=3)", "no more than 2"),
        ("best_first(width=0, depth=1, nodes=1)", "width=0"),
        ("bush", "chain, fixed, best_first"),
    ],
)
def test_shapes_that_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        trees.parse(text)


# --- the real loop, enumerated --------------------------------------------------------------------

RULE = rules.Token()
CHAIN_RULES = {"token": rules.Token(), "block": rules.Block()}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "warm, top-k": {"temperature": 0.7, "top_k": 2},
}
DRAFTERS = {
    "other": lambda target: random_table(2),
    "same": lambda target: target,
    "hopeless": hopeless,
    "one-hot": lambda target: one_hot(3),
}
LOOP_SHAPES = {
    "2, without": fixed(2),
    "1 2, with": fixed(1, 2, draw="with"),
    "uneven, without": fixed(paths=((0,), (1,), (1, 0))),
    "three children": fixed(3),
    "uneven, top": fixed(paths=((0,), (1,), (0, 0), (0, 1)), draw="top"),
    "best first": BestFirst(width=2, depth=2, nodes=4),
}


def method_of(target, drafter, distribution, rule, shape, policy=None) -> TreeSpeculative:
    return TreeSpeculative(
        target=target,
        drafter=ModelDrafter(drafter),
        rule=rule,
        policy=policy or constant(shape.depth),
        sampling=distribution,
        eos_ids=jnp.array([EOS], jnp.int32),
        shape=shape,
    )


def step_of(method, contexts, state, dice):
    return method.step(contexts, state, dice)


one_step = jax.jit(lambda method, contexts, state: method.step(contexts, state))


def check_enumerated(drafter, distribution, rule, shape, policy=None, step=step_of, budget=4):
    """Total variation between the loop's outputs and the target's."""
    target, inputs = random_table(0), inputs_of([PROMPT])
    chosen = smp.Sampling(**SAMPLINGS[distribution])
    method = method_of(target, DRAFTERS[drafter](target), chosen, rule, shape, policy)
    found = output_distribution(method, inputs, budget, step=step)
    wanted = sequence_distribution(target, inputs, chosen, [EOS], budget)
    return total_variation(found, wanted)


def rules_of(shape, distribution):
    """Where children are chosen there is one rule."""
    drawn = isinstance(shape, FixedTree) and shape.draw != "top" and distribution != "greedy"
    return CHAIN_RULES if drawn else ["token"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("shape", "distribution", "rule"),
    [
        case if number % 3 == 0 else slow(case)
        for number, case in enumerate(
            (name, distribution, rule)
            for name, shape in LOOP_SHAPES.items()
            for distribution in SAMPLINGS
            for rule in rules_of(shape, distribution)
        )
    ],
)
def test_enumerated_distribution_is_the_targets(shape, distribution, rule, double):
    for drafter in DRAFTERS:
        found = check_enumerated(drafter, distribution, CHAIN_RULES[rule], LOOP_SHAPES[shape])
        assert found < 1e-6, drafter


def only_the_best_child(method, contexts, state, dice):
    """The mistake of most code at temperature 0: children come from a one-hot distribution."""
    made = dataclasses.replace(method, drafter=Sure(method.drafter.model))
    after, round_ = made.step(contexts, state, dice)
    return after, round_


class Sure(ModelDrafter):
    """Is certain of its first choice."""

    def logits(self, hidden):
        logits = super().logits(hidden)
        return smp.standardize(logits, smp.Sampling(0.0))


@pytest.mark.sweep
def test_at_temperature_0_children_come_from_the_beliefs():
    """Greedy distributions are one-hot and have no second child; the belief has."""
    target, inputs = random_table(0, dtype=jnp.float32), inputs_of([PROMPT] * 4)
    method = method_of(
        target, random_table(2, dtype=jnp.float32), smp.Sampling(0.0), CHAIN_RULES["token"],
        fixed(2, 2),
    )  # fmt: skip
    begin = begun(method, inputs, 4)
    _, round_ = one_step(method, *begin)
    assert bool(round_.nodes.submitted.all())
    _, round_ = jax.jit(only_the_best_child)(method, *begin, None)
    assert int(round_.nodes.submitted[0].sum()) == 2


def begun(method, inputs, budget, samples=None):
    rows = len(inputs.prompt)
    zeros = jnp.zeros((rows,), jnp.int32)
    keys = smp.row_keys(jax.random.key(0), zeros if samples is not None else jnp.arange(rows),
                        zeros if samples is None else samples)  # fmt: skip
    room = inputs.prompt.shape[1] + budget + method.slots
    return loop.start(method, inputs, keys, zeros + budget, buffer_len=room)


ROWS, LENGTH = 1 << 14, 4
SAMPLES = 7 * ROWS


def p_value(rule, shape, distribution, decode=loop.decode, samples=SAMPLES):
    """Chi-square of outputs of the real jitted loop."""
    target, draft = (random_table(seed, dtype=jnp.float32) for seed in (1, 2))
    method = method_of(target, draft, distribution, rule, shape)
    inputs = repeat(inputs_of([PROMPT]), ROWS)
    counts: collections.Counter = collections.Counter()
    for first in range(0, samples, ROWS):
        context, state = begun(method, inputs, LENGTH, jnp.arange(first, first + ROWS))
        state = jax.device_get(decode(method, context, state).replace(keys=()))
        known = np.arange(state.tokens.shape[1])[None, :] < state.length[:, None]
        outputs = np.where(known, state.tokens, -1)[:, len(PROMPT) :]
        for output, count in zip(*np.unique(outputs, axis=0, return_counts=True), strict=True):
            counts[tuple(int(token) for token in output if token >= 0)] += int(count)
    wanted = sequence_distribution(target, inputs_of([PROMPT]), distribution, {EOS}, LENGTH)
    p = chi_square(counts, wanted)
    print(f"p = {p:.3g} with n = {counts.total()}")
    return p


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("token", fixed(2, 2, draw="with")),
        slow(("block", fixed(paths=((0,), (1,), (1, 0))))),
        slow(("gumbel", fixed(2, 1))),
        slow(("token", fixed(2, 1))),
        slow(("block", fixed(2, 1))),
        slow(("token", BestFirst(width=2, depth=2, nodes=4))),
    ],
)
def test_samples_follow_the_target(rule, shape):
    """114,688 outputs of up to 4 tokens: p > 1e-4."""
    every = CHAIN_RULES | {"gumbel": rules.Gumbel()}
    assert p_value(every[rule], shape, smp.Sampling(0.7)) > 1e-4


class EverySlotAlike(Dice):
    """Siblings are drawn with one and the same noise."""

    def draft(self, state, slot, logprobs, best):
        return super().draft(state, jnp.zeros_like(slot), logprobs, best)


@pytest.mark.sweep
def test_with_coupled_noise_the_tokens_are_plain_decodings():
    target = random_table(0, dtype=jnp.float32)
    inputs = inputs_of([[1, 0], [2, 1, 1], [0]])
    rule, chosen = rules.Gumbel(), smp.Sampling(1.0)
    eos = jnp.array([EOS], jnp.int32)
    plain = autoregressive.Autoregressive(target, chosen, eos, rule)
    shapes = fixed(2, 2), BestFirst(2, 2, 4)
    wanted = loop.decode(plain, *begun(plain, inputs, 9))
    for shape in shapes:
        method = method_of(target, random_table(2, dtype=jnp.float32), chosen, rule, shape)
        found = loop.decode(method, *begun(method, inputs, 9))
        assert found.length.tolist() == wanted.length.tolist()
        for row, length in enumerate(wanted.length.tolist()):
            same = found.tokens[row, :length], wanted.tokens[row, :length]
            assert same[0].tolist() == same[1].tolist()


def test_counts_of_a_round():
    """A twin is always right where its children are the target's two best."""
    target = random_table(0, dtype=jnp.float32)
    inputs = inputs_of([PROMPT])
    method = method_of(target, target, smp.Sampling(0.0), RULE, fixed(2, 1))
    method = dataclasses.replace(method, eos_ids=jnp.zeros((0,), jnp.int32))
    state = loop.decode(method, *begun(method, inputs, 9))
    stats = jax.tree.map(lambda x: x[0].tolist(), state.stats)
    assert (stats.target_calls, stats.emitted, stats.accepted) == (3, 9, 6)
    assert (stats.verified, stats.draft_calls) == (12, 6)  # four nodes in each round, in two levels
    assert (stats.accepted_lengths, stats.tested) == ([0, 0, 3], [3, 3])


@pytest.mark.sweep
@pytest.mark.parametrize("draw", ["without", "top"])
def test_more_children_than_tokens(draw, double):
    """Four children over three tokens, of which the drafter may give no chance to some."""
    tree = fixed(4, draw=draw)
    for drafter in ("other", "one-hot"):
        assert check_enumerated(drafter, "plain", RULE, tree) < 1e-6
    for drafter, there in ((random_table(2, forbidden=0), 3), (one_hot(3), 1)):
        method = method_of(random_table(0), drafter, smp.Sampling(1.0), RULE, tree)
        _, round_ = one_step(method, *begun(method, inputs_of([PROMPT] * 4), 4))
        assert (round_.nodes.submitted.sum(1) == there).all()


def test_the_budget_caps_the_depth():
    target = random_table(0, dtype=jnp.float32)
    method = method_of(target, target, smp.Sampling(0.0), RULE, fixed(2, 2))
    contexts, state = begun(method, inputs_of([PROMPT, PROMPT]), 9)
    state = state.replace(limit=state.length + jnp.array([2, 1]))
    _, round_ = one_step(method, contexts, state)
    assert round_.nodes.submitted.sum(1).tolist() == [2, 0]


# --- the best tree --------------------------------------------------------------------------------


def every_tree(count, most_children, depth):
    """All trees of `count` nodes, as sets of paths of ranks."""
    found = {frozenset()}
    for _ in range(count):
        grown = set()
        for tree in found:
            for path in ((), *tree):
                ranks = [p[-1] for p in tree if p[:-1] == path and len(p) == len(path) + 1]
                if len(path) < depth and len(ranks) < most_children:
                    grown.add(tree | {(*path, len(ranks))})
        found = grown
    return found


def test_the_programme_finds_the_best_of_all_trees():
    chances = [0.55, 0.2, 0.1]
    made = best_trees(chances, range(1, 7), 3)
    for (size, depth), (shape, tokens) in made.items():
        worth = [1 + sum(np.prod([chances[r] for r in path]) for path in tree)
                 for tree in every_tree(size, 3, depth)]  # fmt: skip
        assert tokens == pytest.approx(max(worth)), (size, depth)
        assert (shape.nodes, shape.depth <= depth) == (size, True)


def test_where_nodes_are_dear_a_chain_is_best():
    chances = [0.8, 0.1]
    (dear,) = choose(chances, [4], 4, 0.05, lambda n: 1 + 0.5 * n)
    assert dear.shape.depth == 4  # all four nodes are verified anyway, so the best four
    cheap = choose(chances, [4, 16], 8, 0.0, lambda n: 1.0)
    assert cheap[1].tokens > cheap[0].tokens
    assert cheap[1].speedup == cheap[1].tokens
