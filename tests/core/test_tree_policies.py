"""Policies and trees: how large the next tree is, what a round teaches, and what is refused."""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from experiments.adaptive.policies import path
from pairs import TEXTS
from specjax import loop, policies, rules, speculative
from specjax import sampling as smp
from specjax.autoregressive import Autoregressive
from specjax.batching import bucket
from specjax.decoding import building
from specjax.drafters.base import ModelDrafter
from specjax.policies import Costs, constant
from specjax.policies.nodes import cut, nodes
from specjax.pytrees import pytree
from specjax.trees import BestFirst, FixedTree, fixed
from specjax.trees import speculative as tree_speculative
from specjax.trees.speculative import TreeSpeculative
from specjax.tuning import fitting
from specjax.tuning.job import Job
from table_models import TableModel, inputs_of, random_table
from test_trees import PROMPT, begun, check_enumerated, method_of, one_step
from tiny_models import quick, slow
from toy_policies import Erratic

RULE = rules.Token()


# Deep nodes stand before shallow ones: a part of it is no part by levels.
MIXED = FixedTree((0, 1, 0, 1))
SHAPES = {"mixed": MIXED, "best first": BestFirst(width=2, depth=2, nodes=4)}


@pytree
class ErraticNodes(Erratic):
    """Numbers of nodes from 0 to 4 that depend on all past rounds, and depths that do."""

    def nodes(self, state, most):
        return (state * 3 + 1) % 5


def toys():
    flat = [1.0, 1.1, 1.2, 1.3, 1.4]
    return {
        "cut": cut(2, 3),
        "erratic": ErraticNodes(),
        "nodes": nodes(Costs(0.0, flat), every=3),
        "goodput": policies.parse("goodput", costs=Costs(0.2, [1.0, 1.1, 1.2])),
        "ucb": policies.parse(path("ucb")),
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "shape"),
    quick(
        itertools.product(("erratic", "nodes", "cut", "goodput", "ucb"), SHAPES),
        ("erratic", "mixed"), ("nodes", "best first"),
    ),
)  # fmt: skip
def test_enumerated_with_a_policy(policy, shape, double):
    chosen = toys()[policy]
    # Where children are chosen there is one rule.
    for rule in (RULE, rules.Block())[: 2 if shape == "mixed" else 1]:
        found = check_enumerated("other", "warm, top-k", rule, SHAPES[shape], chosen)
        assert found < 1e-6, rule


@pytest.mark.sweep
def test_hedge_learns_from_shallower_trees(double):
    assert check_enumerated("other", "plain", RULE, MIXED, policies.parse(path("hedge"))) < 1e-6


def peeking(method, contexts, state, dice):
    """Planted: a child is dropped for the token that it holds."""
    grow = tree_speculative.grow

    def grown(method):
        def made(*args):
            drafted = grow(method)(*args)
            kept = drafted.nodes.submitted & (drafted.nodes.tokens != 0)
            return drafted._replace(nodes=drafted.nodes._replace(submitted=kept))

        return made

    tree_speculative.grow = grown
    try:
        return method.step(contexts, state, dice)
    finally:
        tree_speculative.grow = grow


def test_enumeration_sees_a_look_at_the_tokens(double):
    found = check_enumerated("other", "plain", RULE, fixed(2), step=peeking)
    assert found > 0.01


def made(shape, policy, temperature=1.0, passes=(), seed=2):
    target = random_table(0, dtype=jnp.float32)
    draft = random_table(seed, dtype=jnp.float32)
    method = method_of(target, draft, smp.Sampling(temperature), RULE, shape, policy)
    return dataclasses.replace(method, passes=passes)


INPUTS = [PROMPT, [0, 1, 2], [2], [1, 1]]


