"""What rounds and calls cost: fitted to calls of known work, checked, and given to policies."""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
import test_loops
from experiments import by_loop, command
from experiments.adaptive import race
from pairs import TEXTS
from specjax import devices, generate, loop, policies
from specjax.decoding import building, starting
from specjax.decoding.texts import common_width, tokenize
from specjax.measure import costing, counting, doubts, fit, timing
from specjax.measure.counting import Always, Undecided
from specjax.measure.fit import CALL, PLAIN_CALL, REFUSED, TOKEN
from specjax.measure.speedup import measure_speedup
from specjax.measure.stopwatch import Stopwatch
from specjax.policies import Costs
from specjax.sampling import Sampling
from specjax.tuning import fitting
from specjax.tuning.job import Job
from table_models import inputs_of, random_table
from toy_policies import library


def close(values):
    return pytest.approx(values, rel=1e-5)


# --- the fit ---------------------------------------------------------------------------------


def test_unit_times():
    """Exact where the calls are sums; where they are not, errors count by a call's length."""
    works = [{"a": 1, "b": 2}, {"a": 1, "b": 5}, {"a": 1, "c": 1}]
    found = fit.unit_times(works, [3.0 + 2 * 0.5, 3.0 + 5 * 0.5, 3.0 + 7.0])
    assert found == close({"a": 3.0, "b": 0.5, "c": 7.0})
    # Of 1 second in one call and 300 in 100: Σ (x/t − 1)² is least at Σ (x/t)/Σ (x/t)².
    (found,) = fit.unit_times([{"a": 1}, {"a": 100}], [1.0, 300.0]).values()
    assert found == close((1 + 1 / 3) / (1 + 1 / 9))


def test_no_unit_takes_less_than_nothing():
    """Two units in 1 s and one in 2 s: a fixed time of 3 s and −1 s a unit, without the bound."""
    works, seconds = [{"call": 1, "b": 1}, {"call": 1, "b": 2}], [2.0, 1.0]
    assert fit.unit_times(works, seconds, ordered=False) == close({"call": 3.0, "b": -1.0})
    found = fit.unit_times(works, seconds)
    assert found["b"] == 0
    assert 1 < found["call"] < 2


LOOPS = {"policies": (1, 8), "γ=3": (4,), "γ=7": (8,)}
PASSES = {"policies": {1: 4.0, 8: 7.0}, "γ=3": {4: 5.5}, "γ=7": {8: 6.5}}
ROUNDS = {  # s; a draft step takes 1, and the beginning of a draft 0.5
    (name, k): PASSES[name][min(w for w in widths if w > k)] + 0.5 * (k > 0) + k
    for name, widths in LOOPS.items()
    for k in range(widths[-1])
}
TOOK = {**ROUNDS, CALL: 10.0, PLAIN_CALL: 6.0, TOKEN: 2.0}
TIMED = {"policies": (0, 1, 4, 7), "γ=3": (3,), "γ=7": (7,)}


def calls(rounds=(1, 9), noise=0.0, seed=0, took=None):
    """Calls of 1 and of some 9 rounds, or of 1 and 30 tokens, as `measure` makes them. A budget of
    one token leaves no room for a draft, and the last round of an output drafts none here."""
    rng, took, found = np.random.default_rng(seed), took or TOOK, []
    for several in rounds:
        for _ in range(16):
            count = several if several == 1 else several + int(rng.integers(-2, 3))
            works = [{PLAIN_CALL: 1, TOKEN: count if several == 1 else count + 21}]
            for name, lengths in TIMED.items():
                for k in lengths:
                    work = collections.Counter({CALL: 1, (name, 0): 1})
                    work[name, k] += count - 1
                    works.append(work)
            for work in works:
                seconds = sum(took[kind] * n for kind, n in work.items())
                found.append((work, seconds * (1 + noise * rng.normal())))
    return found


def test_fit():
    """All parts of sums without noise come back, in the seconds that the calls took."""
    found = fit.fit(LOOPS, calls())
    for name, table in found.items():
        gamma = LOOPS[name][-1] - 1
        assert table.round_times(gamma).tolist() == close([TOOK[name, k] for k in range(gamma + 1)])
        assert (table.draft, table.call) == (close(1.0), close(10.0))
        assert (table.token, table.plain_call) == (close(2.0), close(6.0))
        assert max(table.error, table.largest_error, table.drop) < 1e-6
    assert fit.lengths_of((1, 4, 11)) == [0, 1, 2, 3, 4, 7, 10]
    assert fit.lengths_of((5,)) == [0, 1, 2, 4]
    assert fit.lengths_of((2,)) == [0, 1]


