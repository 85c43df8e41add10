"""EAGLE-1 and EAGLE-3: their logits, and that these are from the target's true features."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagles
import test_loops
from eagles import KINDS, eagle_of, features_of, target_of
from specjax import loop, speculative
from specjax.autoregressive import Autoregressive
from specjax.drafters import eagle
from specjax.measure.counting import Always
from specjax.models.decoder import Decoder
from specjax.models.memory import nbytes
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Sampling
from specjax.speculative import Speculative
from table_models import inputs_of
from tiny_models import quick
from toy_policies import Erratic, Scripted

pytestmark = pytest.mark.sweep

VERSIONS = (1, 3)
GAMMA = 3
NEVER = jnp.int32([-1])
SLOW = pytest.mark.slow
LATE = jnp.int32([[0, 0, 0]] * 4 + [[3, 2, 2], [0, 3, 2]])  # tokens to draft, by round and row
CLOSE = 2e-4  # of log-probabilities in float32
# One token beside longer ones; a T5 begins with its start token alone and reads a source.
PROMPTS = [[1], [0, 2, 3, 1], [4, 4]]
SOURCES = [[3, 1, 4], [2, 1], [4, 0, 3, 1]]


def inputs_for(target):
    if target.config.is_encoder_decoder:
        return inputs_of([[0]] * len(SOURCES), SOURCES)
    return inputs_of(PROMPTS)


def method_of(
    target, drafter, *, policy=None, distribution=None, rule=None, eos=NEVER, gamma=GAMMA
):
    return Speculative(
        drafter.sees(target.model), drafter, rule or Token(), policy or constant(gamma),
        distribution or Sampling(1.0), eos, gamma,
    )  # fmt: skip


# --- against a reference -------------------------------------------------------------------------


@jax.jit
def run_and_ask(method, contexts, state):
    """Rounds until all rows are done, and before each what the drafter says first, by length."""

    def body(carry):
        state, said, lengths, slot = carry
        known = state.tokens, state.length, contexts.drafter, state.drafter
        hidden, _ = method.drafter.begin(*known)
        said = said.at[slot].set(method.drafter.logits(hidden))
        lengths = lengths.at[slot].set(jnp.where(state.done, 0, state.length))
        return method.step(contexts, state)[0], said, lengths, slot + 1

    rows, size = state.tokens.shape[0], method.target.vocab_size
    said, lengths = jnp.zeros((24, rows, size)), jnp.zeros((24, rows), jnp.int32)
    state, said, lengths, _ = jax.lax.while_loop(
        lambda carry: jnp.any(~carry[0].done), body, (state, said, lengths, jnp.int32(0))
    )
    return state.tokens, state.stats, said, lengths


def expected_logits(target, drafter, tokens):
    """(B, T, V) of a plain pass over the known text with the target's true features."""
    inputs = inputs_for(target)
    hidden = features_of(drafter, inputs.source, inputs.source_len, tokens)
    if drafter.config.cross:
        before = np.asarray(drafter.features(jnp.asarray(hidden)))[:, :-1]
        first = np.broadcast_to(drafter.module.first[...], (len(tokens), 1, before.shape[2]))
        source = drafter.read(inputs.source, inputs.source_len)
        embedded = drafter.embed(jnp.asarray(tokens))
        features = jnp.concatenate([first, before], axis=1)
        start = jnp.zeros((len(tokens),), jnp.int32)
        return np.asarray(
            drafter.logits(drafter.module(embedded, features, start, None, source)[0])
        )
    table = np.asarray(drafter.embed(jnp.arange(target.model.vocab_size)[None])[0])
    parts = drafter.settings(), drafter.tensors(), table

    def head(x):
        return np.asarray(target.model.logits(jnp.asarray(x, jnp.float32)))

    return np.stack(
        [eagles.reference(*parts, head, *row) for row in zip(hidden, tokens, strict=True)]
    )


def disagreement(target, drafter, policy=None, method=None) -> float:
    """The largest difference between the loop's and the reference's log-probabilities."""
    method = method or method_of(target, drafter, policy=policy)
    begun = test_loops.begin(method, inputs_for(target), [9, 7, 8])
    tokens, stats, said, lengths = jax.device_get(run_and_ask(method, *begun))
    assert 0 < stats.accepted.sum() < stats.verified.sum()
    rounds, rows = np.nonzero(lengths)
    assert len(rounds) > 9
    expected = expected_logits(target, drafter, tokens)[rows, lengths[rounds, rows] - 1]
    found, expected = (
        np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32), axis=-1))
        for x in (said[rounds, rows], expected)
    )
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    finite = np.isfinite(expected)
    return float(np.abs(found[finite] - expected[finite]).max())


@pytest.mark.parametrize(
    ("kind", "version", "passes"),
    [
        ("t5", 1, (3, 6)),
        pytest.param("t5", 3, (), marks=SLOW),
        pytest.param("gpt", 3, (3, 6), marks=SLOW),
        pytest.param("llama", 1, (), marks=SLOW),
    ],
)
def test_a_round_begins_from_true_features(kind, version, passes):
    """After rejections, in rounds without drafts, beside rows of other lengths, after narrower
    passes: what a round says first is what one pass over the known text says, in numpy for a target
    without an encoder."""
    target = target_of(kind)
    flat = Sampling(4.0)  # so that some drafts are accepted
    method = method_of(target, eagle_of(target, version), policy=Erratic(), distribution=flat)
    method = dataclasses.replace(method, passes=passes)
    assert disagreement(target, method.drafter, method=method) < CLOSE


