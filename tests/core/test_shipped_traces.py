"""Traces that are shipped: what is left out, how they are joined, and figures by kind of text."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
from experiments import by_loop
from experiments.adaptive.policies.learned import learned, online, seen_in
from experiments.replay import environment, evaluation
from experiments.replay.__main__ import join
from experiments.trace.pack import packed
from pairs import TEXTS
from specjax.drafters.ngram import PromptLookup
from specjax.policies import Costs, constant
from specjax.policies.entropy import svip
from specjax.replay import replay, rollouts
from specjax.sampling import Sampling
from specjax.support import files
from table_models import inputs_of
from test_policies import keys_of, stats_of
from test_replay import GAMMA_MAX, PROMPTS, V, greedy_trace, method_of, policy_of, recorded


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
    run = found, known, jax.random.key(0), 1
    kinds = 3 * ["code"] + 3 * ["chat"]
    *still, oracle, same = evaluation.evaluate({"same": constant(2)}, *run, kinds=kinds)
    assert same["by"] == still[1]["by"]
    rounds = replay.replay([constant(2)], found, jax.random.key(0)).verified[0]
    took, emitted = rounds @ (0.1 * np.arange(GAMMA_MAX + 1) + 1), np.asarray(found.emitted)
    for kind, part in (("code", slice(3)), ("chat", slice(3, 6))):
        speedup = emitted[part].sum() / took[part].sum()
        assert (
            oracle["by"][kind]["speedup"] >= same["by"][kind]["speedup"] == pytest.approx(speedup)
        )
    assert 0 < same["of_chosen"]["low"] <= same["of_chosen"]["value"] <= same["of_chosen"]["high"]


@pytest.mark.parametrize("drafter", [None, PromptLookup(V)])
def test_tested_tokens_are_those_of_replay(drafter):
    """Rounds of γ_max tokens along the outputs, at temperature 0. A silent lookup tests nothing."""
    method = method_of(constant(1), Sampling(0.0), drafter)
    trace = recorded(method, inputs_of(PROMPTS), hidden=False) if drafter else greedy_trace()
    seen, found = seen_in(trace), replay.replay([constant(GAMMA_MAX)], trace, jax.random.key(0))
    assert seen.accepted.sum() == (found.accepted[0] @ np.arange(GAMMA_MAX + 1)).sum()
    assert seen.known[:, 3].sum() == found.verified[0, :, 1:].sum()  # rounds with a draft
    assert (seen.next_accepted <= seen.following).all()
    assert seen.next_accepted.sum() == seen.accepted[seen.known[:, 3] == 0].sum()


def test_a_row_that_stopped_drafts_again():
    """Rejections end drafting, and rounds without a draft bring it back."""
    policy = online(Costs(0.45, [1.0] * (GAMMA_MAX + 1)))
    state, allowed = policy.init(keys_of(1), GAMMA_MAX), []
    for _ in range(90):
        state, most = policy.begin(state, jnp.ones((1,), bool), GAMMA_MAX)
        allowed.append(int(jnp.minimum(most, 1)[0]))
        state = policy.update(state, stats_of(allowed[-1], 0, GAMMA_MAX, ratio=[0.0]))
    assert allowed[0] == 1 in allowed[-20:]


def test_learned_from_a_trace(tmp_path):
    """Tokens of belief .9 are all accepted, those of .1 never: it drafts on, or stops."""
    whole = greedy_trace()
    trace = whole._replace(
        own_belief_logprob=jnp.full_like(whole.own_belief_logprob, jnp.log(0.9)),
        belief_logprob=jnp.full_like(whole.belief_logprob, jnp.log(0.1)),
        entropy=jnp.zeros_like(whole.entropy),
    )
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        rollouts.save(tmp_path / "a.npz", trace)
        policy = learned(Costs(0.05, [1.0] * (GAMMA_MAX + 1)), trace=str(tmp_path / "a.npz"))
    found = replay.replay([policy, constant(GAMMA_MAX)], trace, jax.random.key(0))
    accepted, verified = (x @ np.arange(GAMMA_MAX + 1) for x in (found.accepted, found.verified))
    assert np.diff(accepted.sum(1)) == 0 < np.diff(verified.sum(1))


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
    assert [row["alpha"] for row in again] == [row["alpha"] for row in made]
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


@pytest.mark.parametrize("file", ["0.5B-T0.npz", "lookup-T0.npz"])
def test_a_game_of_drafting_is_replay(file):
    """An agent that drafts three tokens wherever there is room takes the time of γ = 3; the reward
    at that rate is 0, and it sees the beliefs of the trace."""
    found = rollouts.load(command_line.ROOT / "docs" / "results" / "mixed" / file)
    found = jax.tree.map(lambda x: x[::16], found)
    table = Costs(0.3, [1.0, 1.1, 1.2, *[1.3] * 6])
    rounds = replay.replay([constant(3)], found, jax.random.key(0))
    speedup = replay.score(rounds, found, table).speedup.item()
    game = environment.Drafting(found, table, rate=speedup)
    total, time, tokens = 0.0, 0.0, 0
    for output in range(len(found.emitted)):
        (*_, slot, _), over = game.reset(output=output)[0], False
        while not over:
            before = game.begin
            (top1, _, slot, _), reward, over, _, info = game.step(bool(slot < 3))
            assert slot != 1 or top1 == found.top1[output, before, 0]
            total, time = total + reward, time + info.get("time", 0.0)
            tokens += info.get("tokens", 0)
    assert tokens == int(found.emitted.sum())
    assert tokens / time == pytest.approx(speedup, rel=1e-5)
    assert total == pytest.approx(0.0, abs=1e-3 * tokens)
