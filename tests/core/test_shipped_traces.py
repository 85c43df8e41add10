"""Traces that are shipped: what is left out, how they are joined, and figures by kind of text."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
from experiments import by_loop
from experiments.adaptive.policies.learned import features, fit, seen_in
from experiments.replay import evaluation
from experiments.replay.__main__ import join
from experiments.trace.pack import packed
from pairs import TEXTS
from specjax.policies import Costs, constant
from specjax.policies.entropy import svip
from specjax.replay import replay, rollouts
from specjax.sampling import Sampling
from specjax.support import files
from table_models import inputs_of
from test_replay import GAMMA_MAX, PROMPTS, greedy_trace, method_of, policy_of, recorded


@pytest.mark.sweep
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rollouts_to_be_shipped(temperature, tmp_path):
    """Without the target behind rejected tokens, packed, and of two files, rounds are the same. A
    belief whose last bits were lost moves a bar of `lookahead` by no more than a round in 50."""
    method, inputs = method_of(constant(1), Sampling(temperature)), inputs_of(PROMPTS)
    whole = recorded(method, inputs, hidden=False)
    short = packed(recorded(method, inputs, hidden=False, judged=False))
    rollouts.save(tmp_path / "a.npz", short)
    short = rollouts.load(tmp_path / "a.npz")
    assert short.entropy.dtype == jnp.float32
    twice = join([short, whole])
    assert twice.input_index.tolist() == list(range(12))
    assert twice.emitted.tolist() == 2 * whole.emitted.tolist()
    policies = [constant(1), constant(3), policy_of("heuristic"), svip(0.5), policy_of("lookahead")]
    first, then = (replay.replay(policies, x, jax.random.key(0), draws=8) for x in (whole, short))
    np.testing.assert_array_equal(first.verified[:3], then.verified[:3])
    np.testing.assert_array_equal(first.accepted[:3], then.accepted[:3])
    assert np.abs(first.verified - then.verified).sum() <= 0.02 * first.verified.sum()


def test_speedups_by_kind():
    """Over plain decoding and over the length that is best on other outputs of the kind."""
    found, known = greedy_trace(), by_loop.by_formula(0.1, [1.0] * (GAMMA_MAX + 1), 0.0, ())
    kinds = ["code", "code", "code", "chat", "chat", "chat"]
    *still, oracle, same = evaluation.evaluate(
        {"same": constant(2)}, found, known, jax.random.key(0), 1, kinds=kinds
    )
    assert same["by"] == still[1]["by"]
    emitted, rounds = np.asarray(found.emitted), [
        replay.replay([constant(2)], found, jax.random.key(0)).verified[0, part].sum(0)
        for part in (slice(3), slice(3, 6))
    ]  # fmt: skip
    for kind, part, lengths in zip(("code", "chat"), (slice(3), slice(3, 6)), rounds, strict=True):
        took = lengths @ (0.1 * np.arange(GAMMA_MAX + 1) + 1)
        assert same["by"][kind]["speedup"] == pytest.approx(emitted[part].sum() / took)
        assert oracle["by"][kind]["speedup"] >= same["by"][kind]["speedup"]
    assert 0 < same["of_chosen"]["low"] <= same["of_chosen"]["value"] <= same["of_chosen"]["high"]


def test_tested_tokens_are_those_of_replay():
    """Rounds of γ_max tokens along the outputs, at temperature 0."""
    trace = greedy_trace()
    seen, found = seen_in(trace), replay.replay([constant(GAMMA_MAX)], trace, jax.random.key(0))
    lengths = np.arange(GAMMA_MAX + 1)
    accepted = (found.accepted[0] @ lengths).sum()
    assert seen.accepted.sum() == accepted
    rounds = found.verified[0].sum()
    # A round without room drafts nothing; in others the slots begin anew.
    assert seen.known[:, 3].sum() == rounds - found.verified[0, :, 0].sum()
    assert (seen.next_accepted <= seen.following).all()
    assert seen.next_accepted.sum() == seen.accepted[seen.known[:, 3] == 0].sum()


def test_learned_from_a_trace():
    """Where every token of a belief of .9 is accepted and none of .1, the fitted policy drafts on
    after the one and stops after the other, however the costs are."""
    whole = greedy_trace()
    shape = whole.own_belief_logprob.shape
    fields = {
        "own_belief_logprob": jnp.full(shape, jnp.log(0.9)),
        "belief_logprob": jnp.full((*shape, GAMMA_MAX), jnp.log(0.1)),
        "entropy": jnp.zeros((*shape, GAMMA_MAX)),
    }
    trace = whole._replace(**fields)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        policy = fit(trace, Costs(0.05, [1.0] * (GAMMA_MAX + 1)))
    for belief, due in ((0.9, True), (0.1, False)):
        known = features(*jnp.float32([belief, 0.0, 0.7]), jnp.int32(0), GAMMA_MAX)
        assert (float(jax.nn.sigmoid(known @ policy.here)) > 0.5) == due
    found = replay.replay([policy, constant(GAMMA_MAX)], trace, jax.random.key(0))
    lengths = np.arange(GAMMA_MAX + 1)
    assert (found.accepted @ lengths).sum(1)[0] == (found.accepted @ lengths).sum(1)[1]
    assert (found.verified @ lengths).sum(1)[0] < (found.verified @ lengths).sum(1)[1]


@pytest.mark.slow
def test_kinds_of_text_from_models_to_a_learned_policy(monkeypatch, capsys, tmp_path, pair):
    """Cells by kind, which continue; packed; speedups by kind; learned; bad input."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    run = functools.partial(command_line.run, monkeypatch, capsys)
    rows = [{"category": f"kind {i % 2}", "turns": [text]} for i, text in enumerate(2 * TEXTS)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "small.py"
    file.write_text(
        "from configs import mixed\n\n"
        "def get_config():\n"
        "    config = mixed.get_config()\n"
        f"    config.target, config.weights = {pair.target.name!r}, ''\n"
        f"    config.drafts, config.names = ({pair.draft.name!r},), ('own',)\n"
        f"    config.data_dir = {str(tmp_path / 'q.jsonl')!r}\n"
        "    config.categories = ('kind 0', 'kind 1')\n"
        "    config.max_new_tokens, config.temperatures = 12, (0.0,)\n"
        "    return config\n"
    )
    work, flags = tmp_path / "trace", ["--gamma_max=2", "--inputs=4", "--nocosts", "--nojudged"]
    trace = functools.partial(run, "experiments.trace", f"--config={file}", f"--workdir={work}")
    assert trace(*flags).status == 0
    made = files.read_rows(work / "results.jsonl")
    assert [row["category"] for row in made] == ["kind 0", "kind 1"]
    files.write_rows(work / "results.jsonl", made[:1])
    assert trace(*flags).status == 0
    again = files.read_rows(work / "results.jsonl")
    same = ("category", "positions", "alpha", "file", "run")
    assert [{n: r[n] for n in same} for r in again] == [{n: r[n] for n in same} for r in made]

    to = tmp_path / "packed"
    assert run("experiments.trace.pack", f"--trace={work}", f"--workdir={to}").status == 0
    (row,) = files.read_rows(to / "results.jsonl")
    assert row["kinds"] == {"kind 0": 4, "kind 1": 4}
    assert row["positions"] == sum(one["positions"] for one in made)
    lines = []
    for place in (work, to):
        job = functools.partial(run, "experiments.replay", f"--trace={place}")
        outcome = job("--draft=own", "--c=0.1", "--policies=heuristic")
        assert outcome.status == 0, outcome.stderr
        assert "Speedup by kind of text" in outcome.stdout
        lines.append(files.read_rows(place / "replay.jsonl"))
    assert [x["by"] for x in lines[0]] == [x["by"] for x in lines[1]]
    assert "has no costs of its own: give --c" in job("--draft=own").stderr
    with jax.numpy_dtype_promotion("standard"):
        outcome = job("--c=0.1", "--learned")
    assert outcome.status == 0, outcome.stderr
    names = [line["policy"] for line in files.read_rows(to / "replay.jsonl")]
    assert names[-2:] == ["learned on the other half", "learned on other kinds"]
    (to / row["file"]).write_bytes((to / row["file"]).read_bytes()[:300])
    assert "damaged" in job("--c=0.1").stderr


def test_a_fitted_policy_is_judged_on_other_outputs(monkeypatch):
    """Each part is replayed once, by a policy that saw none of it."""
    trace, fitted = greedy_trace(), []

    def fit_(found, costs):
        fitted.append(found.input_index.tolist())
        return constant(len(fitted))

    monkeypatch.setattr(evaluation, "fit", fit_)
    parts = [np.array([0, 3]), np.array([1, 2, 4, 5])]
    known = by_loop.by_formula(0.1, [1.0] * (GAMMA_MAX + 1), 0.0, ())
    *_, line = evaluation.evaluate({}, trace, known, jax.random.key(0), 1, folds={"mine": parts})
    assert fitted == [[1, 2, 4, 5], [0, 3]]
    found = replay.replay([constant(1), constant(2)], trace, jax.random.key(0)).verified
    lengths = found[0, parts[0]].sum(0) + found[1, parts[1]].sum(0)
    assert line["tau"] == pytest.approx(trace.emitted.sum() / lengths.sum())
