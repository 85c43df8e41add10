"""Token ids in the place of texts, and models that come from no directory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from pairs import TEXTS
from specjax.decoding.texts import tokenize
from specjax.models import table


class Averager(nnx.Module):
    """The next token from the last embedding and the mean of all so far, which a cache holds."""

    def __init__(self, vocab_size: int, width: int, seed: int):
        rngs = nnx.Rngs(seed)
        self.vocab_size = vocab_size
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def start(self, inputs, buffer_len):
        return (), jnp.zeros((inputs.prompt.shape[0], buffer_len, self.embed.features))

    def __call__(self, tokens, start, context, cache):
        slots = start[:, None] + jnp.arange(tokens.shape[1])[None]
        cache = cache.at[jnp.arange(len(tokens))[:, None], slots].set(self.embed(tokens))
        seen = jnp.arange(cache.shape[1])[None, None] <= slots[:, :, None]
        weights = seen.astype(cache.dtype)
        mean = weights @ cache / weights.sum(axis=2, keepdims=True)
        return mean - self.embed(tokens), cache

    def logits(self, hidden):
        return 20 * self.head(hidden)


IDS = [[3, 14, 15], [9], [2, 6, 5, 3]]


def outputs_by_hand(module: Averager, prompt: list[int], count: int, eos: int) -> list[int]:
    """Greedy, without any cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] != eos):
        read = module.embed(jnp.asarray(ids))
        ids.append(int(jnp.argmax(module.head(read.mean(axis=0) - read[-1]))))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def own():
    return (
        specjax.wrap(Averager(20, 16, 0), eos_ids=(1,), name="large"),
        specjax.wrap(Averager(20, 4, 1), name="small"),
    )


@pytest.mark.sweep
def test_a_flax_module_of_ones_own(own):
    """Plain and speculative greedy decoding against the module run by hand."""
    target, draft = own
    expected = [outputs_by_hand(Averager(20, 16, 0), prompt, 12, 1) for prompt in IDS]
    assert len(set(np.concatenate(expected))) > 4
    for drafter in (None, draft, target):
        result = specjax.generate(target, drafter, IDS, gamma=3, max_new_tokens=12)
        assert result.tokens == expected
        assert result.texts == [""] * 3
    assert result.block_efficiency > 2


@pytest.mark.sweep
def test_a_pytree_of_ones_own():
    """A table, which is no module: every token follows the same distribution."""
    target = specjax.wrap(table.fixed([0.5, 0.3, 0.2, 0.0]), name="table")
    draft = specjax.wrap(table.fixed([0.2, 0.3, 0.2, 0.3]))
    options = {"temperature": 1.0, "key": 0, "max_new_tokens": 200, "batch_size": 8}
    result = specjax.generate(target, draft, [[0]], num_samples=8, **options)
    shares = np.bincount(np.concatenate(result.tokens), minlength=4) / 1600
    assert np.all(abs(shares - [0.5, 0.3, 0.2, 0.0]) < 0.05)
    alpha = specjax.measure_alpha(
        target, draft, [[0]], sampling=specjax.Sampling(), key=0, max_new_tokens=20
    )
    assert alpha.value == pytest.approx(0.7, abs=1e-5)


@pytest.mark.sweep
def test_ids_stand_for_their_text(pair):
    """Lists, tuples and arrays of what the tokenizer makes, beside texts."""
    target, draft = pair.target, pair.draft
    ids = tokenize(target, TEXTS[:4])
    forms = [list(ids[0]), tuple(ids[1]), np.asarray(ids[2]), jnp.asarray(ids[3])]
    texts = specjax.generate(target, draft, TEXTS[:4], max_new_tokens=8)
    assert specjax.generate(target, draft, forms, max_new_tokens=8) == texts
    mixed = [TEXTS[0], *forms[1:]]
    assert specjax.generate(target, draft, mixed, max_new_tokens=8) == texts


def test_long_ids_are_cut_as_texts_are(pair):
    ids = [*range(3, 23), 1]
    with pytest.warns(UserWarning, match="1 input.s. longer than 6 tokens"):
        assert tokenize(pair.target, [ids], 6) == [[3, 4, 5, 6, 7, 1]]


def test_no_ids_are_an_empty_input(own, pair):
    assert tokenize(own[0], [[]]) == [[0]]  # a prompt of the start token
    with pytest.warns(UserWarning, match="1 empty input"):
        assert tokenize(pair.target, [[]]) == [[]]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[3, 20]], r"20 in \[3, 20\] is no token id of large: they are 0 … 19"),
        ([[3, -1]], "-1 in"),
        ([[3.0]], r"texts\[0\]=\[3.0\] should be a string, or a list of token ids"),
        ([[True]], r"texts\[0\]="),
        ([np.zeros((1, 2), int)], r"texts\[0\]="),
        ([3, 4], r"texts\[0\]=3 should be"),
        (["a"], "large has no tokenizer.*give lists of token ids"),
    ],
)
def test_wrong_ids(own, texts, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(*own, texts)


def test_wrong_models(tmp_path, own):
    with pytest.raises(ValueError, match=r"Linear lacks vocab_size, start, logits: specjax\.types"):
        specjax.wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"eos_ids=20 must be a whole number in \[0, 19\]"):
        specjax.wrap(Averager(20, 4, 0), eos_ids=(20,))
    with pytest.raises(ValueError, match="20 ids in the target and 21 ids in the draft"):
        specjax.generate(own[0], specjax.wrap(Averager(21, 4, 0)), IDS)
    with pytest.raises(ValueError, match="large is of no family"):
        specjax.save(tmp_path / "large", own[0])
    assert not (tmp_path / "large").exists()


def test_another_number_of_a_filter_compiles_nothing():
    from specjax.sampling import Sampling, standardize

    traced = []

    @jax.jit
    def run(logits, chosen):
        traced.append(chosen)
        return standardize(logits, chosen)

    logits = jnp.log(jnp.float32([0.5, 0.3, 0.12, 0.08]))
    for share in (0.1, 0.3):
        kept = run(logits, Sampling(filters=[f"user_sampling:min_p({share})"]))
    assert len(traced) == 1
    np.testing.assert_allclose(np.exp(kept), [0.625, 0.375, 0, 0], rtol=1e-6)
