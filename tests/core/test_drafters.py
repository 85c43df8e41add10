"""Drafters by name, and everywhere a draft can be named; a drafter without a base class."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import specjax
from experiments.reproduce.study import Study
from pairs import TEXTS
from reference import sequence_distribution, total_variation
from specjax import doctor, drafters
from specjax.checkpoints import Checkpoint
from specjax.decoding import building
from specjax.drafters import ngram
from specjax.drafters.base import proposal
from specjax.drafters.switch import switch
from specjax.pytrees import pytree
from specjax.replay import rollouts
from specjax.sampling import Sampling
from specjax.settings import Drafting
from specjax.support import files
from specjax.testing.enumeration import output_distribution
from specjax.trees import fixed
from table_models import inputs_of, random_table


def loud(target, sharpness):
    """What an import path may name: it takes the target if it asks for it."""
    return ngram.PromptLookup(target.model.vocab_size, sharpness)


@pytest.fixture
def counted(pair, tmp_path):
    """The target with ngram.npz beside it."""
    (tmp_path / "target").symlink_to(pair.target.name)
    counts = ngram.count([[5, 6, 7, 1]], pair.target.model.vocab_size, pair.target.start_id)
    ngram.save(tmp_path / "ngram.npz", counts)
    return specjax.load(tmp_path / "target"), counts


def test_by_name(pair, tmp_path, counted):
    """With settings, by import path, and of models by directory."""
    size = pair.target.model.vocab_size
    assert drafters.load("lookup", pair.target) == ngram.PromptLookup(size)
    found = drafters.load("lookup(max_ngram=2, min_ngram=2)", pair.target)
    assert found == ngram.PromptLookup(size, 2, 2)
    found = drafters.load("test_drafters:loud(sharpness=4)", pair.target)
    assert found == ngram.PromptLookup(size, 4)
    assert isinstance(drafters.load(pair.draft.name, pair.target), Checkpoint)
    target, counts = counted
    for found in (
        drafters.load("bigram(strength=2.0)", target),
        drafters.load("bigram(strength=2.0)", pair.target, counts=lambda: counts),
    ):
        np.testing.assert_array_equal(found.prior, ngram.bigram(counts, strength=2.0).prior)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lookup(max=2)", "unexpected keyword argument 'max'"),
        ("test_drafters:no", "has no attribute 'no'"),
        ("nowhere:no", "there is no module 'nowhere'"),
        ("bigram", r"needs counts, and there is no .*ngram\.npz.*or take lookup"),
    ],
)
def test_no_such_drafter(pair, name, words):
    with pytest.raises(ValueError, match=words):
        drafters.load(name, pair.target)


@pytest.mark.sweep
def test_what_takes_a_draft_takes_its_name(pair, tmp_path):
    """generate, measure_alpha, a study's drafts, and the doctor."""
    lookup = ngram.PromptLookup(pair.target.model.vocab_size, max_ngram=2)
    generate = functools.partial(specjax.generate, pair.target, texts=TEXTS, max_new_tokens=24)
    assert generate("lookup(max_ngram=2)").rows == generate(lookup).rows
    measure = functools.partial(specjax.measure_alpha, pair.target, texts=TEXTS, max_new_tokens=24)
    assert measure("lookup(max_ngram=2)").value == measure(lookup).value
    config = ml_collections.ConfigDict({"target": pair.target.name, "dtype": "", "drafts": ()})
    study = Study(config, files.Rows(tmp_path / "results.jsonl"))
    assert study.draft("lookup(max_ngram=2)") == lookup
    plan = doctor.Plan(
        pair.target.name, "lookup", texts=TEXTS, max_new_tokens=24, drafting=Drafting(3)
    )
    left_out = ("draws", "speed", "speedup")  # which take long to compile
    chosen = [check for check in doctor.CHECKS if check.name not in left_out]
    found = {finding.name: finding for finding in doctor.examine(plan, chosen)}
    assert {finding.verdict for finding in found.values()} <= {"pass", "warn"}
    assert "lookup" in found["draft files"].seen
    assert found["compatibility"].seen.startswith("300 ids")
    assert found["greedy identity"].verdict == "pass"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_drafter_says(temperature):
    """The likeliest token is the first of equals. A silent drafter's logits are finite."""
    logits = jnp.float32([[1, 3, 3, -jnp.inf], [-jnp.inf] * 4])
    said = proposal(logits, Sampling(temperature))
    assert said.proposes.tolist() == [True, False]
    assert said.best[0] == 1
    softmax = np.exp([1, 3, 3, -np.inf]) / np.exp([1, 3, 3]).sum()
    np.testing.assert_allclose(np.exp(said.belief[0]), softmax, rtol=1e-6)
    drawn = softmax if temperature else [0, 1, 0, 0]
    np.testing.assert_allclose(np.exp(said.logprobs[0]), drawn, rtol=1e-6)
    assert np.all(np.isfinite(said.belief[1]))
    assert np.all(np.isfinite(said.logprobs[1]))