def test_a_policy_of_its_own():
    """A loop with the passes of another has its costs, and what its decisions take besides."""
    decided = {k: ROUNDS["policies", k] + 0.25 + 0.5 * k for k in range(8)}
    works = calls()
    for count in (1, 9):
        for k in (1, 7):
            work = collections.Counter({CALL: 1, ("mine", 0): 1})
            work["mine", k] += count - 1
            seconds = 13 + sum(n * decided[kind[1]] for kind, n in work.items() if kind != CALL)
            works.append((work, seconds))
    found = fit.fit(LOOPS, works, passes_of={"mine": "policies"})
    assert found["mine"].round_times(7).tolist() == close(list(decided.values()))
    assert found["policies"].round_times(7).tolist() == close(
        [ROUNDS["policies", k] for k in range(8)]
    )
    assert found["mine"].call == close(10 + 3)
    assert found["policies"].call == close(10)
    assert found["mine"].error < 1e-6
    # It has no place among static γ, which lie between those that were timed.
    assert by_loop.gammas(found) == range(3, 8)


def refused_calls(counts=(5, 9, 12)):
    """Calls of rounds that draft nothing: each but the last calls the drafter, and refuses."""
    idle, vain = ROUNDS["policies", 0], 0.5 + 1.0
    return [
        ({CALL: 1, ("policies", 0): n, REFUSED: n - 1}, 10.0 + n * idle + (n - 1) * vain)
        for n in counts
    ]


def test_a_refused_call():
    """The drafter's call in a round that drafts nothing, beyond such a round without it."""
    assert np.isnan(fit.fit(LOOPS, calls())["policies"].refused)
    found = fit.fit(LOOPS, calls() + refused_calls())
    assert [float(table.refused) for table in found.values()] == close([1.5] * 3)
    for name, table in found.items():
        gamma = LOOPS[name][-1] - 1
        assert table.round_times(gamma).tolist() == close(
            [ROUNDS[name, k] for k in range(gamma + 1)]
        )


def test_a_first_round_that_finds_its_pass_cold():
    """It is no matter of the rounds that follow: a static loop's call takes so much more."""
    cold = {"γ=3": 2.5, "γ=7": 4.0}
    works = [
        (work, took + sum(more for name, more in cold.items() if (name, 0) in work))
        for work, took in calls()
    ]
    found = fit.fit(LOOPS, works + refused_calls())
    for name, table in found.items():
        gamma = LOOPS[name][-1] - 1
        assert table.round_times(gamma).tolist() == close(
            [ROUNDS[name, k] for k in range(gamma + 1)]
        )
        assert (table.draft, table.call) == (close(1.0), close(10.0 + cold.get(name, 0.0)))


def test_rounds_that_all_take_the_same():
    """Drafts of one length on an accelerator, where a token's cost is another, are such. What they
    take says nothing of a loop with a pass as wide."""
    took = dict(TOOK) | {("γ=3", k): 7.5 for k in range(4)} | {("γ=7", k): 9.25 for k in range(8)}
    found = fit.fit(LOOPS, calls(took=took), steady={"γ=3", "γ=7"})
    for name, expected in (("γ=3", [7.5] * 4), ("γ=7", [9.25] * 8), ("policies", None)):
        expected = expected or [TOOK[name, k] for k in range(8)]
        assert found[name].round_times(len(expected) - 1).tolist() == close(expected)
    assert found["policies"].draft == close(1.0)
    assert max(found["γ=3"].error, found["γ=3"].drop) < 1e-6
    between = [by_loop.static_costs(found, gamma).round_times(gamma)[-1] for gamma in range(3, 8)]
    assert between == close([7.5, 7.9375, 8.375, 8.8125, 9.25])


@pytest.mark.sweep
def test_a_loop_is_timed_as_it_runs(pair, monkeypatch):
    """Whoever drafts γ tokens in every round is timed as it is: on an accelerator that is another
    program, whose rounds all take the same. Alone on a CPU it drafts single tokens too."""
    steady, timed = [], []
    race = Stopwatch.race

    def watched(watch, methods, *given, **options):
        timed.append([(*name.split(", "), by.policy.fixed) for name, by in methods.items()])
        return race(watch, methods, *given, **options)

    monkeypatch.setattr(Stopwatch, "race", watched)
    monkeypatch.setattr(costing, "fit", lambda *_, **options: steady.append(options["steady"]))
    static = {"γ=2": build(pair, pair.draft, 2)}
    loops = {"policies": build(pair, pair.draft, 2, policy=Undecided()), **static}
    texts = tokenize(pair.target, TEXTS[:1])
    own = {"mine": build(pair, pair.draft, 2)}  # a policy of a loop that it shares decides nothing
    watch = watch_of(pair, 4)
    for accelerator in (False, True):
        monkeypatch.setattr(devices, "is_accelerator", lambda _, there=accelerator: there)
        costing.measure(watch, loops | own, texts, passes_of={"mine": "policies"})
        costing.measure(watch, static, texts)
    assert steady == [set(), set(), {"γ=2"}, {"γ=2"}]
    both = [
        *(("policies", f"{length} drafted", False) for length in range(3)),
        ("γ=2", "2 drafted", True),
        *(("mine", f"{length} drafted", False) for length in (1, 2)),
    ]
    assert timed == [both, [("γ=2", f"{length} drafted", True) for length in (1, 2)], both,
                     [("γ=2", "2 drafted", True)]]  # fmt: skip


