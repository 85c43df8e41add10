"""What decodes in the end: plain decoding, drafts of one length, or a policy's decisions."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from pairs import TEXTS
from specjax import devices
from specjax.autoregressive import Autoregressive
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.measure import costing, timing
from specjax.measure.stopwatch import Stopwatch
from specjax.policies import Costs, parse
from specjax.policies.constant import Constant
from specjax.policies.estimating import Estimating
from specjax.sampling import Sampling
from specjax.tuning import trials
from specjax.tuning.job import Job

KEY = jax.random.key(0)


def race(monkeypatch, takes, emitted=lambda at: 1):
    """Trials by hand: seconds by the name and place of a loop, and its tokens. Returns the loops of
    each trial."""
    raced = []

    def raced_by_hand(watch, methods, texts):
        raced.append(methods)
        rows = {
            name: [[types.SimpleNamespace(emitted=emitted(at))]] for at, name in enumerate(methods)
        }
        took = {name: np.full((2, 1), takes(name, at)) for at, name in enumerate(methods)}
        return timing.Comparison(took, {}, rows, {})

    monkeypatch.setattr(Stopwatch, "race", raced_by_hand)
    return raced


def faster(pair, method, texts, cost=None, batch_size=1):
    watch = Stopwatch(pair.target, 8, KEY, batch_size, trials.REPEATS)
    return trials.faster(watch, method, texts, cost).method


def fastest(pair, method, texts, max_new_tokens=8, batch_size=1):
    job = Job(pair.target, texts, None, max_new_tokens, KEY, None, batch_size, minutes=0)
    return trials.fastest(job, method).method


def method_of(pair, policy, gamma=3, **options):
    built = building.build(pair.target, pair.draft, gamma=gamma, sampling=Sampling(0.0), **options)
    return dataclasses.replace(built, policy=policy)


def test_costs_of_loops_of_their_own():
    """Passes of five positions take 4, of two 1.5, and a token 1: between them they grow evenly. A
    draft step takes .1."""
    table = Costs(0.1, [1.5, 1.5, 4.0, 4.0, 4.0], token=1.0)
    for widths, passes in (
        ((), [1.75, 2.5, 3.25, 4.0]),
        ((2, 9), [1.5, 1.5 + 2.5 / 3, 4 - 2.5 / 3, 4.0]),
    ):
        expected = {k: passes[k - 1] + 0.1 * k for k in range(1, 5)}
        assert trials.own_costs(table, widths) == pytest.approx(expected)
    untold = Costs(0.1, [2.0] * 3, token=np.nan)
    assert trials.own_costs(untold, ()) == pytest.approx({1: 2.1, 2: 2.2})


def test_the_length_that_is_tried():
    """In batches of four rows the worst counts: shorter drafts."""
    policy, found = parse("lookahead", costs=Costs(0.05, [1.0] * 9, alpha=0.8, between=0.2)), []
    cost = 1 + 0.05 * np.arange(9)
    for rows in (1, 4):
        worst = np.random.default_rng(0).beta(3.2, 0.8, (100_000, rows)).min(axis=1)
        tokens = np.cumsum(worst[:, None] ** np.arange(9), axis=1)
        time = cost * np.mean(1 / tokens, axis=0)
        promised = policy.promised_alone(dict(enumerate(cost[1:], 1)), rows)
        assert promised == pytest.approx({k: 1 / time[k] for k in range(1, 9)}, rel=5e-3)
        assert list(promised.values()) == sorted(promised.values(), reverse=True)
        found.append(next(iter(promised)))
    assert found[0] > found[1]
    assert list(policy.promised_alone({1: 1.0, 7: 1.0, 3: 1.0})) == [7, 3, 1]


def test_what_a_length_promises():
    """Over a token of plain decoding, or a round without a draft if that is less, as a policy does:
    with one length to draft, and outputs that are alike, both promise the same. α is chosen by, and
    promised a standard error lower."""
    for token in (1.0, 1.5, np.nan):
        table = Costs(0.2, [1.1, 1.1], token=token, alpha=0.8, alpha_error=0.2, between=0.0)
        policy = parse("lookahead", costs=table)
        promised = policy.promised_alone({1: 1.3})[1]
        assert promised == pytest.approx(np.fmin(token, 1.1) * 1.6 / 1.3, rel=1e-4)
        assert promised == pytest.approx(policy.promised_speedup(1), rel=1e-4)
    # Two tokens are better at .8, and one at .6.
    promised = policy.promised_alone({1: 1.0, 2: 1.3})
    assert list(promised) == [2, 1]
    assert promised == pytest.approx({2: 1.1 * 1.96 / 1.3, 1: 1.1 * 1.6}, rel=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize(("batch_size", "fixed"), [(1, 1.01), (2, 1.03)])
def test_the_faster_one_stays(pair, monkeypatch, fixed, batch_size):
    """By seconds for a token, on real loops with a clock that is not. Decisions must bring 2%."""
    real, raced = Stopwatch.race, []

    def watched(watch, methods, texts):
        raced.append(methods)
        found = real(watch, methods, texts)
        slow, fast = np.tile([3.0, 2.0], 2 // batch_size), np.ones(4 // batch_size)
        both = np.stack([fast, fast]), np.stack([9 * fast, slow]), np.stack([fixed * fast, slow])
        decode = dict(zip(methods, both, strict=True))
        return dataclasses.replace(found, decode=decode)

    monkeypatch.setattr(Stopwatch, "race", watched)
    table = Costs(0.1, [1.0, 1.0, 1.0, 9.0], alpha=0.6, token=1.0)
    method = method_of(pair, parse("lookahead", costs=table), passes=(3 * batch_size,))
    texts = tokenize(pair.target, TEXTS[:4])
    found = faster(pair, method, texts, batch_size=batch_size)
    ((decides, plain, other),) = (both.values() for both in raced)
    assert decides is method
    assert isinstance(plain, Autoregressive)
    assert (other.gamma_max, other.passes, type(other.policy)) == (2, (), Constant)
    assert found is (other if fixed < 1.02 else method)
    found = faster(pair, method, texts, {1: 1.0, 3: 1.0}, batch_size)
    other = raced[1]["γ=3"]
    assert (other.gamma_max, other.policy.gamma) == (3, 3)
    assert found is (other if fixed < 1.02 else method)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("promise", "tried", "stays"),
    [
        ({1: 1.5, 2: 1.43}, (1, 2), 2),  # about as much
        ({1: 1.5, 2: 1.42}, (1,), 1),
        ({6: 1.5, 7: 1.49, 5: 1.48, 8: 1.47, 4: 1.46}, (6, 8), 8),  # the next one that is apart
        ({3: 1.5, 2: 1.48, 1: 1.47}, (3, 2), 2),
        ({3: 1.5, 4: 1.48}, (3, 4), 4),
        ({4: 1.5, 5: 1.5}, (4,), 4),
    ],
)
def test_a_second_length_is_tried(pair, monkeypatch, promise, tried, stays):
    """The best that promises 95% of the first and is longer or shorter than it by a third, here
    timed as the fastest."""
    raced = race(monkeypatch, lambda _, at: 3.0 - at)
    monkeypatch.setattr(Estimating, "promised_alone", lambda *_: promise)
    method = method_of(pair, parse("lookahead", costs=Costs(0.0, [1.0] * 9, alpha=0.6)), gamma=8)
    found = faster(pair, method, [[1]])
    (names,) = map(tuple, raced)
    assert names == (trials.POLICY, timing.PLAIN, *(f"γ={length}" for length in tried))
    assert (found.gamma_max, found.policy.gamma) == (stays, stays)


@pytest.mark.parametrize("plain", [1.04, 1.06])
def test_the_fastest_of_three_losers_does_not_stay(pair, monkeypatch, plain):
    """Costs promise a speedup, and are wrong: plain decoding is in the trial too. Decisions must
    bring 2%, and any draft 5%."""
    takes = {trials.POLICY: 1.0, timing.PLAIN: plain}
    race(monkeypatch, lambda name, _: takes.get(name, 1.2))
    method = method_of(pair, parse("lookahead", costs=Costs(0.1, [1.0] * 4, alpha=0.6)))
    found = faster(pair, method, [[1]])
    assert isinstance(found, Autoregressive)
    monkeypatch.setattr(trials, "MIN_GAIN_OF_DECISIONS", 1.0)
    found = faster(pair, method, [[1]])
    assert (found is method) == (plain == 1.06)


@pytest.mark.parametrize("emitted", [5, 4])
def test_time_is_for_a_token(pair, monkeypatch, emitted):
    """At T > 0 outputs differ: 1 s for four tokens, or 1.1 s for four or five."""
    race(monkeypatch, lambda _, at: (1.0, 2.0, 1.1)[at], lambda at: (4, 4, emitted)[at])
    method = method_of(pair, parse("lookahead", costs=Costs(0.1, [1.0] * 4, alpha=0.6)))
    found = faster(pair, method, [[1]], {2: 1.2})
    assert (found is method) == (emitted == 4)


@pytest.mark.parametrize(
    ("texts", "rows", "tried"),
    [
        (127, 1, 0),
        (128, 1, 4),
        (128, 8, 0),
        (256, 8, 8),
        (600, 1, 16),
        (600, 16, 16),
        (3, 1, 0),
    ],
)
def test_how_many_texts_are_tried(pair, monkeypatch, texts, rows, tried):
    """One in 32, from 4 to 16, in whole batches; from all over the run."""
    seen = []

    def seeing(watch, method, some):
        seen.append((some, watch.batch_size))
        return trials.Fastest(method)

    monkeypatch.setattr(trials, "faster", seeing)
    method = method_of(pair, parse("lookahead", costs=Costs(0.1, [1.0] * 4, alpha=0.6)))
    given = [[3 + index // 100, 3 + index % 100] for index in range(texts)]
    fastest(pair, method, given, batch_size=rows)
    assert [len(some) for some, _ in seen] == [tried]
    if tried:
        first, *_, last = (100 * (ids[0] - 3) + ids[1] - 3 for ids in seen[0][0])
        assert first == 0
        assert last >= texts - 2 * (texts // tried)


@pytest.mark.sweep
def test_who_is_not_tried(pair, monkeypatch):
    """Policies that do not estimate α, plain decoding, and whoever prefers it where no length
    promises more; or without texts."""
    monkeypatch.setattr(Stopwatch, "race", None)
    texts = tokenize(pair.target, TEXTS[:4])
    table = Costs(0.1, [1.0] * 4, alpha=0.6)
    for policy in (parse("goodput", costs=table), parse("svip")):
        method = method_of(pair, policy)
        assert faster(pair, method, texts) is method
    method = method_of(pair, parse("lookahead", costs=table))
    assert faster(pair, method, []) is method
    assert fastest(pair, method, [*TEXTS[:3] * 42, "", TEXTS[0]]) is method
    dear = method_of(pair, parse("lookahead", costs=Costs(9.0, [1.0] * 4)))
    found = fastest(pair, dear, TEXTS[:4] * 32)
    assert isinstance(found, Autoregressive)
    for policy in ("lookahead", "goodput"):
        dear = method_of(pair, parse(policy, costs=Costs(9.0, [1.0] * 4)))
        for texts_ in (texts, []):
            found = faster(pair, dear, texts_)
            assert isinstance(found, Autoregressive)


@pytest.mark.parametrize(("cost", "fixed"), [(1.5, 0.94), (1.5, 0.96), (1.7, 0.0)])
def test_a_length_beside_plain_decoding(pair, monkeypatch, cost, fixed):
    """Where the policy prefers that, a length is tried if it promises more: at α = .6 a token
    brings 1.6, for 1.5 or for 1.7. It stays if it gains 5%, more than a clock's noise."""
    raced = race(monkeypatch, lambda name, _: fixed if name == "γ=1" else 1.0)
    dear = parse("lookahead", costs=Costs(9.0, [1.0] * 4, alpha=0.6, between=0.0))
    method = method_of(pair, dear)
    found = faster(pair, method, [[1]], {1: cost})
    assert len(raced) == (cost < 1.6)
    for both in raced:
        assert isinstance(both[timing.PLAIN], Autoregressive)
    assert getattr(found, "gamma_max", 0) == (1 if fixed == 0.94 else 0)