def test_faults_are_no_silence():
    """NaN and +∞ are active, and standardize to NaN."""
    for fault in (jnp.nan, jnp.inf):
        said = proposal(jnp.float32([[1, fault, 0]]), Sampling(0.0))
        assert said.proposes.tolist() == [True]
        assert np.all(np.isnan(said.logprobs))


def test_a_greedy_proposal_reduces_the_logits_three_times():
    """Their maximum, where it lies first, and the sum of the softmax."""
    made = jax.jit(lambda logits: proposal(logits, Sampling(0.0)))
    program = made.lower(jnp.zeros((1, 48))).compile().as_text()
    assert program.count(" reduce(") == 3


@pytree
class NextId:
    """Prefers the id after the last one: `vocab_size` and five functions, and no base class."""

    sharpness: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def start(self, inputs, buffer_len):
        return (), ()

    def observe(self, tokens, start, hidden, count, context, state):
        return state

    def begin(self, tokens, length, context, state, *, lags=True):
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        return self._after(last), state

    def extend(self, token, position, context, state):
        return self._after(token), state

    def logits(self, hidden):
        return hidden

    def _after(self, last):
        ids = jnp.arange(self.vocab_size, dtype=jnp.int32)[None, :]
        hit = ids == (last[:, None] + 1) % self.vocab_size
        return jnp.where(hit, self.sharpness, 0)


@pytest.mark.parametrize("how", ["chain", "tree", "switch"])
def test_five_functions_are_a_drafter(how):
    """In chains, in trees and in a switch. All outputs of up to 4 tokens over 3: TV < 1e-12."""
    with jax.enable_x64(True):
        target, inputs, sampling = random_table(1, 3), inputs_of([[1, 0]]), Sampling(0.7)
        checkpoint, drafter = specjax.wrap(target, eos_ids=(2,)), NextId(jnp.float64(1), 3)
        if how == "switch":
            drafter = switch([drafter, ngram.PromptLookup(3)], checkpoint)
        tree = fixed(paths=((0,), (1,), (1, 0))) if how == "tree" else None
        method = building.build(checkpoint, drafter, gamma=2, tree=tree, sampling=sampling)
        assert method.branches == (how == "tree")
        found = output_distribution(method, inputs, 4, step=type(method).step)
        assert (
            total_variation(found, sequence_distribution(target, inputs, sampling, {2}, 4)) < 1e-12
        )


def test_what_five_functions_leave_out():
    """Replay records such a drafter; nothing carries over; and no function may be missing."""
    target = specjax.wrap(random_table(1, 3, dtype=jnp.float32))
    drafter = NextId(jnp.float32(1), 3)
    how = {"gamma_max": 2, "sampling": Sampling(0.0), "max_new_tokens": 4, "key": jax.random.key(0)}
    plain = specjax.generate(target, None, [[1]], max_new_tokens=4)
    trace = rollouts.record(target, drafter, [[1]], plain.tokens, **how)
    assert trace.length[0, 0] == 2
    with pytest.raises(ValueError, match="Constant learns nothing"):
        specjax.generate(target, drafter, [[1]], carry_state=True)
    with pytest.raises(ValueError, match=r"draft=.* must be a checkpoint, a drafter"):
        specjax.generate(target, Sampling(0.0), [[1]])
