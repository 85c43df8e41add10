"""experiments.benchmark: the distribution of the forced rule and its work, floors, and the
command."""

import dataclasses
import json
import math
import random
import types

import jax
import numpy as np
import pytest

import command_line
from configs import benchmark_cpu, benchmark_gpu
from experiments.benchmark import forced, measure, models, peers, tables
from experiments.benchmark.cases import PARTS, SHAPES, Case, chosen, step_bytes, suite
from specjax.measure.timing import PLAIN, SPECULATIVE
from tiny_models import slow

TINY = Case("tiny", "tiny-draft", batch=32, tokens=40, buffer=48, source=5)


@pytest.fixture(scope="module")
def both():
    """Target and draft with random weights."""
    return measure.Lab(None).pair(TINY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_tokens_are_accepted_with_the_chance_that_is_given(both, temperature):
    case = dataclasses.replace(TINY, temperature=temperature, alpha=0.7)
    target, draft = both
    rows = measure.call(case, target, measure.build(case, target, draft))[2]
    trials, accepted = sum(sum(row.tested) for row in rows), sum(row.accepted for row in rows)
    assert all(row.emitted == case.tokens for row in rows)
    deviation = math.sqrt(trials * 0.7 * 0.3)  # 1,700 trials: α is seen within .06
    assert abs(accepted - 0.7 * trials) < 5 * deviation
    assert trials > 1000
    # And the rows take as many rounds as that gives: 32 of them, each by itself.
    mean, deviation = forced.rounds(0.7, case.gamma, case.tokens, 1)
    assert abs(np.mean([row.target_calls for row in rows]) - mean) < 4 * deviation / math.sqrt(32)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_certain_acceptance_and_certain_rejection(both, alpha):
    case = dataclasses.replace(TINY, alpha=alpha, batch=2)
    rows = measure.call(case, both[0], measure.build(case, *both))[2]
    assert [row.accepted for row in rows] == [30 * alpha] * 2  # 10 rounds of 3 + 1, or 40 of 1
    assert [row.target_calls for row in rows] == [10 if alpha else 40] * 2


def test_what_a_step_must_read():
    """tiny: E 16, 2 heads of 8, F 24, 2 decoder layers, V 64."""
    layer = 4 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 24 + 24 * 16 + 3 * 16
    weights = 2 * layer + 16 + 64 * 16
    cache = 2 * 3 * 2 * 16 * (5 + 2.5)  # layers, rows, keys and values, H·D, slots
    found = step_bytes(SHAPES["tiny"], batch=3, source=5, slots=2.5, itemsize=4)
    assert found == 4 * (weights + cache)
    parameters = models.make("tiny", dtype="float32", weights="random").model.params
    read = sum(x.size for name in ("decoder", "decoder_norm", "head")
               for x in jax.tree.leaves(parameters[name]))  # fmt: skip
    crossing = 2 * 16 * 32  # read once per input, and not in a step
    assert weights == read - crossing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_have_their_dtype_and_say_different_things(dtype):
    case = dataclasses.replace(TINY, dtype=dtype, batch=8)
    target, _ = measure.Lab(None).pair(case)
    assert {x.dtype.name for x in jax.tree.leaves(target.model.params)} == {dtype}
    rows = measure.call(case, target, measure.plain_of(case, target))[2]
    assert len({tuple(row.tokens) for row in rows}) > 4


def test_models_that_always_agree_accept_everything():
    case = dataclasses.replace(TINY, weights="agreeing", batch=2)
    target, draft = measure.Lab(None).pair(case)
    rows = measure.call(case, target, measure.build(case, target, draft))[2]
    assert [row.accepted for row in rows] == [30, 30]
    assert [row.tokens for row in rows] == [[0] * 40] * 2


def test_suites_vary_one_factor_at_a_time():
    for made in (benchmark_cpu, benchmark_gpu):
        config = made.get_config()
        base = Case(**config.base.to_dict()).cell
        parts = suite(config)
        assert set(parts) == set(PARTS)
        for name in ("gamma", "batch", "source"):
            for case in parts[name]:
                assert sum(case.cell[field] != base[field] for field in base) <= 1
        assert len(chosen(config)) == len(set(chosen(config)))
    assert len(suite(benchmark_gpu.get_config())["paper"]) == 12
    assert len(chosen(benchmark_gpu.get_config("paper-base"))) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "t5-huge"}, "target='t5-huge': choose one of tiny"),
        ({"kind": "sing"}, "kind='sing': choose one of decode"),
        ({"buffer": 44}, "buffer=44 cannot hold the start token, 40 tokens .* it takes 45"),
    ],
)
def test_cases_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize("temperature", [0.0, slow((1.0,))])
def test_the_loop_that_drafts_nothing(temperature):
    """It calls the target once for each token; at temperature 0 these are plain decoding's."""
    case = dataclasses.replace(
        TINY, kind="silent", temperature=temperature, batch=2, tokens=6, buffer=16
    )
    row = measure.measure(measure.Lab(SETTINGS), case)
    assert row["verified"] == 0
    assert (len(row["speedups"]), row["keys"]) == (2, 6)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    section = tables.silent([case.cell | row])
    assert len(section.rows) == 1
    assert f"{row['speedup']:.2f}" in section.columns[-1][1](section.rows[0])


