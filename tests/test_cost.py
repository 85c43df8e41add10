"""What each timed phase does, by counting; no timings are compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import loop
from specjax.accept import TokenRule
from specjax.autoregressive import Autoregressive
from specjax.drafters.base import ModelDrafter
from specjax.measure import cost
from specjax.measure.cost import Costs
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.sampling import row_keys, sampling
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
        TokenRule(),
        constant(GAMMA),
        sampling(temperature),
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

    new = cost._repeat(run, STEPS, method, contexts, state)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert (new.length, new.done) == (state.length, state.done)  # the same work each time
    assert new.rounds == STEPS
    return tuple(new.cache.tolist()), tuple(new.drafter.cache.tolist())


def test_phases():
    assert after(cost._target_step) == ((STEPS, STEPS), (0, 0))
    assert after(cost._draft_step) == ((0, 0), (STEPS, STEPS))
    for gamma in (1, GAMMA):
        target = STEPS, STEPS * (gamma + 1)
        assert after(cost._verify, gamma=gamma) == (target, (0, 0))
        # The first draft step feeds two positions.
        draft = STEPS * gamma, STEPS * (gamma + 1)
        assert after(cost._round, gamma=gamma) == (target, draft)


def test_steps_depend_on_one_another():
    """Each feeds the token that the one before it chose, so that none can be left out."""
    method, contexts, state = setup(0.0)
    state = cost._target_step(method, contexts, state)
    first = int(state.tokens[0, 0])
    assert first == int(method.target.model.table[1].argmax())
    state = cost._target_step(method, contexts, state)
    assert int(state.tokens[0, 0]) == int(method.target.model.table[first].argmax())
    state = cost._draft_step(method, contexts, state)
    assert int(state.tokens[0, 0]) == int(
        method.drafter.model.model.table[int(method.target.model.table[first].argmax())].argmax()
    )


def test_measure():
    method, contexts, state = setup(0.0)
    found = cost.measure(method, contexts, state, [4, 1, 4], [2], steps=2, repeats=3)
    assert list(found.verify) == [1, 4]
    assert list(found.round) == [2]
    seconds = [found.target_step, found.draft_step, *found.verify.values(), *found.round.values()]
    assert all(0 < value < 60 for value in seconds)
    assert found.c > 0
    assert found.v(4) > 0
    assert int(state.rounds[0]) == 0  # not donated


def test_units():
    """In target steps: a round of 2 costs 4 = 2 × 0.5 + 1.5 + 1.5."""
    costs = Costs(target_step=2.0, draft_step=1.0, verify={2: 3.0}, round={2: 8.0})
    assert (costs.c, costs.v(2), costs.overhead(2)) == (0.5, 1.5, 1.5)


def test_rounds_of_calls():
    """Every round of a timed call drafts γ_max tokens, and every token is one target call."""
    method, contexts, state = setup(1.0)
    new = cost._repeat(cost._any_round, STEPS, method, contexts, state)
    assert (new.length, new.done, new.rounds) == (state.length, state.done, STEPS)
    assert new.cache.tolist() == [STEPS, STEPS * (GAMMA + 1)]
    assert new.drafter.cache.tolist() == [STEPS * GAMMA, STEPS * (GAMMA + 1)]
    plain, begin = plain_setup(1.0)
    context, state = begin()
    new = cost._repeat(cost._any_round, STEPS, plain, context, state)
    assert (new.length, new.done, new.rounds) == (state.length, state.done, STEPS)
    assert new.cache.tolist() == [STEPS, STEPS]


def test_calls_of_plain_decoding_draw_for_each_token():
    """Noise goes by position, which a call does not advance: drawn once it would cost nothing."""
    method, begin = plain_setup(1.0)
    context, state = begin()
    drawn = set()
    for steps in range(1, 13):
        end = cost._repeat(cost._any_round, steps, method, context, state)
        drawn.add(int(end.tokens[0, state.length[0]]))
    assert len(drawn) > 1


def test_fixed_times(monkeypatch):
    """What a call takes beyond its steps or rounds; `begin` is called for each, and not timed."""
    method, contexts, state = setup(0.0)
    plain, begin = plain_setup(0.0)
    begun = []

    def counted(kind, begin):
        return lambda: (begun.append(kind), begin())[1]

    calls = [
        cost.Call(plain, counted("plain", begin), rounds=3),
        cost.Call(method, counted("speculative", lambda: setup(0.0)[1:]), rounds=2),
    ]
    meter = cost.Meter(method, contexts, state, rounds=[GAMMA], steps=5, calls=calls)
    begun.clear()  # of the compilation
    meter.take()
    assert begun == ["plain", "speculative"]
    seconds = {"target": 2.0, "draft": 1.0, ("round", GAMMA): 7.0, ("call", 0): 10.0}
    monkeypatch.setattr(
        meter, "_seconds", {n: [t] for n, t in (seconds | {("call", GAMMA): 15.0}).items()}
    )
    found = meter.costs()
    assert found.plain_fixed == 10 - 3 * 2
    assert found.fixed == {GAMMA: 15 - 2 * 7}


def test_calls_need_their_round():
    method, contexts, state = setup(0.0)
    call = cost.Call(method, lambda: (contexts, state), rounds=2)
    with pytest.raises(ValueError, match="γ=4"):
        cost.Meter(method, contexts, state, rounds=[2], steps=1, calls=[call])


def test_call_overhead():
    """30 tokens in 5 rounds: plain 30 · 2 + 6 = 66, speculative 5 · 8 + 4 = 44, a speedup of
    1.5."""
    costs = Costs(2.0, 1.0, verify={2: 3.0}, round={2: 8.0}, plain_fixed=6.0, fixed={2: 4.0})
    overhead = costs.call_overhead(2, tokens=30, rounds=5)
    assert np.isclose(30 / 5 / (2 * costs.c + costs.v(2) + overhead), 66 / 44)
    free = dataclasses.replace(costs, plain_fixed=0.0, fixed={2: 0.0})
    assert free.call_overhead(2, tokens=30, rounds=5) == free.overhead(2)
    cheap = dataclasses.replace(free, round={2: 4.0})
    assert cheap.call_overhead(2, tokens=30, rounds=5) == -0.5  # raw