@pytest.mark.parametrize("drafted", [0, 1])
def test_a_round_without_a_draft_computes_nothing(drafted):
    """It keeps one feature, and fills no slot; a pass of two positions fills two."""
    target = target_of("gpt")
    method = method_of(target, eagle_of(target, 1), policy=Always(jnp.int32(drafted)))
    method = dataclasses.replace(method, passes=(2, 4))
    contexts, before = test_loops.begin(method, inputs_of([[0, 2, 3], [4, 1, 2]]), 9)
    after, _ = jax.jit(speculative.step)(method, contexts, before)
    features, values = (
        np.asarray(new != old)
        for new, old in (
            (after.drafter.features, before.drafter.features),
            (after.drafter.cache.values, before.drafter.cache.values),
        )
    )
    assert features.any(axis=2).sum(axis=1).tolist() == [drafted + 1] * 2
    assert values.any(axis=(1, 3)).sum(axis=1).tolist() == [2 * drafted] * 2


@SLOW
@pytest.mark.parametrize("stride", [2, 8])
def test_slots_that_lag_are_filled(stride, monkeypatch):
    """Some rounds without a draft one after the other, whose pass has one position."""
    monkeypatch.setattr(eagle.Eagle, "stride", stride)
    jax.clear_caches()
    target = target_of("gpt")
    method = method_of(target, eagle_of(target, 1), policy=Scripted(LATE))
    method = dataclasses.replace(method, passes=(3, 6))
    assert disagreement(target, method.drafter, method=method) < CLOSE
    monkeypatch.setattr(eagle, "catch_up", lambda *known: known[-1])
    jax.clear_caches()
    assert disagreement(target, method.drafter, method=method) > 1e-2


def test_a_head_without_a_first_feature():
    """As published ones are: slot 0 is seen by no other."""
    target = target_of("llama")
    drafter = eagle_of(target, 1, first_learned=False)
    assert disagreement(target, drafter, constant(GAMMA)) < CLOSE


# --- in the loop; tests/core/test_parts.py enumerates ---------------------------------------------

SAMPLINGS = {"greedy": Sampling(0.0), "warm": Sampling(0.7)}


@functools.cache
def pair_of(kind: str, version: int, dtype):
    target = target_of(kind, 3, dtype)
    options = {"ids": np.array([0, 2])} if version == 3 else {}
    return target, eagle_of(target, version, **options)


def until(row: list[int], end: int) -> list[int]:
    """What comes up to the first `end`."""
    return row[: row.index(end) + 1] if end in row else row


# --- taps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick(KINDS, "t5", "llama"))
def test_a_tapped_target_is_the_target(kind):
    """The same tokens and the same hidden states; each tap is what leaves a layer."""
    target = target_of(kind)
    tapped = dataclasses.replace(target.model, taps=(0, 1, 2))
    inputs, begun = inputs_for(target), []
    for model in (target.model, tapped):
        method = Autoregressive(model, Sampling(0.0), NEVER)
        begun.append(loop.decode(method, *test_loops.begin(method, inputs, 9)).tokens)
    np.testing.assert_array_equal(*begun)
    module: Decoder = target.model.module()
    context = module.encode(inputs.source, inputs.source_len)
    call = inputs.prompt, jnp.zeros((1,), jnp.int32), context, None
    states, _ = module.states(*call)
    final, *taps = np.split(np.asarray(tapped(*call)[0]), 4, axis=-1)
    np.testing.assert_array_equal(final, target.model(*call)[0])
    for tap, state in zip(taps, states, strict=True):
        np.testing.assert_array_equal(tap, state)


def test_taps_that_nobody_reads_cost_nothing(on_cpu):
    """The compiled loop has as many operations as without them, and moves no more than 1% more
    bytes."""
    target = target_of("llama")
    costs = []
    for model in (target.model, dataclasses.replace(target.model, taps=(0, 1, 2))):
        method = Autoregressive(model, Sampling(0.0), NEVER)
        begun = test_loops.begin(method, inputs_for(target), 9)
        costs.append(loop.decode.lower(method, *begun).compile().cost_analysis())
    assert costs[0]["flops"] == costs[1]["flops"]
    assert costs[1]["bytes accessed"] < 1.01 * costs[0]["bytes accessed"]


# --- what is shared ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_the_targets_arrays_are_shared_and_not_stored(version):
    target = target_of("t5")
    drafter = eagle_of(target, version)
    places = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target.model)}
    shared = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(drafter.target)}
    assert shared == places
    assert nbytes((target.model, drafter)) == nbytes(drafter)
    sizes = {array.shape for array in drafter.tensors().values()}
    assert target.model.module().embedding.shape not in sizes


def test_a_target_that_has_no_layers_to_reach():
    with pytest.raises(ValueError, match="has no layers and head that EAGLE can reach"):
        eagle_of(target_of("gpt"), 3).sees(object())
    with pytest.raises(ValueError, match=r"taps=\(0, 1, 9\).* has 2 layers, so 9 is none"):
        eagle.fresh(target_of("gpt"), version=3, taps=(0, 1, 9))
    with pytest.raises(ValueError, match="has no encoder"):
        eagle.fresh(target_of("gpt"), cross=True)
    with pytest.raises(ValueError, match="version=2 must be 1 or 3"):
        eagle.fresh(target_of("gpt"), version=2)


def test_a_round_can_be_stepped():
    """Rounds without drafts keep the newest true feature."""
    target = target_of("gpt")
    drafter = eagle_of(target, 1)
    method = method_of(target, drafter, policy=constant(GAMMA))
    contexts, state = test_loops.begin(method, inputs_for(target), 1)
    after, _ = jax.jit(speculative.step)(method, contexts, state)
    assert np.all(np.asarray(after.drafter.features != state.drafter.features).any(axis=(1, 2)))
    assert dataclasses.replace(drafter).config == drafter.config
