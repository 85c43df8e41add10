"""A target with other ids than its draft: its distribution stays whole, its surplus ids come."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import pairs
import specjax
from reference import sequence_distribution, total_variation
from specjax.decoding import building
from specjax.doctor import verdicts
from specjax.drafters import ngram
from specjax.drafters.base import ModelDrafter
from specjax.drafters.resizing import Resized, ResizedLearner, cut_or_pad, resized
from specjax.drafters.switch import switch
from specjax.measure.timing import PLAIN
from specjax.replay import rollouts
from specjax.rules import Block, Token
from specjax.sampling import Sampling
from specjax.testing.enumeration import output_distribution
from table_models import inputs_of, random_table

IDS, FEWER, EOS, BUDGET = 4, 3, 3, 4  # EOS is one of the ids that the draft lacks


def of(seed, size, **options):
    return specjax.wrap(random_table(seed, size), **options)


def test_ids_that_a_draft_lacks_are_not_proposed():
    wide, narrow = (cut_or_pad(jnp.zeros((2, 3)), size) for size in (5, 2))
    assert wide.tolist() == [[0, 0, 0, -jnp.inf, -jnp.inf]] * 2
    assert narrow.tolist() == [[0, 0]] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Token(), Block()], ids=["token", "block"])
def test_enumerated_distribution_is_the_targets(rule, temperature, double):
    """All outputs of up to 4 tokens over 4, with a draft over 3 and one over 5: TV < 1e-12."""
    inputs, chosen = inputs_of([[1, 3]]), Sampling(temperature)
    target = of(1, IDS, eos_ids=(EOS,))
    expected = sequence_distribution(target.model, inputs, chosen, {EOS}, BUDGET)
    assert any(EOS in output for output in expected) or temperature == 0
    for size in (FEWER, IDS + 1):
        draft, how = of(2, size), {"gamma": 2, "sampling": chosen, "rule": rule}
        method = building.build(target, draft, **how, check_tokens=False)
        found = output_distribution(method, inputs, BUDGET)
        assert total_variation(found, expected) < 1e-12


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A T5 of 320 ids without a tokenizer, of which the draft has 300."""
    directory = tmp_path_factory.mktemp("bare")
    target, draft = pairs.write(directory / "target", padding=20), directory / "draft"
    pairs.write(draft, padding=8, noise=0.05)
    for file in target.glob("*token*.json"):
        file.unlink()
    return specjax.load(target), specjax.load(draft)


SOURCES = [[5, 9, 20, 1], [40, 307, 1], [7, 1]]
options = {"max_new_tokens": 8, "batch_size": 3}


@pytest.mark.sweep
def test_every_drafter_leaves_the_targets_tokens_as_they_are(bare):
    target, draft = bare
    decode = functools.partial(specjax.generate, target, texts=SOURCES, **options)
    plain = decode(None).tokens
    assert max(map(max, plain)) >= draft.model.vocab_size == 300
    bigram = ngram.bigram(ngram.count([[5, 9, 20, 1]], 300, 0))
    several = switch([draft, ngram.PromptLookup(300)], target)
    for drafter in (draft, specjax.frequent(draft, range(50)), bigram, several):
        assert decode(drafter, gamma=3).tokens == plain


@pytest.mark.sweep
def test_an_end_that_the_draft_lacks(bare):
    target, draft = bare
    ends = specjax.generate(target, None, SOURCES, **options).tokens[0][2]
    assert ends >= 300
    target = dataclasses.replace(target, eos_ids=(ends,))
    plain = specjax.generate(target, None, SOURCES, **options).tokens
    assert plain[0][-1] == ends
    assert len(plain[0]) <= 3
    assert specjax.generate(target, draft, SOURCES, gamma=3, **options).tokens == plain


@pytest.mark.sweep
def test_comparisons_decode_the_whole_target(bare):
    target, draft = bare
    found = specjax.measure_speedup(
        target, draft, SOURCES[:1], gamma=2, repeats=1, max_new_tokens=8
    )
    plain = specjax.generate(target, None, SOURCES[:1], **options).tokens
    assert [row.tokens for row in found.outputs(PLAIN)] == plain
    assert found.identical()


def test_as_many_ids_cost_nothing():
    drafter = ModelDrafter(random_table(1, 4, dtype=jnp.float32))
    assert resized(drafter, 4) is drafter
    assert isinstance(resized(drafter, 5), Resized)


@pytest.mark.sweep
def test_a_drafter_of_more_ids(bare):
    """Made for another vocabulary; who insists gets it."""
    target, _ = bare
    wide, how = ngram.PromptLookup(321), {"gamma": 2, **options}
    for make in (
        functools.partial(specjax.generate, target, wide, SOURCES, **how),
        lambda **given: switch([wide, ngram.PromptLookup(320)], target, **given),
    ):
        with pytest.raises(ValueError, match=r"drafts 321 ids, and .* has 320.*check_tokens=False"):
            make()
        make(check_tokens=False)


@pytest.mark.sweep
def test_rollouts_of_a_drafter_of_fewer_ids(bare):
    """Recorded like those of any other; a switch learns from rounds, and is refused."""
    target, draft = bare
    tokens = specjax.generate(target, None, SOURCES[:1], max_new_tokens=4).tokens
    run = {"gamma_max": 2, "sampling": Sampling(0.0), "max_new_tokens": 4, "key": jax.random.key(0)}
    trace = rollouts.record(target, draft, SOURCES[:1], tokens, **run)
    assert trace.emitted.tolist() == [len(tokens[0])]
    several = resized(switch([draft, ngram.PromptLookup(320)], target), 321)
    assert isinstance(several, ResizedLearner)
    with pytest.raises(ValueError, match="learns from round to round"):
        rollouts.record(target, resized(several, 320), SOURCES[:1], tokens, **run)


def test_the_doctor_counts_what_is_lost():
    assert verdicts.sizes(320, 320).verdict == "pass"
    found = verdicts.sizes(300, 320)
    assert (found.verdict, found.seen) == (
        "warn",
        "300 ids, and the target has 320: 20 are never drafted",
    )
    assert verdicts.sizes(321, 320).verdict == "warn"