SETTINGS = types.SimpleNamespace(repeats=2, keys_per_repeat=3, steps=1, bandwidth_mb=1, peers=False)


def test_figures_are_averaged_over_keys_that_no_two_repeats_share(both):
    """And say beside the forced α which was seen, and beside τ which was to be expected."""
    case = dataclasses.replace(TINY, batch=2, tokens=8, buffer=16)
    methods = {PLAIN: measure.plain_of(case, both[0]), SPECULATIVE: measure.build(case, *both)}
    calls = [measure.call(case, both[0], methods[SPECULATIVE], key)[2] for key in range(6)]
    rounds = [max(row.target_calls for row in rows) for rows in calls]
    assert len(set(rounds)) > 1
    order = random.Random(0)
    turns = [
        measure.turn(case, both[0], methods, measure.keys_of(SETTINGS, repeat), order)
        for repeat in (1, 2)
    ]
    row = case.cell | measure._counts(case, turns) | measure._speedup(turns, SPECULATIVE)
    row |= forced.expected(row)
    assert row["rounds_by_key"] == [rounds[:3], rounds[3:]]
    assert (row["keys"], row["tau"]) == (6, 8 / (sum(rounds) / 6))
    every = [row for rows in calls for row in rows]
    tested = sum(sum(row.tested) for row in every)
    assert row["alpha_seen"] == sum(row.accepted for row in every) / tested
    mean, deviation = forced.rounds(case.alpha, case.gamma, 8, 2)
    assert row["tau_expected"] == 8 / mean
    assert row["tau_off"] == pytest.approx((mean - sum(rounds) / 6) / deviation * math.sqrt(6))
    by_repeat = [sum(rounds[:3]) / 3, sum(rounds[3:]) / 3]
    scaled = [
        speedup * taken / mean for speedup, taken in zip(row["speedups"], by_repeat, strict=True)
    ]
    assert row["speedup_at_alpha"] == pytest.approx(sum(scaled) / 2)
    made = {"ms": 1.0, "ms_low": 1.0, "ms_high": 1.0, "floor_ms": 1.0, "whole_ms": 1.0}
    made |= {"tokens_per_s": 1.0}
    row |= {"autoregressive": made, "speculative": made, "predicted": 1.0, "overhead_share": 0.1}
    row |= {"peer_note": ""}
    section = tables.decoding([row])
    cells = {name: cell(section.rows[1]) for name, cell in section.columns}
    assert cells["α seen"] == f"{row['alpha_seen']:.2f}"
    assert cells["τ expected"] == f"{row['tau_expected']:.2f} ± {row['tau_error']:.2f}"
    assert cells["τ"] == f"{row['tau']:.2f} ({row['tau_low']:.2f} to {row['tau_high']:.2f})"
    assert "NOT" not in section.words
    strange = row | {"rounds_by_key": [[8] * 3] * 2}  # no draft accepted, six times
    assert "no luck, in tiny" in tables.decoding([strange | forced.expected(strange)]).words


def test_one_key_does_not_say_that_speculation_never_pays():
    """The draw of probability 1.9% that all batches once shared: τ = 2.29 where α gives 2.88."""
    config = benchmark_cpu.get_config()
    cells = [case.cell for case in suite(config)["batch"]]
    speedups = (0.98, 0.91, 0.90, 0.79, 0.70)
    pace = {"tokens_per_s": 1.0}
    rows = [
        cell | {"speedup": one, "rounds": 21, "tau": 48 / 21, "tau_rows": 2.3, "alpha_seen": 0.66,
                "predicted": one, "v": 1.3, "c": 0.3, "autoregressive": pace, "speculative": pace}
        for cell, one in zip(cells, speedups, strict=True)
    ]  # fmt: skip

    def words_of(rows):
        rows = [row | forced.expected(row) for row in rows]
        return tables.batches(config, rows).words

    words = words_of(rows)
    assert "those of 1 key, too few to say" in words
    assert "stops paying between batch 4 and 8 at the expected τ" in words
    many = [
        row | {"speedups": [row["speedup"]] * 5, "rounds_by_key": [[21] * 4] * 5} for row in rows
    ]
    assert "Over 20 keys speculation stops paying before batch 1 as measured" in words_of(many)


