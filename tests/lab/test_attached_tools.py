"""Drafters that belong to a target, named by their directories, in the tools that judge drafts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
import specjax
from configs import adaptive, embedded
from experiments import tasks
from experiments.adaptive import race as leaderboard
from experiments.race import __main__ as race
from experiments.reproduce import alphas, speedups, study, timelines, traces
from experiments.trace import __main__ as trace
from experiments.train import medusa
from pairs import TEXTS
from specjax import drafters
from specjax.drafters import attached, eagle
from specjax.policies import constant
from specjax.replay import replay, rollouts
from specjax.sampling import Sampling
from tiny_models import slow

BUDGET = 12
KINDS = {
    "eagle 1": lambda target: eagle.fresh(target, version=1),
    "eagle 3": lambda target: eagle.fresh(target, version=3),
    "hydra": lambda target: medusa.init(target.model, heads=3, hydra=True),
}


@pytest.fixture(scope="module", params=["eagle 1", *map(slow, ("eagle 3", "hydra"))])
def directory(request, pair, tmp_path_factory):
    """A drafter of each kind, which knows nothing yet, as its directory."""
    place = tmp_path_factory.mktemp("drafter")
    attached.save(place, KINDS[request.param](pair.target), pair.target, dtype=jnp.float32)
    return str(place)


@pytest.mark.slow
def test_select(directory, pair):
    options = {"max_new_tokens": BUDGET, "gammas": (1, 2), "timed_inputs": 2, "repeats": 1}
    (found,) = specjax.select(pair.target, [directory], TEXTS, **options).candidates
    assert not found.problem
    wanted = specjax.measure_alpha(pair.target, directory, TEXTS, max_new_tokens=BUDGET)
    assert (found.alpha, found.alpha_low) == (wanted.value, wanted.low)
    own = drafters.load(directory, pair.target).tensors().values()
    assert found.parameters == sum(x.size for x in own if x.dtype.kind != "i")
    assert found.c > 0


@pytest.mark.slow
def test_a_replay_is_the_loop(directory, pair):
    """At temperature 0 the rounds of a rollout along the target's outputs are those of decoding."""
    options = {"max_new_tokens": BUDGET, "batch_size": 8}
    real = specjax.generate(pair.target, directory, TEXTS, gamma=3, **options)
    assert real.tokens == specjax.generate(pair.target, None, TEXTS, **options).tokens
    loaded = drafters.load(directory, pair.target)
    how = {"gamma_max": 3, "sampling": Sampling(0.0), "key": jax.random.key(0)}
    trace = rollouts.record(pair.target, loaded, TEXTS, real.tokens, **how, **options)
    found = replay.replay([constant(3)], trace, jax.random.key(0))
    lengths = np.arange(found.drafted.shape[-1])  # rounds are counted by length
    np.testing.assert_array_equal(found.drafted[0].sum(-1), real.target_calls)
    np.testing.assert_array_equal(found.drafted[0] @ lengths, real.drafted)
    np.testing.assert_array_equal(found.accepted[0] @ lengths, real.accepted)


def config_of(pair, directory, made):
    """A config of those of the commands, shrunk, with the drafter as its only draft."""
    made.target, made.drafts = pair.target.name, (directory,)
    made.temperatures, made.max_new_tokens = (0.0,), BUDGET
    made.alpha_inputs, made.timed_inputs, made.repeats = 3, 2, 2
    made.gammas, made.gamma_by_position = (1, 2), True
    return made


@pytest.fixture
def examples(monkeypatch):
    found = [tasks.Example(text, text) for text in TEXTS]
    monkeypatch.setattr(tasks, "load", lambda task, split, *_: found)


@pytest.fixture
def tapped(pair, tmp_path):
    """An EAGLE-3, as training leaves it: for its target is wrapped, and it says few ids."""
    place = tmp_path / "run" / "drafter"
    attached.save(place, KINDS["eagle 3"](pair.target), pair.target)
    return str(place)


def test_a_race(tapped, pair, examples):
    """Its rounds and tokens are those of `generate`."""
    directory = tapped
    config = config_of(pair, directory, embedded.get_config())
    sides = race.run(config, directory, 2, 0.0, 2)
    real = specjax.generate(pair.target, directory, TEXTS[:2], gamma=2, max_new_tokens=BUDGET)
    for side, calls in zip(sides, (real.emitted, real.target_calls), strict=True):
        rounds = [moment.source for moment in side.moments if moment.pieces]
        np.testing.assert_array_equal(np.bincount(rounds), calls)
        assert side.tokens == sum(real.emitted)
    kinds = {kind for moment in sides[1].moments for _, kind in moment.pieces}
    assert "rejected" in kinds