@pytest.mark.parametrize(
    ("passes", "own", "facts", "way"),
    [
        # The policy brings 1.96 tokens for 1.5 at best, one token in a loop of its own 1.6.
        ([1.0, 1.3, 1.5, 1.7], 0.95, {}, "fixed"),
        ([1.0, 1.3, 1.5, 1.7], 1.02, {}, "decides"),
        ([1.0, 1.3, 1.5, 1.7], 0.80, {"alpha": np.nan}, "decides"),
        # It prefers plain decoding: at best it brings 2.2 tokens for 3.
        ([3.0, 3.0, 3.0, 3.0], 1.25, {}, "fixed"),
        ([3.0, 3.0, 3.0, 3.0], 1.31, {}, "plain"),
        ([3.0, 3.0, 3.0, 3.0], 1.25, {"alpha_error": 0.1}, "plain"),
    ],
)
def test_costs_alone_where_there_are_few_texts(pair, monkeypatch, passes, own, facts, way):
    """A policy whose rounds are dear is left for a length that promises a quarter more."""
    monkeypatch.setattr(Stopwatch, "race", None)
    monkeypatch.setattr(trials, "own_costs", lambda *_: {1: own})
    table = Costs(0.0, passes, **{"alpha": 0.6, "between": 0.0} | facts)
    method = method_of(pair, parse("lookahead", costs=table))
    for texts in (TEXTS[:4] * 8, []):
        found = fastest(pair, method, texts)
        kind = "decides" if found is method else "fixed" if found.policy else "plain"
        assert kind == way
        assert way != "fixed" or (found.gamma_max, found.passes) == (1, ())


