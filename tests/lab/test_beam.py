"""Beam search, plain and speculative, against slow definitions and against each other."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import t5_variants
from experiments.beam import search as beam
from experiments.beam.decoding import beam_search
from specjax.checkpoints import load
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5, T5Config
from table_models import (
    MarkovModel,
    TableModel,
    hopeless,
    inputs_of,
    logits_after,
    random_table,
    repeat,
)
from tiny_models import slow

NEVER = jnp.int32([-1, -1])  # no token ends a hypothesis
INPUTS = inputs_of([[0, 2], [2]], [[1, 0], [2, 1]])  # prompts of two lengths
BUDGET = jnp.int32([5, 7])
ROOM = 16


def distributions(model, inputs, prefixes) -> np.ndarray:
    """Log-probabilities after each prefix, in float64 and without a cache."""
    logits = logits_after(model, inputs, prefixes, ROOM).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def one(inputs, b):
    """Input b alone, and its prompt."""
    alone = jax.tree.map(lambda x: x[b : b + 1], inputs)
    return alone, tuple(np.asarray(alone.prompt[0, : int(alone.prompt_len[0])]).tolist())


def brute(model, inputs, b, budget, eos, penalty, width) -> list[tuple[list[int], float]]:
    """The definition of the experiment's page in slow Python, without a rule for stopping early."""
    alone, prompt = one(inputs, b)
    live, ended = [((), 0.0)], []
    for length in range(1, budget + 1):
        if not live:
            break
        rows = distributions(model, alone, [prompt + tokens for tokens, _ in live])
        candidates = [
            ((*tokens, token), score + row[token])
            for (tokens, score), row in zip(live, rows, strict=True)
            for token in range(len(row))
            if row[token] > -np.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        ended += [
            (tokens, score / length**penalty)
            for tokens, score in candidates[:width]
            if tokens[-1] in eos or length == budget
        ]
        ended = sorted(ended, key=lambda hypothesis: -hypothesis[1])[:width]
        live = [candidate for candidate in candidates if candidate[0][-1] not in eos][:width]
    return [(list(tokens), score) for tokens, score in ended]


def found(state) -> list[list[tuple[list[int], float]]]:
    return [[(h.tokens, h.score) for h in rows] for rows in beam.n_best(state)]


def check_same(ours, theirs, atol=1e-9):
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    np.testing.assert_allclose([s for _, s in ours], [s for _, s in theirs], rtol=0, atol=atol)


def plain(target, eos=NEVER, penalty=0.0, *, width, inputs=INPUTS, budget=BUDGET):
    return jax.device_get(
        beam.search(target, inputs, budget, eos, penalty, width=width, buffer_len=ROOM)
    )


def fast(target, draft, eos=NEVER, penalty=0.0, *, shape, nested=True, search=beam.speculative):
    """`speculative` with shape = (w, u, γ)."""
    width, draft_width, gamma = shape
    sizes = {"width": width, "draft_width": draft_width, "gamma": gamma, "buffer_len": ROOM}
    return jax.device_get(
        search(target, draft, INPUTS, BUDGET, eos, penalty, nested=nested, **sizes)
    )


def mixed(target: TableModel, seed: int, share: float) -> TableModel:
    """A draft that is the target to a share, and noise for the rest."""
    noise = random_table(seed, target.vocab_size, forbidden=0.0, dtype=target.table.dtype).table
    return TableModel(share * jnp.maximum(target.table, -9.0) + (1 - share) * noise)


def case(seed: int, vocab_size: int):
    """(target, draft, eos_ids, penalty): drafts from near to hopeless, EOS from never to often."""
    target = random_table(3 * seed, vocab_size)
    eager = (0.0, 1.0, 2.5)[seed % 3]
    table = target.table.at[:, 1].add(eager)
    target = TableModel(table)
    share = (1.0, 0.9, 0.6, 0.0, None)[seed % 5]
    draft = hopeless(target) if share is None else mixed(target, 3 * seed + 1, share)
    eos = jnp.int32([(1, 1), (1, 0), (-1, -1), (1, 2)][seed % 4])
    return target, draft, eos, (0.0, 0.6, 1.0, 2.0)[(seed // 2) % 4]


# Against slow definitions.


@pytest.mark.usefixtures("double")
def test_wide_beams_are_exhaustive_search():
    """Two of 9 tokens go on and 1 ends: at width 9 nothing is dropped in 3 steps."""
    table = np.full((4096, 9), -np.inf)
    allowed = [0, 1, 4]
    table[:, allowed] = np.random.default_rng(5).normal(size=(4096, 3))
    model, eos = TableModel(jnp.asarray(table)), jnp.int32([1])
    budget = jnp.int32([3, 3])
    for penalty, b in itertools.product((0.0, 0.7, 1.5), (0, 1)):
        alone, prompt = one(INPUTS, b)
        every = []
        for length in (1, 2, 3):
            for tokens in itertools.product(allowed, repeat=length):
                if 1 not in tokens[:-1] and (tokens[-1] == 1 or length == 3):
                    rows = distributions(model, alone, [prompt + tokens[:i] for i in range(length)])
                    score = sum(row[token] for row, token in zip(rows, tokens, strict=True))
                    every.append((list(tokens), score / length**penalty))
        every.sort(key=lambda hypothesis: -hypothesis[1])
        check_same(found(plain(model, eos, penalty, width=9, budget=budget))[b], every[:9])


SHAPES = {  # (w, u, γ): V
    (1, 3, 4): 5,
    (2, 4, 3): 3,
    (3, 3, 1): 5,
    (4, 9, 2): 6,
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "shape", [shape if shape[0] % 2 == 0 else slow((shape,)) for shape in SHAPES], ids=str
)
def test_speculative_beams_are_plain_beams_are_the_definition(shape):
    """52 models for each shape: the same hypotheses, order and scores, to the last bit."""
    width, kept = shape[0], 0
    for seed in range(52):
        target, draft, eos, penalty = case(seed, SHAPES[shape])
        expected = plain(target, eos, penalty, width=width)
        state = fast(target, draft, eos, penalty, shape=shape)
        assert found(state) == found(expected), seed
        for b, ours in enumerate(found(expected)):  # by the slow definition
            args = int(BUDGET[b]), np.asarray(eos).tolist(), penalty, width
            check_same(ours, brute(target, INPUTS, b, *args))
        check_counts(state.stats, expected.stats, shape)
        kept += int(state.stats.kept.sum())
    assert kept > 52  # or nothing was tested but rounds of one step


def check_counts(stats, plain_stats, shape):
    """What must hold of the counts of any run of `fast` and the plain run."""
    width, draft_width, gamma = shape
    np.testing.assert_array_equal(stats.steps, plain_stats.steps)
    np.testing.assert_array_equal(plain_stats.target_calls, plain_stats.steps)
    np.testing.assert_array_equal(plain_stats.evaluations, width * plain_stats.steps)
    np.testing.assert_array_equal(stats.steps, stats.kept + stats.target_calls)
    np.testing.assert_array_equal(stats.kept_lengths.sum(1), stats.target_calls)
    np.testing.assert_array_equal(stats.kept_lengths @ np.arange(gamma + 1), stats.kept)
    spent = width * stats.target_calls + draft_width * stats.verified
    np.testing.assert_array_equal(stats.evaluations, spent)
    assert (stats.evaluations <= (width + draft_width * gamma) * stats.target_calls).all()
    assert (stats.kept <= stats.verified).all()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("seed", range(3))
def test_the_appendix_to_the_letter_gives_the_same_beams(seed):
    target, draft, eos, penalty = case(seed, 6)
    state = fast(target, draft, eos, penalty, shape=(4, 9, 2), nested=False)
    assert found(state) == found(plain(target, eos, penalty, width=4))


# The draft decides how many calls it takes, and nothing else.


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", [(1, 3, 4), (4, 9, 2)], ids=str)
def test_a_perfect_draft_keeps_every_step(shape):
    for seed in range(10):
        target = random_table(seed, SHAPES[shape])
        stats = fast(target, target, shape=shape).stats
        np.testing.assert_array_equal(stats.steps, BUDGET)
        np.testing.assert_array_equal(stats.kept, stats.verified)
        np.testing.assert_array_equal(stats.target_calls, -(-BUDGET // (shape[2] + 1)))


def test_a_wider_draft_can_crowd_out_the_beam():
    """After 3 come 0 (.4), 1 or 2 (.3 each). 0 is followed by anything, 1 by 1 or 2, 2 by itself.

    The target's only beam is 0 0 0 0. Its own search of width 2 holds 0 and 1, then [1 1] and
    [1 2] at .15 each, while [0 0] has .1: one step of three is kept, and one of one in the next
    round. Nested, the beam would have its place, as in the test above.
    """
    probs = [[0.25, 0.25, 0.25, 0.25], [0, 0.5, 0.5, 0], [0, 0, 1, 0], [0.4, 0.3, 0.3, 0]]
    with np.errstate(divide="ignore"):
        model = MarkovModel(jnp.asarray(np.log(probs), jnp.float32))
    args = model, model, inputs_of([[3]]), jnp.int32([4]), NEVER
    state = beam.speculative(*args, width=1, draft_width=2, gamma=3, nested=False, buffer_len=ROOM)
    assert [tokens for tokens, _ in found(state)[0]] == [[0, 0, 0, 0]]
    assert state.stats.kept_lengths[0].tolist() == [0, 2, 0, 0]


@pytest.mark.usefixtures("double")
def test_a_hopeless_draft_costs_calls_and_changes_nothing():
    target = random_table(0, 5, forbidden=0.0)
    draft = TableModel(-3.0 * target.table)
    state = fast(target, draft, shape=(3, 3, 1))
    assert found(state) == found(plain(target, width=3))
    assert state.stats.kept.sum() == 0
    np.testing.assert_array_equal(state.stats.target_calls, BUDGET)


# Ends, ties, neighbours.


def test_a_finished_hypothesis_and_what_can_still_beat_it():
    """After 0 comes EOS 1 (.6) or 2 (.4), which then repeats itself up to the limit of 3.

    At width 1 nothing can beat log .6, and the search stops after one step. With penalty 2 the
    long one scores log .4 / 9 and wins, so the search must not stop.
    """
    with np.errstate(divide="ignore"):
        model = MarkovModel(jnp.asarray(np.log([[0, 0.6, 0.4], [0, 1, 0], [0, 0, 1]]), jnp.float32))
    inputs, budget, eos = inputs_of([[0]]), jnp.int32([3]), jnp.int32([1])
    short, long = ([1], np.log(0.6)), ([2, 2, 2], np.log(0.4))
    for width, penalty, expected in (
        (1, 0.0, [short]),
        (2, 0.0, [short, long]),
        (1, 2.0, [(long[0], long[1] / 9)]),
        (2, 2.0, [(long[0], long[1] / 9), short]),
    ):
        state = plain(model, eos, penalty, width=width, inputs=inputs, budget=budget)
        check_same(found(state)[0], expected, atol=1e-6)
        assert state.stats.steps.tolist() == [1 if (width, penalty) == (1, 0.0) else 3]


def test_equals_are_ordered_by_beam_and_then_by_token():
    model = MarkovModel(jnp.zeros((3, 3), jnp.float32))
    budget = jnp.int32([2, 0])
    state = plain(model, width=3, budget=budget)
    tokens = [[tokens for tokens, _ in rows] for rows in found(state)]
    assert tokens == [[[0, 0], [0, 1], [0, 2]], []]
    state = fast(model, MarkovModel(-jnp.eye(3)), shape=(3, 5, 2))
    assert found(state) == found(plain(model, width=3))


@pytest.mark.usefixtures("double")
def test_an_input_alone_is_as_in_a_batch():
    target, draft, eos, penalty = case(1, 6)
    both = fast(target, draft, eos, penalty, shape=(4, 9, 2))
    for b in range(2):
        args = repeat(one(INPUTS, b)[0], 2), jnp.repeat(BUDGET[b : b + 1], 2), eos, penalty
        state = beam.speculative(
            target, draft, *args, width=4, draft_width=9, gamma=2, buffer_len=ROOM
        )
        assert found(state) == [found(both)[b]] * 2
        for ours, theirs in zip(
            jax.tree.leaves(state.stats), jax.tree.leaves(both.stats), strict=True
        ):
            np.testing.assert_array_equal(ours[0], theirs[b])


# Planted faults must show.


def differs() -> bool:
    """Whether any of 10 models has other hypotheses than plain beam search; traced anew."""
    function = beam.speculative.__wrapped__
    search = jax.jit(
        lambda *args, **sizes: function(*args, **sizes),
        static_argnames=("width", "draft_width", "gamma", "nested", "buffer_len"),
    )
    for seed in range(10):
        target, draft, eos, penalty = case(seed, 5)
        state = fast(target, draft, eos, penalty, shape=(3, 5, 2), search=search)
        if found(state) != found(plain(target, eos, penalty, width=3)):
            return True
    return False


@pytest.mark.usefixtures("double")
def test_planted_faults_change_the_beams(monkeypatch):
    follow, take = beam.follow, beam.take
    with monkeypatch.context() as patch:  # keep a step although a beam is not on the tree
        patch.setattr(beam, "follow", lambda *args: (follow(*args)[0] | True, follow(*args)[1]))
        assert differs()
    with monkeypatch.context() as patch:  # recognise a node by its token and not by its parent
        patch.setattr(beam, "follow", lambda level, _, token: by_token(follow, level, token))
        assert differs()
    with monkeypatch.context() as patch:  # beams keep their caches when others take their places
        patch.setattr(beam, "take", lambda cache, rows: take(cache, jnp.sort(rows)))
        assert differs()


def by_token(follow, level, token):
    first, _, tokens = level
    nowhere = jnp.zeros_like(tokens)
    return follow((first, nowhere, tokens), jnp.zeros_like(token), token)


# A real model.


def t5_pair():
    """A random target and a draft near it, float32."""
    config = T5Config(
        vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=2, num_heads=2
    )
    target = LanguageModel.of(T5(config, rngs=nnx.Rngs(0)))
    other = LanguageModel.of(T5(config, rngs=nnx.Rngs(1)))
    near = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, target, other)
    return target, near


def test_t5_beams_in_float32():
    target, near = t5_pair()
    kept = 0
    for seed in range(6):
        source = np.random.default_rng(seed).integers(2, 24, size=(2, 6))
        inputs = inputs_of([[0], [0]], [source[0].tolist(), source[1, :3].tolist()])
        args = inputs, jnp.int32([12, 9]), jnp.int32([1]), 0.8
        expected = beam.search(target, *args, width=3, buffer_len=24)
        state = beam.speculative(
            target, near, *args, width=3, draft_width=8, gamma=3, buffer_len=24
        )
        for ours, theirs in zip(found(state), found(expected), strict=True):
            check_same(ours, theirs, atol=1e-5)
        kept += int(state.stats.kept.sum())
    assert kept > 6


def test_both_lower_for_every_platform():
    target, near = t5_pair()
    args = inputs_of([[0], [0]], [[3, 1], [4]]), jnp.int32([4, 4]), jnp.int32([1]), jnp.float32(0)
    platforms = ("cpu", "cuda", "tpu")
    lowered = export.export(beam.search, platforms=platforms)(target, *args, width=2, buffer_len=8)
    assert "stablehlo.while" in lowered.mlir_module()
    export.export(beam.speculative, platforms=platforms)(
        target, near, *args, width=2, draft_width=3, gamma=2, buffer_len=8
    )


# Texts.


class Letters:
    """A tokenizer: ids 5 … 30 are letters, and EOS follows a text."""

    def __call__(self, text, verbose):
        return {"input_ids": [ord(letter) - ord("a") + 5 for letter in text] + [1]}

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(i + ord("a") - 5) for i in ids if 5 <= i < 31)

    def get_vocab(self):
        return {"</s>": 1, **{chr(i + ord("a") - 5): i for i in range(5, 31)}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target, and a draft near it."""
    directory = tmp_path_factory.mktemp("beam") / "target"
    loaded = load(t5_variants.write(directory, t5_variants.VARIANTS["v1_1"]))
    target = dataclasses.replace(loaded, tokenizer=Letters())
    noise = np.random.default_rng(0)
    near = jax.tree.map(
        lambda x: x * jnp.asarray(1 + 0.05 * noise.normal(size=x.shape), x.dtype), target.model
    )
    return target, dataclasses.replace(target, model=near)


search = functools.partial(beam_search, width=3, gamma=2, max_new_tokens=10, length_penalty=0.5)


def test_texts(checkpoints):
    texts = ["some", "", "words", "x"]
    with pytest.warns(UserWarning, match="1 empty input"):
        expected = search(checkpoints[0], None, texts)
    with pytest.warns(UserWarning, match="1 empty input"):
        rows = search(*checkpoints, texts)
    assert [row.index for row in rows] == [0, 1, 2, 3]
    for ours, theirs, text in zip(rows, expected, texts, strict=True):
        assert len(ours.hypotheses) == (3 if text else 0)
        for one, other in zip(ours.hypotheses, theirs.hypotheses, strict=True):
            assert (one.tokens, one.text) == (other.tokens, other.text)
            assert one.text == Letters().decode(one.tokens, skip_special_tokens=True)
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert one.tokens[-1] == 1 or len(one.tokens) == 10
        assert ours.steps == theirs.steps == theirs.target_calls == ours.kept + ours.target_calls
        assert sum(ours.kept_lengths) == ours.target_calls
    assert sum(row.kept for row in rows) > 0


def test_a_model_that_is_not_finite_is_named(checkpoints):
    target, _ = checkpoints
    broken = jax.tree.map(lambda x: x * jnp.asarray(jnp.nan, x.dtype), target.model)
    broken = dataclasses.replace(target, name="broken", model=broken)
    for pair, role in (((broken, None), "target"), ((target, broken), "draft")):
        with pytest.raises(FloatingPointError, match=f"{role} model .*broken"):
            search(*pair, ["some", "words", "x"])


@pytest.mark.parametrize(
    "wrong", ["max_new_tokens", "batch_size", "length_penalty", "width", "draft_width"]
)
@pytest.mark.parametrize("value", [-1, "a"])
def test_numbers_that_are_refused(checkpoints, wrong, value):
    with pytest.raises(ValueError, match=f"{wrong}={value!r} must be"):
        beam_search(checkpoints[0], None, ["x"], **{wrong: value})


# Errors.


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 2, 1), "width=0"),
        ((5, 6, 1), r"width=5 must lie in 1 … 4"),
        ((3, 2, 1), "draft_width=2"),
        ((2, 9, 1), "draft_width=9"),
        ((2, 2, 0), "gamma=0"),
    ],
)
def test_errors(shape, message):
    model = MarkovModel(jnp.zeros((4, 4), jnp.float32))
    with pytest.raises(ValueError, match=message):
        fast(model, model, shape=shape)
