"""What each timed phase does, by counting; no timings are compared."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import phases
from specjax import loop
from specjax.autoregressive import Autoregressive
from specjax.drafters.base import ModelDrafter
from specjax.measure import timing
from specjax.policies import Costs, constant
from specjax.pytrees import pytree
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from specjax.speculative import Speculative
from table_models import MarkovModel, inputs_of

STEPS, GAMMA = 3, 4


@pytree
class Counting:
    """A bigram that counts its positions and logits; the cache holds (calls, positions)."""

    model: MarkovModel
    vocab_size: int = dataclasses.field(default=5, metadata={"static": True})

    def start(self, inputs, buffer_len) -> tuple[Any, Any]:
        return (), jnp.zeros((2,), jnp.int32)

    def __call__(self, tokens, start, context, cache):
        hidden, _ = self.model(tokens, start, context, ())
        return hidden, cache + jnp.asarray([1, tokens.shape[1]], jnp.int32)

    def logits(self, hidden):
        return hidden


def setup(temperature):
    """A pair that never agrees at T = 0, and a state with room for rounds of γ = 4."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)), jnp.float32)
    target, draft = Counting(MarkovModel(table)), Counting(MarkovModel(-table))
    method = Speculative(
        target,
        ModelDrafter(draft),
        Token(),
        constant(GAMMA),
        Sampling(temperature),
        jnp.asarray([-1], jnp.int32),
        GAMMA,
    )
    zeros = jnp.zeros((1,), jnp.int32)
    keys = row_keys(jax.random.key(0), zeros, zeros)
    started = loop.start(method, inputs_of([[1]]), keys, zeros + 20, buffer_len=26)
    return method, *started


def plain_setup(temperature):
    """The target alone, and how it starts."""
    method, _, state = setup(temperature)
    plain = Autoregressive(method.target, method.sampling, method.eos_ids)
    zeros = jnp.zeros((1,), jnp.int32)
    start = plain, inputs_of([[1]]), state.keys, zeros + 20
    return plain, lambda: loop.start(*start, buffer_len=26)


def after(phase, **options):
    """(calls, positions) of target and draft after STEPS runs of a phase, and the state."""
    method, contexts, state = setup(1.0)

    def run(method, contexts, state):
        return phase(method, contexts, state, **options)

    new = phases._repeat(run, STEPS, method, contexts, state)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert (new.length, new.done) == (state.length, state.done)  # the same work each time
    assert new.rounds == STEPS
    return tuple(new.cache.tolist()), tuple(new.drafter.cache.tolist())


@pytest.mark.sweep
def test_phases():
    assert after(phases._target_step) == ((STEPS, STEPS), (0, 0))
    assert after(phases._draft_step) == ((0, 0), (STEPS, STEPS))
    for gamma in (1, GAMMA):
        target = STEPS, STEPS * (gamma + 1)
        assert after(phases._verify, gamma=gamma) == (target, (0, 0))


@pytest.mark.sweep
def test_steps_depend_on_one_another():
    """Each feeds the token that the one before it chose, so that none can be left out."""
    method, contexts, state = setup(0.0)
    state = phases._target_step(method, contexts, state)
    first = int(state.tokens[0, 0])
    assert first == int(method.target.model.table[1].argmax())
    state = phases._target_step(method, contexts, state)
    assert int(state.tokens[0, 0]) == int(method.target.model.table[first].argmax())
    state = phases._draft_step(method, contexts, state)
    assert int(state.tokens[0, 0]) == int(
        method.drafter.model.model.table[int(method.target.model.table[first].argmax())].argmax()
    )


def test_medians():
    """A pass of one position is a target step, and passes between grow evenly."""
    took = {"target": 2.0, "draft": 1.0, "verify": 6.0, "round": 12.0}
    found = phases.medians([took, took, dict.fromkeys(took, 99.0)], 3)
    assert found.verify.tolist() == pytest.approx([2, 10 / 3, 14 / 3, 6])
    assert found.rest.tolist() == 4 * [3]
    assert (found.c, found.v(3), float(found.round_times(3)[3])) == (0.5, 3, 12)
    assert np.isnan([found.call, found.plain_call]).all()


