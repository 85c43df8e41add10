"""Draft-length policies: what each learns from a round, and what all keep in the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_exactness
import test_loops
from reference import sequence_distribution, total_variation
from specjax import policies, speculative
from specjax import sampling as smp
from specjax.drafters.base import ModelDrafter
from specjax.policies import Costs, Observation, Round, constant
from specjax.policies.confidence import confidence
from specjax.policies.entropy import adaedl, svip
from specjax.policies.goodput import goodput
from specjax.policies.heuristic import heuristic
from specjax.policies.lookahead import lookahead
from specjax.policies.together import Shared, together
from specjax.pytrees import pytree
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.testing.enumeration import output_distribution
from table_models import inputs_of, random_table
from toy_policies import LIVE, library


def keys_of(batch: int):
    zeros = jnp.zeros((batch,), jnp.int32)
    return smp.row_keys(jax.random.key(0), jnp.arange(batch, dtype=jnp.int32), zeros)


def stats_of(
    drafted, accepted, gamma_max, overlap=None, ratio=None, probs=None, emitted=None
) -> Round:
    """A round of one or more rows; per-position numbers default to .5."""
    drafted, accepted = (jnp.atleast_1d(jnp.int32(x)) for x in (drafted, accepted))
    slot = jnp.arange(gamma_max, dtype=jnp.int32)[None, :]

    def positions(values):
        row = jnp.full((gamma_max,), 0.5) if values is None else jnp.asarray(values, jnp.float32)
        return jnp.broadcast_to(jnp.pad(row, (0, gamma_max - len(row))), (len(drafted), gamma_max))

    return Round(
        active=drafted >= 0,
        verified=drafted,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else jnp.atleast_1d(jnp.int32(emitted)),
        overlap=positions(overlap),
        ratio=positions(ratio),
        belief_logprob=jnp.log(positions(probs)),
        submitted=slot < drafted[:, None],
        left=jnp.full_like(drafted, 99),
    )


def seen_of(probs, slot=0, hidden=None) -> Observation:
    """One row whose belief is `probs`."""
    distribution = jnp.log(jnp.asarray([probs], jnp.float32))
    hidden = distribution if hidden is None else jnp.asarray([hidden], jnp.float32)
    return Observation(jnp.int32(slot), jnp.array([True]), distribution, distribution, hidden)


def lengths(policy, gamma_max, rounds) -> list[int]:
    """What the policy allows before and after rounds of (drafted, accepted)."""
    state, allowed = policy.begin(policy.init(keys_of(1), gamma_max), LIVE, gamma_max)
    found = [int(allowed[0])]
    for drafted, accepted in rounds:
        state = policy.update(state, stats_of(drafted, accepted, gamma_max))
        state, allowed = policy.begin(state, LIVE, gamma_max)
        found.append(int(allowed[0]))
    return found


def drafts(policy, state, probs, token) -> tuple:
    """Whether it drafts a token from `probs`, and whether it goes on after drawing `token`."""
    state, more = policy.keep_drafting(state, seen_of(probs))
    state, again = policy.go_on(state, more, jnp.log(jnp.asarray([probs[token]], jnp.float32)))
    return state, bool(more[0]), bool(again[0])


# What policies see.


def test_observation():
    """Entropy and largest probability of (.5, .5, 0), (1, 0, 0) and (.6, .3, .1)."""
    distribution = jnp.log(jnp.asarray([[0.5, 0.5, 0], [1, 0, 0], [0.6, 0.3, 0.1]], jnp.float32))
    seen = Observation(jnp.int32(0), jnp.ones(3, bool), distribution, distribution, distribution)
    third = -(0.6 * np.log(0.6) + 0.3 * np.log(0.3) + 0.1 * np.log(0.1))
    np.testing.assert_allclose(seen.entropy, [np.log(2), 0, third], rtol=1e-5)
    np.testing.assert_allclose(seen.top1, [0.5, 1, 0.6], rtol=1e-6)


def test_tested_and_kept_positions():
    """3 drafted and 1 kept: the first two were reached; 2 of 2: both; nothing drafted: none."""
    stats = stats_of([3, 2, 0], [1, 2, 0], 3)
    assert stats.tested.tolist() == [[True, True, False], [True, True, False], [False] * 3]
    assert stats.kept.tolist() == [[True, False, False], [True, True, False], [False] * 3]


def test_positions_behind_an_eos_do_not_count():
    """The second of 4 drafted and 4 accepted tokens is an EOS; the first of 1; then none of 3."""
    stats = stats_of([4, 1, 3], [4, 1, 1], 4, emitted=[2, 1, 2])
    both = [[True, True, False, False], [True, False, False, False]]
    assert stats.tested.tolist() == [*both, [True, True, False, False]]
    assert stats.kept.tolist() == [*both, [True, False, False, False]]
    assert stats.in_output.tolist() == [2, 1, 1]
    assert stats.uncut.active.tolist() == [False, False, True]


@pytest.mark.sweep
@pytest.mark.parametrize("name", library(4, 2, board=True))
def test_nothing_is_learned_from_behind_an_eos(name):
    """The second of four drafted tokens is an EOS. What the models say of those behind it, and
    whether they are accepted, changes no state."""
    policy, states = library(4, 2, board=True)[name], []
    for accepted, behind in ((2, 0.1), (3, 0.4), (4, 0.9)):
        each = [0.6, 0.7, behind, behind]
        state, _ = policy.begin(policy.init(keys_of(1), 4), LIVE, 4)
        round_ = stats_of(4, accepted, 4, each, each, each, emitted=2)
        states.append(policy.update(state, round_))
    for other in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], other)


@pytree
class Witness(policies.Policy):
    """Keeps what it was shown last."""

    def init(self, keys, gamma_max):
        batch, zeros = keys.shape[0], jnp.zeros((keys.shape[0], gamma_max), jnp.float32)
        row = jnp.zeros((batch,), jnp.float32)
        wide = zeros[:, 0:1] + jnp.zeros((1, 3), jnp.float32)
        return {"ratio": zeros, "belief": zeros, "last": row, "hidden": wide, "top": row}

    def keep_drafting(self, state, seen):
        return {**state, "hidden": seen.hidden, "top": seen.top1}, seen.drafting

    def go_on(self, state, drafting, logprob):
        return {**state, "last": logprob}, drafting

    def update(self, state, round_):
        return {**state, "ratio": round_.ratio, "belief": round_.belief_logprob}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_the_loop_shows(temperature):
    """Ratios min(1, p/q) and beliefs of drafted tokens; at temperature 0 the softmax's beliefs."""
    distribution = Sampling(temperature)
    target, draft = (random_table(seed, forbidden=0, dtype=jnp.float32) for seed in (1, 2))
    method = test_loops.method_of(target, draft, chosen=distribution, policy=Witness(), gamma_max=2)
    contexts, state = test_loops.begin(method, inputs_of([[1], [0, 2]]), 9)
    new, round_ = jax.jit(speculative.step)(method, contexts, state)
    tokens = np.asarray(round_.drafts.tokens)[:, :, None]
    distributions = np.exp(round_.target_logprobs[:, :2]), np.exp(round_.drafts.logprobs)
    at = [np.take_along_axis(probs, tokens, 2)[:, :, 0] for probs in distributions]
    np.testing.assert_allclose(new.policy["ratio"], np.minimum(1, at[0] / at[1]), rtol=1e-5)
    # The last token's distribution was read from the hidden state, which in a table is its logits.
    scale = distribution.temperature if temperature else 1.0
    belief = np.asarray(jax.nn.softmax(new.policy["hidden"] / scale, axis=-1))
    last = np.take_along_axis(belief, tokens[:, 1], 1)[:, 0]
    np.testing.assert_allclose(np.exp(new.policy["last"]), last, rtol=1e-5)
    np.testing.assert_allclose(np.exp(new.policy["belief"][:, 1]), last, rtol=1e-5)
    np.testing.assert_allclose(new.policy["top"], belief.max(axis=1), rtol=1e-5)


