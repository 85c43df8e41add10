"""experiments.benchmark: the law of the forced rule and its work, floors, bars, and the command."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

import command_line
from configs import benchmark_cpu, benchmark_gpu, benchmark_tpu
from experiments.benchmark import bars, forced, measure, models, peers, tables
from experiments.benchmark.cases import PARTS, SHAPES, Case, chosen, step_bytes, suite
from specjax import speculative
from specjax.accept import TokenRule
from specjax.pytrees import pytree

TINY = Case("tiny", "tiny-draft", batch=32, tokens=40, buffer=48, source=5)


@pytest.fixture(scope="module")
def both():
    """Target and draft with random weights."""
    return measure.Lab(None).pair(TINY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_tokens_are_accepted_with_the_chance_that_is_given(both, temperature):
    case = dataclasses.replace(TINY, temperature=temperature, alpha=0.7)
    target, draft = both
    call = measure.call(case, target, measure.build(case, target, draft))
    trials, accepted = int(call.tested.sum()), int(call.accepted.sum())
    assert all(len(tokens) == case.tokens for tokens in call.tokens)
    deviation = math.sqrt(trials * 0.7 * 0.3)  # 1,700 trials: α is seen within .06
    assert abs(accepted - 0.7 * trials) < 5 * deviation
    assert trials > 1000


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_certain_acceptance_and_certain_rejection(both, alpha):
    case = dataclasses.replace(TINY, alpha=alpha, batch=2)
    call = measure.call(case, both[0], measure.build(case, *both))
    assert call.accepted.tolist() == [30 * alpha] * 2  # 10 rounds of 3 + 1, or 40 of 1
    assert call.calls.tolist() == [10 if alpha else 40] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_forced_rule_does_all_the_work(both, temperature):
    """Compiled, its loop is no smaller than the paper's rule's."""
    case = dataclasses.replace(TINY, temperature=temperature, batch=2)
    method = measure.build(case, *both)

    def operations(decode, rule):
        by = dataclasses.replace(method, rule=rule)
        text = decode.lower(by, *measure.begin(case, both[0], by)).compile().as_text()
        return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))

    found = operations(forced.decode, method.rule)
    assert found >= operations(speculative.decode, TokenRule())
    # And the count would show it: a rule that reads no law is smaller.
    assert operations(forced.decode, Blind(method.rule.alpha)) < found


@pytree
class Blind(forced.ForcedRule):
    """Computes nothing of what it does not need."""

    def survival(self, target_logprobs, draft_logprobs, drafts, draft_len):
        powers = jnp.cumprod(jnp.full(drafts.shape, self.alpha), axis=1)
        slots = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :]
        return jnp.where(slots < draft_len[:, None], powers, 0.0)


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
    call = measure.call(case, target, measure.build(case, target, None))
    assert len({tuple(tokens) for tokens in call.tokens}) > 4


def test_models_that_always_agree_accept_everything():
    case = dataclasses.replace(TINY, weights="agreeing", batch=2)
    target, draft = measure.Lab(None).pair(case)
    call = measure.call(case, target, measure.build(case, target, draft))
    assert call.accepted.tolist() == [30, 30]
    assert call.tokens == [[0] * 40] * 2


def test_suites_vary_one_factor_at_a_time():
    for made in (benchmark_cpu, benchmark_gpu, benchmark_tpu):
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


def made_up(config):
    """Rows that meet every bar of the CPU suite, just."""
    base = Case(**config.base.to_dict())
    pace = {"of_floor": 0.75, "times_peer": 3.0, "ms": 10.0}
    fields = {"autoregressive": pace, "speculative": {"times_peer": 2.0}}
    fields |= {"gain": 1.8, "gain_at_alpha": 1.7, "predicted": 2.0, "overhead_share": 0.05}
    cases = [base, *suite(config)["buffer"], *suite(config)["shape"], *suite(config)["agree"]]
    rows = [{**case.cell, **json.loads(json.dumps(fields))} for case in cases]
    for row in rows:
        if row["buffer"] == 2048:
            row["autoregressive"]["ms"] = 11.4
    return [*rows, {**suite(config)["start"][0].cell, "cached": {"autoregressive_s": 5.0}}]


def test_bars_are_met_missed_or_not_measured():
    config = benchmark_cpu.get_config()
    rows = made_up(config)
    assert {bar.judge(rows)[1] for bar in bars.bars(config)} == {"met"}
    assert {bar.judge([])[1] for bar in bars.bars(config)} == {"not measured"}
    for row in rows:
        row |= {
            "overhead_share": 0.051,
            "gain": 1.7,
            "gain_at_alpha": 1.69,
            "cached": {"autoregressive_s": 5.1},
        }
        row["autoregressive"] = {"of_floor": 0.74, "times_peer": 1.5, "ms": row["buffer"]}
        row["speculative"] = {"times_peer": 1.9}
    assert {bar.judge(rows)[1] for bar in bars.bars(config)} == {"missed"}
    assert tables.judged(config, rows).words == "10 missed."


def test_bars_of_an_accelerator_need_all_rows_of_the_paper():
    config = benchmark_gpu.get_config()
    (promised,) = (bar for bar in bars.bars(config) if "Tables" in bar.name)
    rows = [
        {**case.cell, "gain": 1.8, "predicted_c_v": 2.0, "c": 0.02, "v": 1.0}
        for case in suite(config)["paper"]
    ]
    assert promised.judge(rows) == (0.9, "met")
    assert promised.judge(rows[1:]) == (None, "not measured")
    assert len(tables.paper(config, rows).rows) == 12


def test_where_speculation_stops_paying():
    rows = [{"batch": b, "gain": g} for b, g in ((1, 1.5), (4, 1.0), (8, 0.9))]
    assert tables.where(rows, "gain") == "between batch 4 and 8"
    assert tables.where(rows[:2], "gain") == "beyond batch 4"
    assert tables.where(rows[2:], "gain") == "before batch 8"


SHRUNK = """
from configs import benchmark_cpu


