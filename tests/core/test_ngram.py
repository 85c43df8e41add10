"""N-gram counts, their distributions and files, prompt lookup, and the loop's output with each of
them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from specjax import loop, speculative
from specjax.drafters import ngram
from specjax.drafters.base import is_silent
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from table_models import chain, inputs_of

START, EOS = 0, 3
SEQUENCES = [[1, 2, 1, 2, EOS], [2, 2, EOS], [1, EOS], []]


@pytest.fixture
def counts():
    return ngram.count(SEQUENCES, 5, START)


def distribution_of(logits) -> np.ndarray:
    return np.asarray(jax.nn.softmax(logits.astype(jnp.float32), axis=-1))


def test_counts(counts):
    """By hand: start→1 twice, start→2 once; 1→2 twice, 1→EOS; 2→1, 2→2, 2→EOS twice."""
    assert counts.unigram.tolist() == [0, 3, 4, 3, 0]
    table = np.zeros((5, 5), int)
    for before in range(5):
        row = slice(counts.offsets[before], counts.offsets[before + 1])
        table[before, counts.ids[row]] = counts.times[row]
    expected = np.zeros((5, 5), int)
    expected[START, [1, 2]] = 2, 1
    expected[1, [2, EOS]] = 2, 1
    expected[2, [1, 2, EOS]] = 1, 1, 2
    assert table.tolist() == expected.tolist()


def test_unigram_distribution(counts):
    """(c + k) / (N + kV) with N = 10, V = 5: for k = 1 [1 4 5 4 1] / 15; for both rows alike."""
    drafter = ngram.unigram(counts)
    logits, _ = drafter.begin(jnp.int32([[0, 0], [1, 2]]), jnp.int32([1, 2]), (), ())
    np.testing.assert_allclose(
        distribution_of(logits), np.tile([1, 4, 5, 4, 1], (2, 1)) / 15, rtol=1e-6
    )
    logits, _ = ngram.unigram(counts, add_k=0.5).extend(jnp.int32([3]), jnp.int32([1]), (), ())
    np.testing.assert_allclose(
        distribution_of(logits)[0], np.array([1, 7, 9, 7, 1]) / 25, rtol=1e-6
    )


def test_bigram_distribution(counts):
    """(c(y, x) + m P₁(x)) / (c(y) + m), P₁ as above, for m = 1 and 3; id 4 was never seen."""
    prior = np.array([1, 4, 5, 4, 1]) / 15
    after = {0: [0, 2, 1, 0, 0], 1: [0, 0, 2, 1, 0], 2: [0, 1, 1, 2, 0], 4: [0, 0, 0, 0, 0]}
    for strength in (1.0, 3.0):
        drafter = ngram.bigram(counts, strength=strength)
        for last, seen in after.items():
            expected = (np.array(seen) + strength * prior) / (sum(seen) + strength)
            logits, _ = drafter.extend(jnp.int32([last]), jnp.int32([1]), (), ())
            np.testing.assert_allclose(distribution_of(logits)[0], expected, rtol=1e-6)


def random_counts(vocab_size: int, tokens: int) -> ngram.Counts:
    """Ids with frequencies as in language, 1 / rank; 0 starts a sequence."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocab_size)
    ids = 1 + rng.choice(vocab_size - 1, size=tokens, p=weights / weights.sum())
    return ngram.count(np.array_split(ids, tokens // 20), vocab_size, 0)


def test_a_large_vocabulary():
    """V = 32,128 against dense rows of numpy, in memory that grows with the pairs alone."""
    counts = random_counts(32_128, 20_000)
    drafter = ngram.bigram(counts)
    last = jnp.int32([0, 1, 7, 32_127])
    distributions = distribution_of(jax.jit(drafter.extend)(last, last, (), ())[0])
    prior = (counts.unigram + 1) / (counts.unigram + 1).sum()
    for row, before in enumerate(last):
        weights = prior.copy()
        pairs = slice(counts.offsets[before], counts.offsets[before + 1])
        weights[counts.ids[pairs]] += counts.times[pairs]
        np.testing.assert_allclose(distributions[row], weights / weights.sum(), rtol=1e-4)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(drafter)) < 1e6


@pytest.mark.parametrize("vocab_size", [5, 2048])
def test_counts_survive_a_file(vocab_size, tmp_path):
    """Equal tables back, under the very name given; the same bytes when written again."""
    counts = random_counts(vocab_size, 5_000)
    ngram.save(tmp_path / "counts", counts)
    again = ngram.load(tmp_path / "counts")
    for saved, loaded in zip(counts, again, strict=True):
        np.testing.assert_array_equal(saved, loaded)
        assert saved.dtype == loaded.dtype
    ngram.save(tmp_path / "second.npz", again)
    assert (tmp_path / "counts").read_bytes() == (tmp_path / "second.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts", "second.npz"]


def test_files_that_are_not_counts(tmp_path, counts):
    """Text, another .npz, and tables that do not fit: each a ValueError that names the file."""
    bad = tmp_path / "bad.npz"
    bad.write_text("no counts")
    with pytest.raises(ValueError, match=r"bad\.npz is not a file of n-gram counts"):
        ngram.load(bad)
    np.savez(bad, unigram=np.ones(3))
    with pytest.raises(ValueError, match=r"bad\.npz is not a file of n-gram counts"):
        ngram.load(bad)
    ngram.save(bad, counts._replace(unigram=counts.unigram[:-1]))
    with pytest.raises(ValueError, match="do not fit together"):
        ngram.load(bad)
    ngram.save(bad, counts._replace(ids=counts.ids + 2))
    with pytest.raises(ValueError, match="outside its vocabulary"):
        ngram.load(bad)
    with pytest.raises(FileNotFoundError):
        ngram.load(tmp_path / "none.npz")


def test_errors(counts):
    """Each names the argument and what it should be."""
    with pytest.raises(ValueError, match="Id 3 is outside 0 … 2"):
        ngram.count(SEQUENCES, 3, START)
    with pytest.raises(ValueError, match="Id 9 is outside"):
        ngram.count([[1]], 5, 9)
    with pytest.raises(ValueError, match="nothing to count"):
        ngram.count([[], []], 5, START)
    with pytest.raises(ValueError, match="add_k=0"):
        ngram.unigram(counts, add_k=0)
    with pytest.raises(ValueError, match="strength=0"):
        ngram.bigram(counts, strength=0)
    for bounds in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="min_ngram"):
            ngram.PromptLookup(5, min_ngram=bounds[0], max_ngram=bounds[1])


