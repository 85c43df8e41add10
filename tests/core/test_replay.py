"""Replay: at temperature 0 the real run itself, at others its distribution; and what it is
worth."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import command_line
import eagles
import test_loops
import test_medusa
from experiments import tasks
from experiments.adaptive.race import Counting
from experiments.replay.evaluation import evaluate
from pairs import TEXTS
from specjax import generate
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.drafters.base import ModelDrafter
from specjax.drafters.ngram import PromptLookup
from specjax.measure import along
from specjax.policies import Costs, Policy, constant
from specjax.policies.entropy import svip
from specjax.policies.lookahead import lookahead
from specjax.pytrees import pytree
from specjax.replay import replay, rollouts
from specjax.replay.replay import Replayed
from specjax.replay.rollouts import Recorder, Rollouts
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from specjax.support import named
from table_models import inputs_of, random_table, repeat
from tiny_models import slow
from toy_policies import EntropyStop, TailReader, library

BUDGET, GAMMA_MAX, V = 12, 3, 10
PROMPTS = [[1], [0, 1], [2, 2, 0], [0], [1, 1], [0, 0, 1]]


def policy_of(name):
    return TailReader() if name == "tail reader" else library(GAMMA_MAX, V, board=True)[name]


def method_of(policy, distribution, drafter=None) -> Speculative:
    """Tables over 10 tokens of which one ends a row; the draft is near the target."""
    target = random_table(1, V, dtype=jnp.float32)
    noise = random_table(2, V, forbidden=0, dtype=jnp.float32).table
    finite = jnp.where(jnp.isfinite(target.table), target.table, -3.0)
    draft = dataclasses.replace(target, table=finite + 0.5 * noise)
    drafter = ModelDrafter(draft) if drafter is None else drafter
    return Speculative(
        target, drafter, Token(), policy, distribution, jnp.int32([V - 1]), GAMMA_MAX
    )


def recorded(method, inputs, *, hidden=True, judged=True, keys=None, budget=BUDGET) -> Rollouts:
    """Rollouts along the target's own outputs."""
    plain = test_loops.alone(method)
    state = test_loops.run(plain, inputs, budget, keys=keys)
    outputs = test_loops.outputs(state, inputs)
    method = dataclasses.replace(method, policy=Recorder(hidden, judged))
    contexts, start = test_loops.begin(method, inputs, budget, keys=keys)
    index = jnp.arange(len(outputs), dtype=jnp.int32)
    padded = along.padded(outputs, len(outputs), budget + 1)
    found, _ = rollouts.roll_out(method, contexts, start, index, *padded)
    return found


@functools.cache
def greedy_trace() -> Rollouts:
    """A trace of all prompts, with hidden states; no policy changes it."""
    return recorded(method_of(constant(1), Sampling(0.0)), inputs_of(PROMPTS))


@pytest.mark.sweep
def test_no_static_length_is_compared_that_has_no_price():
    """The first two of γ = 1 … 3 were timed. The third would win if its pass cost as much as
    theirs; the oracle may take it in the policies' loop alone."""
    found = greedy_trace()
    dear = Costs(0.0, [1.0, 1.0, 1.0, 9.0][: found.gamma_max + 1])
    known = {"policies": dear} | {f"γ={g}": Costs(0.0, [1.0] * (g + 1)) for g in (1, 2)}
    lines = evaluate({"svip": svip(0.5)}, found, known, jax.random.key(0), 1)
    assert [line["policy"] for line in lines] == ["γ=1", "γ=2", "oracle", "svip"]


def counts(state) -> tuple[np.ndarray, ...]:
    """Rounds, drafted tokens and accepted ones of each row of a real run."""
    return state.stats.target_calls, state.stats.verified, state.stats.accepted