# Each policy by hand.


CHEAP = Costs(0.1, [1, 1, 1, 1])
JUMP = Costs(0.1, [1, 2.9, 2.9, 2.9])


@pytest.mark.parametrize(
    ("policy", "gamma_max", "rounds", "due"),
    [
        # Full → 6 (7 is too many); 3 of 6 → 5; no draft → 5; 0 → 4 … 1, and 1.
        (heuristic(5), 6, [(5, 5), (6, 3), (0, 0), (5, 0), (4, 1), (3, 2), (2, 0), (1, 0), (1, 1)],
         [5, 6, 5, 5, 4, 3, 2, 1, 1, 3]),
        # α = ½: 1, 1.364, 1.458, 1.442, so 2. After a rejection α = ⅓: 1, 1.212, 1.204, so 1.
        (goodput(CHEAP, prior=0.5, weight=2, memory=0.5), 3, [(2, 0)], [2, 1]),
        # 1.5/1.6 < 1: none.
        (goodput(Costs(0.6, [1, 1]), prior=0.5), 1, [], [0]),
        # Costs 1, 1.3: α = ½; then ¼ after a rejection, so none; then ⅓, so one.
        (goodput(Costs(0.3, [1, 1]), prior=0.5, weight=1, memory=0.5), 1, [(1, 0), (0, 0)],
         [1, 0, 1]),
        # Costs 1, 3, 3.1, 3.2, α = .95: one token gives 1.95/3 < 1 and three 3.71/3.2.
        (lookahead(JUMP, prior=0.95), 3, [], [3]),
    ],
)  # fmt: skip
def test_lengths(policy, gamma_max, rounds, due):
    """Rounds of (drafted, accepted) in, lengths due."""
    assert lengths(policy, gamma_max, rounds) == due


