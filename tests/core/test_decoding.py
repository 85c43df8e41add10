"""`specjax.generate`: texts in, texts out, and every number that it refuses; batches by bucket."""

import copy
import dataclasses
import functools
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors

import pairs
import specjax
from experiments.beam.decoding import beam_search
from pairs import EOS_IDS, IDS, TEXTS
from specjax import loop
from specjax.batching import bucket, pack
from specjax.checkpoints import Checkpoint
from specjax.decoding import building, starting
from specjax.decoding.texts import tokenize
from specjax.drafters.base import ModelDrafter
from specjax.drafters.ngram import PromptLookup
from specjax.measure import timing
from specjax.policies import Costs, parse
from specjax.policies.estimating import Estimating
from specjax.replay import rollouts
from specjax.rules import Token
from specjax.sampling import Sampling
from table_models import MarkovModel

BUDGET = 24
generate = functools.partial(specjax.generate, max_new_tokens=BUDGET)


@pytest.fixture(scope="module")
def plain(pair):
    """Greedy, without a draft. The rows differ; some end early, some at the budget."""
    result = generate(pair.target, None, TEXTS)
    lengths = {len(row) for row in result.tokens}
    assert len({tuple(row) for row in result.tokens}) == len(TEXTS)
    assert min(lengths) < BUDGET == max(lengths)
    return result


def check(result, gamma=None):
    """Tokens and statistics of every row fit together."""
    for row in result.rows:
        assert 1 <= row.emitted <= BUDGET
        assert all(0 <= token < IDS for token in row.tokens)
        assert not set(row.tokens[:-1]) & set(EOS_IDS)
        assert row.tokens[-1] in EOS_IDS or row.emitted == BUDGET
        assert row.text == pairs.make_tokenizer().decode(row.tokens, skip_special_tokens=True)
        histogram = np.array(row.accepted_lengths)
        assert histogram.sum() == row.target_calls
        assert histogram @ np.arange(len(histogram)) == row.accepted <= row.verified
        # Each call adds a token of the target's own, unless a draft was the end.
        assert row.emitted - row.accepted - row.target_calls in ((0,) if gamma is None else (0, -1))
        if gamma is not None:
            assert len(histogram) == gamma + 1 == len(row.tested) + 1
            assert row.tested == sorted(row.tested, reverse=True)
            assert row.tested[0] <= row.target_calls
            assert sum(row.tested) <= row.verified <= gamma * row.target_calls


def test_without_a_draft(plain):
    check(plain)
    assert plain.texts == [row.text for row in plain.rows]
    assert np.array_equal(plain.target_calls, plain.emitted)
    assert not plain.verified.any()
    assert not plain.accepted.any()
    assert plain.accepted_lengths.tolist() == [[row.target_calls] for row in plain.rows]
    assert plain.block_efficiency == 1


@pytest.mark.sweep
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_greedy_identity(pair, plain, gamma):
    result = generate(pair.target, pair.draft, TEXTS, gamma=gamma)
    check(result, gamma)
    assert result.tokens == plain.tokens
    assert result.texts == plain.texts
    assert 0.1 < result.accepted.sum() / result.verified.sum() < 0.9
    assert result.block_efficiency == plain.emitted.sum() / result.target_calls.sum() > 1


@pytest.mark.sweep
def test_the_target_as_its_own_draft(pair, plain):
    """All that is drafted is accepted; an EOS among the drafts cuts what follows it."""
    result = generate(pair.target, pair.twin, TEXTS)
    assert result.tokens == plain.tokens
    for row in result.rows:
        assert row.target_calls == math.ceil(row.emitted / 5)
        assert row.accepted == sum(row.tested)
        assert row.accepted == row.verified or row.tokens[-1] in EOS_IDS


def test_a_drafter_instead_of_a_checkpoint(pair, plain):
    """A bigram of the outputs themselves, by its table."""
    table = np.zeros((IDS, IDS), np.float32)
    for row in plain.tokens:
        table[[0, *row[:-1]], row] += 1
    bigram = ModelDrafter(MarkovModel(jnp.asarray(table)))
    result = generate(pair.target, bigram, TEXTS)
    check(result, 4)
    assert result.tokens == plain.tokens
    likeliest = table.argmax(axis=1)
    steps = [step for row in plain.tokens for step in itertools.pairwise([0, *row])]
    hits = np.mean([likeliest[last] == token for last, token in steps])
    tested = np.sum([row.tested for row in result.rows])
    kept = result.accepted.sum()
    assert abs(kept / tested - hits) < 0.2