def outputs(method, budget=12):
    state = loop.decode(method, *begun(method, inputs_of(INPUTS), budget))
    return [row[:n].tolist() for row, n in zip(state.tokens, state.length.tolist(), strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_nodes_count(shape):
    begin = begun(made(SHAPES[shape], cut(2, 0)), inputs_of(INPUTS), 9)
    whole = one_step(made(SHAPES[shape], cut(2, 4)), *begin)[1].nodes
    assert bool(whole.submitted.all())
    for count in range(4):
        part = one_step(made(SHAPES[shape], cut(2, count)), *begin)[1].nodes
        assert part.submitted.tolist() == [[node < count for node in range(4)]] * len(INPUTS)
        np.testing.assert_array_equal(part.tokens[:, :count], whole.tokens[:, :count])
    shallow = one_step(made(SHAPES[shape], cut(1, 4)), *begin)[1]
    depth = np.broadcast_to(shallow.nodes.depth, (len(INPUTS), 5))[:, 1:]
    assert set(depth[np.asarray(shallow.nodes.submitted)].tolist()) == {1}
    assert shallow.verified.tolist() == [1] * len(INPUTS)


@pytree
class Measured(TableModel):
    """Says how many tokens its calls have."""

    calls: ClassVar[list[int]] = []

    def __call__(self, tokens, *args, **options):
        width = tokens.shape[1]
        jax.debug.callback(lambda _: Measured.calls.append(width), tokens[0, 0])
        return super().__call__(tokens, *args, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(("nodes_", "width"), [(0, 2), (1, 2), (2, 3), (3, 5), (4, 5)])
def test_the_narrowest_pass_that_holds_the_tree(nodes_, width):
    method = made(MIXED, cut(2, nodes_), passes=(8, 12))
    method = dataclasses.replace(method, target=Measured(method.target.table))
    begin = begun(method, inputs_of(INPUTS), 9)
    Measured.calls.clear()
    jax.block_until_ready(jax.jit(method.step)(*begin))
    jax.effects_barrier()
    assert Measured.calls == [width]


@pytree
class Counted(ModelDrafter):
    """Counts its calls."""

    calls: ClassVar[int] = 0

    def extend(self, *args):
        def count(_):
            Counted.calls += 1

        jax.debug.callback(count, args[0][0])
        return super().extend(*args)


@pytest.mark.parametrize(("policy", "calls"), [(cut(1, 4), 0), (cut(2, 1), 0), (cut(2, 4), 1)])
def test_levels_that_nobody_needs_are_left_out(policy, calls):
    method = made(MIXED, policy)
    method = dataclasses.replace(method, drafter=Counted(method.drafter.model))
    contexts, state = begun(method, inputs_of([PROMPT]), 9)
    Counted.calls = 0
    jax.block_until_ready(jax.jit(method.step)(contexts, state))
    jax.effects_barrier()
    assert Counted.calls == calls


@pytest.mark.sweep
def test_a_tree_of_one_branch_is_a_chain():
    """Same keys, same tokens, and a round that says the same."""
    policy = policies.parse("goodput", costs=Costs(0.3, [1.0, 1.1, 1.2, 1.3]))
    tree = made(fixed(1, 1, 1), policy)
    chain = speculative.Speculative(
        tree.target, tree.drafter, RULE, policy, tree.sampling, tree.eos_ids, gamma_max=3
    )
    assert outputs(tree) == outputs(chain)
    steps = [jax.jit(method.step) for method in (tree, chain)]
    known = [begun(method, inputs_of(INPUTS), 9) for method in (tree, chain)]
    for _ in range(3):
        (after, one), (beyond, other) = (step(*at) for step, at in zip(steps, known, strict=True))
        for name in ("verified", "accepted", "emitted", "tested"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        tested = np.asarray(one.tested)
        for name in ("ratio", "belief_logprob"):
            np.testing.assert_allclose(
                np.asarray(getattr(one, name))[tested],
                np.asarray(getattr(other, name))[tested],
                rtol=1e-5,
                err_msg=name,
            )
        known = [(at[0], state) for at, state in zip(known, (after, beyond), strict=True)]


def test_reach_is_the_chance_that_a_node_is_accepted():
    """Chosen children: the target's probability of the path."""
    method = made(fixed(2, 2, draw="top"), constant(2))
    _, round_ = one_step(method, *begun(method, inputs_of(INPUTS), 9))
    probs = np.exp(round_.target_logprobs)
    parent, tokens = np.asarray(round_.nodes.parent)[0], np.asarray(round_.nodes.tokens)
    for row in range(len(INPUTS)):
        wanted = [1.0]
        for node in range(1, 7):
            wanted.append(wanted[parent[node]] * probs[row, parent[node], tokens[row, node - 1]])
        np.testing.assert_allclose(round_.reach[row], wanted, atol=1e-6)


def last_count(cost, seed):
    """How many nodes the policy asks for after some rounds, on average over rows."""
    policy = nodes(Costs(0.0, cost), every=100)
    method = made(fixed(2, 1), policy, seed=seed)
    method = dataclasses.replace(method, eos_ids=jnp.zeros((0,), jnp.int32))
    state = loop.decode(method, *begun(method, inputs_of(INPUTS), 40))
    return float(np.mean(policy.nodes(state.policy, 4)))


@pytest.mark.sweep
def test_the_number_of_nodes_follows_the_costs():
    assert last_count([1.0] * 5, 2) > 3
    assert last_count([1.0, 2.0, 3.0, 4.0, 5.0], 2) == 0
    # The target itself is always right: two levels of one node are worth it, siblings are not.
    assert 1 <= last_count([1.0, 1.1, 1.7, 2.0, 2.4], 0) < 4


@pytest.mark.parametrize(
    ("policy", "shape", "rule", "said"),
    [
        ("svip", MIXED, "token", "token by token"),
        ("heuristic", MIXED, "token", ""),
        (path("hedge"), MIXED, "block", "Block"),
        (path("hedge"), SHAPES["best first"], "token", "with this tree"),
    ],
)
def test_policies_that_are_refused(policy, shape, rule, said, pair):
    build = functools.partial(
        building.build, pair.target, pair.draft, tree=shape, sampling=smp.Sampling(1.0)
    )
    if said:
        with pytest.raises(ValueError, match=said):
            build(rule=rule, policy=policy)
    else:
        assert build(rule=rule, policy=policy).policy


def test_a_chain_has_no_nodes(pair):
    with pytest.raises(ValueError, match="give a tree"):
        building.build(
            pair.target, pair.draft, gamma=2, sampling=smp.Sampling(1.0), policy=cut(1, 1)
        )


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["nodes", *map(slow, ("goodput", "cut(depth=1, nodes=2)"))])
def test_generate(policy, pair):
    """With measured costs where a policy needs them, greedy tokens are the target's."""
    options = {"max_new_tokens": 10, "batch_size": 4}
    wanted = specjax.generate(pair.target, None, TEXTS, **options)
    given = {"tree": MIXED, "policy": policy, "passes": (4, 12)}
    if policies.needs_costs(policy):
        given = {"settings": specjax.tune(pair.target, pair.draft, TEXTS, **given, **options)}
    found = specjax.generate(pair.target, pair.draft, TEXTS, **given, **options)
    assert [row.tokens for row in found.rows] == [row.tokens for row in wanted.rows]


def test_a_tree_that_is_not_worth_its_time(pair):
    """Plain decoding, by costs of single rounds, whose error is not known."""
    for step, kind in ((9.0, Autoregressive), (0.01, TreeSpeculative)):
        dear = policies.parse("goodput", costs=Costs(step, [1.0] * 3, error=np.nan))
        method = building.build(
            pair.target, pair.draft, tree=MIXED, sampling=smp.Sampling(0.0), policy=dear
        )
        assert isinstance(building.plain_if_preferred(method, 10), kind)


@pytest.mark.sweep
def test_costs_of_a_tree(pair):
    """Whole calls, by nodes or by depth. Timed by nodes: 0, 1 (a pass of two tokens, and the end of
    a level), and all. One text fills three rows."""
    sampling = smp.Sampling(1.0)
    method = building.build(
        pair.target, pair.draft, tree=MIXED, sampling=sampling, passes=(2 * bucket(3),)
    )
    job = Job(pair.target, TEXTS[:1], sampling, 9, 0, batch_size=3, samples=3)
    by_nodes, by_depth = (fitting.costs_for(job, policy, method) for policy in ("nodes", "goodput"))
    assert by_nodes.verify.shape == (5,)
    assert len(np.unique(by_nodes.verify)) <= 3
    assert by_depth.verify.shape == (3,)
    assert (by_depth.verify > 0).all()
    assert min(by_nodes.token, by_depth.token) > 0


def test_unknown_prefixes_are_not_learned_from():
    """Rows that have finished leave the policy as it was."""
    policy = nodes(Costs(0.0, [1.0] * 5))
    method = dataclasses.replace(made(MIXED, policy), eos_ids=jnp.int32([-1]))
    contexts, state = begun(method, inputs_of(INPUTS), 9)
    state = state.replace(done=jnp.array([True, False, True, False]))
    after, _ = one_step(method, contexts, state)
    assert after.policy.counted.tolist() == [0, 1, 0, 1]
    assert (np.asarray(after.policy.seen).sum(1) > 0).tolist() == [False, True, False, True]