def test_costs_reproduce():
    """Five measurements with 2% of noise on each call are within 5% of each other. Without calls
    of one round the fixed time of a call is anyone's guess."""

    def apart(rounds, cost):
        found = [fit.fit(LOOPS, calls(rounds, noise=0.02, seed=seed)) for seed in range(5)]
        values = np.array([cost(each["policies"]) for each in found])
        return (values.max(axis=0) - values.min(axis=0)) / values.mean(axis=0)

    def costs(table):
        fixed = table.token, table.plain_call, table.call, table.draft
        return np.array([*fixed, *table.round_times(7)])

    assert apart((1, 9), costs).max() < 0.05
    assert 0 < fit.fit(LOOPS, calls(noise=0.02))["policies"].error < 0.04
    assert apart((9,), lambda table: float(table.plain_call)) > 0.5


def test_a_longer_draft_is_never_cheaper():
    """Where it was timed as cheaper, by a fifth, the costs keep the order and say so."""
    found = fit.fit(LOOPS, calls(took=TOOK | {("policies", 7): 0.8 * TOOK["policies", 4]}))
    for name, table in found.items():
        assert np.all(np.diff(table.round_times(table.gamma_max)) >= 0), name
        assert table.drop == close(0.2)
        assert table.largest_error > 0.05
    # A pass of eight positions, by itself, below one of four.
    wider = fit.fit(LOOPS, calls(took=TOOK | {("γ=7", 7): 0.9 * TOOK["γ=3", 3]}))
    assert wider["policies"].drop == close(0.1)
    # A round without a draft is not a shorter draft.
    found = fit.fit(LOOPS, calls(took=TOOK | {("policies", 0): 2 * TOOK["policies", 1]}))
    assert found["policies"].drop < 1e-6


def test_a_pass_that_a_wider_one_undercuts():
    """It is left out, and so is one that saves less than 2%; drafts that it had room for are timed
    by the next one that is kept. A pass that never ran takes no more for a position."""
    widths, begin = (1, 2, 3, 4, 6, 8), 0.5
    passes = {1: 2.5, 2: 4.0, 3: 4.2, 4: 3.9, 6: 5.9, 8: 6.0}
    works = [{CALL: 1, ("a", 0): n, ("a", k): 9} for n in (1, 5) for k in range(1, 7)]
    works += [{CALL: 1, ("a", 0): n} for n in (1, 9)]
    fits = {k: min(w for w in widths if w > k) for k in range(8)}
    took = {("a", k): passes[fits[k]] + begin * (k > 0) + 0.1 * k for k in range(8)} | {CALL: 3.0}
    timed = [(work, sum(took[kind] * n for kind, n in work.items())) for work in works]
    table = fit.fit({"a": widths}, timed)["a"]
    kept = [4.4, 4.4, 4.4, 6.5, 6.5, 6.5]
    assert table.verify.tolist() == close([2.5, *kept, 6.5])
    assert table.draft == close(0.1)
    assert fit.pruned(widths[:-1], table) == (1, 4)
    without = [(work, took) for work, took in timed if ("a", 6) not in work]
    table = fit.fit({"a": widths}, without)["a"]
    assert table.verify.tolist() == close([2.5, 4.4, 4.4, 4.4, 6.4, 6.4, *[6.4 * 8 / 6] * 2])
    # Nor does the narrowest, if all rounds drafted.
    without = [(work, took) for work, took in timed if ("a", 0) not in work]
    without += [({CALL: 1, ("a", 3): n}, 3.0 + n * took["a", 3]) for n in (1, 9)]
    assert fit.fit({"a": widths}, without)["a"].verify[0] > 0


