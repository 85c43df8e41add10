"""Policies of the leaderboard alone: the contract of all, and what each learns from a round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.adaptive import policies as board
from experiments.adaptive.policies import (
    average,
    exp3,
    first_descent,
    gammatune,
    given,
    hedge,
    tapout,
    ucb,
)
from experiments.adaptive.policies.acceptance_head import head, init, logit, loss
from experiments.adaptive.policies.bandits import Arms, Tapped
from specjax import policies
from specjax.policies import Costs, constant
from specjax.policies.confidence import confidence
from specjax.policies.entropy import adaedl, svip
from specjax.policies.goodput import Tally, goodput
from specjax.policies.heuristic import heuristic
from specjax.policies.together import together
from specjax.testing import check_policy
from test_policies import JUMP, drafts, keys_of, lengths, seen_of, stats_of
from toy_policies import LIVE, OneOf, library, linear_head

FAST = average(memory=0.0, every=1)
POLICIES = {n: library(2, 3, board=True)[n] for n in board.__all__ if n != "learned"}


@pytest.mark.sweep
@pytest.mark.parametrize("name", POLICIES)
def test_contract(name):
    """As one of several, so that their programs are compiled once."""
    check_policy(OneOf(tuple(POLICIES.values()), jnp.int32([*POLICIES].index(name))))


@pytest.mark.parametrize(
    ("policy", "gamma_max", "rounds", "due"),
    [
        # Full → 6; 1 → average 3.1; 0 → 2.17; 3 = γ → 5, the average stays; 0 → 1.519.
        (gammatune(4), 8, [(4, 4), (6, 1), (4, 0), (3, 3), (5, 0)], [4, 6, 4, 3, 5, 2]),
        # Five rounds of 3 lift the average from 2 to 2.672 > 2.5: up; five of 0 to .876: down one.
        (average(), 8, [(3, 3)] * 5 + [(5, 0)] * 5, [3] * 5 + [5] * 5 + [3]),
        # Without memory it jumps over tiers, and up to no more than γ_max allows.
        (FAST, 8, [(3, 3), (5, 5), (7, 0), (1, 1)], [3, 5, 7, 1, 3]),
        (FAST, 4, [(3, 3), (3, 1)], [3, 3, 3]),
        (average(first=7), 4, [], [3]),
        (first_descent(Costs(0.6, [1, 1]), prior=0.5), 1, [], [0]),
        (first_descent(JUMP, prior=0.95), 3, [], [0]),
        (given((3, 0, 5)), 4, [(3, 1), (0, 0), (4, 4)], [3, 0, 5, 3]),
    ],
)
def test_lengths(policy, gamma_max, rounds, due):
    """Rounds of (drafted, accepted) in, lengths due."""
    assert lengths(policy, gamma_max, rounds) == due


def test_old_names_are_refused_with_the_way_out():
    for name in {*board.__all__} - {"given", "online", "learned"}:
        for ask in (lambda name=name: policies.parse(name), lambda name=name: policies.check(name)):
            with pytest.raises(ValueError, match=f"'experiments.adaptive.policies:{name}'"):
                ask()
        with pytest.raises(AttributeError, match=f"experiments.adaptive.policies:{name}"):
            getattr(policies, name)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gammatune", {"memory": 1.0}, r"memory=1\.0"),
        ("average", {"tiers": (3, 1)}, "must ascend"),
        ("average", {"every": 0}, "every=0"),
        ("given", {"lengths": (1,), "reads": "token"}, "reads='token' must be"),
        ("ucb", {"width": -1}, "width=-1 must be"),
        ("hedge", {"rate": -1}, "rate=-1 must be"),
        ("head", {"params": linear_head(3), "threshold": 2}, "threshold=2 must be a number in"),
    ],
)
def test_errors(name, settings, message):
    with pytest.raises(ValueError, match=message):
        policies.parse(board.path(name), **settings)


def test_given_lengths_may_read_an_entropy():
    assert not POLICIES["given"].keep_drafting((), seen_of([np.nan, 1.0]))[1].any()


def test_first_descent():
    """Costs 1, 1.3, 1.6. Tokens of high belief were accepted 6 of 6 times, others never of 2.

    A token above: 1 + .875 expected, and .875·.7 more with another: 2.4875·1.3 > 1.875·1.6.
    A token below: 1.25, and 1.425·1.3 < 1.25·1.6.
    """
    policy = first_descent(Costs(0.3, [1, 1, 1]), prior=0.5, weight=2)
    state = policy.init(keys_of(1), 2)
    zeros = jnp.zeros((1, 8), jnp.float32)
    tally = Tally(zeros.at[0, 7].set(6), zeros.at[0, 7].set(6).at[0, 0].set(2))
    state, allowed = policy.begin(state._replace(tally=tally), LIVE, 2)
    assert allowed.tolist() == [2]
    assert drafts(policy, state, [0.95, 0.05], 0)[1:] == (True, True)
    assert drafts(policy, state, [0.95, 0.05], 1)[1:] == (True, False)


def test_first_descent_learns_by_belief():
    """Beliefs .95, .05 with ratios 1, .2; the third was never reached. Old evidence halves."""
    policy = first_descent(Costs(0.1, [1, 1, 1, 1]), memory=0.5)
    state = policy.init(keys_of(1), 3)
    for _ in range(2):
        round_ = stats_of(3, 1, 3, ratio=[1.0, 0.2, 0.7], probs=[0.95, 0.05, 0.5])
        state = policy.update(state, round_)
    np.testing.assert_allclose(state.tally.accepted, [[0.3, 0, 0, 0, 0, 0, 0, 1.5]], rtol=1e-6)
    np.testing.assert_allclose(state.tally.tested, [[1.5, 0, 0, 0, 0, 0, 0, 1.5]], rtol=1e-6)


@pytest.mark.sweep
def test_ucb():
    """Means .5 and .4 from 3 plays and 1: radii .961 and 1.665 favour the second arm."""
    zero, plays, rewards = jnp.int32([0]), jnp.float32([[3, 1]]), jnp.float32([[1.5, 0.4]])
    state = Arms(zero, plays, rewards, zero, jnp.uint32([0]))
    assert ucb(width=1.0).begin(state, LIVE, 2)[1].tolist() == [2]
    assert ucb(width=0.0).begin(state, LIVE, 2)[1].tolist() == [1]
    # Costs 1, 1, 2: at most 2 tokens per time; 2 of 2 accepted give 3/2.
    policy = ucb(Costs(0.0, [1, 1, 2]))
    state = policy.update(state._replace(arm=jnp.int32([1])), stats_of(2, 2, 2))
    np.testing.assert_allclose(state.sums, [[1.5, 0.4 + 0.75]], rtol=1e-6)
    assert state.plays.tolist() == [[3, 2]]


@pytest.mark.sweep
def test_ucb_plays_every_arm_first():
    """In an order that differs from row to row."""
    policy, rows = ucb(), 32
    state, orders = policy.init(keys_of(rows), 3), []
    for _ in range(3):
        state, allowed = policy.begin(state, LIVE, 3)
        orders.append(np.asarray(allowed))
        state = policy.update(state, stats_of(allowed, 0 * allowed, 3))
    orders = np.array(orders).T
    assert np.all(np.sort(orders, axis=1) == [1, 2, 3])
    assert len({tuple(order) for order in orders}) > 3


def test_exp3():
    """Two arms, the second played with probability ½ and 1 of at most 3 tokens gained: loss 4/3."""
    policy = exp3()
    state = policy.init(keys_of(1), 2)
    state = policy.update(state._replace(arm=jnp.int32([1])), stats_of(2, 0, 2))
    np.testing.assert_allclose(state.sums, [[0, 4 / 3]], rtol=1e-6)
    eta = np.sqrt(np.log(2) / (2 * 2))
    weights = np.exp([0, -eta * 4 / 3])
    np.testing.assert_allclose(policy.probs(state), [weights / weights.sum()], rtol=1e-6)


@pytest.mark.sweep
def test_exponential_weights_draw_by_their_probabilities():
    """4096 rows, fresh noise in each and in each round: shares within 4 deviations."""
    rows = 4096
    for policy, first in ((exp3(rate=2.0), 1), (hedge(rate=2.0), 0)):
        state = policy.init(keys_of(rows), 3)
        arms = jnp.arange(state.sums.shape[1], dtype=jnp.float32)[None, :]
        state = state._replace(sums=state.sums + arms)
        played = []
        for count in range(2):
            state = state._replace(counted=0 * state.counted + count)
            _, allowed = policy.begin(state, LIVE, 3)
            played.append(np.asarray(allowed) - first)
            probs = np.asarray(policy.probs(state)[0])
            shares = np.bincount(played[-1], minlength=len(probs)) / rows
            assert np.all(abs(shares - probs) < 4 * np.sqrt(probs * (1 - probs) / rows))
        assert np.mean(played[0] == played[1]) < 0.9


@pytest.mark.sweep
@pytest.mark.parametrize(("run", "eos"), [*((run, 9) for run in range(5)), (4, 1), (4, 3), (3, 2)])
def test_hedge_estimates_every_loss_without_bias(run, eos):
    """A draft whose first `run` tokens would be accepted, of which the one numbered `eos` ends the
    row: over the arms that may be played, the estimated losses of all lengths have the true losses
    as their means."""
    gamma_max, table = 4, Costs(0.2, [1.0, 1.1, 1.2, 1.4, 1.3])
    policy = hedge(table, rate=1.0)
    arm = jnp.arange(gamma_max + 1, dtype=jnp.int32)
    start = jnp.broadcast_to(jnp.float32([[0.3, 1.0, 0.0, 2.0, 0.7]]), (5, 5))
    rounds, salt = jnp.full((5,), 3, jnp.int32), jnp.zeros((5,), jnp.uint32)
    state = Arms(arm, jnp.zeros((5, 5)), start, rounds, salt)
    probs = np.asarray(policy.probs(state)[0])
    accepted = jnp.minimum(arm, run)
    emitted = jnp.where(accepted >= eos, eos, accepted + 1)
    new = policy.update(state, stats_of(arm, accepted, gamma_max, emitted=emitted))
    cost = 0.2 * np.arange(5) + [1.0, 1.1, 1.2, 1.4, 1.3]
    kept = np.minimum(run, np.arange(5))
    tokens = np.where(kept >= eos, eos, kept + 1)
    speedup = tokens / cost / np.max(np.arange(1, 6) / cost)
    np.testing.assert_allclose(probs @ np.asarray(new.sums - start), 1 - speedup, rtol=1e-4)
    assert new.counted.tolist() == [4] * 5


@pytest.mark.sweep
def test_hedge_learns_all_from_a_rejection():
    """Arm 4 with a rejection at 1 shows every length, arm 1 without one shows only 0 and 1; a draft
    cut short shows that longer arms would have been cut too."""
    policy = hedge()
    state = policy.init(keys_of(3), 4)._replace(arm=jnp.int32([4, 1, 4]))
    new = policy.update(state, stats_of([4, 1, 1], [1, 1, 1], 4))
    assert (new.sums > 0).tolist() == [[True] * 5, [True, True, False, False, False], [True] * 5]


def playing(policy, arms, gamma_max) -> Tapped:
    """A fresh state whose rows play these arms."""
    state = policy.init(keys_of(len(arms)), gamma_max)
    return state._replace(bandit=state.bandit._replace(arm=jnp.int32(arms)))


def test_tapout_decides_as_the_arm_of_a_row():
    """One distribution and one token, and in each row the verdict of its own arm: a length, a rule
    before the token, a rule after it, and none."""
    policy = tapout(arms=(constant(1), adaedl(bar=0.9), confidence(0.6), heuristic(2)))
    state = playing(policy, [0, 1, 2, 3], 4)
    seen = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0) if x.ndim else x, seen_of([0.5, 0.5]))
    state, more = policy.keep_drafting(state, seen)
    assert more.tolist() == [True, False, True, True]
    state, again = policy.go_on(state, more, jnp.full((4,), jnp.log(0.5)))
    assert again.tolist() == [True, False, False, True]
    tried = jnp.float32(1 - np.eye(4))  # row i has all arms behind it but for arm i
    state = state._replace(bandit=state.bandit._replace(plays=tried))
    begun, allowed = policy.begin(state, LIVE, 4)
    assert begun.bandit.arm.tolist() == [0, 1, 2, 3]
    assert allowed.tolist() == [1, 4, 4, 2]


def test_arms_learn_from_their_own_rounds():
    """A row's rounds of each arm alone, in the order in which it plays them, leave that arm with
    the same state; also where an arm that is not played would learn."""
    arms = heuristic(1), confidence(0.5), goodput(Costs(0.1, [1.0] * 5))
    policy, turns = tapout(arms=arms), [0, 1, 2, 2, 0, 1, 0]
    state = policy.init(keys_of(1), 4)
    alone = [arm.init(keys_of(1), 4) for arm in arms]
    for turn, arm in enumerate(turns):
        state = state._replace(bandit=state.bandit._replace(arm=jnp.int32([arm])))
        round_ = stats_of(4, (4, 1, 3, 0)[turn % 4], 4, probs=[0.9, 0.3, 0.6, 0.2])
        state = policy.update(state, round_)
        alone[arm] = arms[arm].update(alone[arm], round_)
    jax.tree.map(np.testing.assert_array_equal, state.arms, tuple(alone))
    assert state.bandit.plays.tolist() == [[3, 2, 2]]


def test_rewards_of_tapout():
    """2 of 3 drafted tokens and γ_max = 4: (2/3 + 2/4)/2; no draft: 0; an EOS as the first of 4
    accepted ones: (1/4 + 1/4)/2. With costs they are speedups."""
    round_ = stats_of([3, 0, 4], [2, 0, 4], 4, emitted=[3, 1, 1])
    np.testing.assert_allclose(tapout().reward(round_), [7 / 12, 0, 0.25], rtol=1e-6)
    speedup = tapout(Costs(0.0, [1, 1, 2, 2, 2])).reward(round_)  # at most 5/2
    np.testing.assert_allclose(speedup, [3 / 5, 2 / 5, 1 / 5], rtol=1e-6)
    policy = tapout(arms=("svip", "heuristic"))
    state = policy.update(playing(policy, [1, 0, 1], 4), round_)
    np.testing.assert_allclose(state.bandit.sums, [[0, 7 / 12], [0, 0], [0, 0.25]], rtol=1e-6)


def test_tapout_finds_the_better_arm():
    """Drafts of 4 tokens of which all are accepted, or none, at costs 1 to 2.2: of 60 rounds most
    play γ = 4, or γ = 1."""
    policy = tapout(Costs(0.3, [1.0] * 5), width=0.5, arms=(constant(1), constant(4)))
    for share, better in ((1, 1), (0, 0)):
        state = policy.init(keys_of(2), 4)
        for _ in range(60):
            state, allowed = policy.begin(state, LIVE, 4)
            state = policy.update(state, stats_of(allowed, share * allowed, 4))
        assert jnp.all(state.bandit.plays[:, better] > 40)


def test_tapout_carries_the_states_of_its_arms():
    """Plays, rewards and what arms learned come from the batch before, noise from this one."""
    policy = tapout(arms=(heuristic(3), svip()))
    past, fresh = playing(policy, [0, 0], 4), policy.init(keys_of(3), 4)
    past = policy.update(past, stats_of([3, 3], [3, 0], 4))
    found = policy.resume(fresh, past, jnp.array([True, False]))
    assert found.arms[0].tolist() == [4, 4, 4]
    assert found.bandit.plays.tolist() == [[1, 0]] * 3
    np.testing.assert_allclose(found.bandit.sums, [[(1 + 3 / 4) / 2, 0]] * 3, rtol=1e-6)
    assert found.bandit.salt.tolist() == fresh.bandit.salt.tolist()


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("svip", "arms='svip' must be a list"),
        ((), r"arms=\(\) must be a list"),
        (("svip", 3), "arms=3 must be draft-length policies"),
        (("svip", "svipp"), "There is no policy 'svipp'"),
        (("svip", svip), "arms=<function svip.* must be draft-length policies"),
        (("svip", board.path("hedge")), "arms=Hedge.* reads other rows, shorter drafts or trees"),
        ((together(Costs(0.1, [1, 1])),), "arms=Together.* reads other rows"),
        (("cut(2, 3)",), "arms=Cut.* reads other rows, shorter drafts or trees"),
    ],
)
def test_what_is_no_arm(arms, message):
    with pytest.raises(ValueError, match=message):
        tapout(arms=arms)


def test_head():
    """P(a rejection) = 1 − Πâ, â from the state after each token: nothing is known at slot 0."""
    params = linear_head(2)._replace(out=jnp.float32([1.0, 0.0]), bias=jnp.float32(0.0))
    policy = head(params, threshold=0.6)
    state = policy.init(keys_of(1), 4)
    found = []
    for slot, hidden in enumerate([-9.0, np.log(4), np.log(1.5), 0.0]):  # then .8, .8·.6, ·.5
        state, more = policy.keep_drafting(state, seen_of([0.5, 0.5], slot, [hidden, 1.0]))
        found.append((round(float(np.exp(state[0])), 5), bool(more[0])))
    assert found == [(1.0, True), (0.8, True), (0.48, True), (0.24, False)]


def test_loss_of_the_head():
    """−r·log â − 6·(1 − r)·log(1 − â), over tokens that count; a block adds silu(W h + b)."""
    params = linear_head(2)._replace(out=jnp.float32([1.0, -1.0]), bias=jnp.float32(0.5))
    hidden, ratio = np.array([[1.0, 2.0], [3.0, 1.0], [9, 9]]), np.array([0.25, 1.0, 0.5])
    odds = hidden @ [1.0, -1.0] + 0.5
    kept = 1 / (1 + np.exp(-odds))
    each = -ratio * np.log(kept) - 6 * (1 - ratio) * np.log(1 - kept)
    args = (jnp.asarray(x, jnp.float32) for x in (hidden, ratio, [1, 1, 0]))
    np.testing.assert_allclose(loss(params, *args), each[:2].mean(), rtol=1e-5)
    deep = init(jax.random.key(0), 2, layers=1)._replace(out=params.out)
    inner = hidden @ np.asarray(deep.weights[0]).T
    blocks = hidden + inner / (1 + np.exp(-inner))
    found = logit(deep, jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(found, blocks @ [1.0, -1.0], rtol=1e-4)
