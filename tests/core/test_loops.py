"""Both loops, token by token: exact outputs, counts, neighbours, padding, caches and traces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from reference import distribution
from specjax import loop, speculative
from specjax.autoregressive import Autoregressive
from specjax.drafters.base import ModelDrafter
from specjax.measure import metrics
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5, T5Config
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Purpose, Sampling, draw, fold, row_keys
from specjax.speculative import Speculative
from table_models import TableModel, chain, inputs_of, logits_after, random_table
from toy_policies import Scripted

NEVER = jnp.int32([-1, -1])  # no token ends a row


def method_of(
    target, draft, *, chosen=None, policy=None, gamma_max=3, eos_ids=NEVER
) -> Speculative:
    return Speculative(
        target,
        ModelDrafter(draft),
        Token(),
        constant(gamma_max) if policy is None else policy,
        Sampling(0.0) if chosen is None else chosen,
        eos_ids,
        gamma_max,
    )


def keys_of(batch: int, seed: int = 0, index=None):
    index = np.arange(batch) if index is None else index
    return row_keys(
        jax.random.key(seed), jnp.asarray(index, jnp.int32), jnp.zeros((batch,), jnp.int32)
    )


def begin(method, inputs, budget, keys=None, buffer_len=None):
    """`start` of the method's loop; a budget for all rows or for each."""
    batch, prompt_len = inputs.prompt.shape
    budget = np.broadcast_to(budget, (batch,)).astype(np.int32)
    return loop.start(
        method,
        inputs,
        keys_of(batch) if keys is None else keys,
        jnp.asarray(budget),
        buffer_len=buffer_len or prompt_len + int(budget.max()) + 10,
    )


def betas(target, drafter, chosen, inputs, outputs, rule=None):
    """`metrics.overlaps` before each token of the outputs and behind them, (B, T+1)."""
    rule = Token() if rule is None else rule
    eos_ids = jnp.int32([-1])
    method = Speculative(target, drafter, rule, constant(1), chosen, eos_ids, 1)
    begun = begin(method, inputs, len(outputs[0]))
    known = jnp.pad(jnp.int32(outputs), ((0, 0), (0, 1)))
    emitted = jnp.full((len(outputs),), len(outputs[0]), jnp.int32)
    return metrics.overlaps(method, *begun, known, emitted)


def run(method, inputs, budget, **kwargs):
    """The state after `decode`, on the host."""
    state = loop.decode(method, *begin(method, inputs, budget, **kwargs))
    return jax.device_get(state.replace(keys=()))


def outputs(state, inputs) -> list[list[int]]:
    """Each row's new tokens."""
    starts = np.asarray(inputs.prompt_len)
    return [
        row[start:end].tolist()
        for row, start, end in zip(state.tokens, starts, state.length, strict=True)
    ]


def alone(method: Speculative) -> Autoregressive:
    """The autoregressive method for the same target and distribution."""
    return Autoregressive(method.target, method.sampling, method.eos_ids)


# Exact tokens from deterministic tables. The target counts up; the draft errs after 3 and 5.

COUNT = chain([1, 2, 3, 4, 5, 6, 7, 0])
ERRING = chain([1, 2, 3, 7, 5, 0, 7, 0])
PROMPTS = inputs_of([[0], [2], [5]])
SEVEN = jnp.int32([7, 7])


def counting(**kwargs) -> Speculative:
    return method_of(COUNT, ERRING, **{"eos_ids": SEVEN, **kwargs})


def test_exact_tokens_of_rows_that_diverge():
    """γ = 3 and EOS 7. By rounds, drafts | outcome, where [..] is accepted:

    row 0: 1 2 3 | [1 2 3] 4, then 5 0 1 | [5] 6, then 7 0 1 | [7], the rest vanishes
    row 1: 3 7 0 | [3] 4, then 5 0 1 | [5] 6, then [7]
    row 2: 0 1 2 | 6, then [7]
    """
    state = run(counting(), PROMPTS, 10)
    assert outputs(state, PROMPTS) == [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [6, 7]]
    stats = state.stats
    assert stats.target_calls.tolist() == state.rounds.tolist() == [3, 3, 2]
    assert stats.verified.tolist() == [9, 9, 6]
    assert stats.accepted.tolist() == [5, 3, 1]
    assert stats.emitted.tolist() == [7, 5, 2]
    assert stats.accepted_lengths.tolist() == [[0, 2, 0, 1], [0, 3, 0, 0], [1, 1, 0, 0]]
    assert stats.tested.tolist() == [[3, 2, 1], [3, 2, 0], [2, 0, 0]]


