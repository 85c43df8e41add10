"""The log of rounds: it changes nothing, and says what happened."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
import specjax
import test_loops
from pairs import TEXTS
from specjax import log, loop, speculative
from specjax.policies import constant
from specjax.policies.entropy import svip
from specjax.sampling import Sampling
from table_models import inputs_of, random_table
from toy_policies import Erratic

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("policy", [constant(3), svip(), Erratic()])
def test_lines_are_the_rounds(policy):
    """Each number of each round, of three rows that end apart, stepped from Python."""
    tables = [random_table(seed, 3, dtype=jnp.float32) for seed in (1, 2)]
    inputs, chosen = inputs_of([[1, 0], [0], [2, 1, 1]]), Sampling(1.0)
    options = {"chosen": chosen, "eos_ids": jnp.int32([2, 2])}
    method = test_loops.method_of(*tables, policy=policy, **options)
    contexts, state = test_loops.begin(method, inputs, [12, 9, 12])
    state = loop.decode(method, contexts, state.replace(log=log.empty(3, 12, 3)))
    found = [log.lines(jax.device_get(state.log), row) for row in range(3)]
    contexts, state = test_loops.begin(method, inputs, [12, 9, 12])
    expected = [[] for _ in range(3)]
    step = jax.jit(speculative.step)
    while not np.all(state.done):
        _, allowed = policy.begin(state.policy, ~state.done, 3)
        state, round_ = step(method, contexts, state)
        for row in np.flatnonzero(round_.active):
            count = int(round_.verified[row])
            emitted = int(round_.emitted[row])
            belief = np.asarray(round_.drafts.logprobs[row, :count])
            surprise = np.where(belief > -np.inf, -belief, 0)
            expected[row].append(
                {
                    "round": len(expected[row]),
                    "allowed": int(np.broadcast_to(allowed, (3,))[row]),
                    "verified": count,
                    "accepted": min(int(round_.accepted[row]), emitted),
                    "emitted": emitted,
                    "tested": min(int(round_.accepted[row]) + 1, emitted, count),
                    "confidence": np.exp(round_.belief_logprob[row, :count]).tolist(),
                    "entropy": (np.exp(belief) * surprise).sum(-1),
                }
            )
    assert [len(of) for of in found] == [len(of) for of in expected]
    found, expected = (list(itertools.chain(*of)) for of in (found, expected))
    for mine, its in zip(found, expected, strict=True):
        for name in ("confidence", "entropy"):
            np.testing.assert_allclose(mine.pop(name), its.pop(name), atol=2e-6)
        assert mine == its
    assert any(line["verified"] for line in found)


def test_generate(pair):
    """Rows as without a log; sums over rounds are the rows' own counts."""
    options = {"temperature": 1.0, "key": 0, "gamma": 3, "policy": "svip", "max_new_tokens": 16}
    options |= {"num_samples": 2}
    plain = specjax.generate(pair.target, pair.draft, TEXTS, **options)
    logged = specjax.generate(pair.target, pair.draft, TEXTS, log_rounds=True, **options)
    assert (logged.tokens, plain.rounds) == (plain.tokens, [])
    for row in logged.rows:
        assert len(row.rounds) == row.target_calls
        for name in ("verified", "accepted", "emitted"):
            assert sum(line[name] for line in row.rounds) == getattr(row, name)
        tested = [sum(i < line["tested"] for line in row.rounds) for i in range(3)]
        assert tested == row.tested
    assert [line["input"] for line in logged.rounds] == sorted(
        line["input"] for line in logged.rounds
    )
    with pytest.raises(ValueError, match="with chains"):
        specjax.generate(pair.target, None, TEXTS, log_rounds=True)


def test_outputs_that_end_inside_a_draft(pair):
    """A draft that is its target is accepted to the end: what is drafted behind it is not tested,
    and no position has a rate below 1."""
    options = {"temperature": 1.0, "key": 0, "num_samples": 2, "max_new_tokens": 16}
    result = specjax.generate(pair.target, pair.target, TEXTS, log_rounds=True, **options)
    lines = result.rounds
    assert all(line["tested"] == line["accepted"] for line in lines)
    assert any(line["tested"] < line["verified"] for line in lines)
    assert result.summary.acceptance == [1.0] * 4


def test_decode_writes_a_line_for_each_round(pair, tmp_path, monkeypatch, capsys):
    """Lines as `Result.rounds`; a run that was cut off goes on; another file is not overwritten."""
    source, output, log = (tmp_path / name for name in ("in.txt", "out.jsonl", "rounds.jsonl"))
    source.write_text("\n".join(TEXTS))

    def decode(*more):
        return command_line.run(
            monkeypatch, capsys, "specjax decode", "--config=configs/decode.py",
            f"--config.target={pair.target.name}", f"--config.draft={pair.draft.name}",
            "--config.max_new_tokens=12", "--config.batch_size=4", f"--input={source}",
            f"--output={output}", f"--config.rounds_file={log}", *more,
        )  # fmt: skip

    outcome = decode()
    assert outcome.status == 0, outcome.stderr
    expected = specjax.generate(
        pair.target, pair.draft, TEXTS, max_new_tokens=12, batch_size=4, log_rounds=True
    )
    assert [json.loads(line) for line in log.read_text().splitlines()] == expected.rounds
    # What a reader computes is what the command prints.
    lines, acceptance = expected.rounds, expected.summary.acceptance
    rates = [
        sum(i < line["accepted"] for line in lines) / sum(i < line["tested"] for line in lines)
        for i in range(4)
    ]
    assert rates == pytest.approx(acceptance)
    assert ", ".join(f"{rate:.2f}" for rate in rates) in outcome.stdout
    rows = output.read_text().splitlines(keepends=True)
    output.write_text("".join(rows[:5]))  # as if cut off, with rounds of an output too many
    assert decode().status == 0
    for line, wanted in zip(log.read_text().splitlines(), expected.rounds, strict=True):
        found = json.loads(line)  # other batches round apart
        for name in ("confidence", "entropy"):
            np.testing.assert_allclose(found.pop(name), wanted.pop(name), atol=1e-4)
        assert found == wanted
    output.unlink()
    outcome = decode()
    assert (outcome.status, "--overwrite" in outcome.stderr) == (1, True)
    assert decode("--overwrite").status == 0
    outcome = decode(f"--config.rounds_file={output}", "--overwrite")
    assert (outcome.status, "name another" in outcome.stderr) == (1, True)