def replayed_counts(found: Replayed) -> tuple[np.ndarray, ...]:
    """Rounds, drafted and accepted tokens of a replay."""
    lengths = np.arange(found.verified.shape[-1])
    return found.verified.sum(-1), found.verified @ lengths, found.accepted @ lengths


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "drafter"),
    [("constant", None), ("lookahead", None), ("tail reader", None), ("constant", PromptLookup(V)),
     slow(("svip", None)), slow(("hedge", None))],
)  # fmt: skip
def test_greedy_replay_is_the_real_run(name, drafter):
    """Rounds, drafted and accepted tokens of six outputs, of which some end by EOS and some by
    their budget. A lookup proposes little or nothing in some rounds."""
    method, inputs = method_of(policy_of(name), Sampling(0.0), drafter), inputs_of(PROMPTS)
    trace = greedy_trace() if drafter is None else recorded(method, inputs, hidden=False)
    assert drafter is None or np.any(trace.length == 0)
    state = test_loops.run(method, inputs, BUDGET)
    assert trace.emitted.tolist() == state.stats.emitted.tolist()
    assert min(trace.emitted.tolist()) < max(trace.emitted.tolist()) == BUDGET
    found = replay.replay([method.policy], trace, jax.random.key(0))
    for ours, theirs in zip(replayed_counts(found), counts(state), strict=True):
        assert ours[0].tolist() == theirs.tolist()


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "refuses"), [("svip", False), ("adaedl", True), ("head", True)])
def test_calls_of_the_drafter(name, refuses):
    """One for each drafted token, and one more where a policy saw the distribution and stopped: as
    many as in the real loop. svip stops before it calls."""
    policy, refused = policy_of(name), 0
    for prompt in PROMPTS[::3]:  # one width: the programs are compiled once
        method, inputs = method_of(policy, Sampling(0.0)), inputs_of([prompt])
        found = replay.replay([policy], recorded(method, inputs), jax.random.key(0))
        counting = dataclasses.replace(method, drafter=Counting(method.drafter))
        state = test_loops.run(counting, inputs, BUDGET)
        assert int(state.stats.verified[0] + found.refused[0, 0]) == int(state.drafter[1])
        refused += int(found.refused[0, 0])
        # All of these policies begin each round by a call, if there is room for a token.
        idle = found.trail[0, 0, : BUDGET - 1] == 0
        assert found.vain[0, 0] == (idle.sum() if refuses else 0)
    assert (refused > 0) == refuses


@pytree
class Drifting(ModelDrafter):
    """Says something else behind drafted tokens than where a round begins with the same text."""

    guesses = True
    drift: jax.Array  # (V,)

    def extend(self, token, position, context, state):
        hidden, state = super().extend(token, position, context, state)
        return hidden + self.drift[None, :], state


@pytree
class Unaware(Drifting):
    """The same, recorded as if what it says depended on the text alone."""

    guesses = False


def drifting(kind=Drifting) -> Drifting:
    """The draft of `method_of`, with noise."""
    model = method_of(constant(1), Sampling(0.0)).drafter.model
    return kind(model, random_table(3, V, dtype=jnp.float32).table[0])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "kind"),
    [("svip", Drifting), ("head", Unaware), ("tail reader", Drifting),
     slow(("constant", Unaware)), slow(("lookahead", Drifting))],
)  # fmt: skip
def test_greedy_replay_of_a_drafter_that_guesses(name, kind):
    """A round of its own from each position is the real run, and one rollout for all is not."""
    method = method_of(policy_of(name), Sampling(0.0), drifting(kind))
    inputs = inputs_of(PROMPTS)
    state = test_loops.run(method, inputs, BUDGET)
    found = replay.replay([method.policy], recorded(method, inputs), jax.random.key(0))
    pairs = zip(replayed_counts(found), counts(state), strict=True)
    same = all(ours[0].tolist() == theirs.tolist() for ours, theirs in pairs)
    assert same == (kind is Drifting)