def test_decode(tapped, pair, tmp_path, monkeypatch, capsys):
    """By its directory, from the command line."""
    inputs = tmp_path / "in.txt"
    inputs.write_text("".join(f"{text}\n" for text in TEXTS[:3]))
    outcome = command_line.run(
        monkeypatch, capsys, "specjax decode", "--config=configs/decode.py",
        f"--config.target={pair.target.name}", f"--config.draft={tapped}", "--config.gamma=2",
        f"--config.max_new_tokens={BUDGET}", f"--input={inputs}", "--output=-",
    )  # fmt: skip
    assert outcome.status == 0, outcome.stderr
    rows = [json.loads(line) for line in outcome.stdout.splitlines()]
    real = specjax.generate(pair.target, None, TEXTS[:3], max_new_tokens=BUDGET)
    assert [row["tokens"] for row in rows] == real.tokens
    assert [row["output"] for row in rows] == real.texts
    assert sum(row["drafted"] for row in rows) > 0


def study_of(config, place):
    return study.Study(config, study.open_results(place, config))


@pytest.mark.slow
def test_the_papers_tables_and_figures(tapped, pair, examples, tmp_path):
    """Table 3, the gains table, Figures 1 and 5."""
    (tmp_path / "run" / "final.json").write_text('{"minutes": 7.0}')
    config = config_of(pair, tapped, embedded.get_config())
    on = study_of(config, tmp_path)
    (cell,) = alphas.keys(config)[-1:]
    found = alphas.measure(on, cell)
    wanted = specjax.measure_alpha(pair.target, tapped, TEXTS[:3], max_new_tokens=BUDGET)
    assert found["alpha"] == pytest.approx(wanted.value)
    assert found["training_minutes"] == 7.0
    assert found["parameters"] == drafters.parameters(on.draft(tapped))
    on.results.append({**cell, "table": "alpha", **found, **study.identity(on)})
    gained = speedups.measure(on, cell)
    assert gained["identical"]
    assert gained["speedup_decode"] > 0
    on.results.append({**cell, "table": "speedup", **gained, **study.identity(on)})
    drawn = traces.measure(on, {})
    assert drawn["tokens"] == len(timelines.measure(on, {"gamma": gained["gamma"]})["output"])
    assert traces.setting(drawn).startswith(f"run, γ={gained['gamma']}, T=0")


@pytest.mark.slow
def test_a_trace(tapped, pair, examples, tmp_path):
    """Rollouts of a whole config for experiments.replay, with what the calls took."""
    config = config_of(pair, tapped, embedded.get_config())
    config.timed_inputs, config.repeats, config.temperatures = 1, 1, (1.0,)
    with config.unlocked():
        config.trace = {"gamma_max": 1, "inputs": 3, "hidden": False, "widths": ()}
    (row,) = trace.fill(study_of(config, tmp_path), tmp_path)
    assert row["file"] == "run-T1.npz"
    found = rollouts.load(tmp_path / row["file"])
    options = {"max_new_tokens": BUDGET, "batch_size": config.batch_size}
    options |= {"sampling": specjax.Sampling(), "key": 0}
    real = specjax.generate(pair.target, None, TEXTS[:3], **options)
    np.testing.assert_array_equal(found.emitted, real.emitted)
    alpha = specjax.measure_alpha(pair.target, tapped, TEXTS[:3], **options)
    assert row["alpha"] == pytest.approx(alpha.value)
    assert row["alpha"] > 0.01
    assert set(row["costs"]) == {"policies", "γ=1"}


@pytest.mark.slow
def test_the_leaderboard(pair, examples, tmp_path):
    """By directory, against every static γ, with one policy; sampled outputs are plain decoding's
    too, and the rounds those of the replay."""
    place = str(tmp_path / "drafter")
    attached.save(place, KINDS["hydra"](pair.target), pair.target)
    config = config_of(pair, place, adaptive.get_config())
    with config.unlocked():
        config.static, config.gamma_max, config.widths = (1, 2), 2, ()
        config.policies = {"svip": {"threshold": 0.1}}
        config.cost_repeats, config.cost_error = 1, 1e6
    on = study_of(config, tmp_path)
    for temperature in (0.0, 1.0):
        rows = leaderboard.measure(on, {"draft": place, "temperature": temperature})
        assert [row["method"] for row in rows] == ["γ=1", "γ=2", "svip"]
        assert all(row["identical"] and row["draft_calls"] > 0 for row in rows)
        assert all(row["tau"] == pytest.approx(row["tau_replayed"]) for row in rows)
