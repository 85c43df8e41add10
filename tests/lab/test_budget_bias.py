"""Verification budgets: the law of a round's first token, against enumeration by hand."""

import functools
import itertools

import numpy as np
import pytest

import command_line
import pairs
from configs import budgets
from experiments import tasks
from experiments.budgets import __main__ as comparison
from experiments.budgets import bias, example, schemes
from experiments.reproduce.study import Study
from specjax.measure import batches
from specjax.measure.provenance import Results
from specjax.support import files

V, G = 3, 2
EXACT = [("fixed N", 0), ("early stop", 0)]
BIASED = [("fixed N", 1), ("early stop", 1), ("global maximum", 0), ("global maximum", 1)]


def steps(positions):
    """A cost with a step at the second and at the fourth position."""
    return np.array([1.0, 1.0, 1.7, 1.75, 2.6, 2.61, 2.62])[positions]


def law_of(survival, others, weights, p, q, tokens, rule, cost, by_other):
    chance = schemes.ranked(survival, others).verified(rule, cost) @ by_other
    return schemes.emitted(p, q, schemes.by_token(chance, tokens, weights, q))


def test_the_example_of_dspark():
    """Chances .8, then .9 after A and 0 after B, and a speed of .45 at three positions."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    own = np.array([[0.8, 0.72], [0.8, 0.0]])
    one = np.array([0, 1]), np.ones(2)
    found = law_of(
        own, np.zeros((1, 0)), one[1], p, q, one[0], schemes.global_maximum,
        lambda positions: 1 / np.array([np.nan, 1, 0.5, 0.45])[positions], np.ones(1),
    )  # fmt: skip
    np.testing.assert_allclose(found, [0.85, 0.15], rtol=0, atol=1e-12)
    assert schemes.total_variation(found, p) == pytest.approx(0.15)


@pytest.fixture(scope="module")
def tables():
    """Random p of one row, and q of two rows: after no token and after each first token."""
    rng = np.random.default_rng(0)
    return [
        (rng.dirichlet(np.ones(V)), rng.dirichlet(np.full(V, 0.5), size=(2, 1 + V)))
        for _ in range(40)
    ]


def drafts(q, own):
    """Every draft of a row: its tokens, probability, and survival of its slots."""
    found = []
    for a, b in itertools.product(range(V), repeat=G):
        first, second = q[0], q[1 + a]
        beliefs = (first[a], second[b]) if own else (first.max(), second.max())
        found.append(((a, b), first[a] * second[b], np.cumprod(beliefs)))
    return found


def by_hand(p, q, name, own):
    """Every draft of both rows, its slots sorted as a list, and the first row's first token."""
    law = np.zeros(V)
    for ((a, _), w, mine), (_, u, theirs) in itertools.product(
        drafts(q[0], own), drafts(q[1], own)
    ):
        slots = [(-s, row, i) for row, of in enumerate((mine, theirs)) for i, s in enumerate(of)]
        slots.sort()
        rates, tokens = [2 / steps(2)], 2.0
        for n, (s, *_) in enumerate(slots, 1):
            tokens -= s
            rates.append(tokens / steps(2 + n))
        count = 2
        if name == "early stop":
            count = next((n for n in range(4) if rates[n + 1] < rates[n]), 4)
        if name == "global maximum":
            count = rates.index(max(rates))
        if (0, 0) in [slot[1:] for slot in slots[:count]]:
            accept = min(1, p[a] / q[0, 0, a])
            left = np.maximum(p - q[0, 0], 0)
            law[a] += w * u * accept
            law += w * u * (1 - accept) * (left / left.sum() if accept < 1 else 0)
        else:
            law += w * u * p
    return law


@pytest.mark.parametrize(("name", "own"), EXACT + BIASED)
def test_enumeration(tables, name, own):
    """The law is that of the enumeration; exact schemes have p, and the others do not."""
    worst = 0.0
    for p, q in tables:
        (mine, theirs) = (drafts(one, own) for one in q)
        survival, others = (np.array([s for *_, s in of]) for of in (mine, theirs))
        weights, by_other = (np.array([w for _, w, _ in of]) for of in (mine, theirs))
        tokens = np.array([draft[0] for draft, *_ in mine])
        found = law_of(
            survival, others, weights, p, q[0, 0], tokens, schemes.N_RULES[name], steps, by_other
        )
        np.testing.assert_allclose(found, by_hand(p, q, name, own), rtol=0, atol=1e-12)
        worst = max(worst, schemes.total_variation(found, p))
    assert (worst < 1e-12) == ((name, own) in EXACT)
    assert worst < 1e-12 or worst > 0.02