def test_two_ids_may_end_a_row():
    """With EOS 2 or 7 the first row ends inside its first block, the others as before."""
    state = run(counting(eos_ids=jnp.int32([7, 2])), PROMPTS, 10)
    assert outputs(state, PROMPTS) == [[1, 2], [3, 4, 5, 6, 7], [6, 7]]
    assert state.stats.accepted.tolist() == [2, 3, 1]
    assert state.stats.accepted_lengths[0].tolist() == [0, 0, 1, 0]


def test_budgets_end_inside_a_block():
    """Budgets 0, 1 and 6 in one batch: nothing; one token without a draft; γ cut to what is left.

    Row 2 drafts 3 (rejected at once: 6), 3 ([7 0 1] 2), then one token is left and none is drafted.
    """
    state = run(counting(eos_ids=NEVER), PROMPTS, [0, 1, 6])
    assert outputs(state, PROMPTS) == [[], [3], [6, 7, 0, 1, 2, 3]]
    assert state.stats.target_calls.tolist() == [0, 1, 3]
    assert state.stats.verified.tolist() == [0, 0, 6]
    assert state.stats.accepted.tolist() == [0, 0, 3]
    assert state.stats.accepted_lengths.tolist() == [[0] * 4, [1, 0, 0, 0], [2, 0, 0, 1]]
    assert np.all(state.done)


def test_autoregressive_exact_tokens():
    """A call for each token; EOS and budgets 10, 2 and 0."""
    method = alone(counting())
    state = run(method, PROMPTS, [10, 2, 0])
    assert outputs(state, PROMPTS) == [[1, 2, 3, 4, 5, 6, 7], [3, 4], []]
    assert state.stats.target_calls.tolist() == state.stats.emitted.tolist() == [7, 2, 0]
    assert state.stats.accepted_lengths.tolist() == [[7], [2], [0]]
    assert not np.any(state.stats.verified + state.stats.accepted)


# Logits that are not finite.


def poisoned(model, token, value=jnp.nan):
    """The same model with a broken logit after `token`."""
    return dataclasses.replace(model, table=model.table.at[token, 1].set(value))


@pytest.mark.sweep
@pytest.mark.parametrize("chosen", [Sampling(0.0), Sampling(top_k=2, top_p=0.9)])
def test_logits_that_are_not_finite_stop_the_loop(chosen):
    """The model's own flag, and no other; the sound rows stop where they were."""
    method = counting(chosen=chosen)
    bad_target = dataclasses.replace(method, target=poisoned(COUNT, 5))
    state = run(bad_target, PROMPTS, 10)
    assert (bool(state.target_finite), bool(state.draft_finite)) == (False, True)
    assert state.rounds.max() == 1
    bad_draft = dataclasses.replace(method, drafter=ModelDrafter(poisoned(ERRING, 5)))
    state = run(bad_draft, PROMPTS, 10)
    assert (bool(state.target_finite), bool(state.draft_finite)) == (True, False)
    state = run(alone(bad_target), PROMPTS, 10)
    assert not state.target_finite
    assert state.rounds.max() == 1


def test_finished_rows_may_hold_anything():
    """Padding rows of a batch have budget 0: their logits are never looked at."""
    method = method_of(poisoned(COUNT, 5), poisoned(ERRING, 5), eos_ids=jnp.int32([3, 3]))
    for chosen in (method, alone(method)):
        state = run(chosen, PROMPTS, [10, 10, 0])
        assert state.target_finite
        assert state.draft_finite
        assert outputs(state, PROMPTS) == [[1, 2, 3], [3], []]


# Every round of random tables against numpy: distributions from a fresh cache, commit token by
# token.


