"""Rows admitted while others run: the tokens of every row are those that it has alone, whenever it
was admitted and beside whom; nothing is compiled twice, and no cache is copied.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagles
import test_loops
from specjax import loop
from specjax.checkpoints import Checkpoint
from specjax.decoding import building, streaming
from specjax.decoding.run import Run
from specjax.decoding.running import Running
from specjax.decoding.starting import Request
from specjax.drafters import ngram
from specjax.drafters.base import ModelDrafter
from specjax.drafters.switch import switch
from specjax.models.memory import nbytes
from specjax.results import Progress, Row
from specjax.sampling import Sampling
from table_models import MarkovModel, chain, random_table
from tiny_models import config_of, quick

V, EOS, BUDGET, KEY = 7, 2, 12, jax.random.key(3)
TABLE, NEAR = (random_table(seed, V, forbidden=0, dtype=jnp.float32) for seed in (1, 2))
# Ten inputs of 1 to 6 ids, one of them twice.
IDS = [
    [1, 3],
    [4],
    [5, 0, 3, 3],
    [6, 6, 1],
    [1, 3],
    [3, 0, 5, 1, 4, 4],
    [0, 1],
    [6],
    [4, 1],
    [5, 5],
]
BUDGETS = [12, 1, 7, 12, 12, 3, 12, 9, 12, 2]


def checkpoint(model, family="gpt2") -> Checkpoint:
    """A checkpoint of a table: as decoder-only, or behind an encoder."""
    return Checkpoint("table", model, config_of(family, V, 1), None, (EOS,))


def by_model() -> ModelDrafter:
    """Right now and then."""
    return ModelDrafter(dataclasses.replace(TABLE, table=0.7 * TABLE.table + 0.5 * NEAR.table))


def bigram() -> ngram.Bigram:
    return ngram.bigram(ngram.count([[3, 4, 1, 2], [5, 3, 2], [6, 1, 3]], V, 0))


def made(name: str, temperature: float = 1.0):
    """(method, target) by the names of a drafter and of a policy, rule or tree; "t5": of an
    encoder-decoder."""
    drafter, _, kind = name.partition(", ")
    target = checkpoint(TABLE, "t5" if kind == "t5" else "gpt2")
    options = {"sampling": Sampling(temperature), "gamma": 3}
    if drafter == "EAGLE":
        target = eagles.target_of("gpt", V)
        return building.build(target, eagles.eagle_of(target, 1), **options), target
    draft = {
        "plain": lambda: None,
        "model": by_model,
        "switch": lambda: switch([ngram.PromptLookup(V), bigram(), by_model()], target, "bandit"),
    }[drafter]()
    if kind.startswith(("fixed", "best_first")):
        options["tree"] = kind
    elif kind == "gumbel":
        options["rule"] = kind
    elif kind == "hedge":
        options["policy"] = kind
    method = building.build(target, draft, **options)
    return method, target


def stream(method, target, batch_size=3, **options) -> list[Row]:
    settings = {"max_new_tokens": BUDGET, "key": KEY, "budgets": BUDGETS}
    return list(streaming.stream(method, target, IDS, batch_size=batch_size, **settings | options))


def batches(method, target, size=3, **options) -> list[Row]:
    """Whole batches one after the other: nothing is admitted."""
    before = loop.admit._cache_size()
    rows = stream(method, target, size, admits=size, **options)
    assert loop.admit._cache_size() == before
    return rows


def in_order(method, target, order, rows=3, every=0, at_once=1) -> list[Row]:
    """Rows by input, of requests that are admitted in another order."""
    run = Run(BUDGET, KEY, every=every, eager=every > 0)
    running = Running(method, target, run, rows=rows, width=16, at_once=at_once)
    requests = [Request(i, 0, IDS[i], BUDGETS[i]) for i in order]
    found = streaming.decoded(running, requests)
    return sorted((row for row in found if isinstance(row, Row)), key=lambda row: row.index)


KINDS = ["model, hedge", "switch, t5", "EAGLE", "model, best_first(width=2, depth=2, nodes=4)"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", quick(KINDS, *KINDS[:2]))
def test_a_row_is_the_same_whenever_it_was_admitted(name):
    """Tokens, counts and the log of rounds, at temperature 1 with the EOS and the budgets of each
    input: in three rows, one by one in their places, in any order, with pauses or without, as in
    whole batches."""
    method, target = made(name)
    expected = batches(method, target)
    emitted = [row.emitted for row in expected]
    assert all(count <= budget for count, budget in zip(emitted, BUDGETS, strict=True))
    assert any(row.tokens[-1] == EOS and row.emitted < BUDGET for row in expected)
    assert len({tuple(row.tokens) for row in expected}) > 5
    before = loop.admit._cache_size()
    assert stream(method, target) == expected
    assert loop.admit._cache_size() == before + 1
    order = np.random.default_rng(0).permutation(len(IDS)).tolist()
    assert in_order(method, target, order, every=2) == expected
    assert loop.admit._cache_size() == before + 1


@pytest.mark.sweep
def test_greedy_rows_and_any_number_of_them():
    """One at a time; several in a call, in both orders; twins too. A fixed tree."""
    method, target = made("model, fixed(2, 1)", temperature=0.0)
    alone = batches(method, target, 1)
    assert alone[0].tokens == alone[4].tokens
    assert stream(method, target, 4, admits=2, width=16) == alone
    backwards = range(len(IDS))[::-1]
    assert in_order(method, target, backwards, rows=4, every=1, at_once=2) == alone


def test_samples_and_a_later_beginning():
    """Draws of one input are rows of their own, also where noise goes by position."""
    method, target = made("plain, gumbel")
    expected = batches(method, target, num_samples=3)
    assert len({tuple(row.tokens) for row in expected[:3]}) > 1
    assert stream(method, target, num_samples=3) == expected
    assert stream(method, target, num_samples=3, only=range(7, len(expected))) == expected[7:]
    assert stream(method, target, num_samples=3, only=[]) == []


# Each is what some row reads before it writes.
NEEDED = [
    ".keys", ".tokens", ".limit", ".rounds", ".cache", ".drafter.cache", ".salt", ".stats.emitted",
    "[0].target",
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", quick(NEEDED, ".keys", ".drafter.cache", "[0].target"))
def test_what_is_not_replaced_shows(name, monkeypatch):
    """A planted fault: one part of context or state stays as the last row has left it."""
    kind = "t5" if name == "[0].target" else "hedge"
    method, target = made("model, hedge" if kind == "hedge" else "model, t5")
    expected = batches(method, target)
    assert stream(method, target) == expected
    axes_of, faults = loop.row_axes, []

    def faulty(begun, arguments, made):
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(made)]
        found = axes_of(begun, arguments, made)
        faults.extend(path for path in paths if name in path)
        return [None if name in path else axis for path, axis in zip(paths, found, strict=True)]

    monkeypatch.setattr(loop, "row_axes", faulty)
    loop.admit.clear_cache()
    wrong = stream(method, target)
    loop.admit.clear_cache()
    assert faults
    assert wrong != expected


def test_an_axis_that_is_not_the_rows_alone():
    """The error has its name and its shapes."""

    def begun(x):
        return {"a": x[None], "b": jnp.zeros((3 * len(x),)), "c": jnp.zeros((4,))}

    two = (jnp.zeros((2,)),)
    message = r"'b'\] has the shape \(6,\) for 2 rows and \(9,\) for 3"
    with pytest.raises(ValueError, match=message):
        loop.row_axes(begun, two, begun(*two))
    wide = dict(begun(*two), b=two[0])
    assert loop.row_axes(lambda x: begun(x) | {"b": x}, two, wide) == [1, 0, None]


@pytest.mark.parametrize("draft", [None, by_model()])
def test_nothing_compiles_again(draft):
    """Other ids, seeds, temperatures, budgets, pauses: one program to start, one for rounds, and
    one that admits."""

    def programs():
        return [f._cache_size() for f in (loop.start, loop.decode, loop.admit)]

    def run(seed, temperature, texts, **options):
        settings = {"max_new_tokens": BUDGET, "key": jax.random.key(seed), "width": 16}
        chosen = Sampling(temperature)
        method = building.build(target, draft, gamma=3, sampling=chosen)
        run = Run(batch_size=3, **{"eager": True} | settings | options)
        found = streaming.as_they_end(method, target, texts, run)
        assert sum(isinstance(one, Row) for one in found) == len(texts)

    for program in (loop.start, loop.decode, loop.admit):
        program.clear_cache()
    target = checkpoint(TABLE)
    run(0, 0.7, IDS)
    assert programs() == [1, 1, 1]
    run(1, 1.3, IDS[::-1], eager=False, budgets=BUDGETS)
    run(2, 1.0, IDS * 2, every=2)
    run(3, 0.9, IDS[:2] * 2, every=1)
    assert programs() == [1, 1, 1]


@pytest.mark.sweep
def test_no_cache_is_copied():
    """In the compiled admission of T5s, buffer 512, d_kv 8: all is written in place."""
    model = test_loops.target()
    method = test_loops.alone(test_loops.method_of(model, model))

    def arguments(rows):
        inputs = test_loops.translate([[3, 1]] * rows)
        return inputs, test_loops.keys_of(rows), jnp.full((rows,), 9, jnp.int32)

    begun = jax.eval_shape(functools.partial(method.start, buffer_len=512), *arguments(3))
    compiled = loop.admit.lower(method, *begun, jnp.int32([0, 2]), *arguments(2)).compile()
    text = compiled.as_text()
    assert re.search(r"\[3,2,(8,512|512,8)\]", text)
    assert not re.search(r"= f32\[3,2,(8,512|512,8)\]\S* copy\(", text)
    kept = nbytes(begun)
    assert compiled.memory_analysis().alias_size_in_bytes > 0.99 * kept


# What is handed out, and when.

COUNT = checkpoint(chain([1, 2, 3, 4, 5, 6, 0]))  # V = 7, counts and never ends


def test_rows_are_handed_out_as_they_end():
    """By hand: two rows, budgets 3, 9, 3, 1, 2. The first ends in round 3, its place is another's
    in round 4, and so on; the second ends with the last of them, in round 9."""
    method = building.plain(dataclasses.replace(COUNT, eos_ids=(9,)), Sampling(0.0))
    options = {"max_new_tokens": 9, "key": KEY, "batch_size": 2, "budgets": [3, 9, 3, 1, 2]}
    run = Run(every=2, eager=True, **options)
    events = list(streaming.as_they_end(method, COUNT, [[0]] * 5, run))
    rows = [event.index for event in events if isinstance(event, Row)]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert rows[:3] == [0, 2, 3]
    last = dict.fromkeys(range(5), 0)
    for event in events:  # of each row its tokens grow, by two at most
        assert last[event.index] < len(event.tokens) <= last[event.index] + 2
        assert event.tokens == [(1 + i) % 7 for i in range(len(event.tokens))]
        last[event.index] = len(event.tokens)
    assert sum(isinstance(event, Progress) for event in events) >= 4
    assert [row.index for row in streaming.stream(method, COUNT, [[0]] * 5, **options)] == [
        *range(5)
    ]


def test_several_free_rows_are_filled_at_once(monkeypatch):
    """With `admits=2` the loop returns when two of four rows are free, and not when one is."""
    method = building.plain(dataclasses.replace(COUNT, eos_ids=(9,)), Sampling(0.0))
    free, admit = [], Running.admit
    monkeypatch.setattr(
        Running,
        "admit",
        lambda self, some: free.append((self.free, len(some))) or admit(self, some),
    )
    options = {"max_new_tokens": 9, "key": KEY, "batch_size": 4, "admits": 2}
    budgets = [1, 2, 4, 5, 1, 1, 1]
    rows = list(streaming.stream(method, COUNT, [[0]] * 7, budgets=budgets, **options))
    assert [row.emitted for row in rows] == budgets
    assert free == [(4, 4), (2, 2), (2, 1)]


def test_requests_of_like_length_run_together():
    """In their order, up to 64, 256, 1024 ids; a single long one makes no other dear."""
    lengths = [3, 70, 64, 5, 256, 257, 60]
    requests = [Request(i, 0, [1] * length, 5) for i, length in enumerate(lengths)]
    found = [[request.index for request in some] for some in streaming.alike(requests)]
    assert found == [[0, 2, 3, 6], [1, 4], [5]]
    many = [Request(i, 0, [1], 5) for i in range(streaming.POOL + 1)]
    assert [len(some) for some in streaming.alike(many)] == [streaming.POOL, 1]
    target = dataclasses.replace(COUNT, config=dataclasses.replace(COUNT.config, n_positions=512))
    method = building.plain(target, Sampling(0.0))
    texts = [[0] * 3, [1] * 70, [2] * 4, [3], [4] * 65]
    rows = streaming.stream(method, target, texts, max_new_tokens=4, key=KEY, batch_size=2)
    assert [row.tokens[0] for row in rows] == [1, 2, 3, 4, 5]


def test_blank_inputs_hold_no_row():
    """They come first as rows end, and at their places in order."""
    target = checkpoint(COUNT.model, "t5")
    method = building.plain(target, Sampling(0.0))
    texts = [[], [1], [2], [], [3], [4]]
    options = {"max_new_tokens": 6, "key": KEY, "batch_size": 2}
    with pytest.warns(UserWarning, match=r"2 empty input\(s\)"):
        ended = list(streaming.as_they_end(method, target, texts, Run(eager=True, **options)))
    with pytest.warns(UserWarning, match=r"2 empty input\(s\)"):
        rows = list(streaming.stream(method, target, texts, **options))
    assert [row.index for row in ended[:2]] == [0, 3]
    assert [row.index for row in rows] == list(range(6))
    assert [row.index for row in rows if not row.tokens] == [0, 3]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_that_are_named_twice(batch_size):
    """They are decoded once and come twice, each time at their place."""
    method, options = building.plain(COUNT, Sampling(0.0)), {"max_new_tokens": 6, "key": KEY}
    texts, only = [[0], [2], [4]], [2, 0, 0, 1, 2]
    run = Run(only=only, batch_size=batch_size, **options)
    ended = streaming.as_they_end(method, COUNT, texts, run)
    rows = list(ended)
    assert sorted(row.index for row in rows) == [0, 1, 2]
    for order in (rows, rows[::-1]):
        assert [row.index for row in streaming.in_order(order, only=only)] == only
    found = streaming.stream(method, COUNT, texts, only=only, batch_size=batch_size, **options)
    assert [row.tokens[0] for row in found] == [5, 1, 1, 3, 5]


def test_a_fault_of_a_model_is_named_when_it_comes():
    """The target's logits after id 6 are NaN, which only an input reads that is admitted late.
    What has ended before is handed out."""
    broken = MarkovModel(COUNT.model.table.at[6].set(jnp.nan))
    target = dataclasses.replace(COUNT, model=broken, eos_ids=(3,), name="odd")
    method = building.plain(target, Sampling(0.0))
    options = {"max_new_tokens": 9, "key": KEY, "batch_size": 2, "names": ("odd", "")}
    rows = streaming.stream(method, target, [[0], [1], [2], [0], [6], [0]], **options)
    assert [next(rows).index, next(rows).index] == [0, 1]
    with pytest.raises(FloatingPointError, match=r"target model \(odd\)"):
        list(rows)


def test_too_many_requests():
    """There is no place for them."""
    method, target = made("plain")
    running = Running(method, target, Run(4, KEY), rows=2, width=16)
    with pytest.raises(ValueError, match="3 requests are too many for 2 free rows"):
        running.admit([Request(i, 0, [1], 4) for i in range(3)])