@pytest.mark.parametrize(("policy", "rows"), [("lookahead", 1), ("together", 4)])
def test_who_waits_for_the_worst_row(pair, monkeypatch, policy, rows):
    """Whoever reads the batch. Elsewhere others take the place of rows that are done."""
    asked = []
    monkeypatch.setattr(Estimating, "prefers_plain", lambda *given: asked.append(given[3]))
    built = building.build(pair.target, pair.draft, gamma=3, sampling=Sampling(0.0))
    made = dataclasses.replace(built, policy=parse(policy, costs=Costs(0.1, [1.0] * 4)))
    assert building.plain_if_preferred(made, 9, 4) is made
    assert asked == [rows]


# Samples and batches.

sample = functools.partial(generate, temperature=1.0, key=jax.random.key(5))


def label(result):
    return [(row.index, row.sample) for row in result.rows]


@pytest.mark.sweep
@pytest.mark.parametrize("speculates", [True, False])
def test_rows_depend_neither_on_the_batch_nor_on_its_size(pair, speculates):
    draft = pair.draft if speculates else None
    together = sample(pair.target, draft, TEXTS, batch_size=8)
    check(together, 4 if speculates else None)
    assert len({tuple(row) for row in together.tokens}) == len(TEXTS)
    for size in (1, 3):
        assert sample(pair.target, draft, TEXTS, batch_size=size).rows == together.rows
    # Other neighbours, in any order, for the texts at places 0 and 5.
    for order in np.random.default_rng(0).permuted(np.tile([1, 2, 3, 4, 6, 7], (3, 1)), axis=1):
        others = [TEXTS[i] for i in order]
        mixed = [TEXTS[0], *others[:4], TEXTS[5], *others[4:]]
        rows = sample(pair.target, draft, mixed, batch_size=8).rows
        assert (rows[0], rows[5]) == (together.rows[0], together.rows[5])
    other_key = sample(pair.target, draft, TEXTS, key=jax.random.key(6))
    assert not any(a == b for a, b in zip(other_key.tokens, together.tokens, strict=True))


@pytest.mark.sweep
def test_samples_come_in_order_and_do_not_shift_one_another(pair):
    one = sample(pair.target, pair.draft, TEXTS)
    three = sample(pair.target, pair.draft, TEXTS, num_samples=3)
    assert label(three) == list(itertools.product(range(8), range(3)))
    assert [row for row in three.rows if row.sample == 0] == one.rows
    assert len({tuple(row) for row in three.tokens}) == 24


# Inputs.


def test_empty_texts_keep_their_place(pair, plain):
    texts = ["", *TEXTS[1:4], " \t", *TEXTS[5:]]
    for draft in (None, pair.draft):
        with pytest.warns(UserWarning, match=r"2 empty input\(s\)") as caught:
            result = generate(pair.target, draft, texts)
        assert len(caught) == 1
        gamma = 0 if draft is None else 4
        for index in (0, 4):
            empty = specjax.Row(index, 0, "", [], 0, 0, 0, 0, [0] * (gamma + 1), [0] * gamma)
            assert result.rows[index] == empty
        kept = [1, 2, 3, 5, 6, 7]
        assert [result.tokens[i] for i in kept] == [plain.tokens[i] for i in kept]
    with pytest.warns(UserWarning, match="1 empty"):
        assert generate(pair.target, None, [""]).texts == [""]
    assert generate(pair.target, None, []).rows == []


