"""Training an EAGLE: what is unrolled is what is drafted, nothing is seen ahead. All kinds learn,
with their target or without."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pairs
import specjax
from configs.train import CHOICES, get_config
from eagles import eagle_of, target_of
from experiments.train import batches, eagle, train_drafter
from experiments.train.batches import Pair
from experiments.train.eagle import EagleTrainer, unrolled
from experiments.train.loop import fields_of
from experiments.train.medusa import MedusaTrainer
from experiments.train.train_drafter import DrafterConfig, known_tokens
from pairs import TEXTS
from specjax import drafters
from specjax.types import Inputs
from tiny_models import quick

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:.* are in the training split too"),
]
STEPS = 3
TASKS = ("-parse", "-prose")
PAIRS = [
    Pair(np.array([3, 1, 4]), np.array([4, 0, 3, 0, 4, 2])),  # 0 is a token, as "!" is in GPT-2
    Pair(np.array([2, 1]), np.array([1, 4, 3, 2])),
]


REAL = np.array([6 * [1.0] + [0.0], 4 * [1.0] + 3 * [0.0]])  # of their batch


def batch_of(target):
    encodes = target.config.is_encoder_decoder
    pairs = PAIRS if encodes else [Pair(np.zeros(0, np.int32), p.target) for p in PAIRS]
    return batches.collate(pairs, (4 if encodes else 0, 7))


@jax.jit
def drafted(drafter, known, begin):
    """Logits of a round that begins with `begin` known tokens and drafts the text's own tokens."""
    batch, count = known.tokens.shape
    inputs = Inputs(known.source, known.source_len, known.tokens, jnp.full((batch,), count))
    context, state = drafter.start(inputs, count + STEPS)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = drafter.observe(known.tokens, zeros, known.hidden, zeros + begin - 1, context, state)
    padded = jnp.pad(known.tokens, ((0, 0), (0, STEPS)))
    hidden, state = drafter.begin(padded, zeros + begin, context, state)
    logits = [drafter.logits(hidden)]
    for step in range(1, STEPS):
        token = padded[:, begin + step - 1]
        hidden, state = drafter.extend(token, zeros + begin + step - 1, context, state)
        logits.append(drafter.logits(hidden))
    return jnp.stack(logits, axis=1)


def features_before(drafter, known):
    features = drafter.features(known.hidden)
    first = jnp.broadcast_to(drafter.module.first[...], (len(features), 1, features.shape[2]))
    return jnp.concatenate([first, features[:, :-1]], axis=1)


def run_unrolled(drafter, known):
    before = features_before(drafter, known)
    source = drafter.read(known.source, known.source_len)
    return unrolled(drafter, known.tokens, before, source, STEPS)


@jax.jit
def logprobs_along(drafter, known):
    """h and log-probabilities of each unrolled step."""
    found = run_unrolled(drafter, known)
    return [(hidden, jax.nn.log_softmax(drafter.logits(hidden))) for hidden in found]


@pytest.mark.parametrize(("kind", "version"), [("t5", 3), ("gpt", 1)])
def test_what_is_unrolled_is_what_is_drafted(kind, version):
    """Row t of step i is the token i of a draft that began with t + 1 known tokens: the true keys
    up to t, its own after that, each at its position."""
    target = target_of(kind)
    drafter = eagle_of(target, version)
    known = jax.jit(known_tokens)(drafter, batch_of(target))
    steps = logprobs_along(drafter, known)
    count = known.tokens.shape[1]
    for row in (0, 1, 3):
        expected = drafted(drafter, known, row + 1)
        for step in range(min(STEPS, count - row)):
            found = steps[step][1][:, row]
            wanted = jax.nn.log_softmax(expected[:, step])
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-3)


def looks_ahead(drafter, known) -> bool:
    """Whether what row t of step i says changes with the tokens after t + i or features after t."""
    run = jax.jit(lambda *known: run_unrolled(*known))  # traced anew, for `eagle.moved`
    steps, at = run(drafter, known), 3
    changed = known._replace(
        tokens=known.tokens.at[:, at + 1 :].set(0),
        hidden=known.hidden.at[:, at:].multiply(2.0),
    )
    other = run(drafter, changed)
    for step in range(STEPS):
        row = at - step
        if not np.array_equal(steps[step][:, : row + 1], other[step][:, : row + 1]):
            return True
    return False


def test_no_row_reads_its_own_token(monkeypatch):
    """Nor a later feature; and if each read the token that it is to say, that would be seen."""
    target = target_of("gpt")
    drafter = eagle_of(target, 1)
    known = jax.jit(known_tokens)(drafter, batch_of(target))
    assert not looks_ahead(drafter, known)
    plain = eagle.moved
    monkeypatch.setattr(eagle, "moved", lambda x, steps: plain(x, steps + 1))
    assert looks_ahead(drafter, known)


