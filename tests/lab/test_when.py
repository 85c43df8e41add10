"""`experiments.when` on a corner of its space: rows, that a run goes on, traces among them, and the
figures of a row by hand."""

import functools
import json
import types

import jax
import numpy as np
import pytest

import command_line
from experiments import by_loop
from experiments.when import pictures, points, sweep, synthetic
from specjax.measure import costing
from specjax.replay import rollouts
from specjax.support import files

CONFIG = """
from configs import when

def get_config():
    config = when.get_config("small")
    config.outputs, config.tokens, config.gamma_max, config.resamples = 24, 16, 3, 20
    with config.unlocked():
        config.policies = {"goodput": {}, "toy_policies:TailReader": {}}
        config.sweeps = {
            "space": {"alpha": (0.6, 0.8), "within": (0.0, 0.5), "informativeness": (0.0, 1.0)},
            "memory": {"autocorrelation": (0.0, 0.6)},
        }
        config.base.between = 0.0
        config.shown = ("goodput",)
    config.c, config.verify, config.narrow = (0.1,), (0.0, 0.1), (False, True)
    return config
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """The command on a small config, and its directory."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    file, work = tmp_path / "small.py", tmp_path / "work"
    file.write_text(CONFIG)
    flags = f"--config={file}", f"--workdir={work}"
    return functools.partial(
        command_line.run, monkeypatch, capsys, "experiments.when", *flags
    ), work


@pytest.fixture
def traces(tmp_path):
    """A directory as experiments.trace writes it, with a trace of known numbers."""
    directory = tmp_path / "traces"
    directory.mkdir()
    made = synthetic.rollouts(
        synthetic.Chances(0.7, within=0.5, autocorrelation=0.2), jax.random.key(3),
        outputs=24, tokens=16, gamma_max=3,
    )  # fmt: skip
    rollouts.save(directory / "draft-T1.npz", made)
    tables = by_loop.by_formula(0.1, [1.2, 1.3, 1.4, 1.5], 0.0, ())
    trace = {
        "draft": "families/prose/draft", "task": "prose", "temperature": 1.0, "dtype": "float32",
        "file": "draft-T1.npz", "costs": {name: of.as_row() for name, of in tables.items()},
    }  # fmt: skip
    (directory / "results.jsonl").write_text(json.dumps(trace) + "\n")
    return directory


def test_when(command, traces, tmp_path):
    run, work = command
    nothing = run(f"--traces={tmp_path}")
    assert nothing.status == 1
    assert "has no traces" in nothing.stderr
    assert not (work / "results.jsonl").exists()  # nothing was simulated
    outcome = run()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    # Where nothing varies one informativeness stands for both; three costs.
    assert len(rows) == 3 * (2 * 3 + 2)
    names = {"goodput", "toy_policies:TailReader", "oracle"}
    for row in rows:
        assert set(row["of_static"]) == names
        oracle, error = row["of_static"]["oracle"]
        assert all(oracle >= value for value, _ in row["of_static"].values())
        assert 0 <= error < 0.5
        assert row["best"] in names
        assert (row["static"] == 0) == (row["static_speedup"] == [1.0, 0.0])
    steady = [row for row in rows if row["sweep"] == "space" and row["within"] == 0.5]
    blind, sees = ([row for row in steady if row["informativeness"] == i] for i in (0.0, 1.0))
    for one, other in zip(blind, sees, strict=True):
        assert one["of_static"]["oracle"] == other["of_static"]["oracle"]
        assert one["static_speedup"] == other["static_speedup"]
    assert (work / "map.png").stat().st_size > 0
    assert "![Over α" in (work / "report.md").read_text()
    assert run(f"--traces={traces}").status == 0  # nothing is simulated again
    everything = files.Rows(work / "results.jsonl").done
    assert everything[: len(rows)] == rows
    (trace,) = everything[len(rows) :]
    assert trace["trace"] == "prose, draft, T=1"
    assert trace["alpha"] == pytest.approx(0.7, abs=0.1)
    assert (trace["c"], trace["first"], trace["verify"]) == pytest.approx((0.1, 1.3, 0.1), abs=1e-3)
    assert trace["measured"]["of_static"]["oracle"][0] >= 1
    assert points.off(trace) < 0.2
    assert {"narrow", "simulated_narrow", "calibrated", "knowing"} <= set(trace)
    assert "| A | prose, draft, T=1 |" in (work / "report.md").read_text()


def test_judged_by_hand():
    """Chosen on the outputs 0, 2, 4, and judged on 1, 3, 5, where another γ would be best."""
    config = types.SimpleNamespace(seed=0, resamples=1000)
    plain = np.full(6, 6.0)
    static = {0: plain, 1: np.array([3.0, 4, 3, 4, 3, 4]), 2: np.array([4.0, 2, 4, 2, 4, 2])}
    policies = {"a": np.array([2.0, 5, 2, 5, 2, 5]), "b": np.array([5.0, 1, 5, 1, 5, 10])}
    found = sweep.judge(static, policies, np.full(6, 1.0), config)
    assert (found["static"], found["best"]) == (1, "a")
    assert found["static_speedup"] == (1.5, 0.0)
    assert found["of_static"]["a"] == (0.8, 0.0)
    assert found["of_static"]["oracle"] == (4.0, 0.0)
    value, error = found["of_static"]["b"]
    assert value == 1.0  # 12 / (1 + 1 + 10)
    # Of 27 equally likely resamples: 12/30 once, 12/21 six times, 1 twelve times, 4 eight times.
    each = np.repeat([12 / 30, 12 / 21, 1.0, 4.0], [1, 6, 12, 8])
    assert error == pytest.approx(each.std(), rel=0.05)


def test_narrow_passes():
    """Passes of three lengths cost what their static loops do, one without a draft a step."""
    tables = by_loop.by_formula(0.1, [1.0, 1.3, 1.5, 1.9], 0.2, ())
    assert points.passes(tables, 3) == pytest.approx([1.5, 1.7, 2.1])
    found = points.narrow(tables, 3)[costing.POLICIES]
    assert found.round_times(3).tolist() == pytest.approx([1.0, 1.6, 1.9, 2.4])
    assert points.cost_columns(tables, 3) == pytest.approx(
        {"c": 0.1, "first": 1.4667, "verify": 0.3}, abs=1e-3
    )


def test_traces_of_one_cell_stand_in_its_corners():
    """Off the digits in its middle."""
    rows = [{"alpha": alpha, "within": within} for alpha in (0.5, 0.9) for within in (0.0, 0.5)]
    at = {"alpha": 0.85, "within": 0.4}
    found = pictures.places([(letter, at) for letter in "ABC"], rows)
    assert [letter for letter, *_ in found] == ["A", "B", "C"]
    assert len({(x, y) for _, x, y in found}) == 3
    assert all(abs(x - 1) > 0.3 and abs(y - 1) > 0.3 for _, x, y in found)


def test_a_trace_stands_in_the_nearest_column():
    costs = [(0.0, False, 0.02), (0.0, False, 0.1), (0.1, True, 0.1)]
    assert pictures.nearest({"c": 0.09, "verify": 0.01}, costs) == costs[1]
    assert pictures.nearest({"c": 0.03, "verify": 0.0}, costs) == costs[0]
    assert pictures.nearest({"c": 0.02, "verify": 0.08}, costs) == costs[2]
