"""What a run learned on earlier inputs begins the later ones: exact, and sooner right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
import test_loops
import test_replay
import test_switch
from experiments.adaptive.policies.bandits import Hedge, hedge
from pairs import TEXTS
from reference import sequence_distribution, total_variation
from specjax.decoding import building, starting, streaming
from specjax.decoding.starting import Past
from specjax.drafters.base import ModelDrafter
from specjax.drafters.choices import recent
from specjax.policies import Costs, Policy, constant
from specjax.policies.goodput import goodput
from specjax.policies.heuristic import heuristic
from specjax.policies.together import together
from specjax.pytrees import averaged, pytree
from specjax.replay import replay
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from specjax.testing.enumeration import output_distribution
from table_models import MarkovModel, hopeless, inputs_of, random_table
from test_policies import keys_of, stats_of
from tiny_models import slow
from toy_policies import LIVE, Gossip, OneOf, library

pytestmark = pytest.mark.sweep

TABLE = Costs(0.3, [1.0] * 4)


def test_means_over_rows():
    """Means of the second and third of three rows, for two; whole numbers are rounded."""
    past = {"x": jnp.float32([[9, 9], [1, 2], [2, 4]]), "n": jnp.int32([9, 4, 3])}
    like = {"x": jnp.zeros((2, 2), jnp.float32), "n": jnp.zeros(2, jnp.int32)}
    found = averaged(like, past, jnp.array([False, True, True]))
    assert found["x"].tolist() == [[1.5, 3]] * 2
    assert found["n"].tolist() == [4, 4]  # 3.5 to the even one


def test_every_policy():
    """Who carries something over, in the shapes of a batch of another size."""
    rows = jnp.array([True, False])
    for name, policy in library(2, 3, board=True).items():
        past, fresh = (
            jax.eval_shape(functools.partial(policy.init, gamma_max=2), keys_of(n)) for n in (2, 3)
        )
        found = jax.eval_shape(policy.resume, fresh, past, rows)
        same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), found, fresh)
        assert jax.tree.all(same), name
    carrying = [name for name, policy in library(2, 3, board=True).items() if policy.carries]
    resting = {"constant", "given", "head", "online", "svip"}
    assert set(library(2, 3, board=True)) - set(carrying) == resting


@pytest.mark.parametrize(
    "policy", [goodput(TABLE, prior=0.9), heuristic(3), hedge(TABLE, rate=9.0)]
)
def test_a_row_begins_where_the_last_one_ended(policy):
    """After three rounds in which nothing was accepted, with noise of its own."""
    past = policy.init(keys_of(1), 3)
    for _ in range(3):
        past = policy.update(past, stats_of(3, 0, 3))
    fresh = policy.init(test_loops.keys_of(1, index=[7]), 3)
    resumed = policy.resume(fresh, past, jnp.ones((1,), bool))
    if isinstance(policy, Hedge):
        assert resumed.salt.tolist() == fresh.salt.tolist() != past.salt.tolist()
        begun, ended, before = (policy.probs(state).tolist() for state in (resumed, past, fresh))
    else:
        begun, ended, before = (
            np.ravel(policy.begin(s, LIVE, 3)[1])[0] for s in (resumed, past, fresh)
        )
    assert begun == ended != before


# The distribution.


@pytree
class Resumed(Policy):
    """Begins with what another run has learned."""

    inner: Policy
    past: object

    def init(self, keys, gamma_max):
        return self.inner.resume(self.inner.init(keys, gamma_max), self.past, jnp.ones((1,), bool))

    def begin(self, state, live, gamma_max):
        return self.inner.begin(state, live, gamma_max)

    def keep_drafting(self, state, seen):
        return self.inner.keep_drafting(state, seen)

    def go_on(self, state, drafting, logprob):
        return self.inner.go_on(state, drafting, logprob)

    def update(self, state, round_):
        return self.inner.update(state, round_)


def test_enumerated_distribution_of_the_second_input():
    """Given the state at the end of a first input that taught something: all outputs of up to 4
    tokens over 3, TV < 1e-12."""
    names = "goodput", "hedge"
    with jax.enable_x64(True):
        target, inputs = random_table(1), inputs_of([[1, 0]])
        drafter = ModelDrafter(random_table(2, forbidden=0))
        each = tuple(
            dataclasses.replace(library(2, 3, board=True)[name], costs=Costs(0.217, [1.0] * 3))
            for name in names
        )
        chosen, eos = Sampling(0.8), jnp.int32([2])
        expected = sequence_distribution(target, inputs, chosen, {2}, 4)
        for which in range(len(names)):
            one_of = OneOf(each, jnp.int32(which))
            method = Speculative(target, drafter, Token(), one_of, chosen, eos, 2)
            first = test_loops.run(method, inputs_of([[0, 1]]), 9)
            resumeds = tuple(
                Resumed(policy, jax.tree.map(jnp.asarray, past))
                for policy, past in zip(each, first.policy, strict=True)
            )
            method = dataclasses.replace(method, policy=OneOf(resumeds, jnp.int32(which)))
            start = method.policy.init(keys_of(1), 2)[which]
            fresh = each[which].init(keys_of(1), 2)
            same = (
                np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (start, fresh)), strict=True)
            )
            assert not all(same)
            assert total_variation(output_distribution(method, inputs, 4), expected) < 1e-12


# A run.


@pytest.fixture(scope="module")
def useless(pair):
    """Says one id after any other."""
    size = pair.target.model.vocab_size
    return ModelDrafter(MarkovModel(jnp.zeros((size, size), jnp.float32).at[:, 7].set(9.0)))


def test_a_useless_drafter_is_found_out_once(pair, useless):
    """At batch 1 and temperature 0: the same tokens; each input by itself wastes as many drafts as
    the first, and carried over all later ones waste fewer; in batches of 3 too."""
    decode = functools.partial(
        specjax.generate, pair.target, useless, TEXTS, gamma=3, max_new_tokens=16,
        policy=goodput(TABLE, memory=0.98),
    )  # fmt: skip
    for size in (1, 3):
        fresh, carried = decode(batch_size=size), decode(batch_size=size, carry_state=True)
        assert carried.tokens == fresh.tokens
        assert carried.verified[:size].tolist() == fresh.verified[:size].tolist()
        long = fresh.verified[size:] >= 3  # outputs that do not end at once
        assert np.sum(long) >= 3
        assert np.all(carried.verified[size:][long] < fresh.verified[size:][long])
    logged = decode(batch_size=3, carry_state=True, log_rounds=True)
    assert (logged.tokens, logged.verified.tolist()) == (carried.tokens, carried.verified.tolist())
    assert sum(line["verified"] for line in logged.rounds) == carried.verified.sum()


def test_nothing_to_carry_over(pair):
    decode = functools.partial(specjax.generate, pair.target, texts=TEXTS, carry_state=True)
    with pytest.raises(ValueError, match="plain decoding has no policy"):
        decode(None)
    with pytest.raises(ValueError, match="Constant learns nothing"):
        decode(pair.draft)


def test_a_run_that_was_cut_off_keeps_its_batches(pair):
    """The policy reads its batch: rows 3 and 6 of batches of 4, at temperature 1."""
    method = building.build(
        pair.target, pair.draft, gamma=3, sampling=Sampling(1.0), policy=Gossip()
    )
    rows = functools.partial(
        streaming.stream, method, pair.target, TEXTS, max_new_tokens=16, key=jax.random.key(0),
        batch_size=4,
    )  # fmt: skip
    whole = list(rows())
    for missing in ([3, 4, 5, 6], [6], [1, 6]):
        assert list(rows(only=missing)) == [whole[number] for number in missing]
    alone = [row.tokens for row in rows(batch_size=2)]
    assert alone != [row.tokens for row in whole]  # neighbours matter


def test_a_switch_carries_its_choice():
    """Which drafter is worth it: after a batch in which the first one was useless, the second
    begins."""
    target = random_table(1, 5, rows=64, dtype=jnp.float32)
    drafter = test_switch.of(recent(), *map(test_switch.Latecomer, (hopeless(target), target)))
    method = dataclasses.replace(test_loops.method_of(target, target), drafter=drafter)
    assert drafter.carries
    assert not test_switch.of(test_switch.fixed(), *drafter.drafters).carries
    inputs = inputs_of([[0], [1]])
    state = test_loops.run(method, inputs, 12)
    carried = drafter.carry_over(state.drafter)
    past = Past((), jax.tree.map(jnp.asarray, carried), jnp.ones((2,), bool))
    found = []
    for resumed in (False, True):
        contexts, begun = test_loops.begin(method, inputs, 12)
        begun = starting.resume(method, begun, past) if resumed else begun
        after, _ = jax.jit(specjax.speculative.step)(method, contexts, begun)
        found.append(after.drafter.chosen.tolist())
    assert found == [[0, 0], [1, 1]]
    assert max(leaf.size for leaf in jax.tree.leaves(carried)) == 4  # no caches


# Replay.


@pytest.mark.parametrize("policy", [goodput(TABLE, memory=0.98), slow((hedge(TABLE, rate=8.0),))])
def test_replay_is_the_real_run(policy):
    """Outputs one after the other at temperature 0, none of which ends by EOS: rounds and drafted
    tokens of each, as in the loop at batch 1; and not those of fresh starts."""
    method, budget = test_replay.method_of(policy, Sampling(0.0)), test_replay.BUDGET
    trace, past, expected = test_replay.greedy_trace(), None, []
    whole = np.tile(np.flatnonzero(np.asarray(trace.emitted) == budget), 3)
    assert len(whole) >= 6
    trace = jax.tree.map(lambda x: x[whole], trace)
    for index in whole.tolist():
        inputs, keys = (
            inputs_of([[0] * 2, test_replay.PROMPTS[index]]),
            test_loops.keys_of(1, index=[index]),
        )
        inputs = jax.tree.map(lambda x: x[1:], inputs)  # padded alike
        contexts, state = test_loops.begin(method, inputs, budget, keys=keys, buffer_len=32)
        if past is not None:
            state = starting.resume(method, state, past)
        state = specjax.loop.decode(method, contexts, state)
        past = Past(state.policy, (), jnp.ones((1,), bool))
        expected.append([int(x[0]) for x in test_replay.counts(state)])
    found = replay.replay([policy], trace, jax.random.key(0), carry=True)
    carried = np.stack(test_replay.replayed_counts(found))[:, 0].T
    assert carried.tolist() == expected
    fresh = replay.replay([policy], trace, jax.random.key(0))
    assert np.stack(test_replay.replayed_counts(fresh))[:, 0].T.tolist() != expected


def test_replay_refuses_a_policy_that_reads_its_batch():
    with pytest.raises(ValueError, match="Together reads its batch"):
        replay.replay([constant(1), together(TABLE)], test_replay.greedy_trace(), jax.random.key(0))
