"""`standardize` against slow numpy, and the draws against their distributions."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference import chi_square, distribution
from specjax import sampling as smp
from specjax.sampling import Purpose, Sampling


def logits_of(seed: int, rows: int, vocab_size: int) -> np.ndarray:
    """Multiples of ½, so that there are ties, and one in five −inf, though never all."""
    rng = np.random.default_rng(seed)
    logits = np.round(4 * rng.normal(size=(rows, vocab_size))) / 2
    banned = rng.random(logits.shape) < 0.2
    banned[:, 0] = False
    return np.where(banned, -np.inf, logits).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
def test_standardize_is_temperature_then_top_k_then_top_p(temperature, top_k):
    """150 distributions for each top_p: the same support, and probabilities within 1e-6."""
    logits = logits_of(0, 150, 11)
    for top_p in (1.0, 0.95, 0.6, 1e-6):
        chosen = Sampling(temperature, top_k, top_p)
        found = np.exp(smp.standardize(jnp.asarray(logits), chosen))
        expected = np.array([distribution(row, chosen) for row in logits])
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_filters_by_hand():
    """With ½ ¼ ⅛ ⅛ top-k 3 keeps both equals; top-p .6 counts after top-k has renormalised."""
    logits = jnp.log(jnp.float32([0.5, 0.25, 0.125, 0.125]))

    def probs(**kwargs):
        return np.exp(smp.standardize(logits, Sampling(**kwargs)))

    np.testing.assert_allclose(probs(top_k=3), [0.5, 0.25, 0.125, 0.125], rtol=1e-6)
    np.testing.assert_allclose(probs(top_p=0.6), [2 / 3, 1 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(probs(top_k=2, top_p=0.6), [1, 0, 0, 0], rtol=1e-6)
    # Squared first, the four are 16 4 1 1 of 22, and the likeliest alone has .73.
    np.testing.assert_allclose(probs(temperature=0.5, top_p=0.7), [1, 0, 0, 0], rtol=1e-6)


def test_top_p_of_one_keeps_the_tail():
    """40,000 tokens of which the last have 1e-9 of the mass: rounding cuts none off."""
    logits = jnp.linspace(0.0, -20.0, 40_000)[None, :]
    logprobs = smp.standardize(logits, Sampling(top_k=40_000, top_p=1.0))
    assert np.all(np.isfinite(logprobs))


@pytest.mark.parametrize("chosen", [Sampling(0.0), Sampling(), Sampling(top_k=2, top_p=0.9)])
@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [1, np.inf, 0], [-np.inf] * 3])
def test_what_is_not_finite_spreads(chosen, bad):
    """NaN in every entry of that row, and in no other."""
    logprobs = np.asarray(smp.standardize(jnp.float32([bad, [1, -np.inf, 0]]), chosen))
    assert np.all(np.isnan(logprobs[0]))
    assert not np.any(np.isnan(logprobs[1]))


@pytest.mark.parametrize("chosen", [Sampling(0.0), Sampling(0.7), Sampling(top_k=2)])
def test_bfloat16_logits_give_float32_distributions(chosen):
    logits = jnp.asarray(logits_of(1, 20, 9), jnp.bfloat16)
    logprobs = smp.standardize(logits, chosen)
    assert logprobs.dtype == jnp.float32
    assert np.array_equal(logprobs, smp.standardize(logits.astype(jnp.float32), chosen))


def test_argmax_is_the_first_of_equals():
    """1,000 rows with ties: as jnp.argmax; the greedy distribution is one-hot there."""
    logits = jnp.asarray(logits_of(2, 1000, 9))
    expected = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(smp.argmax(logits), expected)
    onehot = np.exp(smp.standardize(logits, Sampling(0.0)))
    np.testing.assert_array_equal(onehot, np.eye(9)[expected])


WRONG = {"temperature": (-1.0, np.nan, np.inf), "top_k": (-1, 2.5), "top_p": (0.0, 1.5, np.nan)}


@pytest.mark.parametrize(("field", "value"), [(f, x) for f, some in WRONG.items() for x in some])
def test_errors_name_the_value(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must"):
        Sampling(**{field: value})


def test_an_entropy_depends_on_its_row():
    """Right to 1e-6, and the same bits alone and beside another row."""
    rows = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (2, 30_000)))
    both, wide = jax.jit(smp.entropy)(rows), np.asarray(rows, np.float64)
    np.testing.assert_allclose(both, -np.sum(np.exp(wide) * wide, axis=1), rtol=1e-6)
    assert [jax.jit(smp.entropy)(row[None])[0] for row in rows] == [*both]


def test_kinds():
    """Only what has to be filtered is sorted."""
    assert Sampling(0.0, 5, 0.5).greedy
    assert Sampling(0.0, 5, 0.5).filters == Sampling(0.5).filters == ()
    assert [len(Sampling(**one).filters) for one in ({"top_k": 1}, {"top_p": 0.9})] == [1, 1]


def sparse_distributions(rows: int, vocab_size: int) -> np.ndarray:
    """Unnormalised distributions with zeros at both ends, and whole blocks of them."""
    rng = np.random.default_rng(vocab_size)
    probs = rng.random((rows, vocab_size)) * (rng.random((rows, vocab_size)) < 0.3)
    probs[::2, : vocab_size // 2] = 0
    probs[1::2, vocab_size // 2 + 1 :] = 0
    probs[:, vocab_size // 2] = 0.5
    return probs.astype(np.float32)


def by_gumbel(keys, probs):
    return smp.draw_by_gumbel(keys, jnp.log(probs))


DRAWS = pytest.mark.parametrize("draw", [smp.draw, by_gumbel])


@DRAWS
@pytest.mark.parametrize("vocab_size", [1, 3, 128, 129, 1000])
def test_impossible_tokens_are_never_drawn(draw, vocab_size):
    """2,000 distributions, unnormalised, with zeros at both ends and whole blocks of zeros."""
    probs = sparse_distributions(2000, vocab_size)
    keys = jax.random.split(jax.random.key(0), 2000)
    token = np.asarray(jax.jit(lambda *args: draw(*args))(keys, jnp.asarray(probs)))
    assert np.all(np.take_along_axis(probs, token[:, None], axis=1) > 0)


def bits_of(octaves: int = 32, each: int = 20_000):
    """Pairs of random words, of all sizes: `high` has 1, 2, … 32 bits."""
    rng = np.random.default_rng(0)
    high = np.concatenate([rng.integers(0, 2 ** (n + 1), each) for n in range(octaves)])
    high[:4], low = [0, 1, 2**32 - 2, 2**32 - 1], rng.integers(0, 2**32, len(high))
    low[:4] = [0, 0, 2**32 - 1, 2**32 - 1]
    return high.astype(np.uint32), low.astype(np.uint32)


def relative_error_of_times() -> float:
    """The largest, of 640,000 float32 times from 1e-20 to 45."""
    high, low = bits_of()
    found = jax.jit(lambda *bits: smp.exponential_of_bits(*bits, jnp.float32))(high, low)
    u = ((high >> 1) + (low.astype(np.longdouble) + 0.5) / 2**32) / 2**32
    exact = -np.where(high & 1, np.log(u), np.log1p(-u))
    assert exact.min() < 1e-18
    return float(np.max(np.abs(np.asarray(found, np.longdouble) / exact - 1)))


def test_times_are_precise_at_any_size():
    """Relative error below 4 units of 2⁻²⁴, so that the rarest tokens win as often as they are due;
    log and log1p cover disjoint halves of the distribution.
    """
    assert relative_error_of_times() < 4 * 2.0**-24
    short, long = (
        smp.exponential_of_bits(jnp.uint32([bit]), jnp.uint32([2**32 - 1]), jnp.float32)
        for bit in (2**32 - 2, 2**32 - 1)
    )
    np.testing.assert_allclose([short[0], long[0]], np.log(2), rtol=1e-6)


WIDE = 256_000
WIDE_DISTRIBUTIONS = {
    "zipf": 1 / np.arange(1, WIDE + 1),
    "flat tail": np.r_[np.full(100, 0.98 / 100), np.full(WIDE - 100, 0.02 / (WIDE - 100))],
}


@pytest.mark.parametrize("name", WIDE_DISTRIBUTIONS)
def test_resolution_of_a_draw(name):
    """At V = 256,000 what a draw realises lies within 1e-6 (total variation) of what it was given.

    If each quotient of a race is off by a relative error of at most e, a set of mass w wins with
    at least w(1 − e)/(w(1 − e) + (1 − w)(1 + e)): so total variation is at most e/2. A quotient has
    the errors of its time, of its mass and of the division.
    """
    probs = (WIDE_DISTRIBUTIONS[name] / WIDE_DISTRIBUTIONS[name].sum()).astype(np.float32)
    quotient = relative_error_of_times() + 2.0**-24
    blocks = probs.reshape(1, -1, 512)  # as `draw` has them
    found = np.asarray(jax.jit(lambda x: jnp.sum(x, axis=-1))(blocks), np.float64)
    of_sums = np.max(np.abs(found / blocks.sum(axis=-1, dtype=np.float64) - 1))
    assert ((of_sums + quotient) + quotient) / 2 < 1e-6  # the race of blocks, and that within one
    logprobs = np.log(probs)
    found = np.asarray(jax.jit(jnp.exp)(logprobs), np.float64)
    of_exp = np.max(np.abs(found / np.exp(logprobs.astype(np.float64)) - 1))
    assert (of_exp + quotient) / 2 < 1e-6


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (smp.draw, "zipf"),
        (smp.draw, "flat tail"),
        pytest.param(by_gumbel, "zipf", marks=pytest.mark.slow),
        pytest.param(by_gumbel, "flat tail", marks=pytest.mark.slow),
    ],
)
def test_wide_distributions_are_drawn(name, draw):
    """n = 3,000 at V = 256,000, counted in 16 stretches of equal mass: chi-square p > 1e-4, and the
    tail of 2% within 4 deviations.
    """
    probs = WIDE_DISTRIBUTIONS[name] / WIDE_DISTRIBUTIONS[name].sum()
    rows, count = 50, 3_000

    @jax.jit
    def many(keys):
        wide = jnp.broadcast_to(jnp.float32(probs)[None, :], (rows, WIDE))
        return jax.lax.map(lambda some: draw(some, wide), keys)

    tokens = np.asarray(many(jax.random.split(jax.random.key(4), (count // rows, rows)))).ravel()
    stretch = np.minimum((np.cumsum(probs) - probs) * 16, 15).astype(int)
    due = np.bincount(stretch, probs, minlength=16)
    p = chi_square(
        collections.Counter(stretch[tokens].tolist()),
        {index: mass for index, mass in enumerate(due) if mass > 0},
    )
    tail = np.cumsum(probs) > 0.98
    mass = probs[tail].sum()
    z = (np.sum(tail[tokens]) - count * mass) / np.sqrt(count * mass * (1 - mass))
    print(f"p = {p:.3g}, z of the tail = {z:.2f}, with n = {count}")
    assert p > 1e-4
    assert abs(z) < 4


@pytest.mark.sweep
@DRAWS
def test_draws_follow_the_distribution(draw):
    """n = 100,000 from 300 tokens, a third of them impossible: chi-square p > 1e-4."""
    count, rng = 100_000, np.random.default_rng(3)
    probs = rng.exponential(size=300) * (np.arange(300) % 3 > 0)
    probs /= probs.sum()
    keys = jax.random.split(jax.random.key(1), count)
    tokens = jax.jit(lambda keys, p: draw(keys, jnp.broadcast_to(p[None, :], (count, 300))))(
        keys, jnp.float32(probs)
    )
    seen = collections.Counter(np.asarray(tokens).tolist())
    p = chi_square(seen, dict(enumerate(probs)))
    print(f"p = {p:.3g} with n = {count}")
    assert p > 1e-4


def test_gumbel_noise_is_shared_by_distributions():
    """The same keys for a distribution and its double temperature: they agree more often than
    apart."""
    logprobs = jax.nn.log_softmax(jnp.asarray(logits_of(4, 4000, 5)), axis=-1)
    keys = jax.random.split(jax.random.key(2), 8000)
    flat = jax.nn.log_softmax(logprobs / 2, axis=-1)
    ours = smp.draw_by_gumbel(keys[:4000], logprobs)
    coupled = np.mean(ours == smp.draw_by_gumbel(keys[:4000], flat))
    independent = np.mean(ours == smp.draw_by_gumbel(keys[4000:], flat))
    assert coupled > independent + 0.2


def test_every_draw_has_its_own_key():
    """Distinct for each row, count, purpose and slot."""
    keys = smp.row_keys(jax.random.key(0), jnp.int32([0, 0, 1, 1]), jnp.int32([0, 1, 0, 1]))
    found = [
        jax.random.key_data(smp.fold(keys, jnp.full((4,), count, jnp.int32), purpose, slot))
        for count, purpose, slot in itertools.product(range(4), Purpose, range(4))
    ]
    found = np.concatenate([*found, jax.random.key_data(keys)])
    assert len(np.unique(found, axis=0)) == len(found)


def test_row_keys_do_not_know_the_batch():
    """Input 5, sample 2 has one key, wherever it stands."""
    alone = smp.row_keys(jax.random.key(0), jnp.int32([5]), jnp.int32([2]))
    among = smp.row_keys(jax.random.key(0), jnp.int32([1, 5, 7]), jnp.int32([0, 2, 2]))
    assert jnp.all(alone == among[1:2])


def test_the_coldest_temperature():
    """Large logits divided by it are a distribution still: that of the most likely token."""
    logits = jnp.float32([[-1e6, 3e6, 2.9e6], [0.0, 1e-3, -1e-3]])
    distribution = np.exp(smp.standardize(logits, smp.Sampling(smp.COLDEST)))
    assert distribution.tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("seed", [1 << 63, 1 << 64, -(1 << 63) - 1])
def test_seeds_that_jax_does_not_take(seed):
    with pytest.raises(ValueError, match=f"key={seed} must be"):
        smp.as_key(seed)