def test_calls_that_say_nothing():
    """No rounds, no costs. Rounds that noise leaves no time still have some: a policy needs costs
    that are positive, and the error says what they are worth."""
    with pytest.raises(ValueError, match="has a round of 'policies'"):
        fit.fit(LOOPS, [({CALL: 1}, 1.0), ({CALL: 1}, 2.0)])
    short, long = {CALL: 1, ("a", 0): 1}, {CALL: 1, ("a", 0): 9}
    noise = fit.fit({"a": (2,)}, [(short, 7.0), (long, 3.0)])["a"]
    assert noise.verify.tolist() == close([0.01, 0.01])  # of (7 + 3)/(1 + 9)
    assert noise.error > 0.2
    assert np.isnan(noise.token)


def test_a_poor_fit_stops_a_race():
    """By its error, or by its order; a good one does not."""
    found = fit.fit(LOOPS, calls(noise=0.02))
    assert doubts.poor_fit("draft at T=0", found["policies"]) == ""
    poor = doubts.poor_fit("draft at T=0", found["policies"], 0.001)
    assert "The costs of draft at T=0 fit poorly: a typical call is off by" in poor
    noisy = fit.fit(LOOPS, calls(noise=0.3))
    assert "fit poorly" in doubts.poor_fit("draft at T=0", noisy["policies"])
    odd = dataclasses.replace(found["policies"], drop=jnp.float32(0.2))
    assert "cheaper by up to 20%" in doubts.poor_fit("draft at T=0", odd)


def test_a_clock_that_stands_still():
    """Also one that was set back; the message is not that of a cost of 0."""
    for seconds in (0.0, -1.0):
        with pytest.raises(ValueError, match="the clock stands still or went back"):
            fit.fit({"a": (2,)}, [({"call": 1, ("a", 0): 1}, 1.0), ({"call": 1}, seconds)])


def test_a_gamma_without_a_cost():
    """The error names the longest that has one; −1 is not the last."""
    table = Costs(0.1, [1.0, 1.2])
    for asked in (lambda: table.v(2), lambda: table.v(-1), lambda: table.overhead(3)):
        with pytest.raises(ValueError, match=r"gamma=.* must be a whole number in \[0, 1\]"):
            asked()


# --- what is timed ---------------------------------------------------------------------------


def watch_of(pair, max_new_tokens, repeats=1, **options):
    return Stopwatch(pair.target, max_new_tokens, jax.random.key(0), repeats=repeats, **options)


def build(pair, draft, gamma=1, **options):
    return building.build(pair.target, draft, gamma=gamma, sampling=Sampling(0.0), **options)


