"""What drafters are shown of the target: its hidden states, of every known token and no other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import test_loops
from specjax import loop
from specjax.accept import TokenRule
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.sampling import sampling
from specjax.speculative import Speculative
from specjax.types import Model
from table_models import inputs_of, random_table
from toy_policies import Erratic

ROWS, GAMMA, V = 3, 3, 5
BUDGET = 9


@pytree
class Reader(Drafter):
    """Keeps the target's hidden state of every position, and drafts as another drafter does."""

    inner: ModelDrafter
    width: Array  # (E,) zeros

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def start(self, inputs, buffer_len):
        context, state = self.inner.start(inputs, buffer_len)
        nothing = jnp.full((*inputs.prompt_len.shape, buffer_len, len(self.width)), jnp.nan)
        return context, (state, nothing)

    def observe(self, tokens, start, hidden, count, context, state):
        slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        at = jnp.where(slot < count[:, None], start[:, None] + slot, state[1].shape[1])
        rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
        kept = state[1].at[rows, at].set(hidden, mode="drop")
        inner = self.inner.observe(tokens, start, hidden, count, context, state[0])
        return inner, kept

    def begin(self, tokens, length, context, state, *, lags=True):
        hidden, inner = self.inner.begin(tokens, length, context, state[0], lags=lags)
        return hidden, (inner, state[1])

    def extend(self, token, position, context, state):
        hidden, inner = self.inner.extend(token, position, context, state[0])
        return hidden, (inner, state[1])

    def logits(self, hidden):
        return self.inner.logits(hidden)


def method_of(target: Model, drafter: Drafter, policy) -> Speculative:
    rule, distribution = TokenRule(), sampling(1.0)
    return Speculative(target, drafter, rule, policy, distribution, jnp.int32([-1]), GAMMA)


@pytest.mark.parametrize("policy", [constant(GAMMA), Erratic()])
def test_a_drafter_sees_the_hidden_states_of_the_text(policy):
    """Of each known token but the last, prompts of 1 to 4 tokens, rounds without drafts: those that
    one call over the whole text gives. Of what was rejected nothing stays.
    """
    target, draft = (random_table(seed, V, dtype=jnp.float32) for seed in (1, 2))
    reader = Reader(ModelDrafter(draft), jnp.zeros((V,)))
    inputs = inputs_of([[1], [0, 2, 3, 1], [4, 4]])
    begun = test_loops.begin(method_of(target, reader, policy), inputs, BUDGET)
    prompt = np.asarray(begun[1].drafter[1])
    state = loop.decode(method_of(target, reader, policy), *begun)
    context, cache = target.start(inputs, state.tokens.shape[1])
    expected, _ = target(state.tokens, jnp.zeros((ROWS,), jnp.int32), context, cache)
    for row, (start, length) in enumerate(zip(inputs.prompt_len, state.length, strict=True)):
        known = int(start) - 1
        np.testing.assert_array_equal(prompt[row, :known], expected[row, :known])
        assert np.all(np.isnan(prompt[row, known:]))
        seen = np.asarray(state.drafter[1])[row]
        np.testing.assert_array_equal(seen[: length - 1], expected[row, : length - 1])
        assert np.all(np.isnan(seen[length:]))  # a finished row reads its last token too
    assert 0 < state.stats.accepted.sum() < state.stats.drafted.sum()


def test_hidden_states_that_nobody_reads_are_not_kept():
    """The compiled loop carries the target's hidden states, (B, K, E), for no drafter but one that
    keeps them.
    """

    @pytree
    class Keeper(Reader):
        def start(self, inputs, buffer_len):
            context, state = self.inner.start(inputs, buffer_len)
            return context, (state, jnp.zeros((ROWS, GAMMA + 1, V)))

        def observe(self, tokens, start, hidden, count, context, state):
            return self.inner.observe(tokens, start, hidden, count, context, state[0]), hidden

    target, draft = (random_table(seed, V, dtype=jnp.float32) for seed in (1, 2))
    inputs, plain = inputs_of([[1], [0], [4]]), ModelDrafter(draft)

    def carried(drafter) -> bool:
        method = method_of(target, drafter, constant(GAMMA))
        begun = test_loops.begin(method, inputs, BUDGET)
        text = loop.decode.lower(method, *begun).compile().as_text()
        outer = re.findall(r"= \((.*)\) while\(", text)
        assert outer
        return any(f"f32[{ROWS},{GAMMA + 1},{V}]" in carry for carry in outer)

    assert carried(Keeper(plain, jnp.zeros((V,))))
    assert not carried(plain)


def test_a_step_shows_the_round():
    """Its hidden states are those that its distributions were read from."""
    target, draft = (random_table(seed, V, dtype=jnp.float32) for seed in (1, 2))
    method = method_of(target, ModelDrafter(draft), constant(GAMMA))
    contexts, state = test_loops.begin(method, inputs_of([[1], [0], [4]]), BUDGET)
    _, round_ = jax.jit(lambda *args: method.step(*args))(contexts, state)
    found = jax.nn.log_softmax(target.logits(round_.hidden), axis=-1)
    np.testing.assert_allclose(found, round_.target_logprobs, rtol=1e-6)
    np.testing.assert_allclose(round_.stop.sum(axis=1), 1.0, rtol=1e-6)
