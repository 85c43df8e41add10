"""α against closed forms and by hand; acceptance by position; intervals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from pairs import IDS, TEXTS
from reference import distribution
from specjax import results, rules
from specjax.batching import pack
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.drafters.base import ModelDrafter
from specjax.measure import metrics
from specjax.pytrees import pytree
from specjax.results import Row
from specjax.rules import Token
from specjax.sampling import Sampling
from table_models import MarkovModel

BUDGET = 24
measure = functools.partial(
    specjax.measure_alpha, texts=TEXTS, max_new_tokens=BUDGET, key=jax.random.key(4)
)


@pytest.fixture(scope="module")
def bigram():
    rng = np.random.default_rng(0)
    return ModelDrafter(MarkovModel(jnp.asarray(rng.normal(size=(IDS, IDS)), jnp.float32)))


@jax.jit
def _logits(model, inputs, tokens):
    module, start = model.module(), jnp.zeros((len(tokens),), jnp.int32)
    context = module.encode(inputs.source, inputs.source_len)
    return model.logits(module(tokens, start, context, None)[0])


def teacher_forced(checkpoint, outputs):
    """The model's logits before each token of each output, in one call without a cache."""
    tokens = np.zeros((len(outputs), BUDGET), np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        row[1 : len(output)] = output[:-1]
    sources = tokenize(checkpoint, TEXTS)
    inputs = pack(sources, start_id=0, rows=len(TEXTS), width=16)
    logits = np.asarray(_logits(checkpoint.model, inputs, jnp.asarray(tokens)))
    return [row[: len(output), :IDS] for row, output in zip(logits, outputs, strict=True)]


def overlap(target_logits, draft_logits, chosen):
    """Σ min of two distributions."""
    return np.minimum(distribution(target_logits, chosen), distribution(draft_logits, chosen)).sum()


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_is_the_mean_overlap_of_the_distributions(pair, bigram, temperature):
    """Σ min by numpy, for a bigram with a known table and for the draft, on ragged outputs."""
    options = {"temperature": temperature, "max_new_tokens": BUDGET, "key": jax.random.key(4)}
    tokens = specjax.generate(pair.target, None, TEXTS, **options).tokens
    assert len({len(row) for row in tokens}) > 1
    chosen, table = Sampling(temperature), np.asarray(bigram.model.table)
    target_logits = teacher_forced(pair.target, tokens)
    distributions = {
        "bigram": [table[[0, *row[:-1]]] for row in tokens],
        "draft": teacher_forced(pair.draft, tokens),
    }
    for name, draft in (("bigram", bigram), ("draft", pair.draft)):
        found = measure(pair.target, draft, sampling=chosen)
        betas = [
            np.array([overlap(p, q, chosen) for p, q in zip(*both, strict=True)])
            for both in zip(target_logits, distributions[name], strict=True)
        ]
        assert found.tokens == sum(map(len, betas))
        for ours, expected in zip(found.overlaps, betas, strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-5)
        np.testing.assert_allclose(found.value, np.concatenate(betas).mean(), atol=1e-5)
        assert (found.low, found.high, found.interval) == (None, None, "–")  # 8 outputs
        if temperature == 0:
            agree = [
                p.argmax(-1) == q.argmax(-1)
                for p, q in zip(target_logits, distributions[name], strict=True)
            ]
            assert found.value == pytest.approx(np.concatenate(agree).mean())


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_of_the_target_itself_is_one(pair, temperature):
    found = measure(pair.target, pair.twin, sampling=Sampling(temperature))
    assert found.value == pytest.approx(1, abs=1e-5)


def test_alpha_compiles_once(pair):
    """Whatever the lengths of texts and outputs."""
    before = metrics.overlaps._cache_size()
    texts, outputs = [TEXTS[5], " ".join(TEXTS[:3])], [[5] * 40, [5]]
    chosen = Sampling(0.0)
    loop = building.build(pair.target, pair.draft, gamma=1, sampling=chosen)
    metrics.alpha_of(loop, pair.target, texts, outputs, 1)
    assert metrics.overlaps._cache_size() == before + 1


def test_alpha_depends_neither_on_the_batch_nor_on_empty_texts(pair):
    options = {"sampling": Sampling(), "draft": pair.draft}
    whole = measure(pair.target, **options)
    with pytest.warns(UserWarning, match="1 empty"):
        fewer = measure(pair.target, texts=[*TEXTS[:7], " "], **options)
    for ours, expected in zip(fewer.overlaps, whole.overlaps[:7], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    with (
        pytest.warns(UserWarning, match="1 empty"),
        pytest.raises(ValueError, match="Nothing to measure"),
    ):
        measure(pair.target, texts=[""], **options)


def test_logits_that_are_not_finite(pair):
    broken = dataclasses.replace(
        pair.draft, model=jax.tree.map(lambda x: x * jnp.nan, pair.draft.model)
    )
    with pytest.raises(FloatingPointError, match="target or its draft are not finite"):
        measure(pair.target, broken)


@pytest.mark.sweep
def test_an_interval_needs_ten_outputs(pair):
    """None of one output or nine. In one line, with what it is of: never the overlaps."""
    texts = [f"x{i} = {i}" for i in range(10)]
    for count in (1, 9, 10):
        found = measure(pair.target, pair.draft, texts=texts[:count], sampling=Sampling())
        assert len(found.overlaps) == count
        if count < 10:
            assert (found.low, found.high) == (None, None)
        else:
            assert found.low < found.value < found.high
        interval = (
            f"{found.low:.3f} to {found.high:.3f}" if count == 10 else "–: fewer than 10 outputs"
        )
        assert repr(found) == (
            f"Alpha({found.value:.3f}, 95% interval {interval}, {count} outputs, "
            f"{found.tokens} tokens)"
        )


@pytree
class Generous(Token):
    """Keeps everything, by another's chance of acceptance."""

    exact = False

    def stop(self, target_logprobs, draft_logprobs, drafts, draft_len):
        return rules.ends(jnp.ones(drafts.shape))


@pytest.mark.sweep
def test_alpha_of_a_rule_that_is_not_exact(pair):
    """It has the rule's name; α of a rule that inherits another's is refused."""
    options = {"sampling": Sampling(), "draft": pair.draft}
    assert measure(pair.target, **options, rule=rules.Block()).rule == ""
    assert measure(pair.target, **options, rule=rules.Lenient(1.0)).rule == ""
    found = measure(pair.target, **options, rule=rules.Lenient(0.25))
    assert "of Lenient(lenience=0.25), 95%" in repr(found)
    with pytest.raises(ValueError, match=r"Generous\(\) .* inherits `acceptance`"):
        measure(pair.target, **options, rule=Generous())


@pytest.mark.sweep
def test_results_say_whether_they_are_exact(pair):
    generate = functools.partial(specjax.generate, pair.target, pair.draft, TEXTS[:1])
    for rule, exact in ((None, True), ("lenient(0.3)", False), ("lenient(1)", True)):
        found = generate(rule=rule, max_new_tokens=4)
        assert found.exact is found.summary.exact is exact
    assert f"exact={False}" in repr(generate(rule="lenient(0.3)", max_new_tokens=4).summary)


# Numbers from rows.


def row_of(accepted_lengths, tested):
    return Row(0, 0, "", [], 0, 0, 0, 0, accepted_lengths, tested)


def test_acceptance_by_position():
    """γ = 3. Rounds that accept 0, 1, 3 and 3; and a last one of which one token was drafted, and
    accepted: it says nothing of positions 2 and 3, which it never reached.
    """
    row = row_of([1, 2, 0, 2], [5, 3, 2])
    np.testing.assert_allclose(results.acceptance_by_position([row]), [4 / 5, 2 / 3, 2 / 2])
    # A row with all rejected: later positions were never reached.
    other = row_of([3, 0, 0, 0], [3, 0, 0])
    np.testing.assert_allclose(results.acceptance_by_position([other]), [0, np.nan, np.nan])
    np.testing.assert_allclose(results.acceptance_by_position([row, other]), [4 / 8, 2 / 3, 1])


@pytest.mark.sweep
def test_acceptance_of_a_perfect_draft_is_one_at_each_position(pair):
    """Also where budgets and EOS cut the last rounds short."""
    result = specjax.generate(pair.target, pair.twin, TEXTS, max_new_tokens=BUDGET)
    assert results.acceptance_by_position(result.rows).tolist() == [1, 1, 1, 1]


def test_interval():
    """Rows are drawn whole: rows of equal entries keep all their spread however long they are."""
    rows = [np.full(n, value) for n, value in ((3, 0.0), (1, 1.0), (6, 0.5), (2, 1.0))]
    value, low, high = metrics.mean_interval(rows)
    assert value == pytest.approx((0 + 1 + 3 + 2) / 12)
    assert low < value < high
    assert metrics.mean_interval(rows) == (value, low, high)
    spread = [np.random.default_rng(i).normal(size=3) for i in range(9)]
    assert metrics.mean_interval(spread, seed=1) != metrics.mean_interval(spread)
    assert metrics.mean_interval([np.ones(5)] * 3) == (1, 1, 1)


def test_coverage_of_the_interval():
    """300 experiments with 40 rows each, n(0, 1) shifts by row: 95% ± 4% of intervals hold 0."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        rows = [rng.normal() + rng.normal(size=rng.integers(1, 9)) for _ in range(40)]
        _, low, high = metrics.mean_interval(rows, draws=300)
        hits += low < 0 < high
    assert 0.91 <= hits / 300 <= 0.98