@pytest.mark.parametrize(("mark", "kept"), [("</s> $A", 0), ("$A </s>", 1), ("$A", 0)])
def test_a_cut_source_keeps_what_its_tokenizer_puts_behind_a_text(mark, kept, pair):
    """As transformers cuts it; ids keep an end id."""
    tokenizer = copy.deepcopy(pairs.make_tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=mark, special_tokens=[("</s>", 1)]
    )
    target = dataclasses.replace(pair.target, tokenizer=tokenizer)
    whole = tokenizer(TEXTS[0])["input_ids"]
    with pytest.warns(UserWarning, match="3 input"):
        found = tokenize(target, [TEXTS[0], [5, 6, 7, 8, 1], [5, 6, 7, 8, 9]], 4)
    assert len(whole) > 4
    assert found == [[*whole[: 4 - kept], *[1] * kept], [5, 6, 7, 1], [5, 6, 7, 8]]


def test_long_texts_are_cut_before_their_last_id(pair, caplog):
    long = " ".join(TEXTS)
    with pytest.warns(
        UserWarning, match=r"2 input\(s\) longer than 40 tokens were trunc"
    ) as caught:
        ids = tokenize(pair.target, [long, TEXTS[0], long])
    assert len(caught) == 1
    whole = pairs.make_tokenizer()(long, verbose=False)["input_ids"]
    assert ids[0] == ids[2] == [*whole[:39], 1]
    assert ids[1] == pairs.make_tokenizer()(TEXTS[0])["input_ids"]
    # transformers' own warning says something else.
    assert not caplog.records
    with pytest.warns(UserWarning, match="8 input.* longer than 2 tokens.*max_source_len"):
        short = generate(pair.target, None, TEXTS, max_source_len=2)
    words = [pairs.make_tokenizer().decode(ids[:1]) for ids in tokenize(pair.target, TEXTS)]
    assert short.tokens == generate(pair.target, None, words).tokens
    with pytest.raises(ValueError, match="max_source_len=0 must be a whole number ≥ 1"):
        generate(pair.target, None, TEXTS, max_source_len=0)


@pytest.mark.sweep
def test_ids_past_the_tokenizers_are_never_emitted(pair):
    """Though the head prefers them, as the model with all its rows shows."""
    rows = pair.target.config.vocab_size
    assert rows > pair.draft.config.vocab_size > IDS == pair.target.model.vocab_size
    uncut = dataclasses.replace(pair.target.model, vocab_size=rows)
    everything = dataclasses.replace(pair.target, model=uncut)
    hot = functools.partial(sample, temperature=5.0)
    padded = np.concatenate(hot(everything, None, TEXTS).tokens)
    assert np.mean(padded >= IDS) > 0.05
    for draft in (None, pair.draft):
        check(hot(pair.target, draft, TEXTS), 4 if draft else None)
    # A draft without a tokenizer is cut to the target's ids too.
    padded_too = dataclasses.replace(pair.draft.model, vocab_size=pair.draft.config.vocab_size)
    nameless = dataclasses.replace(pair.draft, model=padded_too, tokenizer=None)
    check(hot(pair.target, nameless, TEXTS), 4)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma=0 must be a whole number ≥ 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a number ≥ 0 and finite"),
        ({"temperature": math.nan}, "temperature=nan must be a number ≥ 0"),
        ({"temperature": math.inf}, "temperature=inf must be a number ≥ 0 and finite"),
        ({"top_p": 0.0}, r"top_p=0.0 must be a number in \(0, 1\]"),
        ({"top_p": math.nan}, "top_p=nan must be a number in"),
        ({"temperature": 1e-39}, "temperature=1e-39 must be 0 or ≥ 1e-20"),
        ({"temperature": "hot"}, "temperature='hot' must be a number ≥ 0"),
        ({"top_p": None}, "top_p=None must be a number in"),
        ({"top_k": -1}, "top_k=-1 must be a whole number ≥ 0"),
        ({"top_k": 2**31}, "top_k=2147483648 must be a whole number ≥ 0; it must be below 2³¹"),
        ({"gamma": "7"}, "gamma='7' must be a whole number ≥ 1"),
        ({"passes": (2, None)}, "passes=None must be a whole number ≥ 1"),
        ({"batch_size": "8"}, "batch_size='8' must be a whole number ≥ 1"),
        ({"max_source_len": "40"}, "max_source_len='40' must be a whole number ≥ 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number ≥ 1"),
        ({"max_new_tokens": 10**9}, "max_new_tokens=1000000000 must be ≤ 1,048,576: the caches"),
        ({"gamma": 100_000}, r"gamma=100000 must be a whole number in \[1, 1024\]; a row never"),
        ({"passes": 3}, "passes=3 must be a list of whole numbers"),
        ({"filters": 5}, "filters=5 must be a list of filters or their names"),
        ({"rule": 5}, "rule=5 must be an acceptance rule, or its name"),
        ({"rule": Token}, "rule=<class .* is a class: give what it makes, an acceptance rule"),
        ({"policy": 5}, "policy=5 must be a draft-length policy, or its name"),
        ({"draft": 5}, "draft=5 must be a checkpoint, a drafter, or a name"),
        ({"draft": PromptLookup}, "draft=<class .* is a class: give what it makes, a checkpoint,"),
        ({"target": "x"}, "target='x' must be a checkpoint, as specjax.load and specjax.wrap"),
        ({"target": None, "draft": None}, "target=None must be a checkpoint"),
        ({"log_rounds": "False"}, "log_rounds='False' must be True or False"),
        ({"carry_state": []}, r"carry_state=\[\] must be True or False"),
        ({"check_tokens": "False"}, "check_tokens='False' must be True or False"),
        ({"num_samples": 0}, "num_samples=0 must be a whole number ≥ 1"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number ≥ 1"),
    ],
)
def test_numbers_out_of_range(pair, options, message):
    given = {"target": pair.target, "draft": pair.draft, "texts": TEXTS} | options
    with pytest.raises(ValueError, match=message):
        generate(**given)


