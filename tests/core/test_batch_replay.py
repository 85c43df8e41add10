"""Replay of batches: at temperature 0 the real loop, and sums that add up by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from specjax import loop, policies
from specjax.policies import Costs, by_batch_size, constant
from specjax.replay.batches import Oracle, serve
from specjax.sampling import Sampling
from table_models import inputs_of
from test_replay import BUDGET, GAMMA_MAX, PROMPTS, method_of, recorded

ROWS = len(PROMPTS)
WHOLE = ROWS * (GAMMA_MAX + 1)
SIZES = (ROWS, 9, 12, 18)
TIMES = Costs(0.1, [1.0, 1.1, 1.3, 1.9, 2.6], positions=[*SIZES, WHOLE], rest=0.05)
KEYS = test_loops.keys_of(ROWS)


@pytest.fixture(scope="module")
def known():
    method = method_of(constant(GAMMA_MAX), Sampling(0.0))
    return method, recorded(method, inputs_of(PROMPTS), hidden=False)


COSTS = Costs(0.217, [1.0] * (GAMMA_MAX + 1))


@pytest.mark.parametrize(
    "policy",
    [policies.fixed(5), policies.early_stop(TIMES), policies.by_batch_size({1: 3, 4: 1}),
     policies.both(policies.together(COSTS, prior=0.6), policies.threshold(0.4))],
    ids=lambda policy: type(policy).__name__,
)  # fmt: skip
def test_at_temperature_0_replay_is_the_real_batch(known, policy):
    method, trace = known
    real = dataclasses.replace(method, policy=policy, passes=SIZES)
    state = loop.decode(real, *test_loops.begin(real, inputs_of(PROMPTS), BUDGET, KEYS))
    found = serve(policy, trace, TIMES, KEYS, rows=ROWS)
    stats = jax.tree.map(np.sum, state.stats)
    assert int(found.tokens) == stats.emitted == int(jnp.sum(trace.emitted))
    assert int(found.rounds) == int(jnp.max(state.rounds))
    assert int(found.verified) == stats.verified
    assert int(found.accepted) == stats.accepted
    assert int(found.positions) == stats.verified + stats.target_calls


def test_time_by_hand(known):
    """Without drafts a round takes the pass of its live rows: of the smallest size here."""
    _, trace = known
    found = serve(by_batch_size({1: 0}), trace, TIMES, KEYS, rows=ROWS)
    rounds = int(jnp.max(trace.emitted))
    assert int(found.rounds) == rounds
    assert int(found.calls) == int(found.verified) == 0
    assert float(found.time) == pytest.approx(1.05 * rounds)
    assert float(found.rate) == pytest.approx(int(jnp.sum(trace.emitted)) / (1.05 * rounds))


def test_waiting_outputs_take_the_places_of_those_that_ended(known):
    """One row decodes all outputs one after the other; two rows as many tokens in fewer rounds."""
    _, trace = known
    emitted = np.asarray(trace.emitted)
    one = serve(by_batch_size({1: 0}), trace, TIMES, KEYS, rows=1)
    assert int(one.rounds) == int(one.tokens) == emitted.sum()
    two = serve(by_batch_size({1: 0}), trace, TIMES, KEYS, rows=2)
    free, rounds = [0, 0], 0
    for count in emitted:  # the next output goes to the row that is free first
        row = int(np.argmin(free))
        free[row] += count
        rounds = max(free)
    assert int(two.rounds) == rounds
    assert int(two.tokens) == emitted.sum()


def test_the_oracle_verifies_what_is_accepted_alone(known):
    _, trace = known
    run = {"rows": ROWS}
    found = serve(Oracle(TIMES), trace, TIMES, KEYS, **run)
    plain = serve(by_batch_size({1: 0}), trace, TIMES, KEYS, **run)
    assert int(found.verified) == int(found.accepted) > 0
    assert int(found.tokens) == int(plain.tokens)
    assert float(found.rate) > float(plain.rate)