def test_turns(pair):
    """Each method once for each text, and not always in the same order; texts have budgets."""
    texts = tokenize(pair.target, TEXTS[:6])
    methods = {timing.PLAIN: build(pair, None), "spec": build(pair, pair.draft, 2)}
    order = []
    found = watch_of(pair, 8, repeats=2).race(
        methods, texts, [1, 8, 8, 3, 99, 8],
        note=lambda state: order.append("spec" if state.drafter else timing.PLAIN),
    )  # fmt: skip
    turns = [tuple(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert len(turns) == 2 * 6
    assert set(turns) == {(timing.PLAIN, "spec"), ("spec", timing.PLAIN)}
    assert [row.index for row in found.outputs(timing.PLAIN)] == list(range(6))
    assert found.identical("spec")
    assert found.decode["spec"].shape == found.whole["spec"].shape == (2, 6)
    assert np.all(found.decode["spec"] > 0)
    assert np.all(found.decode["spec"] < found.whole["spec"])
    emitted = [row.emitted for row in found.outputs("spec")]
    seconds = found.decode["spec"].sum(axis=1)
    assert found.per_token("spec") == pytest.approx(seconds / sum(emitted))
    assert emitted[0] == 1
    assert emitted[3] <= 3
    assert max(emitted) <= 8


def test_always_counts_its_rounds():
    """Each loop drafts its length, as far as the budget goes, and rounds count by the longest draft
    of both rows: the second has less left at its end. All are one compiled program."""
    two = [random_table(seed, dtype=jnp.float32) for seed in (1, 2)]
    before = loop.decode._cache_size()
    for n in range(4):
        method = test_loops.method_of(*two, policy=Always(jnp.int32(n)))
        state = test_loops.run(method, inputs_of([[1, 0], [2, 1]]), [30, 7])
        counts = state.policy.rounds_by_length
        assert counts.sum(1).tolist() == state.stats.target_calls.tolist()
        lasted = counts @ np.arange(4) - state.stats.verified
        assert lasted[0] == 0 <= lasted[1]
        assert counts[:, n + 1 :].sum() == 0
        assert counts[0, n] >= counts[0].sum() - n
        # Drafts of one length need no counts: all but the last rounds have room for it.
        known = counting.note(state)
        assert sum(known._replace(rounds=None).by_length(n)) == sum(known.by_length(n))
    assert lasted[1] > 0
    refusing = test_loops.method_of(*two, policy=Always(jnp.int32(3), refuses=True))
    watched = dataclasses.replace(refusing, drafter=race.Counting(refusing.drafter))
    state, called = (
        test_loops.run(by, inputs_of([[1, 0], [2, 1]]), [30, 30]) for by in (refusing, watched)
    )
    assert loop.decode._cache_size() == before + 2  # that which counts is another
    assert state.stats.verified.tolist() == [0, 0]
    assert state.stats.target_calls.tolist() == [30, 30]
    assert state.policy.rounds_by_length[:, 0].tolist() == [30, 30]
    assert called.drafter[1] == 29  # there is no room behind the last token


def test_always_counts_no_token_behind_an_eos():
    """Drafts go on behind the token 2, which ends a row: α is that of the outputs' own tokens."""
    target, draft = (random_table(seed, dtype=jnp.float32) for seed in (1, 1))
    draft = dataclasses.replace(draft, table=draft.table.at[::7].set(-draft.table[::7]))
    method = test_loops.method_of(
        target, draft, policy=Always(jnp.int32(3)), eos_ids=jnp.int32([2, 2])
    )
    inputs = inputs_of([[row, column] for row in range(2) for column in range(2)] * 4)
    state = test_loops.run(method, inputs, [30] * 16)
    found = counting.note(state)
    ended = state.length < state.limit
    assert ended.sum() > 4
    assert 0 < found.tokens[0].sum() < found.tokens[1].sum()


@pytest.mark.sweep
def test_a_policy_decides_and_is_not_followed():
    """With a negative length it is followed, by the same program: so what it decides is computed
    with any length. It learns from the rounds that there are."""
    two = [random_table(seed, dtype=jnp.float32) for seed in (1, 2)]
    policy = policies.parse("lookahead", costs=policies.Costs(0.3, [1.0] * 4, alpha=0.5))
    told, before = {}, loop.decode._cache_size()
    for n in (-1, 0, 3):
        method = test_loops.method_of(*two, policy=Always(jnp.int32(n), policy))
        told[n] = test_loops.run(method, inputs_of([[1, 0], [2, 1]]), [30, 30])
    assert loop.decode._cache_size() == before + 1
    free = test_loops.run(
        test_loops.method_of(*two, policy=policy), inputs_of([[1, 0], [2, 1]]), [30, 30]
    )
    jax.tree.map(np.testing.assert_array_equal, told[-1].stats, free.stats)
    jax.tree.map(np.testing.assert_array_equal, told[-1].policy.policy, free.policy)
    assert told[0].stats.verified.tolist() == [0, 0]
    assert told[3].policy.rounds_by_length[:, 1:3].sum() <= 2  # at the end
    for state in (told[-1], told[3]):
        tested = state.policy.policy.evidence.lasting.tested
        assert np.all(tested > 0.5 * state.stats.tested.sum(axis=1))


@pytest.mark.sweep
def test_what_is_timed(pair, monkeypatch):
    """Calls of one token and of whole outputs, of every loop; each is the sum of its rounds. What
    was tested and accepted is counted by output."""
    seen, told, inner = [], [], costing.acceptance
    monkeypatch.setattr(costing, "acceptance", lambda *given: told.append(given) or inner(*given))
    monkeypatch.setattr(costing, "fit", lambda *given, **options: seen.append((*given, options)))
    texts = tokenize(pair.target, TEXTS[:3])
    shared = build(pair, pair.draft, 3, passes=(1,), policy=Undecided())
    loops = {"policies": shared, "γ=2": build(pair, pair.draft, 2)}
    loops["svip"] = dataclasses.replace(loops["policies"], policy=policies.parse("svip"))
    costing.measure(
        watch_of(pair, 12), loops, texts[:2], passes_of={"svip": "policies"},
        plain=build(pair, None), untimed=texts[2:], refusals=True,
    )  # fmt: skip
    ((widths, found, *shares, options),) = seen
    assert widths == {"policies": [1, 4], "γ=2": [3]}
    assert options == {"passes_of": {"svip": "policies"}, "steady": set()}
    works = [work for work, _ in found]
    outputs = generate(pair.target, None, TEXTS[:2], max_new_tokens=12).emitted.tolist()
    works, refused = works[:-4], works[-4:]
    assert refused == [
        *[{CALL: 1, ("policies", 0): 1}] * 2,
        *({CALL: 1, ("policies", 0): n, REFUSED: n - (n == 12)} for n in outputs),
    ]
    # Plain, 0 1 2 3, γ=2, and 1 and 3 with svip; two texts, two budgets.
    assert len(works) == (1 + 4 + 1 + 2) * 2 * 2
    assert works[-1]["svip", 3] > 0
    assert all(seconds > 0 for _, seconds in found)
    assert [dict(work) for work in works[:4]] == [
        {PLAIN_CALL: 1, TOKEN: tokens} for tokens in (1, 1, *outputs)
    ]
    assert all(0 < share < 1 for share in shares)
    ((accepted, tested),) = told
    real = generate(pair.target, pair.draft, TEXTS[:3], max_new_tokens=12, gamma=3,
                    policy=Always(jnp.int32(2)), log_rounds=True)  # fmt: skip
    assert accepted.tolist() == [row.accepted for row in real.rows]
    rejected = [0, 0, 0]
    for round_ in real.rounds:
        rejected[round_["input"]] += round_["accepted"] < round_["verified"]
    assert (tested - accepted).tolist() == rejected
    real = generate(pair.target, pair.draft, TEXTS[:2], max_new_tokens=12, gamma=2)
    for work, row in zip(works[-10:-8], real.rows, strict=True):
        rounds = {kind: n for kind, n in work.items() if kind != CALL}
        assert sum(rounds.values()) == row.target_calls
        assert sum(k * n for (_, k), n in rounds.items()) == row.verified


@pytest.mark.parametrize("order", [1, -1])
def test_texts_that_are_not_timed_compile_nothing(pair, monkeypatch, order):
    """All have one width, be the longest text timed or not."""
    texts = tokenize(pair.target, [TEXTS[0], f"{TEXTS[1]} " * 3])[::order]
    assert len({common_width([text]) for text in texts}) == 2
    widths, prepare = [], starting.prepare
    monkeypatch.setattr(
        starting, "prepare", lambda *a, **k: widths.append(k["width"]) or prepare(*a, **k)
    )
    loops = {"loop": build(pair, pair.draft, 1)}
    costing.measure(watch_of(pair, 4), loops, texts[:1], untimed=texts[1:])
    assert set(widths) == {common_width(texts)}
    assert len(widths) == 3 + 2 + 1  # to compile, timed, not timed


@pytest.mark.sweep
def test_a_batch_lasts_as_long_as_its_slowest_row(pair, monkeypatch):
    """Three texts fill batches of two; the rounds are those of the row that had the most."""
    seen, told = [], []
    monkeypatch.setattr(costing, "fit", lambda loops, calls, *_, **__: seen.extend(calls))
    monkeypatch.setattr(costing, "acceptance", lambda *given: told.append(given) or (0.5, 0.1))
    texts = tokenize(pair.target, TEXTS[:3])
    costing.measure(watch_of(pair, 12, batch_size=2), {"loop": build(pair, pair.draft, 2)}, texts)
    assert len(seen) == 2 * (2 + 2)  # drafts of one token, and of two
    real = generate(pair.target, pair.draft, [*TEXTS[:3], TEXTS[0]], max_new_tokens=12, gamma=2)
    calls = real.target_calls
    found = [sum(n for kind, n in work.items() if kind != CALL) for work, _ in seen[4:]]
    assert found == [1, 1, max(calls[:2]), max(calls[2:])]
    ((accepted, _),) = told
    assert accepted.tolist() == [row.accepted for row in real.rows[:3]]


# --- one table, for policies and replay -------------------------------------------------------


RATIOS = ("goodput", "first_descent", "lookahead", "ucb", "exp3", "hedge", "tapout", "online")


@pytest.mark.parametrize("name", RATIOS)
def test_policies_read_ratios_alone(name):
    """In seconds or in target steps: the same drafts."""
    two = [random_table(seed, dtype=jnp.float32) for seed in (1, 1)]
    policy = library(3, 3, board=True)[name]
    table = Costs(0.3, [1.0, 1.4, 1.5, 1.7])
    found = []
    for told in (table, Costs(0.3 / 1024, table.verify / 1024, token=1 / 1024)):
        method = test_loops.method_of(*two, policy=dataclasses.replace(policy, costs=told),
                                      chosen=Sampling(1.0))  # fmt: skip
        state = test_loops.run(method, inputs_of([[1, 0], [2, 1]]), 40)
        found.append((state.tokens.tolist(), state.stats.verified.tolist()))
    assert found[0] == found[1]


def rounds(table, gamma_max=3):
    return close(np.asarray(table.round_times(gamma_max)).tolist())


def test_rows_and_static_loops():
    """Costs come back from a row; between two timed γ the pass grows evenly."""
    facts = {"call": 3.0, "refused": 0.2, "alpha": 0.6, "between": 0.1, "alpha_error": 0.02}
    found = {
        "policies": Costs(0.1, [1.5, 1.7, 1.9, 2.2], error=0.01, **facts),
        "γ=1": Costs(0.1, [1.8, 1.9], **facts),
        "γ=3": Costs(0.1, [2.4, 2.7, 2.7, 2.7], **facts),
    }
    for table in found.values():
        again = Costs(**json.loads(json.dumps(table.as_row())))
        assert jax.tree.all(jax.tree.map(np.array_equal, table, again))
    assert by_loop.static_costs(found, 3) is found["γ=3"]
    between = by_loop.static_costs(found, 2)
    assert rounds(between, 2) == [2.1, 2.4, 2.5]
    assert between.call == 3


def test_what_outputs_tell_of_acceptance():
    """α of all tokens. How far outputs differ: of 400 whose own α is Beta(2, 2) the correlation is
    1/5; of four it is drawn towards .05, of one that is all there is. Without a tested token
    nothing is known. α is off by as much as its standard error says."""
    rng = np.random.default_rng(0)
    tested = rng.integers(20, 200, 400)
    for own, expected in ((rng.beta(2, 2, 400), 0.2), (np.full(400, 0.5), 0.0)):
        accepted = rng.binomial(tested, own)
        alpha, between, error = fit.acceptance(accepted, tested)
        assert alpha == accepted.sum() / tested.sum()
        assert between == pytest.approx(expected, abs=0.02)
        some = rng.integers(400, size=(2000, 400))
        again = accepted[some].sum(axis=1) / tested[some].sum(axis=1)
        assert error == pytest.approx(again.std(), rel=0.15)
    # Half of the tokens of two outputs and none of two others. Between outputs the mean square is
    # 250/3, within 500/3996, and 83.2/(83.3 + 999/8) = .4.
    alpha, between, error = fit.acceptance(np.array([500, 500, 0, 0]), np.full(4, 1000))
    assert (alpha, between) == (0.25, pytest.approx((2 * 0.05 + 4 * 0.4) / 6, rel=0.01))
    assert error == pytest.approx(np.sqrt(0.1875 * (between + (1 - between) / 1000) / 4))
    # Of one output with four tokens α has the variance .1875 · (.05 + .95/4).
    found = fit.acceptance(np.array([0, 3]), np.array([0, 4]))
    assert found == (0.75, 0.05, pytest.approx(np.sqrt(0.1875 * 0.2875)))
    assert fit.acceptance(np.array([4, 4]), np.array([4, 4])) == (1.0, 0.025, 0.0)
    assert np.isnan(fit.acceptance(np.zeros(2, int), np.zeros(2, int))).all()


def test_static_loops_that_nothing_is_known_of():
    """Beyond those that were timed a pass would seem to cost as much as the widest of them."""
    found = {f"γ={g}": Costs(0.1, [1.0] * (g + 1)) for g in (4, 2)}
    found["policies"] = Costs(0.1, [1.0] * 9)
    assert list(by_loop.gammas(found)) == [2, 3, 4]
    for gamma in (1, 5):
        with pytest.raises(ValueError, match=rf"γ={gamma} has no cost: those of 2 … 4"):
            by_loop.static_costs(found, gamma)


@pytest.mark.parametrize(
    ("said", "widths", "shared"),
    [
        ("none", [], [1.8, 1.9, 2.0, 2.1]),
        ("all", [1, 2, 3], [1.2, 1.5, 1.8, 2.1]),
        ("2", [2], [1.4, 1.5, 2.0, 2.1]),
    ],
)
def test_given(said, widths, shared):
    """γc + v + overhead; a policy pays for the smallest pass that holds its draft."""
    assert command.widths(said.split(","), 3) == widths
    made = by_loop.by_formula(0.1, [1.0, 1.2, 1.4, 1.6], 0.2, widths)
    assert rounds(made["policies"]) == shared
    full = [by_loop.static_costs(made, gamma).round_times(gamma)[-1] for gamma in (1, 2, 3)]
    assert full == close([1.5, 1.8, 2.1])
    with pytest.raises(ValueError, match="--widths=1,x"):
        command.widths(["1", "x"], 3)


# --- costs for those who give none ------------------------------------------------------------


def test_who_needs_costs(pair, tmp_path, monkeypatch):
    """Whose `costs` have no default and are not given; also of one's own."""
    needing = [name for name in policies.NAMES if policies.needs_costs(name)]
    assert needing == ["goodput", "lookahead", "together", "nodes"]
    assert policies.needs_costs("goodput(prior=0.5)")
    assert not policies.needs_costs("svip(threshold=0.3)")
    (tmp_path / "policy_with_costs.py").write_text(
        "from specjax.policies import constant\n\ndef mine(costs, gamma=1):\n"
        "    return constant(gamma)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert policies.needs_costs("policy_with_costs:mine(gamma=2)")
    assert not policies.needs_costs("policy_with_costs:mine(None)")
    # Its costs are of all lengths, of which it will take one.
    timed = []
    monkeypatch.setattr(
        costing, "measure", lambda _, loops, *__, **___: timed.append(loops) or loops
    )
    for name in ("policy_with_costs:mine", "goodput"):
        job = Job(pair.target, TEXTS[:1], max_new_tokens=4)
        fitting.costs_for(job, name, build(pair, pair.draft, 3))
    assert [type(each["loop"].policy).__name__ for each in timed] == ["Undecided", "Goodput"]
    policies.check("goodput")
    policies.check("svip")
    for wrong, said in (
        ("godput", "no policy 'godput'"),
        ("goodput(priro=1)", "priro"),
        ("goodput(prior=7)", "prior=7"),
        ("svip(what=1)", "what"),
    ):
        with pytest.raises(ValueError, match=said):
            policies.check(wrong)


@pytest.mark.sweep
def test_decode_measures_costs(pair, tmp_path, monkeypatch, capsys):
    """And says what they are; a misspelt setting is refused before models are loaded."""
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS[:2]))
    flags = [
        "--config=configs/decode.py", f"--config.target={pair.target.name}",
        f"--config.draft={pair.draft.name}", f"--input={file}", "--config.max_new_tokens=8",
    ]  # fmt: skip
    run = command_line.run
    found = run(monkeypatch, capsys, "specjax decode", *flags, "--config.policy=goodput",
                "--config.carry=True", "--config.batch_size=1")  # fmt: skip
    assert found.status == 0, found.stderr
    assert len(found.stdout.splitlines()) == 2
    assert "goodput: measured " in found.stderr
    assert " ms for the smallest round, " in found.stderr
    wrong = run(monkeypatch, capsys, "specjax decode", *flags, "--config.policy=goodput(x=1)")
    assert wrong.status == 1
    assert "'x'" in wrong.stderr


def test_policies_may_share_a_prefill(pair, monkeypatch):
    """Policies of one draft start from one state, others from their own; outputs do not change.

    Each turn times its own prefills. One program makes them for all policies, whichever of them
    begins a turn, and the warm-up compiles it.
    """
    texts, begun = tokenize(pair.target, TEXTS[:2]), []
    prepare = starting.prepare

    def counted(method, *args, **options):
        begun.append(jax.tree.structure(method))
        return prepare(method, *args, **options)

    monkeypatch.setattr(starting, "prepare", counted)
    methods = {
        timing.PLAIN: build(pair, None),
        "3": build(pair, pair.draft, 3),
        "heuristic": build(pair, pair.draft, 3, policy="heuristic"),
        "average": build(pair, pair.draft, 3, policy="experiments.adaptive.policies:gammatune"),
        "2": build(pair, pair.draft, 2),
    }
    programs, at_turns = [], []

    def listen(event, seconds, **_):
        programs.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        watch = watch_of(pair, 8, repeats=2, say=lambda _: at_turns.append(len(programs)))
        shared = watch.race(methods, texts, share=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert at_turns[0] < at_turns[1] == len(programs)  # nothing compiles after the warm-up
    assert len(begun) == 3 + 3 * 4  # methods without their policies: to warm up, and in each call
    assert len({*begun}) == 3
    begun.clear()
    watch = watch_of(pair, 8, repeats=2)
    own = watch.race(methods, texts)
    assert len(begun) == 5 * (2 + 1 + 4)  # to compile, to warm up, and in each call
    begun.clear()
    watch.race(methods, texts)
    assert len(begun) == 5 * 4  # nothing compiles again
    for name in methods:
        assert own.outputs(name) == shared.outputs(name)
        assert np.all(shared.decode[name] < shared.whole[name])


def test_a_length_beside_a_tree_is_refused(pair):
    """As by `generate`; before, it was not read."""
    with pytest.raises(ValueError, match="its own depth"):
        measure_speedup(pair.target, pair.draft, TEXTS[:1], gamma=3, tree="fixed(2, 1)",
                        max_new_tokens=4, key=0)  # fmt: skip