@pytest.mark.parametrize("name", ["measure_alpha", "measure_speedup", "beam_search", "stream"])
@pytest.mark.parametrize(("role", "wrong"), [("target", "x"), ("draft", 5), ("draft", Checkpoint)])
def test_models_that_are_none(pair, name, role, wrong):
    """Every function that takes a pair names the argument."""
    given = {"target": pair.target, "draft": pair.draft, "texts": TEXTS[:1], "max_new_tokens": 1}
    function = beam_search if name == "beam_search" else getattr(specjax, name)
    with pytest.raises(ValueError, match=f"{role}=.* a checkpoint"):
        function(**given | {role: wrong})


def test_a_buffer_is_never_larger_than_the_bound(pair):
    """Also where memory is counted before anything runs."""
    method = building.build(pair.target, None, gamma=1, sampling=Sampling(0.0))
    with pytest.raises(ValueError, match=r"max_new_tokens=\d+ must be ≤ 1,048,576"):
        starting.room_of(method, None, 2**20 + 1)


TAKE_TEXTS = {
    "generate": lambda pair, texts: generate(pair.target, None, texts),
    "speculatively": lambda pair, texts: generate(pair.target, pair.draft, texts),
    "measure_alpha": lambda pair, texts: specjax.measure_alpha(pair.target, pair.draft, texts),
    "beam_search": lambda pair, texts: beam_search(pair.target, None, texts),
    "select": lambda pair, texts: specjax.select(pair.target, [pair.draft], texts),
    "record": lambda pair, texts: rollouts.record(
        pair.target, pair.draft, texts, [[1]], gamma_max=2, sampling=Sampling(0.0),
        max_new_tokens=4, key=jax.random.key(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKE_TEXTS)
def test_texts_that_are_no_list_of_strings(pair, name):
    """One string is not the list of its letters."""
    for texts, message in (
        ("import os", r"texts='import os' should be a list of strings, such as \['import os'\]"),
        (b"import os", "should be a list of strings"),
        (None, "texts=None should be a list of strings"),
        ((text for text in TEXTS), "should be a list of strings"),
        ([*TEXTS, None], r"texts\[8\]=None should be a string"),
        (set(TEXTS), r"texts=\{.* has no order: give a list"),
        (dict.fromkeys(TEXTS), r"texts=\{.* has no order: give a list"),
        ([*TEXTS, "a\udc80"], r"texts\[8\]=.* holds '\\udc80', half a character"),
        ([["import os"]], r"texts\[0\]=\['import os'\] should be a string"),
    ):
        with pytest.raises(ValueError, match=message):
            TAKE_TEXTS[name](pair, texts)


def test_an_id_of_more_than_64_bits(pair):
    with pytest.raises(ValueError, match=f"{2**70} in .* is no token id of .*: they are 0 … 299"):
        tokenize(pair.target, [[2**70, 1]])


@pytest.mark.parametrize("call", [specjax.generate, specjax.measure_alpha])
@pytest.mark.parametrize("key", [3, np.int64(3), jax.random.PRNGKey(3)])
def test_seeds_are_keys(pair, call, key, monkeypatch):
    """And reach the loop as such."""
    seen = []
    monkeypatch.setattr(starting, "arguments", lambda *_, key, **__: seen.append(key) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(pair.target, pair.draft, TEXTS, key=key)
    assert seen == [jax.random.key(3)]


@pytest.mark.parametrize("key", [0.5, "0", True, jnp.zeros(3)])
def test_what_is_no_key(pair, key):
    with pytest.raises(ValueError, match=r"key=.* must be jax\.random\.key\(seed\), or the seed"):
        generate(pair.target, pair.draft, TEXTS, key=key)


def test_a_prefix_that_inputs_lack(pair):
    """One warning, with how many; nothing is added to them."""
    target = dataclasses.replace(pair.target, prefix="parse: ")
    bare, whole = ["x = 1", "y = 2"], ["parse: x = 1"]
    with pytest.warns(UserWarning, match=r"2 of 3 input\(s\) do not begin with 'parse: '"):
        found = tokenize(target, bare + whole)
    assert found == tokenize(pair.target, bare + whole)
    tokenize(target, whole)


def test_different_vocabularies(pair):
    words = pairs.tokenizers.train([*TEXTS, "unheard of, " * 9], IDS + 1)
    other = dataclasses.replace(pair.draft, tokenizer=pairs.tokenizers.to_transformers(words, 40))
    with pytest.raises(ValueError, match="vocabulary size: 300 ids in the target and 301 ids in"):
        generate(pair.target, other, TEXTS)


def test_a_checkpoint_without_a_tokenizer(pair):
    bare = dataclasses.replace(pair.target, tokenizer=None)
    with pytest.raises(ValueError, match=r"target has no tokenizer.*Copy tokenizer\.json"):
        generate(bare, None, TEXTS)


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_model(pair, temperature):
    def spoil(checkpoint, name):
        broken = jax.tree.map(lambda x: x * jnp.nan, checkpoint.model)
        return dataclasses.replace(checkpoint, model=broken, name=name)

    again = functools.partial(generate, texts=TEXTS, temperature=temperature, key=0)
    bad_target, bad_draft = spoil(pair.target, "big"), spoil(pair.draft, "small")
    for draft in (pair.draft, None):
        with pytest.raises(FloatingPointError, match=r"target model \(big\) .* not finite"):
            again(bad_target, draft)
    with pytest.raises(FloatingPointError, match=r"draft model \(small\) .* not finite"):
        again(pair.target, bad_draft)


# Shapes.


def test_buckets():
    sizes = [bucket(n) for n in range(1, 2000)]
    assert sizes == sorted(sizes)
    assert sorted(set(sizes))[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    for n, size in enumerate(sizes, 1):
        assert n <= size <= max(n, 1.5 * (n - 1))
        assert bucket(size) == size
    assert (bucket(5, smallest=16), bucket(17, smallest=16), bucket(0)) == (16, 24, 1)


def test_pack():
    inputs = pack([[5, 6, 1], [7]], start_id=9, rows=3, width=4)
    assert inputs.source.tolist() == [[5, 6, 1, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert inputs.source_len.tolist() == [3, 1, 1]
    assert inputs.prompt.tolist() == [[9], [9], [9]]
    assert inputs.prompt_len.tolist() == [1, 1, 1]
    assert {x.dtype for x in jax.tree.leaves(inputs)} == {jnp.dtype("int32")}


def test_a_start_token_other_than_padding(pair, plain):
    """It is the prompt, and no part of the output."""
    other = dataclasses.replace(
        pair.target, config=dataclasses.replace(pair.target.config, decoder_start_token_id=7)
    )
    found = generate(other, None, TEXTS).tokens
    assert found != plain.tokens
    assert generate(other, pair.draft, TEXTS).tokens == found  # though the draft has another


@pytest.mark.parametrize("speculates", [True, False])
def test_nothing_compiles_again(pair, speculates):
    """Other texts in the bucket, another seed, temperature, filter and budget; fewer live rows."""
    draft = pair.draft if speculates else None

    def traces():
        return loop.start._cache_size(), loop.decode._cache_size()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the empty text
        sample(pair.target, draft, TEXTS)
        before = traces()
        sample(pair.target, draft, TEXTS[::-1], key=jax.random.key(7), temperature=0.3)
        sample(pair.target, draft, ["", *TEXTS[:7]], max_new_tokens=20)
        # One row left in the last batch is a batch of one, compiled once and for all.
        assert traces() == before


# What is watched.


@pytest.mark.parametrize("name", ["draft", "twin"])
def test_summary(pair, name):
    """Accepted, corrections and bonus are all tokens; what was rejected was corrected."""
    result = generate(pair.target, getattr(pair, name), TEXTS)
    found = result.summary
    assert found.tokens == found.accepted + found.corrections + found.bonus == sum(result.emitted)
    assert (found.outputs, found.iterations) == (8, result.target_calls.sum())
    assert (found.verified, found.accepted) == (result.verified.sum(), result.accepted.sum())
    assert found.tokens_per_iteration == result.block_efficiency
    assert len(found.acceptance) == 4
    if name == "twin":  # every draft is accepted to its end, or to the end of the output
        assert found.corrections == 0
        assert found.acceptance == [1, 1, 1, 1]
        ended = [row.emitted % 5 != 0 and row.emitted < BUDGET for row in result.rows]  # by a draft
        assert found.bonus == found.iterations - sum(ended)
    else:
        assert found.corrections > found.bonus > 0


def test_summary_without_a_draft(plain):
    found = plain.summary
    assert found.tokens == found.bonus == found.iterations
    assert (found.verified, found.corrections, found.acceptance) == (0, 0, [])
    assert specjax.Result([]).summary.tokens_per_iteration == 0


@pytest.mark.sweep
def test_expected_and_measured_speedup(pair):
    """A blank text is left out. A policy is part of what is measured."""
    found = specjax.measure_speedup(
        pair.target, pair.draft, [*TEXTS[:2], ""], batch_size=2, policy="heuristic", repeats=1
    )
    assert set(found.phases) == {"draft", "verify"}
    assert min(found.costs.c, found.costs.v(4), found.speedup, found.speedup_end_to_end) > 0
    assert found.predicted is None or found.predicted > 0
    assert found.identical()


def test_estimates_by_hand():
    """Two batches of two rows: a batch lasts as long as its slowest row, and drafts as long as the
    row that drafts most levels, of two nodes each."""

    def row(calls, levels, emitted):
        accepted = emitted - calls
        drafted = 2 * levels, levels
        return specjax.Row(0, 0, "", [5] * emitted, calls, *drafted, accepted, [0] * 5, [0] * 4)

    batches = [[row(3, 12, 9), row(5, 20, 7)], [row(2, 8, 8), row(2, 0, 2)]]
    none: dict = {}
    found = timing.Comparison(none, none, {timing.SPECULATIVE: batches}, none,
                              Costs(0.1, [1.5] * 5, rest=0.1))  # fmt: skip
    # 5 + 2 calls, 9 + 8 tokens and 20 + 8 draft steps; a round takes 1.6 beside these.
    assert dict(found.phases) == pytest.approx({"draft": 2.8, "verify": 11.2})
    assert found.predicted == pytest.approx(17 / 14)
    with pytest.raises(ValueError, match="`compare` does it"):
        dataclasses.replace(found, _costs=None).predicted  # noqa: B018


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([""], {}, "every text is blank"),
        (["a"], {"repeats": 0}, "repeats"),
        (["a"], {"tree": "oak"}, "oak"),
        ("a", {}, "list of"),
    ],
)
def test_what_cannot_be_measured(pair, texts, options, said):
    with pytest.raises(ValueError, match=said):
        specjax.measure_speedup(pair.target, pair.draft, texts, **options)