def check_commit(before, round_, after, eos_ids):
    """One round's tokens and counts, row by row."""
    gamma = round_.drafts.tokens.shape[1]
    for row in range(len(before.length)):
        gained = [] if before.done[row] else _gained(before, round_, row, eos_ids)
        start, end = before.length[row], after.length[row]
        known = after.tokens[row, :end].tolist()
        assert known == before.tokens[row, :start].tolist() + gained
        alive, count = int(not before.done[row]), round_.drafts.length[row]
        kept = min(round_.accepted[row], len(gained))
        reached = np.arange(gamma) < min(count, kept + 1, len(gained))
        change = jax.tree.map(
            lambda new, old, row=row: new[row] - old[row], after.stats, before.stats
        )
        assert change.target_calls == after.rounds[row] - before.rounds[row] == alive
        assert change.verified == alive * count
        assert change.accepted == alive * kept
        assert change.emitted == len(gained)
        assert np.array_equal(change.accepted_lengths, alive * (np.arange(gamma + 1) == kept))
        assert np.array_equal(change.tested, alive * reached)
        ended = bool(gained) and (gained[-1] in eos_ids or end == before.limit[row])
        assert after.done[row] == (before.done[row] or ended)


def _gained(before, round_, row, eos_ids):
    accepted = round_.accepted[row]
    assert accepted <= round_.drafts.length[row]
    gained = []
    for token in [*round_.drafts.tokens[row, :accepted], round_.next_token[row]]:
        gained.append(int(token))
        if token in eos_ids or before.length[row] + len(gained) == before.limit[row]:
            break
    return gained


def check_distributions(method, inputs, before, round_):
    """Both models' distributions in a round are those of a fresh cache, within 1e-6."""
    width = before.tokens.shape[1]
    for row in np.flatnonzero(~before.done):
        source = jax.tree.map(lambda x, row=row: x[row : row + 1], inputs)
        drafts = round_.drafts.tokens[row, : round_.drafts.length[row]].tolist()
        known = before.tokens[row, : before.length[row]].tolist()
        prefixes = [tuple(known + drafts[:i]) for i in range(len(drafts) + 1)]
        pairs = [
            (method.target, prefixes, round_.target_logprobs),
            (method.drafter.model, prefixes[:-1], round_.drafts.logprobs),
        ]
        for model, asked, found in pairs:
            if asked:
                logits = logits_after(model, source, asked, width)
                expected = [distribution(one, method.sampling) for one in logits]
                np.testing.assert_allclose(np.exp(found[row, : len(asked)]), expected, atol=1e-6)


SCRIPTS = {  # caps by round and row
    "rows apart": np.random.default_rng(0).integers(4, size=(40, 4)),
    "long pauses": np.resize([3, 0, 0, 0, 0, 2, 0, 1], (40, 1)),
    "late start": np.resize([0, 0, 0, 3, 1], (40, 1)),
}


def alike_pair(vocab_size: int) -> tuple[TableModel, TableModel]:
    """A target that seldom says its last token, and a draft that is often right."""
    table = random_table(1, vocab_size, dtype=jnp.float32).table
    table = table.at[:, -1].add(-1.5)
    noise = np.random.default_rng(2).normal(size=table.shape)
    return TableModel(table), TableModel(table + jnp.asarray(0.5 * noise, jnp.float32))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_round_by_hand(script):
    """Rows with prompts of 1 to 4 tokens and sources; drafts of 0 to 3 tokens by a script.

    The tables see every slot of the cache, so a rejected block, a missed catch-up or padding of
    the prompt would show in the distributions. Six seeds.
    """
    policy = Scripted(jnp.asarray(np.broadcast_to(SCRIPTS[script], (40, 4)), jnp.int32))
    eos = jnp.int32([4])
    method = method_of(*alike_pair(5), chosen=Sampling(0.8), policy=policy, eos_ids=eos)
    inputs = inputs_of([[1], [2, 0], [0, 3, 1], [1, 1, 1, 2]], [[1], [2], [1, 2], [0, 0, 3]])
    drafted, accepted = [], []
    for seed in range(6):
        contexts, state = begin(method, inputs, [24, 24, 3, 24], keys_of(4, seed))
        while not bool(jnp.all(state.done)):
            new, round_ = _step(method, contexts, state)
            before, after = (jax.device_get(each.replace(keys=())) for each in (state, new))
            round_ = jax.device_get(round_)
            check_commit(before, round_, after, [4])
            check_distributions(method, inputs, before, round_)
            drafted.extend(round_.drafts.length[~before.done])
            accepted.extend(round_.accepted[~before.done])
            state = new
    assert len(drafted) > 80
    assert {0, 1, 3} <= set(drafted)
    assert {0, 1, 3} <= set(accepted)


_step = jax.jit(speculative.step)


