"""Rows admitted while others run: the tokens of every row are those that it has alone, whenever it
was admitted and beside whom; nothing is compiled twice, and no cache is copied.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagles
from specjax import decoding, loop
from specjax.decoding import Request, Running
from specjax.drafters import ngram
from specjax.drafters.base import ModelDrafter
from specjax.drafters.switch import switch
from specjax.models.hub import Checkpoint
from specjax.results import Row
from specjax.sampling import sampling
from table_models import random_table
from tiny_models import config_of

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
    """Of a table: as decoder-only, or behind an encoder."""
    return Checkpoint("table", model, config_of(family, V, 1), None, (EOS,))


def by_model() -> ModelDrafter:
    """Right now and then."""
    return ModelDrafter(dataclasses.replace(TABLE, table=0.7 * TABLE.table + 0.5 * NEAR.table))


def bigram() -> ngram.Bigram:
    return ngram.bigram(ngram.count([[3, 4, 1, 2], [5, 3, 2], [6, 1, 3]], V, 0))


def made(name: str, temperature: float = 1.0):
    """(method, target) by the name of a drafter, policy, rule or tree; with "t5" of an
    encoder-decoder."""
    drafter, _, kind = name.partition(", ")
    target = checkpoint(TABLE, "t5" if kind == "t5" else "gpt2")
    options = {"sampling": sampling(temperature), "gamma": 3}
    if "EAGLE" in drafter:
        target = eagles.target_of(kind)
        return decoding.build(target, eagles.eagle_of(target, 1), **options), target
    some = {
        "plain": lambda: None,
        "model": by_model,
        "lookup": lambda: ngram.PromptLookup(V),
        "bigram": bigram,
        "switch": lambda: switch([bigram(), by_model()], target, "bandit"),
    }[drafter]()
    if kind.startswith(("fixed", "best_first")):
        return decoding.build(target, some, tree=kind, **options), target
    if kind in ("hedge", "ucb", "gammatune"):
        options["policy"] = kind
    if kind == "gumbel":
        options["rule"] = kind
    method = decoding.build(target, some, **options)
    return (decoding.with_log(method, BUDGET) if kind == "logged" else method), target


def stream(method, target, batch_size=3, **options) -> list[Row]:
    settings = {"max_new_tokens": BUDGET, "key": KEY, "budgets": BUDGETS}
    return list(decoding.stream(method, target, IDS, batch_size=batch_size, **settings | options))


def batches(method, target, size=3, **options) -> list[Row]:
    """Whole batches one after the other: nothing is admitted."""
    before = loop.admit._cache_size()
    rows = stream(method, target, size, admits=size, **options)
    assert loop.admit._cache_size() == before
    return rows


def in_order(method, target, order, every=0, at_once=1) -> list[Row]:
    """Rows by input, of requests that are admitted in another order."""
    running = Running(
        method, target, rows=3, width=16, max_new_tokens=BUDGET, key=KEY, at_once=at_once
    )
    requests = [Request(i, 0, IDS[i], BUDGETS[i]) for i in order]
    found = decoding._decoded(running, requests, every > 0, every)
    return sorted((row for row in found if isinstance(row, Row)), key=lambda row: row.index)


KINDS = [
    "plain", "plain, t5", "plain, gumbel", "model", "model, gumbel", "model, hedge", "model, ucb",
    "model, gammatune", "model, logged", "lookup", "lookup, t5", "switch", "EAGLE, t5",
    "EAGLE, gpt", "model, fixed(branches=(2, 1))", "model, best_first(width=2, depth=2, nodes=4)",
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
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


@pytest.mark.parametrize("name", ["plain", "model", "model, best_first(width=2, depth=2, nodes=4)"])
def test_greedy_rows_and_any_number_of_them(name):
    """Also one at a time, several at a time, and in more rows than there are inputs; twins too."""
    method, target = made(name, temperature=0.0)
    alone = batches(method, target, 1)
    assert alone[0].tokens == alone[4].tokens
    for rows, admits in ((1, 1), (3, 1), (4, 2), (12, 1)):
        assert stream(method, target, rows, admits=admits) == alone
    assert in_order(method, target, range(len(IDS))[::-1], every=1, at_once=2) == alone


def test_samples_and_a_later_beginning():
    """Draws of one input are rows of their own."""
    method, target = made("model")
    expected = batches(method, target, samples=3)
    assert len({tuple(row.tokens) for row in expected[:3]}) == 3
    assert stream(method, target, samples=3) == expected
    assert stream(method, target, samples=3, first=7) == expected[7:]
    assert stream(method, target, samples=3, first=30) == []