@pytest.mark.sweep
def test_confidence():
    """Beliefs .92 and .62 accepted, .32 rejected: after six tokens τ is the edge .6.

    A rejected .97 costs any τ up to .6 a third; more would lose accepted tokens.
    """
    policy = confidence(0.4)
    state = policy.init(keys_of(1), 3)
    taus = []
    for drafted, accepted, probs in [(3, 2, [0.92, 0.62, 0.32])] * 2 + [(1, 0, [0.97])]:
        state = policy.update(state, stats_of(drafted, accepted, 3, probs=probs))
        taus.append(float(state.threshold[0]))
    np.testing.assert_allclose(taus, [0.4, 0.6, 0.6], rtol=1e-6)
    assert drafts(policy, state, [0.65, 0.35], 0)[1:] == (True, True)
    assert drafts(policy, state, [0.65, 0.35], 1)[1:] == (True, False)


def test_svip():
    """√(.15·H) > .3 where H > .6: (½, ½) has .693, (.9, .1) .325. The token is drafted anyway."""
    policy = svip()
    state = policy.init(keys_of(1), 3)
    assert drafts(policy, state, [0.5, 0.5], 0)[1:] == (True, False)
    assert drafts(policy, state, [0.9, 0.1], 0)[1:] == (True, True)


def test_adaedl():
    """Rates .95, .475, .7375, .869, .934: λ falls, rises three times, and stays when all of γ_max
    were accepted. 1 − √(.2·H) ≥ .4 where H ≤ 1.8: log 4 is less, log 8 more."""
    policy = adaedl(bar=0.4)
    state = policy.init(keys_of(1), 4)
    bars = []
    for drafted, accepted in [(2, 2), (3, 0), (4, 4), (4, 4), (4, 4), (0, 0)]:
        state = policy.update(state, stats_of(drafted, accepted, 4))
        bars.append(float(state.bar[0]))
    np.testing.assert_allclose(bars, [0.399, 0.4, 0.401, 0.402, 0.402, 0.401], rtol=1e-5)
    np.testing.assert_allclose(state.rate, [0.934375], rtol=1e-5)
    assert drafts(policy, state, [0.25] * 4, 0)[1:] == (True, True)
    assert drafts(policy, state, [0.125] * 8, 0)[1:] == (False, False)


@pytest.mark.parametrize(("prior", "tokens"), [(1.0, [1, 2, 3, 4]), (0.0, [1, 1, 1, 1])])
def test_goodput_at_the_ends(prior, tokens):
    policy = goodput(CHEAP, prior=prior)
    rate = policy.rate(policy.alpha(policy.init(keys_of(1), 3)), 3)
    np.testing.assert_allclose(rate[0], np.divide(tokens, [1, 1.1, 1.2, 1.3]), rtol=1e-6)