@pytest.mark.sweep
@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("name", ["eagle", slow("medusa")])
def test_heads_say_that_they_guess(name, aware):
    """Greedy replay of these is their real run too, and would not be if they did not say so."""
    if name == "eagle":
        target = eagles.target_of("gpt", V)
        model, drafter = target.model, eagles.eagle_of(target, 1)
    else:
        drafter = test_medusa.drafter("gpt")
        model = drafter.target
    policy, never = constant(GAMMA_MAX), jnp.int32([-1])
    method = Speculative(model, drafter, Token(), policy, Sampling(0.0), never, GAMMA_MAX)
    inputs = inputs_of([[a, b] for a in range(1, V) for b in range(1, V)])
    state = test_loops.run(method, inputs, BUDGET)
    trace = recorded(method, inputs, hidden=False)
    if not aware:
        trace = trace._replace(accepted=jnp.full_like(trace.accepted, -1))
    found = replay.replay([policy], trace, jax.random.key(0))
    pairs = zip(replayed_counts(found), counts(state), strict=True)
    assert all(ours[0].tolist() == theirs.tolist() for ours, theirs in pairs) == aware
    assert 0 < state.stats.accepted.sum() < state.stats.verified.sum()


def two_sample_p_value(left: np.ndarray, right: np.ndarray) -> float:
    """Chi-square over the distinct rows of two samples; rare rows are pooled."""
    cells, which = np.unique(np.concatenate([left, right]), axis=0, return_inverse=True)
    seen = np.stack([np.bincount(x, minlength=len(cells)) for x in np.split(which.ravel(), 2)])
    rare = seen.sum(0) < 20
    table = np.concatenate([seen[:, ~rare], seen[:, rare].sum(1, keepdims=True)], axis=1)
    return float(stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


ROWS = 8192


def sampled(policy, skew=False, drafter=None) -> float:
    """The p-value of (rounds, drafted, accepted, emitted, two tokens) of real runs and replays."""
    method = method_of(policy, Sampling(1.0), drafter)
    inputs = repeat(inputs_of([[1, 0]]), ROWS)
    state = test_loops.run(method, inputs, 6, keys=test_loops.keys_of(ROWS, seed=1))
    real = np.stack([*counts(state), state.stats.emitted, *state.tokens[:, 2:4].T], axis=1)
    trace = recorded(method, inputs, budget=6)
    if skew:  # as if chances were those of the draft's own tokens
        trace = trace._replace(own_draft=trace.draft[:, :, 0], own_target=trace.target[:, :, 0])
    found = replayed_counts(replay.replay([policy], trace, jax.random.key(2)))
    ours = np.stack([*(x[0] for x in found), trace.emitted, *trace.tokens[:, :2].T], axis=1)
    # A row that ends after one token has no second: what stands there is arbitrary.
    for sample in (real, ours):
        sample[sample[:, 3] < 2, 5] = 0
    return two_sample_p_value(real, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "same"),
    [("constant", None, True), ("svip", None, True), ("tail reader", None, True),
     ("constant", "skew", False), ("constant", Drifting, True), ("svip", Unaware, False)],
)  # fmt: skip
def test_sampled_replay_has_the_real_runs_distribution(name, kind, same):
    """8,192 real runs and 8,192 replays, each along an output of its own: p > 1e-4. p is less with
    chances of other tokens than the output's, and where a drafter that guesses does not say so."""
    drafter = drifting(kind) if isinstance(kind, type) else None
    assert (sampled(policy_of(name), kind == "skew", drafter) > 1e-4) == same


@pytest.mark.sweep
def test_a_round_goes_on_behind_a_token_that_is_rejected():
    """Where acceptance ends within the output, a token that the drafter likes better than the
    target does: wherever that is in the draft."""
    method = method_of(constant(1), Sampling(1.0), drifting())
    inputs = repeat(inputs_of([[1, 0]]), 64)
    trace = recorded(method, inputs, keys=test_loops.keys_of(64))
    end = np.asarray(trace.accepted)
    position = np.arange(end.shape[1])[None, :] + end
    ends = (end < trace.length) & (position < trace.emitted[:, None])
    for slot in range(GAMMA_MAX):
        here = ends & (end == slot)
        assert here.sum() > 10
        assert np.all(np.asarray(trace.target < trace.draft)[here, slot])


