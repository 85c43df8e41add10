"""`experiments.switch` on a tiny pair: rows, report, that a run goes on, and the oracle by hand."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

import command_line
from experiments.switch import __main__ as switch
from pairs import TEXTS
from specjax import tasks
from specjax.policies import Costs
from specjax.support import files


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    return functools.partial(command_line.run, monkeypatch, capsys)


def test_cost():
    """So that a round takes 1 + γ · cost tokens of plain decoding, and never less than one."""
    for token, cost in ((1.0, 0.5 / 3), (1.2, 0.25 / 3), (2.0, 0.0)):
        table = Costs(0.1, [0.9, 1.2, 1.2, 1.2], token=token)
        assert switch.cost(table) == pytest.approx(cost, abs=1e-6)


@pytest.mark.slow
def test_switch(command, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tasks, "load", lambda task, split, *_: [tasks.Example(t, f" {t}") for t in TEXTS]
    )
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import switch\n\n"
        "def get_config():\n"
        "    config = switch.get_config()\n"
        f"    config.target = {pair.target.name!r}\n"
        f"    config.drafts = 'lookup', {pair.draft.name!r}\n"
        "    config.temperatures, config.max_new_tokens, config.batch_size = (0.0,), 12, 2\n"
        "    config.timed_inputs, config.repeats, config.cost_repeats = 1, 2, 1\n"
        "    config.gammas, config.choices, config.copied_words = (2,), ('bandit',), 3\n"
        "    return config\n"
    )
    work = tmp_path / "work"
    job = functools.partial(command, "experiments.switch", f"--config={file}", f"--workdir={work}")
    outcome = job()
    assert outcome.status == 0, outcome.stderr
    rows = files.Rows(work / "results.jsonl").done
    names = ["lookup, γ = 2", "draft, γ = 2", "bandit, γ = 2", "oracle"]
    assert [row["method"] for row in rows] == names
    for row in rows[:3]:
        assert row["tau"] >= 1
        assert min(row["speedup_decode"], row["speedup_free"], row["speedup_copied"]) > 0
        assert row["identical"] is True
        assert len(row["costs"]) == 2
    assert (rows[2]["best"], sum(row["best"] for row in rows[:2])) == (True, 1)
    assert [len(row["rounds"]) for row in rows[:3]] == [0, 0, 2]
    assert sum(rows[2]["rounds"]) > 0
    assert rows[3]["speedup_decode"] > 0
    assert "Best switch: bandit" in (work / "report.md").read_text()
    assert job().status == 0  # nothing is measured again
    assert len(files.Rows(work / "results.jsonl").done) == len(rows)


def test_a_copied_input_begins_its_text_again():
    example = tasks.Example("one two three", " four five six")
    assert switch.copied(example, 5) == "one two three four five\none two three"


def test_oracle_by_hand():
    """An output of four tokens. One drafter is right but for the third token; the other one has
    nothing to say before the first, and is right after it: a round without drafts, and one with
    two tokens, 1 + 1.2. Plain decoding takes 4 steps and 1 for the call."""
    of = {"input_index": jnp.int32([0]), "emitted": jnp.int32([4]), "tokens": jnp.zeros((1, 5))}
    of |= {"accepted": jnp.full((1, 5), -1)}
    right, erring = jnp.float32([[1, 1, 1, 1, 0]]), jnp.float32([[1, 1, 0, 1, 0]])
    model = types.SimpleNamespace(**of, acceptance=erring, length=jnp.int32([[2, 2, 2, 2, 2]]))
    lookup = types.SimpleNamespace(**of, acceptance=right, length=jnp.int32([[0, 2, 2, 2, 2]]))
    times = {"rest": 0.0, "call": 0.5, "plain_call": 1.0}
    ways = [(model, Costs(0.5, [1, 1, 1], **times)), (lookup, Costs(0.1, [1, 1, 1], **times))]
    found = switch.oracle(ways, jax.random.key(0), 2)
    assert found == pytest.approx(5 / (1 + 1.2 + 0.5))
    alone = switch.oracle(ways[:1], jax.random.key(0), 1)  # two tokens, then none
    assert alone == pytest.approx(5 / (2 + 1 + 0.5))
    # A drafter that guesses: a round that begins at the second token has nothing to say, and one
    # that begins before has two tokens there, which are accepted; then there is one left.
    model.accepted, model.length = jnp.int32([[2, 0, 0, 1, 0]]), jnp.int32([[2, 0, 2, 2, 2]])
    settled = switch.oracle(ways[:1], jax.random.key(0), 1)
    assert settled == pytest.approx(5 / (2 + 1 + 0.5))