def test_units():
    """In target steps: a round of 2 costs 4 = 2 × 0.5 + 1.5 + 1.5."""
    found = Costs(1.0, [2.0, 2.5, 3.0], rest=3.0, token=2.0)
    assert (found.c, found.v(2), found.overhead(2)) == (0.5, 1.5, 1.5)
    assert found.speedup(2, 8, 4) == 0.5
    assert found.speedup(2, 8, 4, draft_calls=4) == 2 / 3.5
    lost = dataclasses.replace(found, rest=found.rest - 9)
    assert lost.overhead(2) == -3  # raw
    assert lost.speedup(2, 8, 4) is None


@pytest.mark.sweep
def test_rounds_of_calls():
    """Every round of a timed call drafts γ_max tokens, and every token is one target call."""
    method, contexts, state = setup(1.0)
    new = phases._repeat(phases._any_round, STEPS, method, contexts, state)
    assert (new.length, new.done, new.rounds) == (state.length, state.done, STEPS)
    assert new.cache.tolist() == [STEPS, STEPS * (GAMMA + 1)]
    assert new.drafter.cache.tolist() == [STEPS * GAMMA, STEPS * (GAMMA + 1)]
    plain, begin = plain_setup(1.0)
    context, state = begin()
    new = phases._repeat(phases._any_round, STEPS, plain, context, state)
    assert (new.length, new.done, new.rounds) == (state.length, state.done, STEPS)
    assert new.cache.tolist() == [STEPS, STEPS]


@pytest.mark.sweep
def test_calls_of_plain_decoding_draw_for_each_token():
    """Noise goes by position, which a call does not advance: drawn once it would cost nothing."""
    method, begin = plain_setup(1.0)
    context, state = begin()
    drawn = set()
    for steps in range(1, 13):
        end = phases._repeat(phases._any_round, steps, method, context, state)
        drawn.add(int(end.tokens[0, state.length[0]]))
    assert len(drawn) > 1


@pytest.mark.sweep
def test_fixed_times():
    """What a call takes beyond its steps or rounds; each begins anew, which is not timed."""
    method, contexts, state = setup(0.0)
    plain, begin = plain_setup(0.0)
    begun = []

    def counted(kind, begin):
        return lambda: (begun.append(kind), begin())[1]

    calls = [
        (plain, counted("plain", begin), 3),
        (method, counted("speculative", lambda: setup(0.0)[1:]), 2),
    ]
    take = phases.stopwatch(method, contexts, state, GAMMA, steps=5, calls=calls)
    begun.clear()  # of the compilation
    sample = take()
    assert begun == ["plain", "speculative"]
    seconds = {
        "target": 2.0, "draft": 1.0, "verify": 2.0, "round": 7.0,
        ("call", 0, 3): 10.0, ("call", GAMMA, 2): 15.0,
    }  # fmt: skip
    assert set(sample) == set(seconds)
    assert min(sample.values()) > 0
    found = phases.medians([seconds], GAMMA)
    assert found.plain_call == 10 - 3 * 2
    assert found.call == 15 - 2 * 7


def test_overhead_with_the_fixed_times_of_calls():
    """30 tokens in 5 rounds: plain 30 · 2 + 6 = 66, speculative 5 · 8 + 4 = 44, a speedup of
    1.5."""
    found = Costs(1.0, [2.0, 2.5, 3.0], rest=3.0, token=2.0, call=4.0, plain_call=6.0)
    overhead = found.overhead(2, tokens=30, rounds=5)
    assert np.isclose(30 / 5 / (2 * found.c + found.v(2) + overhead), 66 / 44)
    assert np.isclose(found.speedup(2, 30, 5), 66 / 44)
    for free in (0.0, jnp.nan):  # none, or not measured
        none = dataclasses.replace(found, call=jnp.float32(free), plain_call=jnp.float32(free))
        assert none.overhead(2, tokens=30, rounds=5) == found.overhead(2) == 1.5


@pytest.mark.parametrize("turn", [1, 2, 5])
def test_methods_take_turns(turn):
    """Each decodes `turn` batches in a row; every batch is decoded once by each in each repeat."""
    called = []
    runs = {
        name: lambda batch, name=name: called.append((name, batch)) or (1.0, 2.0, [], batch)
        for name in "ab"
    }
    between = []
    found = timing.in_turns(
        runs, range(4), 3, turn=turn, between=lambda: between.append(len(called))
    )
    assert found.decode["a"].shape == (3, 4)
    assert found.notes == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    in_a_row = [len(list(group)) for _, group in itertools.groupby(name for name, _ in called)]
    assert min(in_a_row) == min(turn, 4)
    assert len(between) == 3 * -(-4 // turn)
    assert sorted(called) == sorted(3 * [(name, batch) for name in "ab" for batch in range(4)])