def test_losses_by_hand():
    """EAGLE-1: smooth-L1 and forward KL over the real positions, without noise."""
    target = target_of("gpt")
    drafter = eagle_of(target, 1)
    known = jax.jit(known_tokens)(drafter, batch_of(target))
    trainer = EagleTrainer(token_weight=0.5, feature_weight=2.0)
    found = jax.jit(lambda *args: trainer.loss(*args, None))(drafter, known)
    hidden, draft = logprobs_along(drafter, known)[0]
    distance = np.abs(hidden - known.hidden)  # whose features are the hidden states themselves
    near = np.where(distance < 1, distance**2 / 2, distance - 0.5).mean(-1)
    p = np.exp(known.logprobs)
    each = 2.0 * near + 0.5 * (p * (known.logprobs - draft)).sum(-1)
    real = REAL
    assert found.positions == REAL.sum() == 6 + 4
    np.testing.assert_allclose(found.total, (each * real).sum(), rtol=1e-5)
    alpha = np.minimum(p, np.exp(draft)).sum(-1)
    np.testing.assert_allclose(found.seen["alpha_1"], (alpha * real).sum() / real.sum(), rtol=1e-5)


def test_a_head_over_some_ids_learns_the_targets_distribution_over_them():
    """Its loss is KL over its ids, weighed by their mass; its α counts what it can say."""
    target = target_of("gpt")
    drafter = eagle_of(target, 3, ids=np.array([0, 2, 3]))
    known = jax.jit(known_tokens)(drafter, batch_of(target))
    trainer = EagleTrainer(version=3, steps=2, decay=0.5)
    found = jax.jit(lambda *args: trainer.loss(*args, None))(drafter, known)
    real, total = REAL, 0.0
    for step, (_, logprobs) in enumerate(logprobs_along(drafter, known)[:2]):
        count = real.shape[1] - step
        draft = np.asarray(logprobs)[:, :count, [0, 2, 3]]
        p = np.exp(known.logprobs)[:, step:, [0, 2, 3]]
        among = np.log(p / p.sum(-1, keepdims=True))
        total += 0.5**step * ((p * (among - draft)).sum(-1) * real[:, step:]).sum()
    np.testing.assert_allclose(found.total, total, rtol=1e-4)


@pytest.mark.parametrize("layers", [0, 1])
def test_medusa_learns_at_every_token_and_at_no_padding(layers):
    """Each head's mean is that over the texts one by one, which have no padding."""
    target = target_of("gpt")
    trainer = MedusaTrainer(heads=2, train_layers=layers)
    drafter = trainer.init(target, np.zeros(5), seed=0)

    @jax.jit
    def loss(batch):
        return trainer.loss(drafter, known_tokens(drafter, batch), None)

    found = loss(batch_of(target))
    assert found.positions == 6 + 4
    nothing = np.zeros(0, np.int32)
    alone = [
        loss(batches.collate([Pair(nothing, pair.target)], (0, len(pair.target)))) for pair in PAIRS
    ]
    for head in (1, 2):
        counts = np.array([6, 4]) - head  # a head says nothing of the first tokens of a text
        means = [float(one.seen[f"loss_{head}"]) for one in alone]
        expected = (counts * means).sum() / counts.sum()
        np.testing.assert_allclose(found.seen[f"loss_{head}"], expected, rtol=1e-4)


