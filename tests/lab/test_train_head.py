"""The acceptance head: what it is shown, that it learns it, and the command that trains it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import command_line
from experiments.train import train_head
from experiments.train.train_head import HeadConfig, Seen
from pairs import TEXTS
from specjax import generate, speculative
from specjax.decoding import building, starting
from specjax.decoding.texts import tokenize
from specjax.policies import acceptance_head as head
from specjax.policies import parse
from specjax.rules import at_tokens
from specjax.sampling import Sampling
from specjax.support import files

pytestmark = pytest.mark.usefixtures("standard_promotion")


def config_of(pair, **changes) -> HeadConfig:
    sizes = {"inputs": 4, "held_out_inputs": 4, "max_new_tokens": 12, "steps": 20, "tokens": 16}
    return HeadConfig(pair.target.name, pair.draft.name, **{"gamma": 3, **sizes, **changes})


def test_what_is_observed(pair):
    """Ratios min(1, p/q), how likely each token is reached, and the state after each token."""
    method = building.build(pair.target, pair.draft, gamma=3, sampling=Sampling(1.0))
    sources = tokenize(pair.target, TEXTS[:2])
    begin = {"max_new_tokens": 3, "key": jax.random.key(0), "rows": 2}
    contexts, state = starting.prepare(method, pair.target, sources, [(0, 0), (1, 0)], **begin)
    _, seen = train_head.observe(method, contexts, state)
    _, round_ = jax.jit(speculative.step)(method, contexts, state)
    tokens, distributions = (
        round_.drafts.tokens,
        (round_.target_logprobs[:, :3], round_.drafts.logprobs),
    )
    p, q = (np.exp(at_tokens(distribution, tokens)) for distribution in distributions)
    assert round_.drafts.length.tolist() == [2, 2]  # one of three tokens is the target's own
    ratio = np.minimum(1, p / q)
    np.testing.assert_allclose(seen.ratio[:, :2], ratio[:, :2], rtol=1e-5)
    reached = np.stack([np.ones(2), ratio[:, 0], np.zeros(2)], axis=1)
    np.testing.assert_allclose(seen.reached, reached, rtol=1e-5)
    # The distribution of the second token is read from the state after the first.
    logits = method.drafter.logits(seen.hidden[:, 0])
    distribution = jax.nn.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(distribution, round_.drafts.logprobs[:, 1], rtol=1e-3, atol=1e-4)
    # Where the first token ends the row, the second is in no output.
    ends = jnp.full_like(method.eos_ids, tokens[0, 0])
    _, seen = train_head.observe(dataclasses.replace(method, eos_ids=ends), contexts, state)
    goes_on = float(tokens[1, 0] != tokens[0, 0])
    reached = np.stack([np.ones(2), ratio[:, 0] * [0, goes_on], np.zeros(2)], axis=1)
    np.testing.assert_allclose(seen.reached, reached, rtol=1e-5)


def test_all_rounds_are_collected(pair):
    """At temperature 0, as many tokens as `generate` tests: none behind an EOS."""
    config = config_of(pair, temperatures=(0.0,), batch_size=3)
    seen = train_head.collect(config, pair.target, pair.draft, TEXTS)
    rows = generate(pair.target, pair.draft, TEXTS, gamma=3, max_new_tokens=12).rows
    assert set(np.unique(seen.ratio)) == {0.0, 1.0}
    assert np.all(seen.reached == 1)
    assert len(seen.ratio) == sum(sum(row.tested) for row in rows)


def test_a_head_learns_what_can_be_known(pair):
    """Acceptance by the sign of one of eight features: on new tokens it ranks nearly all aright,
    and the loss is far below a constant's. Tokens that are not reached teach nothing."""
    rng = np.random.default_rng(0)

    def draw(count):
        hidden = rng.normal(size=(count, 8))
        ratio, reached = (hidden[:, 0] > 0).astype(np.float32), rng.random(count) < 0.7
        wrong = np.where(reached, ratio, 1 - ratio)
        return Seen(*(np.asarray(x, np.float32) for x in (hidden, wrong, reached)))

    config = config_of(pair, steps=200, tokens=128, learning_rate=0.02)
    params, losses = train_head.fit(config, draw(1000))
    found = train_head.judge(config, params, draw(500))
    assert found["ranked"] > 0.97
    assert found["loss"] < 0.3 * found["loss_of_a_constant"]
    assert losses[0] > 3 * np.mean(losses[-20:])