@pytest.mark.sweep
def test_lookahead():
    """Costs 1, 1.1, 1.8, 2 and α = .9: time is worth 1.9/1.1 a step, what one token gives. A
    second token takes .7 for .9·S, but two take .9 for 1.71·S: S must exceed .909.

    The odds are 9 at a belief of .9, which is too little. Elsewhere they are 9^.4 times those of
    the belief to the power of .6.
    """
    policy = lookahead(Costs(0.1, [1, 1, 1.6, 1.7]), prior=0.9)
    state, allowed = policy.begin(policy.init(keys_of(1), 3), LIVE, 3)
    assert allowed.tolist() == [3]
    bars = 1.9 / 1.1 * np.array([0.1 / 0.9, 0.9 / 1.71, 0.2 / 0.9, np.inf])
    np.testing.assert_allclose(state.bars[0], bars, rtol=1e-5)
    assert drafts(policy, state, [0.9, 0.1], 0)[1:] == (True, False)
    first, *found = drafts(policy, state, [0.92, 0.08], 0)
    assert found == [True, True]
    np.testing.assert_allclose(first.survival, [1 / (1 + 1 / (9**0.4 * 11.5**0.6))], rtol=1e-5)
    assert first.drafted.tolist() == [1]
    assert drafts(policy, first, [0.5, 0.5], 0)[1:] == (True, True)  # the bar is lower here


@pytest.mark.sweep
def test_lookahead_falls_back_to_what_was_measured():
    """α = .1 or .6 by 40 tested tokens, which do not fade."""
    tables = [Costs(0.3, [1, 1], alpha=alpha, between=0.01) for alpha in (0.1, 0.6)]
    bad, good = map(lookahead, tables)
    for policy, alpha in ((bad, 0.1), (good, 0.6)):
        update, nothing = jax.jit(policy.update), stats_of([0, 0], [0, 0], 1)
        state = policy.init(keys_of(2), 1)
        np.testing.assert_allclose(policy.alpha(state), [alpha] * 2, rtol=1e-6)
        for _ in range(200):
            state = update(state, stats_of([1, 1], [0, 0], 1))
        assert policy.begin(state, LIVE, 1)[1].tolist() == [0, 0]
        for _ in range(1500):
            state = update(state, nothing)
        np.testing.assert_allclose(policy.alpha(state), [alpha] * 2, rtol=0.05)
        assert policy.begin(state, LIVE, 1)[1].tolist() == [int(policy is good)] * 2
    unknown = lookahead(Costs(0.3, [1, 1]))
    np.testing.assert_allclose(unknown.alpha(unknown.init(keys_of(1), 1)), 0.7, rtol=1e-6)


@pytest.mark.sweep
def test_who_prefers_plain():
    """At α = .1 a draft for .3 steps is not worth it."""
    assert lookahead(Costs(0.3, [1, 1], alpha=0.1, between=0.01)).prefers_plain(1, 1500)
    assert not lookahead(Costs(0.3, [1, 1], alpha=0.6)).prefers_plain(1, 1)
    assert not lookahead(Costs(0.3, [1, 1])).prefers_plain(1, 1)
    # A token for .5 brings .7: 1.7 for 1.5, and costs may be off by .1, or by .2.
    assert not goodput(Costs(0.5, [1, 1], error=0.1)).prefers_plain(1, 1)
    assert goodput(Costs(0.5, [1, 1], error=0.2)).prefers_plain(1, 1)
    for make in (goodput, together, lookahead):
        for error in (0.0, np.nan):  # where nothing was fitted, none is known
            assert make(Costs(2, [1, 1, 1], error=error)).prefers_plain(2, 500)
            assert not make(Costs(0.1, [1, 1, 1], error=error)).prefers_plain(2, 500)
        # In its loop, at α = .6, one token brings 1.6/1.6 for 1/1.05; outside 1 for 1/1. A token
        # for .56 is worth the loop, and one for .6 is not.
        for step, plain in ((0.56, False), (0.6, True)):
            measured = Costs(step, [1.05, 1, 1], alpha=0.6, between=0.0)
            policy = make(measured, **({} if make in (together, lookahead) else {"prior": 0.6}))
            assert policy.prefers_plain(2, 500) == plain, make
            assert np.any(policy.begin(policy.init(keys_of(1), 2), LIVE, 2)[1] > 0)
    assert not constant(2).prefers_plain(2, 1)
    # Outputs that are all of one token's kind or another.
    apart = Costs(0.3, [1, 1], alpha=0.1, between=1.0)
    assert lookahead(apart, width=0.0).prefers_plain(1, 1500)