KINDS = {
    "eagle": ({"heads": 2, "inner": 16, "token_weight": 1.0}, "alpha_1"),
    "medusa": ({"heads": 2, "hydra": True}, "loss_2"),
    "kangaroo": ({"layers": 1}, "alpha_1"),
    "shallow": ({"layers": (0, 2)}, "alpha_1"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target like the pair's, with three layers in the decoder."""
    place = tmp_path_factory.mktemp("targets") / "target"
    return specjax.load(pairs.write(place, padding=20, layers=3))


@pytest.fixture
def config(target, tmp_path):
    texts = [*TEXTS, 8 * TEXTS[0]]  # the last one is too long
    rows = [json.dumps({"input": text, "target": text}) for text in texts]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return DrafterConfig(
        "eagle", target.name, KINDS["eagle"][0], task="jsonl",
        task_file=str(tmp_path), steps=30, target_tokens=64, buckets=((16, 16),), warmup_steps=2,
        learning_rate=1e-2, log_every=5, eval_every=15, checkpoint_every=10,
    )  # fmt: skip


@pytest.mark.parametrize("choice", [name for name in CHOICES if name.endswith(TASKS)])
def test_configs_make_their_trainers(choice):
    made = DrafterConfig(**fields_of(get_config(choice)))
    assert type(made.trainer).__name__.lower() == f"{made.drafter}trainer"
    assert dict(made.settings).items() <= dataclasses.asdict(made.trainer).items()


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", quick(KINDS, "eagle", "shallow"))
def test_a_run_learns_and_writes_a_drafter(kind, config, target, tmp_path, capsys):
    work, (settings, shown) = tmp_path / "work", KINDS[kind]
    config = dataclasses.replace(config, drafter=kind, settings=settings)
    count = len(TEXTS) + 1
    repeated = f"{count} of {count} inputs of validation and {count} of {count} inputs of test"
    with pytest.warns(UserWarning, match=f"{repeated} are in the training split too"):
        final = train_drafter.run(config, work)
    left_out = f"1 of {count} pairs of test are longer than every bucket of ((16, 16),)"
    assert left_out in capsys.readouterr().err
    assert final["test_examples"] == len(TEXTS)
    losses = [row["train_loss"] for row in rows_of(work) if "train_loss" in row]
    assert losses[-1] < 0.95 * losses[0]
    assert final[shown] > 0
    assert {path.name for path in work.iterdir()} == {
        "checkpoints", "metrics.jsonl", "curve.png", "provenance.json", "final.json", "drafter",
    }  # fmt: skip
    found = drafters.load(str(work / "drafter"), target)
    assert drafters.parameters(found) == final["parameters"]
    with pytest.raises(ValueError, match="has a checkpoint of 30 steps, more than steps=5"):
        train_drafter.run(dataclasses.replace(config, steps=5), work)


def test_heads_that_are_trained_with_their_target(config, target, tmp_path):
    """Its last layer and the norm behind it change, and nothing else; the heads belong to what
    comes of it, decode it as it decodes itself, and are refused elsewhere."""
    work, settings = tmp_path / "work", {"heads": 2, "train_layers": 1}
    final = train_drafter.run(
        dataclasses.replace(config, drafter="medusa", settings=settings), work
    )
    new = specjax.load(work / "target")
    before, after = (nnx.to_flat_state(nnx.state(x.model.module())) for x in (target, new))
    changed = {
        path for (path, old), (_, now) in zip(before, after, strict=True)
        if not np.allclose(old[...], now[...], rtol=1e-3, atol=1e-5)
    }  # fmt: skip
    assert changed == {
        path for path, _ in before if path[:2] == ("decoder", 2) or path[0] == "decoder_norm"
    }
    assert 0 < final["target_kl"] < 1
    assert final["parameters"] == 2 * (16 * 16 + 16)
    place = str(work / "drafter")
    options = {"max_new_tokens": 12}
    found = specjax.generate(new, place, TEXTS, gamma=2, **options)
    assert found.tokens == specjax.generate(new, None, TEXTS, **options).tokens
    assert max(found.accepted) > 0
    words = r"belongs to the target 'work/target', and .* has other weights"
    with pytest.raises(ValueError, match=words):
        drafters.load(place, target)


def test_a_run_keeps_its_target(config, tmp_path):
    """With a checkpoint, a target that has changed since is refused by the name of its file."""
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    began = {"models": {"target": {"model.safetensors": "8 bytes, c"}}}
    (tmp_path / "provenance.json").write_text(json.dumps(began))
    words = r"target, model\.safetensors was '8 bytes, c' and is '\d+ bytes"
    with pytest.raises(ValueError, match=words):
        train_drafter.run(config, tmp_path)


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on(config, tmp_path):
    """After 20 of 30 steps: with the losses and the drafter of one that was not."""
    whole = dataclasses.replace(config, decay_share=0.0)
    once, cut = tmp_path / "once", tmp_path / "cut"
    finals = [train_drafter.run(whole, once)]
    train_drafter.run(dataclasses.replace(whole, steps=20), cut)
    finals.append(train_drafter.run(whole, cut))
    losses = [
        [(row["step"], row["train_loss"]) for row in rows_of(place) if "train_loss" in row]
        for place in (once, cut)
    ]
    assert [step for step, _ in losses[1]] == [5, 10, 15, 20, 25, 30]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert all(final.pop("minutes") > 0 for final in finals)
    schedules = [final.pop("schedules") for final in finals]
    assert schedules == [
        [{"from": 0, "steps": 30}],
        [{"from": 0, "steps": 20}, {"from": 20, "steps": 30}],
    ]
    assert finals[0] == pytest.approx(finals[1], rel=1e-5)


def test_minutes_of_a_log():
    rows = [(5, 0.1), (10, 0.2), (12, 0.5)]
    log = [{"step": step, "seconds_per_step": seconds} for step, seconds in rows]
    log.insert(1, {"step": 5, "held_out_loss": 1.0})
    assert train_drafter.minutes(log) == pytest.approx((0.5 + 1.0 + 1.0) / 60)


def test_wrong_settings(config, tmp_path):
    with pytest.raises(ValueError, match="steps=0 must be a whole number ≥ 1"):
        dataclasses.replace(config, steps=0)
    with pytest.raises(ValueError, match=r"train_layers=4 must be .* \[0, 3\]"):
        train_drafter.run(
            dataclasses.replace(config, drafter="medusa", settings={"train_layers": 4}), tmp_path
        )
    with pytest.raises(ValueError, match="unexpected keyword argument 'speed'"):
        _ = dataclasses.replace(config, settings={"speed": 1}).trainer
    with pytest.raises(ValueError, match="There is no trainer 'owl'"):
        _ = dataclasses.replace(config, drafter="owl").trainer
