"""Training of Medusa's and Hydra's heads: what they say along known tokens, a loss that falls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.train import medusa, train_drafter
from experiments.train.medusa import Known, MedusaTrainer, init, loss
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Gemma2Config, Llama
from table_models import inputs_of
from test_medusa import HEADS, OPTIONS, drafter, expected_logits, hidden_states, target
from tiny_models import quick

T = 10
# Compiled: an operation at a time takes seconds.
along = jax.jit(lambda *known: list(medusa.along(*known)))


def cross_entropy(target_logprobs, draft_logprobs, tokens):
    """−log q(token), as the original trains."""
    del target_logprobs
    return -jnp.take_along_axis(draft_logprobs, tokens[:, None], axis=1)[:, 0]


def known(kind: str) -> Known:
    """Four texts that count through the ids in steps of their own, of 6 to 10 tokens; the first two
    tokens are the prompt."""
    model = target(kind)
    lengths = np.array([10, 6, 8, 10])[:, None]
    tokens = (3 + np.arange(T)[None, :] * np.array([[1], [2], [3], [5]])) % 25
    tokens = np.where(np.arange(T)[None, :] < lengths, tokens, 0).astype(np.int32)
    place = np.arange(T)[None, :]
    counts = (place >= 2) & (place < lengths)
    inputs = inputs_of([[0]] * 4, [[3, 1]] * 4 if kind == "t5" else None)
    hidden = jnp.asarray(hidden_states(model, inputs, tokens))
    return Known(jnp.asarray(tokens), jnp.asarray(counts), hidden, model.logits(hidden))


@pytest.mark.parametrize("kind", quick(OPTIONS, "t5", "llama"))
def test_along_is_what_the_drafter_says(kind):
    """At every place and of every head as in numpy, from which the loop's proposals are tested
    too."""
    heads, text = drafter(kind), known(kind)
    tokens, hidden = np.asarray(text.tokens), np.asarray(text.hidden)
    for k, logits in enumerate(along(heads, text.tokens, text.hidden)):
        assert logits.shape == (4, T - 2 - k, heads.vocab_size)
        for row, at in ((0, 0), (1, 3), (3, T - 3 - k)):
            path = tokens[row, at + 1 :]
            expected = expected_logits(heads, k, hidden[row, at], path)
            np.testing.assert_allclose(logits[row, at], expected, rtol=1e-3, atol=1e-4)


def looks_ahead(say, text: Known) -> float:
    """By how much logits before a token depend on it, or on one behind it: the largest change,
    over all tokens and heads."""
    before, worst = [np.asarray(x) for x in say(text.tokens)], 0.0
    for place in range(T):
        changed = text.tokens.at[:, place].set((text.tokens[:, place] + 7) % 25)
        for k, (old, new) in enumerate(zip(before, say(changed), strict=True)):
            ahead = max(place - 1 - k, 0)  # places whose head k proposes `place` or one before it
            difference = np.abs(old[:, :ahead] - np.asarray(new)[:, :ahead])
            worst = max(worst, difference.max(initial=0.0))
    return worst


def test_no_head_reads_its_own_token():
    """Nor one behind it; the same test sees heads that read their tokens one place too late."""
    heads, text = drafter("llama"), known("llama")
    assert looks_ahead(lambda tokens: along(heads, tokens, text.hidden), text) == 0

    def faulty(tokens):
        return along(heads, jnp.roll(tokens, -1, axis=1), text.hidden)

    assert looks_ahead(faulty, text) > 0.1


def test_heads_begin_as_the_targets():
    """Every head says what the target's own says of the feature, with a linear head or without."""
    for kind, options in OPTIONS.items():
        text = known(kind)
        for k, logits in enumerate(along(init(target(kind), 2, **options), *text[::2])):
            np.testing.assert_allclose(logits, text.logits[:, : T - 2 - k], rtol=1e-4, atol=1e-4)


def test_own_heads_of_a_capped_target_begin_without_the_cap():
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = Gemma2Config(
        **sizes, num_attention_heads=2, tie_word_embeddings=True, final_logit_softcapping=0.5
    )
    capped = LanguageModel.of(Llama(config, rngs=nnx.Rngs(0)))
    hidden = 20 * jax.random.normal(jax.random.key(0), (5, 8))
    (head,) = init(capped, 1, own_head=True).heads
    expected = capped.logits(hidden)
    assert np.abs(expected).max() > 0.3  # the cap shows
    found = 0.5 * jnp.tanh(head.logits(hidden, capped) / 0.5)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_the_loss_by_hand():
    """Means over the tokens that count, with weights .8, .64 and .512; prompts and padding are left
    out."""
    heads, text = drafter("gpt"), known("gpt")
    value, each = loss(heads, text, cross_entropy)
    tokens, counts = np.asarray(text.tokens), np.asarray(text.counts)
    for k, logits in enumerate(along(heads, text.tokens, text.hidden)):
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        places = [(row, at) for row, at in np.argwhere(counts) if at >= 2 + k]
        found = np.mean([-logprobs[row, at - 2 - k, tokens[row, at]] for row, at in places])
        np.testing.assert_allclose(each[k], found, rtol=1e-5)
    np.testing.assert_allclose(value, 0.8 * each[0] + 0.64 * each[1] + 0.512 * each[2], rtol=1e-6)