@pytest.mark.sweep
@pytest.mark.parametrize("telling", [True, False])
def test_lookahead_learns_what_beliefs_tell(telling):
    """Tokens of belief .8 and .2, both accepted half of the time, or as often as is believed."""
    policy, rng = lookahead(Costs(0.1, [1, 1])), np.random.default_rng(0)
    state = policy.init(keys_of(1), 1)
    update = jax.jit(lambda state, round_: policy.update(policy.begin(state, LIVE, 1)[0], round_))
    for _ in range(400):
        belief = rng.choice([0.2, 0.8])
        kept = rng.random() < (belief if telling else 0.5)
        state = update(state, stats_of(1, int(kept), 1, ratio=[float(kept)], probs=[belief]))
    assert 0.7 < state.slope[0] < 1.3 if telling else state.slope[0] < 0.3


@pytest.mark.parametrize("stretches", [True, False])
def test_lookahead_learns_how_far_to_trust_recent_rounds(stretches):
    """Half of the tokens are accepted: 24 in a row and then none of 24, or by a coin."""
    policy, rng = lookahead(Costs(0.1, [1, 1], alpha=0.5)), np.random.default_rng(0)
    state, update = policy.init(keys_of(1), 1), jax.jit(policy.update)
    for at in range(240):
        kept = at // 24 % 2 == 0 if stretches else rng.random() < 0.5
        state = update(state, stats_of(1, int(kept), 1))
    evidence = state.evidence
    estimates = policy.estimates(evidence, *policy.first())[0]
    credit = np.asarray(evidence.credit[0])
    assert np.all(np.diff(credit) < 0 if stretches else np.diff(credit) > 0)
    # The last stretch had no token: the estimate that weighs it most is the lowest.
    trusted = estimates[0] if stretches else estimates[2]
    assert abs(policy.alpha(state)[0] - trusted) < 0.05
    assert policy.alpha(state)[0] < 0.2 if stretches else policy.alpha(state)[0] > 0.4


@pytest.mark.sweep
def test_lookahead_gives_up_on_evidence():
    """Costs 1, 1.4: one token pays from α = .4 on. Where .2 was measured, and one in five is
    accepted, it is drafted while α + .63/√n is more, n ≤ 9: of these there are (1 − b)/b from the
    start. Then, and where outputs are alike, nothing is drafted; with a width of 0 nothing at
    all."""
    for between, width, tests in ((0.2, 0.63, 6), (0.1, 0.63, 1), (0.05, 0.63, 0), (0.2, 0.0, 0)):
        table = Costs(0.4, [1, 1], alpha=0.2, between=between)
        policy = lookahead(table, weight=1e3, lasting=1.0, width=width)
        state, found = policy.init(keys_of(1), 1), []
        for _ in range(40):
            state, allowed = policy.begin(state, LIVE, 1)
            found.append(min(int(allowed[0]), 1))
            state = policy.update(state, stats_of(found[-1], found[-1] * (len(found) % 5 == 0), 1))
        assert sum(found) == sum(found[:tests]) == tests


@pytest.mark.sweep
def test_a_loop_for_the_best_outputs_alone():
    """At α = .5 no draft pays. Where outputs differ enough, the best of them bring more than plain
    decoding, over all outputs; but not by idle rounds that take as much longer, nor where α may as
    well be lower, or costs are off by as much."""
    for idle, between, error, off, plain in (
        (1.0, 0.003, 0.0, 0.0, True), (1.0, 0.1, 0.0, 0.0, False), (1.0, 0.1, np.nan, 0.0, False),
        (1.0, 0.1, 0.3, 0.0, True), (1.0, 0.4, 0.2, 0.0, False), (1.2, 0.1, 0.0, 0.0, True),
        (1.1, 0.3, 0.0, 0.0, False), (1.0, np.nan, 0.0, 0.0, True), (1.1, 0.3, 0.0, 0.5, True),
    ):  # fmt: skip
        passes = [idle] + [1.8] * 8
        known = {"alpha": 0.5, "between": between, "alpha_error": error, "error": off}
        policy = lookahead(Costs(0.05, passes, **known))
        assert policy.prefers_plain(8, 200) == plain
        assert lookahead(policy.costs, width=0.0).prefers_plain(8, 200)
        cost = np.array(passes) + 0.05 * np.arange(9)
        worth = 1e6 if np.isnan(between) else 1 / between - 1
        mean = 0.5 - np.nan_to_num(error)
        alphas = np.random.default_rng(0).beta(mean * worth, (1 - mean) * worth, 100_000)
        tokens = np.cumsum(alphas[:, None] ** np.arange(9), axis=1)
        found = policy.promised_speedup(8)
        np.testing.assert_allclose(found, 1 / np.mean(np.min(cost / tokens, axis=1)), rtol=5e-3)
        assert plain == (found < 1 + max(0.02, off))