@pytest.mark.sweep
def test_no_token_is_accepted_that_was_not_drafted():
    """A drafter that says nothing behind its first token."""
    drafter = dataclasses.replace(drifting(), drift=jnp.full((V,), -jnp.inf))
    method = method_of(constant(1), Sampling(1.0), drafter)
    trace = recorded(method, repeat(inputs_of([[1, 0]]), 64), keys=test_loops.keys_of(64))
    assert np.all(trace.length == 1)
    assert np.unique(trace.accepted).tolist() == [0, 1]


def even(alpha: float, rows: int, emitted: int, gamma_max: int) -> Rollouts:
    """Outputs every token of which is accepted with probability α."""
    column = jnp.zeros((rows, emitted + 1), jnp.float32)
    slots = jnp.zeros((rows, emitted + 1, gamma_max), jnp.float32)
    fields = dict.fromkeys(Rollouts._fields, slots)
    return Rollouts(
        **fields
        | {
            "input_index": jnp.arange(rows, dtype=jnp.int32),
            "emitted": jnp.full((rows,), emitted, jnp.int32),
            "budget": jnp.full((rows,), emitted + gamma_max, jnp.int32),
            "tokens": column.astype(jnp.int32),
            "own_target": column,
            "own_draft": column.at[:, :-1].set(jnp.log(alpha)).at[:, -1].set(-jnp.inf),
            "own_belief_logprob": column,
            "length": jnp.full(column.shape, gamma_max, jnp.int32),
            "drafts": slots.astype(jnp.int32),
            "hidden": slots[..., None][..., :0],
            "accepted": column.astype(jnp.int32) - 1,
        }
    )


@pytest.mark.sweep
def test_the_papers_numbers():
    """40,000 tokens at α = .8 and c = .1, v = 1: within 2% of Eq. 1, of Thm 3.8 for γ = 3, and of
    the oracle's 1/(1 − α + cα), for drafts that 24 hardly ever cut short: there the best length is
    just what will be accepted."""
    alpha, c, gamma_max = 0.8, 0.1, 24
    trace, key = even(alpha, 40, 1000, gamma_max), jax.random.key(0)
    table = Costs(c, [1.0] * (gamma_max + 1))
    (fixed,) = np.stack(replay.score(replay.replay([constant(3)], trace, key), trace, table), 1)
    tau = (1 - alpha**4) / (1 - alpha)
    np.testing.assert_allclose(fixed, [tau / (3 * c + 1), tau, 3], rtol=0.02)
    tau, oracle = 1 / (1 - alpha), replay.oracle(trace, key, [table])
    np.testing.assert_allclose(oracle, [1 / (1 - alpha + c * alpha), tau, alpha * tau], rtol=0.02)


@pytest.mark.sweep
def test_calls_take_time_too():
    """Two draws of two outputs of 6 tokens in rounds of 3 tokens that cost 1.5: 4 calls, 8 rounds;
    (24 + 4·1) / (8·1.5 + 4·.5) = 2."""
    trace = even(1.0, 2, 6, 2)
    found = replay.replay([constant(2)], trace, jax.random.key(0), draws=2)
    assert found.runs.tolist() == [[2, 2]]
    assert found.verified.tolist() == found.accepted.tolist() == [[[0, 0, 4]] * 2]
    table = Costs(0.25, [1.0, 0.95, 1.0], call=0.5, plain_call=1.0)
    assert replay.score(found, trace, table).speedup.tolist() == [2.0]
    refused = found._replace(refused=np.array([[3, 5]]))  # 2 steps more
    assert replay.score(refused, trace, table).speedup.tolist() == [28 / 16]
    dear = dataclasses.replace(table, refused=jnp.float32(1.25))  # the first of a round
    vain = refused._replace(vain=np.array([[1, 1]]))
    assert replay.score(vain, trace, dear).speedup.tolist() == [28 / 18]
    assert replay.score(vain, trace, table).speedup.tolist() == [28 / 16]
    slow = Costs(0.25, [1.0, 0.95, 1.0], call=0.5, token=2.0, plain_call=1.0)
    assert replay.score(found, trace, slow).speedup.tolist() == [(2 * 24 + 4) / 14]
    with pytest.raises(ValueError, match="γ_max=1"):
        replay.score(found, trace, Costs(0.25, [1.0, 1.0]))


