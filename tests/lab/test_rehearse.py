"""The real loop with the draws of a replay: its outputs and its rounds."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import test_loops
import test_replay
from experiments.adaptive import rehearse
from experiments.adaptive.rehearse import Rehearsed
from specjax.autoregressive import Autoregressive
from specjax.drafters.ngram import PromptLookup
from specjax.policies import constant
from specjax.replay import replay
from specjax.sampling import Sampling, row_keys
from table_models import inputs_of
from tiny_models import quick

pytestmark = pytest.mark.sweep

KEY = jax.random.key(5)


def both(method, inputs, budget=test_replay.BUDGET):
    """Rollouts along sampled outputs, and the loop that rehearses them."""
    index = jnp.arange(len(inputs.prompt), dtype=jnp.int32)
    keys = row_keys(KEY, index, jnp.zeros_like(index))
    trace = test_replay.recorded(method, inputs, keys=keys, budget=budget)
    rehearsed = Rehearsed(method, rehearse.script(trace, KEY))
    return trace, test_loops.run(rehearsed, inputs, budget, keys=keys)


@pytest.mark.parametrize(
    ("name", "guesses"),
    quick(
        itertools.product(["constant", "svip", "lookahead", "hedge", "tail reader"], [False, True]),
        ("lookahead", True),
    ),
)
def test_it_is_the_replay(name, guesses):
    """Outputs are the recorded ones, some ended by EOS; rounds, drafted and accepted tokens are
    those of a replay with the same key."""
    drafter = test_replay.drifting() if guesses else None
    method = test_replay.method_of(test_replay.policy_of(name), Sampling(1.0), drafter)
    inputs = inputs_of(test_replay.PROMPTS * 4)
    trace, state = both(method, inputs)
    assert len(set(trace.emitted.tolist())) > 2
    for b, output in enumerate(test_loops.outputs(state, inputs)):
        assert output == trace.tokens[b, : trace.emitted[b]].tolist()
    found = replay.replay([method.policy], trace, KEY)
    ours = test_replay.replayed_counts(found)
    for replayed, real in zip(ours, test_replay.counts(state), strict=True):
        assert replayed[0].tolist() == real.tolist()
    assert 0 < int(jnp.sum(state.stats.accepted)) < int(jnp.sum(state.stats.verified))


def test_a_drafter_that_falls_silent():
    method = test_replay.method_of(constant(3), Sampling(1.0), PromptLookup(test_replay.V))
    inputs = inputs_of(test_replay.PROMPTS * 4)
    trace, state = both(method, inputs)
    ours = test_replay.replayed_counts(replay.replay([method.policy], trace, KEY))
    for replayed, real in zip(ours, test_replay.counts(state), strict=True):
        assert replayed[0].tolist() == real.tolist()
    assert test_loops.outputs(state, inputs) == [
        trace.tokens[b, :n].tolist() for b, n in enumerate(trace.emitted)
    ]


def test_plain_decoding_reads_the_script():
    """As the races have it: one token in each round, those of the script and not its own."""
    method = test_replay.method_of(constant(2), Sampling(1.0))
    inputs = inputs_of(test_replay.PROMPTS * 4)
    trace, _ = both(method, inputs)
    drawn = rehearse.script(trace, KEY)
    drawn = drawn._replace(each=drawn.each._replace(tokens=(drawn.each.tokens + 1) % 2))
    plain = Rehearsed(Autoregressive(method.target, method.sampling, jnp.int32([-1])), drawn)
    keys = row_keys(KEY, trace.input_index, jnp.zeros_like(trace.input_index))
    state = test_loops.run(plain, inputs, test_replay.BUDGET, keys=keys)
    for b, output in enumerate(test_loops.outputs(state, inputs)):
        count = trace.emitted[b]
        assert output[:count] == ((trace.tokens[b, :count] + 1) % 2).tolist()
    assert jnp.all(state.stats.target_calls == state.stats.emitted)