def test_judging_by_hand():
    """One kept token above one lost of two; a constant â loses least at ⅓ of 1 : 2·1."""
    config = HeadConfig("", "", reject_weight=2.0)
    params = head.HeadParams(jnp.zeros((0, 1, 1)), jnp.zeros((0, 1)), jnp.ones((1,)), jnp.zeros(()))
    hidden, ratio = np.float32([[1], [-1], [2]]), np.float32([1, 0, 0])
    found = train_head.judge(config, params, Seen(hidden, ratio, np.float32([1, 1, 0])))
    assert (found["accepted"], found["ranked"]) == (0.5, 1.0)
    constant = -(np.log(1 / 3) + 2 * np.log(2 / 3)) / 2
    assert found["loss_of_a_constant"] == pytest.approx(constant)
    assert found["loss"] == pytest.approx(1.5 * np.log1p(np.exp(-1)), rel=1e-5)


def test_a_file_of_a_head(tmp_path):
    params = head.init(jax.random.key(0), 4, layers=2)
    head.save(tmp_path / "head.npz", params)
    for ours, theirs in zip(head.load(tmp_path / "head.npz"), params, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    (tmp_path / "other.npz").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"other\.npz is not a file of the parameters of a head"):
        head.load(tmp_path / "other.npz")


@pytest.mark.slow
def test_the_command(pair, tmp_path, monkeypatch, capsys):
    """A head in the pair's own files, which `generate` decodes with."""
    rows = [json.dumps({"input": text, "target": text}) for text in TEXTS]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    fields = {
        "target": pair.target.name, "draft": pair.draft.name, "task": "jsonl",
        "task_file": tmp_path, "inputs": 4, "held_out_inputs": 2, "max_new_tokens": 12,
        "steps": 20, "tokens": 16, "gamma": 3,
    }  # fmt: skip
    flags = ["--config=configs/train.py:head", f"--workdir={tmp_path / 'run'}"]
    flags += [f"--config.{name}={value}" for name, value in fields.items()]
    outcome = command_line.run(monkeypatch, capsys, "experiments.train", *flags)
    assert outcome.status == 0, outcome.stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json", "metrics.jsonl", "final.json", "head.npz",
    }  # fmt: skip
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert 0 <= final["held_out"]["ranked"] <= 1
    policy = parse("head", params=head.load(tmp_path / "run" / "head.npz"), threshold=0.9)
    found = generate(pair.target, pair.draft, TEXTS[:2], gamma=3, policy=policy)
    plain = generate(pair.target, None, TEXTS[:2])
    assert found.tokens == plain.tokens


def test_wrong_settings():
    for changes, words in (
        ({"steps": 0}, "steps=0 must be a whole number ≥ 1"),
        ({"gamma": 2.5}, r"gamma=2\.5 must be a whole number"),
        ({"layers": "two"}, "layers='two' must be a whole number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a number > 0"),
        ({"temperatures": ("a",)}, "temperatures='a' must be a number ≥ 0"),
        ({"temperatures": ()}, r"temperatures=\(\) must be a list"),
    ):
        with pytest.raises(ValueError, match=words):
            HeadConfig("", "", **changes)


def test_one_process_trains_in_a_directory(tmp_path):
    """The second is refused before anything is loaded."""
    busy = "is being written by another process"
    with files.only_writer(tmp_path / "head.npz"), pytest.raises(ValueError, match=busy):
        train_head.run(HeadConfig("none", "none"), tmp_path)