@pytest.mark.sweep
def test_settings_run_side_by_side():
    """Each of 40 thresholds, in chunks of 16, is what it is alone; three kinds compile thrice."""
    trace = greedy_trace()
    thresholds = [svip(threshold=t) for t in np.linspace(0.05, 0.6, 40)]
    mixed = [constant(1), *thresholds, TailReader(), constant(3)]
    before = replay._side_by_side._cache_size()
    found = replay.replay(mixed, trace, jax.random.key(0), at_once=16)
    assert replay._side_by_side._cache_size() - before == 3
    assert len(np.unique(found.verified[1:41], axis=0)) > 3
    for i in (0, 7, 33, 41):
        alone = replay.replay([mixed[i]], trace, jax.random.key(0))
        for ours, theirs in zip(found, alone, strict=True):
            assert np.array_equal(ours[i], theirs[0])


# The oracle.


def random_costs(rng, gamma_max, **of_plain):
    """Random costs of one loop; longer drafts may well be cheaper, and calls dear."""
    draft, call = rng.uniform(0, 0.3), rng.uniform(0, 2)
    return Costs(draft, rng.uniform(0.3, 3.0, gamma_max + 1).tolist(), call=call, **of_plain)


def random_trace(longest: int, settled: bool = False) -> Rollouts:
    """16 outputs of 1 to so many tokens, at random chances; some end by their budget, and at some
    positions the drafter has little or nothing to say. `settled`: whole rounds, as of a drafter
    that guesses."""
    rng, rows = np.random.default_rng(0), 16
    made = even(0.5, rows, longest, GAMMA_MAX)
    emitted = rng.integers(1, longest + 1, rows)
    there = np.arange(longest + 1) < emitted[:, None]
    chance = rng.uniform(0.05, 1.0, there.shape) ** rng.choice([0, 1, 4], (rows, 1))
    made = made._replace(
        emitted=jnp.asarray(emitted, jnp.int32),
        budget=jnp.asarray(emitted + rng.choice([0, 0, 4], rows), jnp.int32),
        own_draft=jnp.asarray(np.where(there, np.log(chance), -np.inf), jnp.float32),
        length=jnp.asarray(rng.choice([0, 1, 3, 3, 3], there.shape), jnp.int32),
        entropy=jnp.asarray(rng.uniform(0, 2, made.entropy.shape), jnp.float32),
    )
    if not settled:
        return made
    left = np.maximum(emitted[:, None] - np.arange(longest + 1), 0)
    most = np.minimum(made.length, left)
    return made._replace(accepted=jnp.asarray(rng.integers(0, most + 1), jnp.int32))


@pytree
class Script(Policy):
    """As many tokens as are written down for each round."""

    lengths: jax.Array

    def init(self, keys, gamma_max):
        return jnp.zeros(keys.shape, jnp.int32)

    def begin(self, state, live, gamma_max):
        return state + 1, self.lengths[state]


@pytest.mark.sweep
@pytest.mark.parametrize("settled", [False, True])
def test_the_oracle_is_the_fastest_of_all_ways(settled):
    """Every sequence of lengths, in either of two loops, and plain decoding: the least time of each
    output, added up, is the oracle's. 256 sequences of four rounds, outputs of four tokens."""
    trace, key = random_trace(4, settled), jax.random.key(1)
    scripts = list(itertools.product(range(GAMMA_MAX + 1), repeat=4))
    ways = replay.replay([Script(jnp.int32(s)) for s in scripts], trace, key, at_once=256)
    short = np.array([max(script) <= 2 for script in scripts])
    rng, took = np.random.default_rng(1), set()
    for _ in range(20):
        of_plain = {"token": rng.uniform(0.5, 1.5), "plain_call": rng.uniform(0, 2)}
        loops = [random_costs(rng, gamma, **of_plain) for gamma in (GAMMA_MAX, 2)]
        plain = np.asarray(trace.emitted) * of_plain["token"] + of_plain["plain_call"]
        times = [plain[None]]
        for table, fits in zip(loops, (short | True, short), strict=True):
            rounds = np.asarray(table.round_times(table.gamma_max))
            counts = ways.verified[fits][:, :, : len(rounds)]
            refused = ways.refused[fits] * float(table.draft)
            times.append(counts @ rounds + refused + float(table.call))
        least = [time.min(axis=0) for time in times]
        took |= set(np.argmin(least, axis=0).tolist())
        expected = plain.sum() / np.min(least, axis=0).sum()
        assert replay.oracle(trace, key, loops).speedup == pytest.approx(expected, rel=1e-5)
    assert took == {0, 1, 2}  # each way is the fastest somewhere