def test_halves_bound_the_total_variation(tables):
    """By independent estimates, in the mean; by the law itself it is the total variation."""
    rng = np.random.default_rng(1)
    for p, q in tables[:5]:
        law = q[0, 0]
        tv = schemes.total_variation(law, p)
        assert schemes.gain(law, law, p) == pytest.approx(tv)
        draws = rng.multinomial(20, law, size=(4000, 2)) / 20
        assert np.mean([schemes.gain(one, two, p) for one, two in draws]) < tv + 0.005
        assert np.mean([schemes.total_variation(one, p) for one, _ in draws]) > tv - 0.005


def test_both_models_along_outputs(pair, tmp_path, monkeypatch):
    """Distributions are those by which α is measured; drafts continue the known tokens."""
    examples = [tasks.Example(text, text) for text in pairs.TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    config = budgets.get_config()
    family = config.parse
    family.target, family.draft, family.drafts = pair.target.name, pair.draft.name, ()
    family.alpha_inputs, family.max_new_tokens, family.contexts = 4, 8, 4
    family.bias = {name: config[name] for name in bias.FIELDS}
    family.bias.update({"batch_sizes": (1, 2), "gammas": (2, 3), "samples": 4, "knees": (4,)})
    on = Study(family, Results(tmp_path / "results.jsonl"))
    both = bias.Pair(on)
    alpha = on.alpha(family.draft, 1.0, both.outputs)
    for index, overlaps in enumerate(alpha.overlaps):
        p, q, _ = both.along(index)
        np.testing.assert_allclose(np.minimum(p, q).sum(axis=1), overlaps, atol=1e-5)
    index = max(range(4), key=lambda i: len(both.outputs[i]))
    identity = np.array([0.0, 1.0])
    chosen = [(index, 0), (index, 1)]
    for (_, at), one in zip(chosen, bias.contexts(both, (identity, identity), chosen), strict=True):
        p, q, _ = both.along(index)
        mine = one.tokens == both.outputs[index][at]
        assert mine.sum() >= 2
        survival = dict(zip(bias.CHANCES, one.survival, strict=True))
        top, own = (
            survival[name][:, 1:] / survival[name][:, :-1]
            for name in ("top token, raw", "drawn token, raw")
        )
        np.testing.assert_allclose(top[mine, 0], q[at + 1].max(), rtol=1e-4)
        assert np.isclose(own[mine, 0][:, None], q[at + 1], rtol=1e-4).any(axis=1).all()
        assert (own < top * (1 + 1e-5)).all()
        assert (own < top * 0.9).any()  # not every draw is the most likely token
        np.testing.assert_allclose(one.weights.sum(), 1, atol=family.bias.mass)
    rows = list(bias.measure(on))
    assert len(rows) == 3 + 4 * (2 * 5 + 2 * 3)
    exact = [row for row in rows if row["scheme"] == "early stop" or (
        row["scheme"] == "fixed N" and row["chances"].startswith("top"))]  # fmt: skip
    assert max(row["largest"] for row in exact) < bias.ROUNDING
    assert max(row["largest"] for row in rows) > 0.01
    section = bias.section("parse", rows)
    assert {line["scheme"] for line in section.rows} <= {*schemes.N_RULES, "cut below 0.3"} - {
        "early stop"
    }
    assert "early stop by top token (affine 4, steps 4)" in section.words


def test_the_table_by_batch_size():
    """The best γ of smaller batches, at the same temperature and times."""
    rows = [
        {"method": method, "temperature": t, "times": times, "batch": batch, "setting": setting}
        for method, t, times, batch, setting in [
            (comparison.STATIC, 1.0, "knee 64", 4, 3),
            (comparison.STATIC, 1.0, "knee 64", 16, 1),
            (comparison.STATIC, 0.0, "knee 64", 4, 5),
            (comparison.STATIC, 1.0, "measured", 4, 6),
            (comparison.EARLY, 1.0, "knee 64", 4, 0.9),
        ]
    ]
    assert comparison.table(rows, 1.0, "knee 64", 16) == {4: 3}
    assert comparison.table(rows, 1.0, "knee 64", 32) == {4: 3, 16: 1}


def test_the_clock_shows_both_summaries_and_the_repeats():
    """Rows that lack the range of the repeats have the ratio of the rates alone."""

    def row(method, rate, of_plain, **more):
        clock = {"rate": rate, "of_plain": of_plain, "replayed": rate, "identical": None, **more}
        return {"temperature": 1.0, "batch": 32, "method": method, "clock": clock}

    def cells(*rows):
        section = comparison.by_the_clock(rows)
        return {heading: cell(rows[-1]) for heading, cell in section.columns}

    plain = row(comparison.PLAIN, 100.0, 1.0, of_plain_range=[1.0, 1.0])
    ranged = cells(plain, row("early_stop", 71.0, 0.85, of_plain_range=[0.6, 0.9]))
    assert (ranged["of plain"], ranged["by rates"]) == ("0.85", "0.71")
    assert ranged["repeats"] == "0.60 to 0.90"
    assert "repeats" not in cells(plain, row("early_stop", 71.0, 0.85))


def test_what_became_of_drafted_tokens():
    """Four drafted, three verified, one accepted; a row without a draft; one that has ended."""
    counts = (np.array(column) for column in ([4, 0, 2], [3, 0, 2], [1, 0, 2]))
    seen = example.Seen(np.array([True, True, False]), *counts)
    became = [[seen.of(row, slot) for slot in range(5)] for row in range(3)]
    first = [example.KEPT, example.REJECTED, example.IN_VAIN, example.LEFT_OUT, None]
    assert became == [first, [None] * 5, [None] * 5]


@pytest.mark.slow
def test_the_comparison(tmp_path, pair, monkeypatch, capsys):
    """A tiny pair at two batch sizes: rows and report; the same command measures nothing again."""
    examples = [tasks.Example(text, text) for text in pairs.TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: examples)
    count = min(len(examples), 8)
    file, work = tmp_path / "small.py", tmp_path / "work"
    file.write_text(
        "from configs import budgets\n\n"
        "def get_config():\n"
        "    config = budgets.get_config('parse')\n"
        f"    config.target, config.draft = {pair.target.name!r}, {pair.draft.name!r}\n"
        f"    config.outputs = config.alpha_inputs = {count}\n"
        "    config.gamma_max, config.static, config.thresholds = 2, (1, 2), (0.5,)\n"
        "    config.batch_sizes, config.accelerator_batch_sizes, config.knees = (2,), (4,), (64,)\n"
        "    config.max_new_tokens, config.temperatures, config.draws = 12, (0.0,), 2\n"
        "    config.timed_inputs, config.cost_repeats, config.repeats = 4, 1, 1\n"
        "    return config\n"
    )
    run = functools.partial(
        command_line.run, monkeypatch, capsys, "experiments.budgets",
        f"--config={file}", f"--workdir={work}",
    )  # fmt: skip
    outcome = run()
    assert outcome.status == 0, outcome.stderr
    rows = files.read_rows(work / "results.jsonl")
    assert [row["method"] for row in rows] == [*comparison.METHODS] * 2
    assert [row["times"] for row in rows[::8]] == ["measured", "knee 64"]
    for row in rows:
        assert row["rate"] > 0
        if row["method"] == row["better"]:
            assert row["of_better"] == pytest.approx(1)
    clocked = {row["method"]: row["clock"] for row in rows if "clock" in row}
    assert clocked[comparison.EARLY]["identical"]
    report = (work / "report.md").read_text()
    assert "By the clock" in report
    assert "early_stop: " in report
    assert (work / "budgets.png").stat().st_size > 0
    assert (work / "example.png").stat().st_size > 0
    monkeypatch.setattr(batches, "pass_times", None)
    assert run().status == 0
    assert files.read_rows(work / "results.jsonl") == rows
    passes = command_line.run(
        monkeypatch, capsys, "experiments.budgets.passes", f"--config={file}",
        f"--workdir={tmp_path / 'passes'}",
    )  # fmt: skip
    assert passes.status == 0, passes.stderr
    (one,) = files.read_rows(tmp_path / "passes" / "results.jsonl")
    assert (one["batch"], one["gamma"], one["positions"]) == (2, 1, 4)
    assert min(one["whole"], one["packed"], one["step"]) > 0