@pytest.mark.parametrize("alpha", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("between", [0.0, 1.0, np.nan])
def test_promises_at_the_ends(alpha, between):
    """At 1 a token takes 1.1/2, at 0 a plain one; of .7, the prior, if outputs are alike, 1.1/1.7;
    if all of an output is accepted or none, 1.1/2 in seven of ten."""
    policy = lookahead(Costs(0.1, [1, 1], alpha=alpha, between=between))
    expected = {0.0: 1.0, 1.0: 2 / 1.1}.get(
        alpha, 1 / (0.7 * 0.55 + 0.3) if between == 1 else 1.7 / 1.1
    )
    np.testing.assert_allclose(policy.promised_speedup(1), expected, rtol=5e-3)


def test_lookahead_tries_again():
    """Costs 1, 1.3: after a rejection two rounds pass without a draft, and more after the next."""
    policy = lookahead(Costs(0.3, [1, 1]), prior=0.5, weight=1, memory=0.5)
    state, found = policy.init(keys_of(1), 1), []
    for _ in range(40):
        state, allowed = policy.begin(state, LIVE, 1)
        found.append(min(int(allowed[0]), 1))
        state = policy.update(state, stats_of(found[-1], 0, 1))
    tried = np.flatnonzero(found)
    assert tried[:2].tolist() == [0, 3]
    assert np.all(np.diff(np.diff(tried)) >= 0)
    assert np.diff(tried)[-1] > 3


@pytest.mark.sweep
def test_finished_rows_learn_nothing():
    """The state of every policy stays as it was, but for one that keeps what is left of each."""
    for name, policy in library(2, 3, board=True).items():
        state, _ = jax.jit(policy.begin, static_argnums=2)(policy.init(keys_of(2), 2), LIVE, 2)
        done = stats_of([2, 1], [1, 1], 2)._replace(active=jnp.array([True, False]))
        new = jax.jit(policy.update)(state, done)
        if isinstance(state, Shared):
            state, new = state.evidence, new.evidence
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            assert np.array_equal(before[1], after[1]), name


def test_costs():
    """Rounds by what they draft; a table for another γ_max; what no table can be made of."""
    table = Costs(0.25, [1.2, 1.2, 1.4, 1.4])
    np.testing.assert_allclose(table.round_times(3), [1.2, 1.45, 1.9, 2.15], rtol=1e-6)
    with pytest.raises(ValueError, match="γ_max=3 and not for 4"):
        goodput(table).init(keys_of(1), 4)
    with pytest.raises(ValueError, match=r"verify=0\.0 must be .* one for each of 0"):
        Costs(0.1, [1.0, 0.0])
    with pytest.raises(ValueError, match="call=-1"):
        Costs(0.1, [1.0], call=-1)


# All policies, in the loop.

NAMES = list(library(2, 3))


def small_method(policy, dtype=jnp.float32, **changes):
    """Tables over 3 tokens, γ_max = 2; the draft's logits are finite, for the head reads them."""
    target, draft = random_table(1, dtype=dtype), random_table(2, forbidden=0, dtype=dtype)
    eos = jnp.int32([test_exactness.EOS])
    settings = {"sampling": Sampling(0.8), "gamma_max": 2, "rule": Token(), **changes}
    return speculative.Speculative(
        target=target, drafter=ModelDrafter(draft), policy=policy, eos_ids=eos, **settings
    )


def bias(method, budget) -> float:
    """Total variation between the loop's distribution and the target's."""
    inputs = inputs_of([test_exactness.PROMPT])
    expected = sequence_distribution(
        method.target, inputs, method.sampling, {test_exactness.EOS}, budget
    )
    return total_variation(output_distribution(method, inputs, budget), expected)


def test_other_settings_compile_nothing():
    """Every setting is data; what is static would be another program."""
    for name, policy in library(2, 3, board=True).items():
        for field in dataclasses.fields(policy):
            assert not field.metadata.get("static"), (name, field.name)
        for leaf in jax.tree.leaves(policy):
            assert isinstance(leaf, jax.Array), name