@pytest.mark.sweep
def test_the_oracle_needs_the_drafts():
    with pytest.raises(ValueError, match="at most 3 tokens"):
        replay.oracle(greedy_trace(), jax.random.key(0), [Costs(0.1, [1.0] * 5)])


def test_what_was_not_recorded():
    """Distributions over the vocabulary never are, hidden states if asked for."""
    trace = greedy_trace()._replace(hidden=jnp.zeros((0,)))
    with pytest.raises(ValueError, match="entropy and top1"):
        replay.replay([EntropyStop()], trace, jax.random.key(0))
    with pytest.raises(ValueError, match="--hidden"):
        replay.replay([policy_of("head")], trace, jax.random.key(0))


@pytest.mark.sweep
def test_files(tmp_path):
    """What is loaded replays alike, though hidden states are rounded; other files are refused."""
    method = method_of(constant(1), Sampling(0.0), drifting())
    trace = recorded(method, inputs_of(PROMPTS))
    rollouts.save(tmp_path / "trace.npz", trace)
    loaded = rollouts.load(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as file:  # by the names of older files
        np.testing.assert_array_equal(file["own_confidence"][0], trace.own_belief_logprob[0, 0])
    np.testing.assert_allclose(loaded.hidden[0, 0], trace.hidden[0, 0], atol=2e-3)
    ours, theirs = (replay.replay([svip()], each, jax.random.key(0)) for each in (trace, loaded))
    assert np.array_equal(ours.verified, theirs.verified)
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz is not a file of rollouts"):
        rollouts.load(tmp_path / "other.npz")


def test_a_file_costs_no_more_than_it_weighs(tmp_path):
    """One long output among many empty ones; counts whose sum wraps around."""
    path, count = tmp_path / "trace.npz", 3000
    flat = {name: np.zeros((2 * count, 1, 1)[:rank]) for name, rank in rollouts._RANKS.items()}
    flat |= {name: np.zeros(count, np.int64) for name in ("input_index", "emitted", "budget")}
    flat["emitted"][0] = count
    largest = np.iinfo(np.int64).max
    np.savez_compressed(path, **flat)
    with pytest.raises(ValueError, match=r"trace\.npz: its outputs take .* bytes at the length"):
        rollouts.load(path)
    flat["emitted"][:3] = largest, largest, count + 2
    np.savez_compressed(path, **flat)
    with pytest.raises(ValueError, match=r"trace\.npz: its arrays do not fit together"):
        rollouts.load(path)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:1 empty")
@pytest.mark.parametrize("temperature", [slow((0.0,)), 1.0])
def test_record_texts(pair, temperature):
    """Through tokenizer and batches: the real run at temperature 0; at both, the rollouts' first
    tokens are rejected ones, where the output's own might be."""
    texts, distribution = [*TEXTS[:3], "", *TEXTS[3:5]], Sampling(temperature)
    key, options = jax.random.key(3), {"max_new_tokens": 16, "batch_size": 2}
    plain, real = (
        generate(pair.target, draft, texts, gamma=3, temperature=temperature, key=key, **options)
        for draft in (None, pair.draft)
    )
    options |= {"gamma_max": 3, "sampling": distribution, "key": key}
    trace = rollouts.record(pair.target, pair.draft, texts, plain.tokens, **options)
    assert trace.input_index.tolist() == [0, 1, 2, 4, 5]
    assert trace.emitted.tolist() == [len(tokens) for tokens in plain.tokens if tokens]
    there = np.arange(trace.tokens.shape[1]) < np.asarray(trace.emitted)[:, None]
    uncertain = there & (np.asarray(trace.overlap)[:, :, 0] < 0.999)
    assert uncertain.any()
    assert np.all(np.asarray(trace.target < trace.draft)[uncertain, 0])
    if temperature == 0:
        found = replay.replay([constant(3)], trace, key)
        calls, drafted, accepted = (x[0].tolist() for x in replayed_counts(found))
        rows = [row for row in real.rows if row.tokens]
        assert calls == [row.target_calls for row in rows]
        assert drafted == [row.verified for row in rows]
        assert accepted == [row.accepted for row in rows]


def test_nothing_to_record(pair):
    with pytest.raises(ValueError, match="every input or output is empty"):
        rollouts.record(
            pair.target, pair.draft, ["x"], [[]],
            gamma_max=2, sampling=Sampling(0.0), max_new_tokens=4, key=jax.random.key(0),
        )  # fmt: skip


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, pair):
    """A command on a small config of the pair."""
    examples = [tasks.Example(text, text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import embedded\n\n"
        "def get_config():\n"
        "    config = embedded.get_config()\n"
        f"    config.target = {pair.target.name!r}\n"
        f"    config.drafts = ({pair.draft.name!r},)\n"
        "    config.max_new_tokens, config.repeats = 24, 1\n"
        "    config.temperatures = (0.0,)\n"
        "    return config\n"
    )
    return functools.partial(command_line.run, monkeypatch, capsys), f"--config={file}"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_commas_within_settings_part_nothing():
    texts = ["svip", "goodput(prior=0.9, memory=0.8)", "m:f"]
    assert named.split("svip, goodput(prior=0.9, memory=0.8),,m:f") == texts


@pytest.mark.slow
def test_trace_and_replay(command, tmp_path):
    """What they write; going on where all is done; given costs; refusals in one sentence."""
    run, config = command
    work = tmp_path / "trace"
    job = functools.partial(run, "experiments.trace", config, f"--workdir={work}")
    outcome = job("--gamma_max=2", "--inputs=4")
    assert outcome.status == 0, outcome.stderr
    (row,) = lines_of(work / "results.jsonl")
    assert (list(row["costs"]), row["outputs"]) == (["policies", "γ=1", "γ=2"], 4)
    assert len(row["costs"]["policies"]["verify"]) == 3
    assert row["c"] >= 0
    assert rollouts.load(work / row["file"]).emitted.sum() == row["positions"]
    assert job("--gamma_max=2", "--inputs=4").status == 0
    assert lines_of(work / "results.jsonl") == [row]
    assert "another config" in job("--gamma_max=3", "--inputs=4").stderr

    job = functools.partial(run, "experiments.replay", f"--trace={work}")
    costs = "--c=0.1", "--verify=1,1.1,1.2", "--overhead=0.05"
    outcome = job("--policies=heuristic,goodput(prior=0.9, memory=0.8),svip(threshold=0.3)", *costs)
    assert outcome.status == 0, outcome.stderr
    found = {row["policy"]: row for row in lines_of(work / "replay.jsonl")}
    given = ["heuristic", "goodput(prior=0.9, memory=0.8)", "svip(threshold=0.3)"]
    assert list(found) == ["γ=1", "γ=2", "oracle", *given]
    best = max(found[f"γ={gamma}"]["speedup"] for gamma in (1, 2))
    one = found["γ=1"]
    # A row with one token left drafts none, at the same width.
    assert one["speedup"] == pytest.approx(
        one["tau"] / (0.1 * one["verified"] + 1.1 + 0.05), rel=1e-5
    )
    for row in found.values():
        assert row["regret"] >= -1e-6
        assert row["of_best_static"] == pytest.approx(row["speedup"] / best)
        assert row["regret"] == pytest.approx(found["oracle"]["speedup"] / row["speedup"] - 1)
    assert found["oracle"]["closed"] == 1
    assert all(f"| {name} |" in (work / "report.md").read_text() for name in found)
    assert job("--policies=heuristic,svip", "--carry", *costs).status == 0
    named = [row["policy"] for row in lines_of(work / "replay.jsonl")]
    assert named[3:] == ["heuristic", "svip", "heuristic, carried over"]
    for bad, said in (
        ("--policies=together", "Together reads its batch"),
        ("--draft=other", "has no --draft='other'"),
        ("--policies=svip(threshold=low)", "cannot be read"),
        ("--policies=svip,unheard", "no policy 'unheard'"),
        ("--widths=1", "--widths=1 goes with --c"),
        ("--policies=head", "missing a required argument"),
    ):
        outcome = job(bad)
        assert outcome.status == 1
        assert said in outcome.stderr, outcome.stderr
        assert outcome.stderr.count("\n") == 1
    (row,) = lines_of(work / "results.jsonl")
    row["costs"]["policies"]["error"] = 0.249
    (work / "results.jsonl").write_text(f"{json.dumps(row)}\n")
    for page in (job("--policies=heuristic").stdout, (work / "report.md").read_text()):
        assert "The costs of this trace fit poorly: a typical call is off by 25%" in page


def test_the_trail_and_what_was_lost_on_it():
    """Rounds by where they began add up to the counts, and nothing that is lost comes back."""
    trace, key, table = greedy_trace(), jax.random.key(0), Costs(0.1, [1.0, 1.1, 1.2, 1.3])
    found = replay.replay([constant(3)], trace, key)
    marked = found.trail[0] >= 0
    assert marked.sum(1).tolist() == found.verified[0].sum(1).tolist()
    drafted = np.where(marked, found.trail[0], 0).sum(1)
    assert drafted.tolist() == (found.verified[0] @ np.arange(GAMMA_MAX + 1)).tolist()
    lost = replay.regret(found.trail[0], trace, key, table, [table])
    assert np.all(lost[:, 0] == 0)
    assert np.all(np.diff(lost, axis=1) >= -1e-9)
    assert lost[:, -1].sum() > 0


@pytest.mark.sweep
def test_regret_by_hand():
    """All of 7 tokens are accepted. Rounds of 3 take 1.3 for 4 tokens. One token a round takes 1.1
    for 2: by token 4 they have taken 2.2, and .9 are lost."""
    trace = even(1.0, 1, 8, 3)._replace(budget=jnp.int32([8]))
    table, key = Costs(0.1, [1.0, 1.0, 1.0, 1.0]), jax.random.key(0)
    found = replay.replay([constant(1)], trace, key)
    assert found.trail[0, 0, :8].tolist() == [1, -1, 1, -1, 1, -1, 1, -1]
    lost = replay.regret(found.trail[0], trace, key, table, [table])
    np.testing.assert_allclose(lost[0, [0, 4]], [0, 0.9], atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_prefers_plain_decodes_plainly(temperature):
    """The same tokens, in plain decoding's time."""
    table = Costs(3.0, [1.1] * 4, token=0.7, call=5.0, plain_call=2.0)
    method = method_of(lookahead(table), Sampling(temperature))
    plain = building.plain_if_preferred(method, BUDGET)
    assert isinstance(plain, Autoregressive)
    inputs = inputs_of(PROMPTS)
    same = [
        test_loops.outputs(test_loops.run(by, inputs, BUDGET), inputs) for by in (method, plain)
    ]
    assert same[0] == same[1]
    trace = recorded(method, inputs)
    decoded, own = replay.as_decoded(method.policy, trace, table)
    found, left = (replay.replay([by], trace, jax.random.key(0)) for by in (decoded, method.policy))
    assert replay.score(found, trace, own).speedup == pytest.approx(1.0)
    assert replay.score(left, trace, table).speedup < 0.7
    drafts = method_of(constant(2), Sampling(temperature))
    assert building.plain_if_preferred(drafts, BUDGET) is drafts
    assert replay.as_decoded(drafts.policy, trace, table) == (drafts.policy, table)