def get_config(part="all"):
    config = benchmark_cpu.get_config(part)
    config.repeats, config.steps, config.bandwidth_mb, config.peers = 1, 1, 1, False
    config.base.update(target="tiny", draft="tiny-draft", source=5, tokens=8, buffer=16)
    config.verify_gamma, config.gammas = 2, (3,)
    config.batches, config.sources = (1, 2), (5,)
    config.buffers, config.buffer_batches = (16,), (1,)
    config.shapes = (("tiny", ""),)
    config.agreeing = (("tiny", "tiny-draft"),)
    config.starts = (("tiny", "tiny-draft"),)
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
    assert [row["kind"] for row in rows] == ["decode"] * 2 + ["verify", "decode", "decode", "start"]
    base = rows[0]
    assert base["autoregressive"]["of_floor"] > 0
    assert base["peer_note"] == "skipped: --config.peers is off"
    assert base["predicted"] > 0
    assert base["tau"] == 8 / base["rounds"]
    tau = 1 + 0.8 + 0.8**2 + 0.8**3
    assert base["gain_at_alpha"] == pytest.approx(base["gain"] * tau / base["tau"])
    assert set(rows[2]["v_by_gamma"]) == {"1", "2"}
    assert "speculative" not in rows[3]
    assert rows[4]["alpha_seen"] == 1.0
    for when in ("cold", "cached"):
        assert rows[5][when]["speculative_s"] > 0
        assert rows[5][when]["peak_gb"] > rows[5][when]["weights_gb"]
    for title in ("Bars", "Decoding", "c and v(γ)", "Start and memory", "Batches", "Where"):
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
    assert "'everything' is not known: choose all or one of base, gamma" in outcome.stderr


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
        ours = measure.call(case, target, measure.build(case, target, None)).tokens
        peer, ids = lab.peer(case), models.sources(case)
        assert peer.generate(ids, case.tokens) == ours
        assert peer.generate(ids, case.tokens, gamma=3) == ours