def test_lengths_have_loops_of_their_own_on_an_accelerator(pair, monkeypatch):
    """Two are timed, as they will run; those between follow. A policy's loop says little of it."""
    timed, given = [], []

    def measure(watch, loops, texts, *, longest, **_):
        timed.append((loops, texts, longest))
        took = {1: 2.0, 3: 5.0}
        return {name: Costs(0.0, [took[by.gamma_max]] * (by.gamma_max + 1))
                for name, by in loops.items()}  # fmt: skip

    monkeypatch.setattr(costing, "measure", measure)
    monkeypatch.setattr(Estimating, "promised_alone", lambda _, cost, rows: given.append(cost))
    method = method_of(pair, parse("lookahead", costs=Costs(0.1, [1.0] * 4, alpha=0.6)))
    for accelerator in (False, True):
        monkeypatch.setattr(devices, "is_accelerator", lambda _, there=accelerator: there)
        for texts in (TEXTS[:4], TEXTS[:4] * 128):
            with pytest.raises(TypeError):  # of what follows
                fastest(pair, method, texts, max_new_tokens=40)
    assert given == [trials.own_costs(method.policy.costs, ())] * 3 + [{1: 2.0, 2: 3.5, 3: 5.0}]
    ((loops, texts, longest),) = timed
    assert [(by.policy.gamma, by.gamma_max, by.passes) for by in loops.values()] == [
        (1, 1, ()), (3, 3, ())
    ]  # fmt: skip
    assert (len(texts), longest) == (4, 32)


def test_the_worst_row_counts_where_all_wait_for_it(pair, monkeypatch):
    """A policy that reads its batch is tried with shorter drafts in a larger one."""
    raced = race(monkeypatch, lambda *_: 1.0)
    table = Costs(0.05, [1.0] * 9, alpha=0.8, between=0.2)
    for name in ("lookahead", "together"):
        method = method_of(pair, parse(name, costs=table), gamma=8)
        for rows in (1, 8):
            faster(pair, method, [[1]], batch_size=rows)
    lengths = [[*methods.values()][-1].gamma_max for methods in raced]
    assert lengths[0] == lengths[1] == lengths[2] > lengths[3]


def test_room_is_checked_before_a_trial(pair, monkeypatch):
    """The texts are not those that costs were measured on."""
    checked = []
    monkeypatch.setattr(trials, "check_room", lambda *given: checked.append(given))
    monkeypatch.setattr(trials, "faster", lambda _, method, __: trials.Fastest(method))
    method = method_of(pair, parse("lookahead", costs=Costs(0.1, [1.0] * 4, alpha=0.6)))
    fastest(pair, method, TEXTS[:4] * 32, max_new_tokens=7)
    assert checked == [(pair.target, tokenize(pair.target, TEXTS[:1] * 4), 7)]