# Prompt lookup. None: nothing is proposed.


def proposals(drafter, known: list[list[int]], sources=None, drafted=()) -> list[int | None]:
    """What each row proposes after its known tokens and then the drafted ones."""
    inputs = inputs_of(known, sources)
    width = inputs.prompt.shape[1] + len(drafted) + 1
    context, state = drafter.start(inputs, width)
    # Beyond the known tokens stands what must not be read.
    tokens = jnp.full((len(known), width), 9, jnp.int32)
    for row, ids in enumerate(known):
        tokens = tokens.at[row, : len(ids)].set(jnp.asarray(ids, jnp.int32))
    length = jnp.int32([len(ids) for ids in known])
    logits, state = jax.jit(drafter.begin)(tokens, length, context, state)
    for step, ids in enumerate(drafted):
        logits, state = jax.jit(drafter.extend)(jnp.int32(ids), length + step, context, state)
    logits = np.asarray(logits)
    best = np.argmax(logits, axis=1)
    one_hot = np.where(np.arange(logits.shape[1]) == best[:, None], 0, -np.inf)
    silent = np.asarray(is_silent(logits))
    np.testing.assert_array_equal(logits, np.where(silent[:, None], -np.inf, one_hot))
    return [None if quiet else int(token) for quiet, token in zip(silent, best, strict=True)]


LOOKUP = ngram.PromptLookup(10)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([1, 2, 3, 1, 2], 3),  # after [1 2]
        ([1, 2, 3, 4, 2, 5, 1, 2], 3),  # the longer match wins over the more recent [2]
        ([1, 2, 3, 1, 2, 4, 1, 2], 4),  # of equals, the most recent
        ([5, 1, 2, 3, 6, 6, 1, 2, 3], 6),  # three tokens
        ([0, 4, 1, 2, 3, 7, 5, 1, 2, 3, 8, 4, 1, 2, 3], 8),  # a fourth would not be looked at
        ([1, 2, 3, 4], None),  # no match
        ([7], None),  # one token
        ([7, 7], 7),  # the match ends where the text does
        ([1, 2, 9], None),  # 9 lies beyond the known tokens only
        ([1, 2, 1], 2),
    ],
)
def test_lookup(known, expected):
    assert proposals(LOOKUP, [known]) == [expected]


@pytest.mark.parametrize(
    ("source", "known", "expected"),
    [
        ([4, 5, 6, 1], [0, 4, 5], 6),  # from the source
        ([4, 5, 6, 1], [0, 4, 5, 7, 5], 7),  # as long in the output: more recent
        ([4, 5, 6, 1], [0, 5, 7, 4, 5], 6),  # longer in the source
        ([4, 5, 6, 1], [0, 6], 1),  # its EOS, 1, may be copied as well
        ([4, 5, 6, 1], [0, 1], None),  # nothing follows the source's end
        ([4, 5, 6, 0], [0, 4, 6, 0], 4),  # [6 0] ends the source; what follows 0 is the output's 4
        ([8, 4, 5], [4, 6, 8, 4], 5),
        ([6, 8], [4, 7, 8, 4], 7),  # no n-gram reaches from the source into the output
    ],
)
def test_lookup_in_the_source(source, known, expected):
    assert proposals(LOOKUP, [known], [source]) == [expected]


