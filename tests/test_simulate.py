"""The simulation's numbers, its table models, the notebook's shape; CI executes the notebook."""

import ast
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_loops
from experiments import simulate
from experiments.common import ROOT
from reference import chi_square
from specjax import accept
from specjax import sampling as smp
from specjax.drafters.base import ModelDrafter
from specjax.models import table
from specjax.paper import formulas
from specjax.types import Inputs

NOTEBOOK = ROOT / "notebooks" / "01_how_it_works.ipynb"

# The four parts


def test_distribution_of_the_output_is_the_targets():
    # 20,000 draws: a frequency has a standard error below 0.0035, and 0.015 is more than 4 of them.
    draws = 20_000
    part = simulate.distribution(jax.random.key(0), draws)
    assert part.rows[0]["alpha"] == pytest.approx(0.8)
    assert part.rows[0]["accepted"] == pytest.approx(0.8, abs=0.015)
    assert max(abs(row["error"]) for row in part.rows) < 0.015
    assert [round(row["residual"], 6) for row in part.rows] == [0.75, 0.25, 0, 0, 0, 0, 0, 0]
    counts = {row["token"]: round(row["drawn"] * draws) for row in part.rows}
    assert chi_square(counts, dict(enumerate(simulate.TARGET_PROBS))) > 1e-3
    assert "0.800" in part.sentence


def test_promised_speedups():
    part = simulate.predicted()
    speedups = [f"{row['speedup']:.2f}" for row in part.rows]
    assert speedups == ["1.77", "2.67", "3.16", "3.25", "2.50", "5.72"]
    assert all(row["best_speedup"] >= row["speedup"] for row in part.rows)


def test_loop_gives_the_promised_speedup(monkeypatch):
    # 10,000 tokens a setting: the interval is about 1.5% of τ, and the cut last round takes 0.6%.
    monkeypatch.setattr(simulate, "ALPHAS", (0.7,))
    part = simulate.simulated(jax.random.key(1), rows=50, budget=200)
    free = [row for row in part.rows if row["acceptance"] == "independent"]
    runs = [row for row in part.rows if row["acceptance"] == "in stretches"]
    assert [row["gamma"] for row in free] == [row["gamma"] for row in runs] == [3, 5, 7]
    for row in free:
        assert row["simulated_speedup"] == pytest.approx(row["speedup"], rel=0.04)
    # Correlated acceptance gives less than the mean α promises.
    assert all(row["simulated_speedup"] < row["speedup"] for row in runs)


def test_no_speedup_up_to_alpha_equal_to_c():
    part = simulate.no_speedup(jax.random.key(2), rows=20, budget=200)
    for row in part.rows:
        assert row["simulated_speedup_1"] == pytest.approx(row["speedup_1"], rel=0.04)
        speedups = row["alpha"] > row["c"]
        assert (row["best_gamma"] > 0) == (row["best_speedup"] > 1 + 1e-12) == speedups
        assert (row["speedup_1"] > 1 + 1e-12) == speedups


def test_report_is_written(tmp_path):
    simulate.write(tmp_path, [simulate.predicted()], seed=0)
    rows = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert rows[0] | {"part": "speedup", "alpha": 0.5, "seed": 0} == rows[0]
    assert "](speedup.png)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "speedup.png").stat().st_size > 10_000


@pytest.mark.slow
def test_command_line(tmp_path):
    command = [sys.executable, "-m", "experiments.simulate", f"--workdir={tmp_path / 'new'}"]
    command += ["--draws=2000", "--outputs=20", "--tokens=50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("┏") == 4
    assert max(map(len, done.stdout.splitlines())) <= 100
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"simulate.jsonl", "report.md", "distribution.png", "no_speedup.png"} <= written


# Table models


def inputs_of(first: list[int]) -> Inputs:
    """Prompts of one token each, (B, 1)."""
    zeros = jnp.zeros((len(first),), jnp.int32)
    source = jnp.zeros((len(first), 0), jnp.int32)
    return Inputs(source, zeros, jnp.array(first, jnp.int32)[:, None], zeros + 1)


def test_table_looks_at_the_last_token():
    distributions = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
    model = table.by_last_token(distributions)
    context, cache = model.start(inputs_of([0]), 8)
    hidden, _ = model(jnp.array([[1, 2, 0]]), jnp.array([3]), context, cache)
    np.testing.assert_allclose(np.exp(model.logits(hidden))[0], distributions[[1, 2, 0]], rtol=1e-6)
    assert (model.order, model.vocab_size) == (1, 3)


def test_fixed_table_looks_at_nothing():
    model = table.fixed([0.7, 0.3])
    context, cache = model.start(inputs_of([0]), 8)
    hidden, _ = model(jnp.array([[1, 0]]), jnp.array([0]), context, cache)
    np.testing.assert_allclose(np.exp(model.logits(hidden))[0], [[0.7, 0.3]] * 2, rtol=1e-6)
    assert (model.order, model.vocab_size) == (0, 2)


def test_draft_of_alpha_by_every_measure():
    """Its overlap in closed form, in the acceptance rule's terms and along an output."""
    alphas = np.array([0.0, 0.3, 1.0])
    target_probs = np.array([[0.6, 0.4, 0.0], [0.1, 0.9, 0.0], [0.5, 0.5, 0.0]])
    draft_probs = table.draft_of_alpha(target_probs, alphas)
    np.testing.assert_allclose(1 - formulas.d_lk(target_probs, draft_probs), alphas, atol=1e-12)
    target, draft = table.by_last_token(target_probs), table.by_last_token(draft_probs)
    np.testing.assert_allclose(accept.overlap(target.table, draft.table), alphas, atol=1e-6)
    drafter, output = ModelDrafter(draft), [[1, 1, 0]]
    betas = test_loops.betas(target, drafter, smp.sampling(), inputs_of([0]), output)
    np.testing.assert_allclose(betas[0], alphas[[0, 1, 1, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table.fixed([0.5, 0.4]), "sum to 1"),
        (lambda: table.fixed([1.5, -0.5]), "≥ 0"),
        (lambda: table.fixed([[0.5, 0.5]]), "1 axes"),
        (
            lambda: table.by_last_token([[0.5, 0.5]]),
            "a distribution over all tokens for each token",
        ),
        (lambda: table.draft_of_alpha([0.5, 0.5], 0.3), "probability 0"),
        (lambda: table.draft_of_alpha([1.0, 0.0], 1.3), "must lie in"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The notebook


def cells(kind: str) -> list[dict]:
    """The notebook's cells of one kind."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_notebook_compiles():
    code = ["".join(cell["source"]) for cell in cells("code")]
    ast.parse("\n".join(code))
    assert "from specjax import" in code[0]


def test_notebook_shows_its_figures_and_no_errors():
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 6
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert NOTEBOOK.stat().st_size < 400_000


def test_every_exercise_has_a_folded_solution():
    text = "".join("".join(cell["source"]) for cell in cells("markdown")).split("8. Exercises")[-1]
    solutions = [cell for cell in cells("code") if "solution" in cell["metadata"].get("tags", [])]
    assert len(solutions) == sum(f"**{number}. " in text for number in range(1, 10)) == 5
    assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in solutions)
