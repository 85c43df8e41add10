"""The policy `together`, worked by hand; `check_policy` enumerates it in `test_parts.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from specjax import sampling as smp
from specjax import speculative
from specjax.policies import Costs
from specjax.policies.estimating import Evidence
from specjax.policies.goodput import Tally
from specjax.policies.lookahead import lookahead
from specjax.policies.together import Shared, together
from specjax.sampling import Sampling
from table_models import inputs_of, random_table
from test_policies import keys_of, stats_of
from toy_policies import LIVE


def shared(accepted, tested, left) -> Shared:
    """Rounds that do not fade; all estimates have the same credit."""
    tally = Tally(jnp.float32(accepted), jnp.float32(tested))
    return Shared(Evidence(tally, tally, jnp.zeros((len(left), 3))), jnp.int32(left))


@pytest.mark.sweep
def test_one_length_for_all_by_hand():
    """Costs 1, 1.1, 1.8, 1.9: a second token needs a wider pass, which has room for a third.

    α of .9 and .2, with hardly any prior, as much left of both: the second is slower, and its 1,
    1.2, 1.24 and 1.25 over the cost are 1, 1.09, .69 and .66. One of .9 and one of .95: 1, 1.73,
    1.51 and 1.81 of the first, so three. Where rows have two tokens left a third term is worth
    nothing. Where the second row has ended, or will be done before the first, the first counts
    alone.
    """
    policy = together(Costs(0.1, [1, 1, 1.6, 1.6]), weight=1e-6)

    def length(*state):
        return int(policy.begin(shared(*state), LIVE, 3)[1])

    ten = [10.0, 10.0]
    assert length([9, 2], ten, [9, 9]) == 1
    assert length([9, 9.5], ten, [9, 9]) == 3
    assert length([9, 9.5], ten, [2, 2]) == 1
    assert length([9, 2], ten, [9, 0]) == 3
    assert length([9, 2], ten, [30, 3]) == 3
    assert length([9, 2], ten, [0, 0]) == 0


def test_a_draft_is_given_up_on_evidence():
    """Costs 1, 1.5: one token pays from α = .5 on. Where .05 was measured, outputs differ by .2,
    and no token of n was accepted, it is drafted while .05/(1 + n/40) + 1.6/√(4 + n) is more:
    n ≤ 8. A row of much evidence ends it for all."""
    policy = together(Costs(0.5, [1, 1], alpha=0.05, between=0.2), weight=1e4, width=1.6)
    for tested, drafted in ((0, 1), (4, 1), (8, 1), (9, 0), (100, 0)):
        assert int(policy.begin(shared([0.0], [tested], [9]), LIVE, 1)[1]) == drafted
    assert int(policy.begin(shared([0.0, 0.0], [4, 100], [9, 9]), LIVE, 1)[1]) == 0
    assert int(policy.begin(shared([0.0, 0.0], [4, 100], [9, 0]), LIVE, 1)[1]) == 1


@pytest.mark.sweep
def test_a_batch_enters_for_hope_of_all_outputs():
    """At α = .5 no draft pays. Where outputs differ by .4 they would bring 1.28 of plain decoding,
    by .2 1.17, and 1.01 if α were .2; and of four rows the worst brings nothing."""
    for between, error, rows, plain in (
        (0.4, 0.0, 1, False), (0.2, 0.0, 1, False), (0.2, 0.3, 1, True), (0.4, 0.0, 4, True),
    ):  # fmt: skip
        table = Costs(0.05, [1.0] + [1.8] * 8, alpha=0.5, between=between, alpha_error=error)
        assert together(table).prefers_plain(8, 200, rows) == plain


@pytest.mark.sweep
def test_alone_it_is_lookahead_without_beliefs():
    """A row by itself, round by round: the same α, and the length that it promises most of."""
    table = Costs(0.35, [1, 1, 1.1, 1.1], alpha=0.7)
    one, other = lookahead(table), together(table)
    states = [policy.init(keys_of(1), 3) for policy in (one, other)]
    rng, found = np.random.default_rng(0), []
    for _ in range(40):
        alpha, same = (p.alpha(s) for p, s in zip((one, other), states, strict=True))
        np.testing.assert_allclose(alpha, same, rtol=1e-5)
        found.append(int(other.begin(states[1], LIVE, 3)[1]))
        assert found[-1] == int(smp.argmax(one.rate(alpha, 3))[0])
        round_ = stats_of(found[-1], rng.integers(found[-1] + 1), 3)
        states = [p.update(s, round_) for p, s in zip((one, other), states, strict=True)]
    assert len(set(found)) > 1


@pytest.mark.parametrize(("measured", "drafted"), [(0.95, 3), (0.3, 0), (np.nan, 2)])
def test_it_begins_with_the_alpha_that_was_measured(measured, drafted):
    """Costs 1, 1.4, 1.8, 2.2: at α = .95 three tokens pay best, at .7, where nothing was measured,
    two, at .3 none."""
    policy = together(Costs(0.4, [1.0] * 4, alpha=measured))
    assert int(policy.begin(policy.init(keys_of(2), 3), LIVE, 3)[1]) == drafted


@pytest.mark.sweep
def test_the_worst_row_of_many():
    """α = .7 of which a share of .2 is between outputs: a deviation of √(.21 · .2). Of 1, 2, 4 and
    16 rows the worst is expected 0, .59, 1.05 and 1.77 of them lower, and once 95 tokens of each
    were tested a 20th of the variance is left. Costs 1, 1.52: one token pays for one or two rows,
    and may pay for four. Where nothing is known of outputs, all are alike."""
    table = Costs(0.52, [1, 1], alpha=0.7, between=0.2)
    for rows, lower in ((1, 0.0), (2, 0.589), (4, 1.049), (16, 1.768)):
        policy, own = together(table), np.full(rows, 9)
        worst = policy.slowest(shared(0.0 * own, 0.0 * own, own))
        np.testing.assert_allclose(worst, 0.7 - lower * np.sqrt(0.21 * 0.2), atol=1e-3)
        worst = policy.slowest(shared(66.5 + 0.0 * own, 95.0 + 0.0 * own, own))
        np.testing.assert_allclose(worst, 0.7 - lower * np.sqrt(0.21 * 0.01), atol=1e-3)
        assert policy.prefers_plain(1, 40, rows) == (rows > 4)
        worst = np.random.default_rng(0).beta(2.8, 1.2, (200_000, rows)).min(axis=1)
        promised = 1 / np.mean(np.minimum(1, 1.52 / (1 + worst)))
        np.testing.assert_allclose(policy.promised_speedup(1, rows), promised, rtol=3e-3)
        alike = together(dataclasses.replace(table, between=jnp.float32(np.nan)))
        assert not alike.prefers_plain(1, 40, rows)
        fewer = shared(np.zeros(rows + 3), np.zeros(rows + 3), [*own, 0, 0, 0])
        np.testing.assert_allclose(policy.slowest(fewer)[0], 0.7 - lower * 0.2049, atol=1e-3)


@pytest.mark.parametrize("measured", [0.7, np.nan])
def test_a_batch_learns_as_one(measured):
    """After a round in which each of n rows lost its first token, with a first α of .7 that is
    worth 40 tested tokens if it was measured, and else 6. Ended rows do not count."""
    known = 6 if np.isnan(measured) else 40
    for count in (1, 4, 16):
        policy = together(Costs(0.1, [1, 1], alpha=measured))
        state = shared(np.zeros(count), np.ones(count), np.full(count, 9))
        others = 0.7 * known / (count - 1 + known)
        lasting = others * known / (1 + known)
        expected = np.mean([weight * lasting / (1 + weight) for weight in (1, 8, 64)])
        np.testing.assert_allclose(policy.alpha(state), [expected] * count, rtol=1e-5)
        first = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), state.evidence)
        ended = Shared(first, jnp.append(state.left, 0))
        np.testing.assert_allclose(policy.alpha(ended)[:-1], policy.alpha(state), rtol=1e-5)
    resumed = policy.resume(policy.init(keys_of(3), 1), state, jnp.ones(16, bool))
    assert resumed.evidence.lasting.tested.tolist() == [1.0] * 3
    assert resumed.left.tolist() == [2] * 3


@pytest.mark.sweep
def test_a_batch_drafts_as_one():
    """In the loop: in each round all live rows draft the same, but for those with no room for it;
    lengths vary; what is left follows the rows, padding included. At temperature 0 neighbours
    change no token; at others they do, which is why it is declared."""
    tables = [random_table(seed, 3, dtype=jnp.float32) for seed in (1, 2)]
    policy = together(Costs(0.35, [1.0] * 4), prior=0.6, weight=1.0, memory=0.8)
    inputs, budgets = inputs_of([[1, 0], [0], [2, 1, 1], [1]]), [25, 13, 19, 0]
    method = test_loops.method_of(*tables, policy=policy, chosen=Sampling(1.0))
    contexts, state = test_loops.begin(method, inputs, budgets)
    step, found = jax.jit(speculative.step), set()
    while not np.all(state.done):
        before, (state, round_) = state, step(method, contexts, state)
        left = np.asarray(before.limit - before.length) * ~np.asarray(before.done)
        asked = int(round_.verified.max())
        assert round_.verified.tolist() == np.maximum(np.minimum(asked, left - 1), 0).tolist()
        found.add(asked)
        after = np.asarray(state.limit - state.length) * ~np.asarray(state.done)
        assert round_.left.tolist() == state.policy.left.tolist() == after.tolist()
    assert len(found) > 2

    besides = [inputs_of([[1, 0], [n, 0, n], [2 - n], [0]]) for n in range(3)]
    for chosen, alike in ((Sampling(0.0), True), (Sampling(1.0), False)):
        method = dataclasses.replace(method, sampling=chosen)
        states = [test_loops.run(method, beside, budgets) for beside in besides]
        assert (len({tuple(state.tokens[0]) for state in states}) == 1) == alike