def test_the_papers_tables():
    """A line for each row of the paper that the suite has."""
    config = benchmark_gpu.get_config()
    rows = [
        {**case.cell, "speedup": 1.8, "predicted_c_v": 2.0, "c": 0.02, "v": 1.0, "rounds": 30}
        for case in suite(config)["paper"]
    ]
    assert len(tables.paper(config, rows).rows) == 12


def test_where_speculation_stops_paying():
    rows = [{"batch": b, "speedup": g} for b, g in ((1, 1.5), (4, 1.0), (8, 0.9))]
    assert tables.where(rows, "speedup") == "between batch 4 and 8"
    assert tables.where(rows[:2], "speedup") == "beyond batch 4"
    assert tables.where(rows[2:], "speedup") == "before batch 8"


SHRUNK = """
from configs import benchmark_cpu


def get_config(part="all"):
    config = benchmark_cpu.get_config(part)
    config.repeats, config.steps, config.bandwidth_mb, config.peers = 1, 1, 1, False
    config.keys_per_repeat = 2
    config.base.update(target="tiny", draft="tiny-draft", source=5, tokens=8, buffer=16)
    config.gammas = (3,)
    config.batches, config.sources = (1, 2), (5,)
    config.buffers, config.buffer_batches = (16,), (1,)
    config.shapes = (("tiny", ""),)
    config.agreeing = (("tiny", "tiny-draft"),)
    config.silent = (("tiny", "tiny-draft"),)
    return config
"""


def command(monkeypatch, capsys, tmp_path, part, *arguments):
    (tmp_path / "shrunk.py").write_text(SHRUNK)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    return command_line.run(
        monkeypatch,
        capsys,
        "experiments.benchmark",
        f"--config={tmp_path / 'shrunk.py'}{part}",
        f"--workdir={tmp_path / 'out'}",
        *arguments,
    )


@pytest.mark.slow
def test_the_command_measures_what_is_missing(monkeypatch, capsys, tmp_path):
    outcome = command(monkeypatch, capsys, tmp_path, ":batch")
    assert outcome.status == 0, outcome.stderr
    outcome = command(monkeypatch, capsys, tmp_path, "")
    assert outcome.status == 0, outcome.stderr
    path = tmp_path / "out" / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ["decode"] * 5 + ["silent"] * 2
    assert [row["kind"] for row in rows] == kinds
    base = rows[0]
    assert base["autoregressive"]["of_floor"] > 0
    assert base["peer_note"] == "skipped: --config.peers is off"
    assert base["predicted"] > 0
    assert base["tau"] == 8 / base["rounds"]
    assert base["keys"] == 2
    wanted = base["speedup"] * base["tau_expected"] / base["tau"]
    assert base["speedup_at_alpha"] == pytest.approx(wanted)
    assert "speculative" not in rows[2]
    assert (rows[3]["share"], rows[4]["alpha_seen"]) == (0.25, 1.0)
    for title in ("Decoding", "Batches", "Where"):
        assert f"## {title}" in (tmp_path / "out" / "report.md").read_text()
    assert "tiny + tiny-draft B2 T16 S5 N8" in outcome.stdout
    before = path.read_bytes()
    assert command(monkeypatch, capsys, tmp_path, "").status == 0
    assert path.read_bytes() == before
    outcome = command(monkeypatch, capsys, tmp_path, "", "--config.repeats=2")
    assert outcome.status == 1
    assert "holds rows of another machine" in outcome.stderr


def test_a_part_that_is_not_known(monkeypatch, capsys, tmp_path):
    outcome = command(monkeypatch, capsys, tmp_path, ":everything")
    assert outcome.status == 1
    assert "'everything' is not known: choose one of all, base, gamma" in outcome.stderr


def test_without_torch_peers_are_skipped_with_a_word(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.absent() == "skipped: torch is not installed"


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_says_the_same_on_the_same_weights():
    pytest.importorskip("torch")
    for weights in ("random", "agreeing"):
        case = dataclasses.replace(TINY, weights=weights, batch=1)
        lab = measure.Lab(None)
        target, _ = lab.pair(case)
        ours = [row.tokens for row in measure.call(case, target, measure.plain_of(case, target))[2]]
        peer, ids = lab.peer(case), models.sources(case)
        assert peer.generate(ids, case.tokens) == ours
        assert peer.generate(ids, case.tokens, gamma=3) == ours