def test_no_key_is_used_twice():
    """Two rounds under JAX's own checker, which does see a key that is."""
    tables = (random_table(seed, 5, dtype=jnp.float32) for seed in (1, 2))
    method = method_of(*tables, chosen=Sampling())
    with jax.debug_key_reuse(True):
        contexts, state = begin(method, inputs_of([[1], [2]]), 9)
        step = jax.jit(speculative.step)
        state, _ = step(method, contexts, step(method, contexts, state)[0])
        keys = fold(state.keys, state.rounds, Purpose.NEXT)
        draw(keys, jnp.ones((2, 5)))
        with pytest.raises(jax.errors.KeyReuseError):
            draw(keys, jnp.ones((2, 5)))


@pytest.mark.sweep
def test_nothing_is_traced_again():
    """Prompt, seed, distribution, budget, γ, EOS and weights are data; a wider batch is a new
    shape."""

    def decode(inputs, seed, chosen, gamma, eos, table, budget, plain_only=False):
        tables = (random_table(table + i, 5, dtype=jnp.float32) for i in range(2))
        policy = constant(gamma)
        method = method_of(*tables, chosen=chosen, policy=policy, eos_ids=jnp.int32(eos))
        keys = keys_of(inputs.prompt.shape[0], seed)
        for each in (method, alone(method))[plain_only:]:
            run(each, inputs, budget, keys=keys, buffer_len=20)

    def traces():
        return [f._cache_size() for f in (loop.start, loop.decode)]

    prompts = inputs_of([[1], [2, 3]])
    decode(prompts, 0, Sampling(0.7, top_k=2), 3, [4], 0, 5)
    first = traces()
    decode(inputs_of([[2, 2], [0]]), 1, Sampling(1.1, top_k=3, top_p=0.8), 1, [3], 5, [7, 1])
    assert traces() == first
    decode(inputs_of([[1], [2, 3], [0]]), 0, Sampling(0.7, top_k=2), 3, [4], 0, 5, plain_only=True)
    assert traces() == [count + 1 for count in first]


# Real models: small T5s whose layers are scaled up, so that their tokens vary.

SOURCES = [[3, 9, 4, 1], [8, 1], [5, 6, 7, 2, 2, 9, 30, 1], [11, 4, 1], [20, 31, 12, 13, 1]]
SMALL = T5Config(
    vocab_size=40,
    d_model=24,
    d_kv=8,
    d_ff=32,
    num_layers=1,
    num_decoder_layers=2,
    num_heads=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
BUDGET = 24


@functools.cache
def target() -> LanguageModel:
    """37 real ids of 40; the matrices of all layers doubled."""
    model = LanguageModel.of(T5(SMALL, rngs=nnx.Rngs(10)), 37)

    def double(path, x):
        inside = "coder'" in jax.tree_util.keystr(path) and x.ndim == 2
        return 2.0 * x if inside else x

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(double, model.params))


def near(model: LanguageModel) -> LanguageModel:
    """The same model with noise on its weights: it agrees more often than not."""
    rng = np.random.default_rng(0)

    def shake(x):
        return x + jnp.asarray(0.02 * float(jnp.std(x)) * rng.normal(size=x.shape), x.dtype)

    return dataclasses.replace(model, params=jax.tree.map(shake, model.params))


def opposite(model: LanguageModel) -> LanguageModel:
    """Likes least what the model likes best."""

    def negate(path, x):
        return -x if "'head'" in jax.tree_util.keystr(path) else x

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(negate, model.params))


def translate(sources) -> tuple:
    return inputs_of([[0] for _ in sources], sources)


@functools.cache
def greedy_tokens() -> list[list[int]]:
    """What the target says on its own. The rows differ, and vary within."""
    inputs = translate(SOURCES)
    rows = outputs(run(Autoregressive(target(), Sampling(0.0), NEVER), inputs, BUDGET), inputs)
    assert len({tuple(row) for row in rows}) == len(SOURCES)
    assert min(len(set(row)) for row in rows) >= 4
    return rows


@pytest.mark.parametrize("gamma", range(1, 9))
def test_greedy_identity(gamma):
    """A draft that is right now and then, γ of γ_max = 8, five ragged sources, 24 tokens each."""
    method = method_of(target(), near(target()), policy=constant(gamma), gamma_max=8)
    inputs = translate(SOURCES)
    state = run(method, inputs, BUDGET)
    assert outputs(state, inputs) == greedy_tokens()
    assert 0.1 < state.stats.accepted.sum() / state.stats.verified.sum() < 0.9


