"""What drafters are shown of the target: its hidden states, of every known token and no other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import test_loops
from experiments.train import train_head
from specjax import loop
from specjax.drafters.base import Drafter, ModelDrafter
from specjax.measure import along, metrics
from specjax.policies import constant
from specjax.pytrees import pytree
from specjax.replay import rollouts
from specjax.rules import Token
from specjax.sampling import Sampling
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
    rule, distribution = Token(), Sampling(1.0)
    return Speculative(target, drafter, rule, policy, distribution, jnp.int32([-1]), GAMMA)


@pytest.mark.sweep
@pytest.mark.parametrize("policy", [constant(GAMMA), Erratic()])
def test_a_drafter_sees_the_hidden_states_of_the_text(policy):
    """Each known token but the last has those that one call over the whole text gives: prompts of
    1 to 4 tokens, rounds without drafts. Nothing stays of rejected tokens.
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
    assert 0 < state.stats.accepted.sum() < state.stats.verified.sum()


@pytree
class Echo(Drafter):
    """Its state is the target's hidden state that it was shown last, and 1 more for each token that
    it read since: what it drafts has the distribution of that state. NaN, if a round begins and it
    was not shown the state of the last token but one, which was read before the round.
    """

    vocab_size = V

    def start(self, inputs, buffer_len):
        rows = inputs.prompt_len.shape
        return (), (jnp.zeros((*rows, V)), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))

    def observe(self, tokens, start, hidden, count, context, state):
        last = jnp.maximum(count - 1, 0)[:, None]
        token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
        shown = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
        some = count > 0
        return (
            jnp.where(some[:, None], shown, state[0]),
            jnp.where(some, start + count, state[1]),
            jnp.where(some, token, state[2]),
        )

    def begin(self, tokens, length, context, state, *, lags=True):
        hidden, end, token = state
        read = jnp.take_along_axis(tokens, jnp.maximum(end - 1, 0)[:, None], axis=1)[:, 0]
        right = (end == length - 1) & ((end == 0) | (token == read))
        return jnp.where(right[:, None], hidden, jnp.nan), state

    def extend(self, token, position, context, state):
        hidden, *where = state
        return hidden + 1, (hidden + 1, *where)

    def logits(self, hidden):
        return hidden


TARGET = random_table(1, V, forbidden=0, dtype=jnp.float32)
PROMPTS = inputs_of([[1], [0, 2, 3, 1], [4, 4]])
FIRST = PROMPTS.prompt_len.tolist()


def after_each(tokens) -> np.ndarray:
    """(B, T, V): the target's hidden state after each token, in one call."""
    context, cache = TARGET.start(PROMPTS, tokens.shape[1])
    start = jnp.zeros((ROWS,), jnp.int32)
    return np.asarray(TARGET(jnp.asarray(tokens), start, context, cache)[0])


def shown(tokens) -> np.ndarray:
    """What `Echo` was shown last when t + 1 tokens are known: the state after t of them."""
    return np.pad(after_each(tokens)[:, :-1], ((0, 0), (1, 0), (0, 0)))


@pytest.fixture(scope="module")
def known():
    """Outputs of 5, 2 and 4 tokens, as `along` takes them; and all tokens of each row."""
    outputs = [[3, 0, 2, 2, 4], [1, 3], [0, 0, 4, 1]]
    tokens = np.zeros((ROWS, 10), np.int32)
    for row, output in enumerate(outputs):
        text = [*PROMPTS.prompt[row, : FIRST[row]].tolist(), *output]
        tokens[row, : len(text)] = text
    return outputs, along.padded(outputs, ROWS, 7), tokens


@pytest.mark.sweep
def test_alpha_of_a_drafter_that_is_shown_the_target(known):
    """β by hand, at every position of outputs behind prompts of 1 to 4 tokens."""
    outputs, padded, tokens = known
    method = method_of(TARGET, Echo(), constant(GAMMA))
    begun = test_loops.begin(method, PROMPTS, BUDGET)
    betas = np.asarray(metrics.overlaps(method, *begun, *padded))
    p, q = (jax.nn.softmax(x, axis=-1) for x in (after_each(tokens), shown(tokens)))
    for row, output in enumerate(outputs):
        here = slice(FIRST[row] - 1, FIRST[row] + len(output))
        expected = jnp.minimum(p[row, here], q[row, here]).sum(-1)
        np.testing.assert_allclose(betas[row, : len(output) + 1], expected, rtol=1e-5)


@pytest.mark.sweep
def test_rollouts_of_a_drafter_that_is_shown_the_target(known):
    """What each draft begins with, and what is drafted goes on from there; nothing of a rollout
    stays for the next."""
    outputs, padded, tokens = known
    method = method_of(TARGET, Echo(), rollouts.Recorder(hidden=True))
    contexts, state = test_loops.begin(method, PROMPTS, BUDGET)
    index = jnp.arange(ROWS, dtype=jnp.int32)
    found, _ = rollouts.roll_out(method, contexts, state, index, *padded)
    states, slots = shown(tokens), np.arange(GAMMA, dtype=np.float32)[:, None]
    for row, output in enumerate(outputs):
        for at in range(len(output) + 1):
            begins = states[row, FIRST[row] + at - 1]
            np.testing.assert_allclose(found.hidden[row, at], begins + slots, rtol=1e-5)
            if at < len(output):
                own = np.asarray(jax.nn.log_softmax(begins))[output[at]]
                np.testing.assert_allclose(found.own_draft[row, at], own, rtol=1e-5)


@pytest.mark.sweep
def test_head_training_of_a_drafter_that_is_shown_the_target():
    """After each drafted token, in every round: from what was shown before the round."""
    method = method_of(TARGET, Echo(), constant(GAMMA))
    contexts, state = test_loops.begin(method, PROMPTS, BUDGET)
    rounds = []
    while not np.all(state.done):
        length = state.length.tolist()
        state, seen = train_head.observe(method, contexts, state)
        rounds.append((length, jax.device_get(seen)))
    states, several = shown(state.tokens), 0
    for length, seen in rounds:
        for row, slot in np.argwhere(seen.reached > 0):
            expected = states[row, length[row] - 1] + np.float32(slot + 1)
            np.testing.assert_allclose(seen.hidden[row, slot], expected, rtol=1e-5)
            several += slot > 0
    assert len(rounds) > 2
    assert several > 5


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_a_step_shows_the_round():
    """Its hidden states are those that its distributions were read from."""
    target, draft = (random_table(seed, V, dtype=jnp.float32) for seed in (1, 2))
    method = method_of(target, ModelDrafter(draft), constant(GAMMA))
    contexts, state = test_loops.begin(method, inputs_of([[1], [0], [4]]), BUDGET)
    _, round_ = jax.jit(lambda *args: method.step(*args))(contexts, state)
    found = jax.nn.log_softmax(target.logits(round_.hidden), axis=-1)
    np.testing.assert_allclose(found, round_.target_logprobs, rtol=1e-6)
    np.testing.assert_allclose(round_.stop.sum(axis=1), 1.0, rtol=1e-6)