def test_lookup_goes_on_with_drafted_tokens():
    """After 1 2 3 1 2 it drafts 3, 1, 2, 3 …: a copy may run into what it wrote itself."""
    assert proposals(LOOKUP, [[1, 2, 3, 1, 2]], drafted=[[3]]) == [1]
    assert proposals(LOOKUP, [[1, 2, 3, 1, 2]], drafted=[[3], [1], [2]]) == [3]


def test_the_shortest_ngram_counts():
    """With min_ngram 2 a match of one token proposes nothing."""
    strict = ngram.PromptLookup(10, max_ngram=2, min_ngram=2)
    assert proposals(strict, [[1, 2, 3, 2], [1, 2, 3, 1, 2]]) == [None, 3]


def test_an_id_beyond_the_vocabulary_is_not_proposed():
    assert proposals(ngram.PromptLookup(3), [[1, 7, 1], [1, 2, 1]]) == [None, 2]


# In the loop.

NEVER = jnp.int32([-1])


def decode(target, drafter, inputs, budget, *, gamma=4, eos_ids=NEVER, temperature=0.0):
    """The state after the jitted loop, on the host."""
    batch = inputs.prompt.shape[0]
    method = speculative.Speculative(
        target, drafter, Token(), constant(gamma), Sampling(temperature), eos_ids, gamma
    )
    rows = jnp.arange(batch, dtype=jnp.int32)
    keys = row_keys(jax.random.key(0), rows, rows)
    budgets = jnp.full((batch,), budget, jnp.int32)
    room = inputs.prompt.shape[1] + budget + gamma + 1
    started = loop.start(method, inputs, keys, budgets, buffer_len=room)
    return jax.device_get(loop.decode(method, *started).replace(keys=()))


def test_lookup_ends_drafts_early():
    """A cycle of 4, γ = 4; row 0 has seen one token, row 1 a whole cycle.

    Row 0 drafts nothing for 4 rounds and knows then 0 1 2 3 0; it drafts 4, then what is left.
    Row 1 drafts 4 at once, and has 5 tokens in each of two rounds.
    """
    cycle = chain([1, 2, 3, 0, 4])
    inputs = inputs_of([[0], [0, 1, 2, 3, 0]])
    state = decode(cycle, ngram.PromptLookup(5), inputs, 10)
    assert state.tokens[0, :11].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert state.tokens[1, 5:15].tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert state.stats.target_calls.tolist() == [6, 2]
    assert state.stats.verified.tolist() == state.stats.accepted.tolist() == [4, 8]
    assert state.draft_finite


def test_lookup_copies_eos():
    """The source 3 1 2 4 with EOS 4: after 3 the target goes on like the source."""
    target = chain([3, 2, 4, 1, 4])
    state = decode(
        target, ngram.PromptLookup(5), inputs_of([[0]], [[3, 1, 2, 4]]), 10, eos_ids=jnp.int32([4])
    )
    assert state.tokens[0, : int(state.length[0])].tolist() == [0, 3, 1, 2, 4]
    assert state.stats.accepted.tolist() == [3]
    assert state.stats.target_calls.tolist() == [2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_faulty_logits_are_still_flagged(value):
    """NaN beside −inf is a fault; −inf throughout is not, and the row decodes plainly."""
    target, inputs = chain([1, 2, 3, 0, 4]), inputs_of([[0]])
    faulty = ngram.Unigram(jnp.float32([value] + [-np.inf] * 4))
    assert not decode(target, faulty, inputs, 6).draft_finite
    silent = decode(target, ngram.Unigram(jnp.full((5,), -jnp.inf)), inputs, 6)
    assert silent.draft_finite
    assert silent.stats.verified.tolist() == [0]
    assert silent.tokens[0, :7].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_overlap_is_zero_where_nothing_is_proposed():
    """A cycle of 3 at temperature 0: the first three prefixes have no match, then all is right."""
    target, inputs = chain([1, 2, 0]), inputs_of([[0]])
    output = [[1, 2, 0, 1, 2]]
    betas = test_loops.betas(target, ngram.PromptLookup(3), Sampling(0.0), inputs, output)
    np.testing.assert_array_equal(betas, [[0, 0, 0, 1, 1, 1]])