def test_greedy_identity_with_eos_and_budgets():
    """The autoregressive tokens end at the same EOS or budget, for each row on its own."""
    inputs, budgets = translate(SOURCES), [24, 1, 13, 0, 22]
    ends = jnp.int32([greedy_tokens()[0][9], greedy_tokens()[2][4]])
    method = method_of(target(), near(target()), gamma_max=8, eos_ids=ends)
    expected = outputs(run(alone(method), inputs, budgets), inputs)
    assert len(expected[0]) <= 10
    assert len(expected[2]) <= 5
    assert outputs(run(method, inputs, budgets), inputs) == expected


@pytest.mark.parametrize("gamma", [1, 4, 7, 8])
def test_perfect_draft(gamma):
    """Every token is accepted: ⌈24 / (γ+1)⌉ target calls."""
    method = method_of(target(), target(), policy=constant(gamma), gamma_max=8)
    inputs = translate(SOURCES)
    state = run(method, inputs, BUDGET)
    assert outputs(state, inputs) == greedy_tokens()
    calls = -(-BUDGET // (gamma + 1))
    assert set(state.stats.target_calls) == {calls}
    assert set(state.stats.accepted) == set(state.stats.verified) == {BUDGET - calls}


@pytest.mark.parametrize("gamma", [1, 8])
def test_hopeless_draft(gamma):
    """No token is accepted: a target call for each, and the target's tokens all the same."""
    method = method_of(target(), opposite(target()), policy=constant(gamma), gamma_max=8)
    inputs = translate(SOURCES)
    state = run(method, inputs, BUDGET)
    assert outputs(state, inputs) == greedy_tokens()
    assert set(state.stats.target_calls) == {BUDGET}
    assert set(state.stats.accepted) == {0}


@pytest.mark.sweep
def test_greedy_identity_of_single_rows():
    """Batch 1, γ = γ_max = 3 and 5 different sources, padded to one width."""
    method = method_of(target(), near(target()), gamma_max=3)
    for row, expected in enumerate(greedy_tokens()):
        inputs = jax.tree.map(lambda x, row=row: x[row : row + 1], translate(SOURCES))
        assert outputs(run(method, inputs, BUDGET), inputs) == [expected]


def pad_more(inputs):
    """Three more rows, of budget 0, and four more columns of padding that hold rubbish."""
    source = jnp.pad(inputs.source, ((1, 2), (0, 4)), constant_values=17)
    ones = {"constant_values": 1}
    lengths = jnp.pad(inputs.source_len, (1, 2), **ones), jnp.pad(inputs.prompt_len, (1, 2), **ones)
    prompt = jnp.pad(inputs.prompt, ((1, 2), (0, 0)))
    return inputs._replace(
        source=source, source_len=lengths[0], prompt=prompt, prompt_len=lengths[1]
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["speculative", "plain"])
def test_neighbours_and_padding_change_nothing(name):
    """Temperature 1: a row among four others, and among more rows and more padding."""
    method = method_of(target(), near(target()), chosen=Sampling(1.0), gamma_max=3)
    method = method if name == "speculative" else alone(method)
    inputs = translate(SOURCES)
    together = run(method, inputs, BUDGET, keys=keys_of(5))
    expected = outputs(together, inputs)
    assert len({tuple(row) for row in expected}) == len(SOURCES)

    more, index = pad_more(inputs), [99, 0, 1, 2, 3, 4, 98, 97]
    budgets = [0, *[BUDGET] * 5, 0, 0]
    padded = run(method, more, budgets, keys=keys_of(8, index=index), buffer_len=50)
    assert outputs(padded, more)[1:6] == expected
    assert np.array_equal(padded.stats.target_calls[1:6], together.stats.target_calls)


def test_seeds_and_samples_differ():
    """Autoregressive T5 at temperature 1: another key or another sample, other tokens."""
    method = Autoregressive(target(), Sampling(1.0), NEVER)
    inputs = translate([SOURCES[2]] * 5)
    zeros = jnp.zeros((5,), jnp.int32)
    keys = row_keys(jax.random.key(0), zeros, jnp.arange(5, dtype=jnp.int32))
    rows = outputs(run(method, inputs, BUDGET, keys=keys), inputs)
    assert len({tuple(row) for row in rows}) == 5