def test_the_divergence_gets_the_distributions_of_one_place():
    """Both are of the token to be predicted: the target's comes from its logits before it."""
    text, seen = known("gpt"), []

    def divergence(target_logprobs, draft_logprobs, tokens):
        seen.append((target_logprobs, tokens))
        return cross_entropy(target_logprobs, draft_logprobs, tokens)

    loss(drafter("gpt"), text, divergence)
    assert len(seen) == HEADS
    for k, (logprobs, tokens) in enumerate(seen):
        expected = jax.nn.log_softmax(text.logits, axis=-1)[:, 1 + k : T - 1]
        np.testing.assert_allclose(logprobs, expected.reshape(logprobs.shape), rtol=1e-5)
        np.testing.assert_array_equal(tokens, text.tokens[:, 2 + k :].ravel())


def forward_kl(target_logprobs, draft_logprobs, tokens):
    return jnp.sum(jnp.exp(target_logprobs) * (target_logprobs - draft_logprobs), axis=-1)


@pytest.mark.parametrize(
    ("divergence", "options"),
    [(cross_entropy, {"hydra": True}), (forward_kl, {"own_head": True})],
)
def test_the_loss_falls(divergence, options, standard_promotion):
    """60 steps: to less than half for each head, and nothing of the target moves."""
    text, heads = known("gpt"), init(target("gpt"), HEADS, **options)
    optimizer = optax.adam(2e-2)

    @jax.jit
    def step(params, state):
        def loss_of(params):
            return loss(dataclasses.replace(heads, heads=params), text, divergence)

        (_, each), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, each

    params, state = heads.heads, optimizer.init(heads.heads)
    losses = []
    for _ in range(60):
        params, state, each = step(params, state)
        losses.append(np.asarray(each))
    print(losses[0], losses[-1])
    assert np.all(losses[-1] < losses[0] / 2)
    assert jax.tree.structure(params) == jax.tree.structure(heads.heads)


def made():
    """A divergence by import path, which holds nothing fixed of itself."""
    return forward_kl


def test_a_target_that_is_trained_too():
    """As long as it is as it was, its KL is 0 and the heads' loss is theirs, with their gradient;
    the target's last layers have the gradient that comes by the hidden states alone."""
    heads, text = drafter("gpt"), known("gpt")
    nothing = jnp.zeros((4, 0), jnp.int32), jnp.zeros((4,), jnp.int32)
    pairs = train_drafter.Known(
        text.tokens[:, :-1], text.tokens[:, 1:], text.counts[:, 1:].astype(jnp.float32),
        text.hidden[:, :-1], jax.nn.log_softmax(text.logits[:, :-1]), *nothing,
    )  # fmt: skip
    plain = MedusaTrainer(HEADS, divergence=f"{__name__}:made")
    trainer = dataclasses.replace(plain, train_layers=1, heads_weight=0.5)
    begun = medusa.with_layers(heads, 1)

    def of_both(begun):
        found = trainer.loss(begun, pairs, None)
        return found.total, found.seen

    def of_heads(begun):
        own = begun.drafter()
        hidden, _ = train_drafter.read(own.target, pairs.tokens, *nothing)
        found = plain.loss(own, pairs._replace(hidden=hidden), None)
        return 0.5 * found.total, found.seen

    (both, seen), gradient = jax.jit(jax.value_and_grad(of_both, has_aux=True))(begun)
    (alone, theirs), expected = jax.jit(jax.value_and_grad(of_heads, has_aux=True))(begun)
    np.testing.assert_allclose(seen.pop("target_kl"), 0.0, atol=1e-5)
    np.testing.assert_allclose(both, alone, rtol=1e-4)
    for name in theirs:
        np.testing.assert_allclose(seen[name], theirs[name], rtol=1e-4)
    for name in ("heads", "layers", "norm"):
        leaves = (jax.tree.leaves(getattr(tree, name)) for tree in (gradient, expected))
        for found, wanted in zip(*leaves, strict=True):
            scale = np.abs(wanted).max()
            assert scale > 0
            np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3 * scale)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match=r"heads=0 must be"):
        init(target("gpt"), 0)
    with pytest.raises(ValueError, match=r"layers=0 must be"):
        init(target("gpt"), layers=0)
    assert medusa.DECAY == 0.8
