"""Training: what is learned, what is written, and that an interrupted run is the same run."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

from configs import train as configured
from experiments import tasks
from experiments.train import (
    batches,
    loop,
    steps,
    train,
    workdirs,
)
from experiments.train.config import TrainConfig
from specjax import checkpoints
from specjax.support.files import Rows, only_writer

pytestmark = pytest.mark.usefixtures("standard_promotion")

TINY = {
    "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> str:
    """Three small files of pairs: assignments and their trees."""
    directory, names = tmp_path_factory.mktemp("pairs"), []
    for split, numbers in zip(
        tasks.SPLITS, (range(120), range(120, 136), range(136, 152)), strict=True
    ):
        rows = [
            {"input": f"x{i} = {i % 7}", "target": f"(Assign [(Name x{i})] (Constant {i % 7}))"}
            for i in numbers
        ]
        if split == "test":
            rows.append({"input": "x = 1", "target": "(Too long)" * 20})
        names.append(directory / f"{split}.jsonl")
        names[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ",".join(map(str, names))


@pytest.fixture(scope="module")
def config(files) -> TrainConfig:
    return TrainConfig(
        task="jsonl", task_file=files, vocab_size=270, model=TINY, steps=8, target_tokens=128,
        buckets=((24, 64),), learning_rate=1e-2, warmup_steps=2, log_every=2, eval_every=4,
        sample_examples=4, checkpoint_every=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that was not interrupted: its directory and its final figures."""
    directory = tmp_path_factory.mktemp("whole")
    with jax.numpy_dtype_promotion("standard"):
        return directory, train.run(config, directory)


def _rows(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds_per_step"} for row in rows]


def test_a_run_leaves_what_it_promises(whole):
    directory, final = whole
    rows = _rows(directory)
    assert [row["step"] for row in rows if "train_loss" in row] == [2, 4, 6, 8]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    assert rows[-2]["train_loss"] < rows[0]["train_loss"]
    assert (directory / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((directory / "final.json").read_text()) == final
    assert final["test_examples"] == {"losses": 16, "outputs": 16}
    assert {"exact", "distinct", "held_out_loss", "shuffled_loss"} <= final.keys()
    samples = (directory / "samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0]).keys() == {"step", "input", "output", "target"}
    assert json.loads((directory / "provenance.json").read_text())["pairs"]["train"] == 120


def test_the_exported_model_is_the_trained_one(whole, config):
    directory, final = whole
    loaded = checkpoints.load(directory / "model")
    assert loaded.tokenizer("x1 = 1")["input_ids"][-1] in loaded.eos_ids
    assert loaded.max_source_len == config.max_source_len
    assert json.loads(loaded.metadata["training_data"])["pairs"]["test"] == 17
    test = tasks.load("jsonl", "test", files=config.task_file.split(","))
    cut = batches.in_order(batches.encode(test, loaded.tokenizer), config.buckets, 128)
    trainer = steps.Trainer(loaded.model.graphdef, loop.optimizer(config))
    loss = steps.held_out_loss(trainer, loaded.model.params, cut)
    assert loss == pytest.approx(final["held_out_loss"], abs=1e-2)  # stored in half precision


def test_an_interrupted_run_goes_on_to_the_same_end(whole, config, tmp_path, monkeypatch, capsys):
    directory, final = whole
    append = Rows.append

    def interrupted(log, row):
        if row["step"] == 6:  # after a checkpoint at 3 and rows for 2 and 4
            raise KeyboardInterrupt
        append(log, row)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(config, tmp_path)
    assert [row["step"] for row in _rows(tmp_path)] == [2, 4, 4]
    assert "compiling for (24, 64)" in capsys.readouterr().err
    assert train.run(config, tmp_path) == final
    ours, theirs = _rows(tmp_path), _rows(directory)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    # The row of step 4 was written anew, from the losses of step 4 alone: step 3 was not repeated.
    assert [row["steps_in_mean"] for row in ours if "train_loss" in row] == [2, 1, 2, 2]
    assert [o == t for o, t in zip(ours, theirs, strict=True)] == [True, False, *[True] * 4]
    samples = [(d / "samples.jsonl").read_text() for d in (tmp_path, directory)]
    assert samples[0] == samples[1]
    weights = [checkpoints.load(d / "model").model.params for d in (tmp_path, directory)]
    for a, b in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_is_not_trained_again(whole, config, capsys):
    directory, final = whole
    before = (directory / "metrics.jsonl").read_text()
    assert train.run(config, directory) == final
    assert "Reading the pairs of jsonl.\n120 pairs to train on." in capsys.readouterr().err
    with pytest.raises(ValueError, match="has a checkpoint of 8 steps, more than steps=4"):
        train.run(dataclasses.replace(config, steps=4), directory)
    assert (directory / "metrics.jsonl").read_text() == before


def test_a_workdir_keeps_its_settings(tmp_path):
    """Other ones are refused once there is a checkpoint; more steps are not.

    An attempt that is refused later writes nothing."""
    work = tmp_path / "work"
    work.mkdir()

    def claim(*, checked=True, **changes):
        config = ml_collections.ConfigDict({"steps": 8, "seed": 0, "tokenizer": ""} | changes)
        mark = workdirs.claim(work, config, may_grow=("steps",))
        if checked:
            mark()
        return json.loads((work / "config.json").read_text())["steps"] if any(work.iterdir()) else 0

    assert claim(checked=False) == 0
    claim(seed=1)
    (work / "tokenizer").mkdir()
    (work / "provenance.json").write_text("{}")
    assert claim() == 8  # a start that failed before it made anything holds nothing
    (work / "checkpoints" / "4").mkdir(parents=True)
    assert claim() == claim(steps=12, checked=False) == claim() == 8
    words = r"seed was 0 and is 1; tokenizer was '' and is 'x'\. Name"
    with pytest.raises(ValueError, match=words):
        claim(seed=1, tokenizer="x")
    assert claim(steps=9) == 9
    with pytest.raises(ValueError, match="steps was 9 and is 8"):
        claim()
    assert json.loads((work / "config.json").read_text())["steps"] == 9


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"model_type": "t5", "steps": 8}'),
        ("config.json", "[]"),
        ("model.gguf", ""),
        ("model-00001-of-00002.safetensors", ""),
        ("samples.jsonl", "{}"),
    ],
)
def test_a_workdir_with_something_else_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}.*Name another"):
        workdirs.claim(tmp_path, ml_collections.ConfigDict({"steps": 8}))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: content}


def test_a_run_keeps_its_data_and_models(tmp_path):
    """With a checkpoint, other data or models are refused by name; the versions that they came
    from alone are not, and more steps are another schedule."""
    began = {
        "task": "jsonl", "pairs": {"train": 2}, "sha256": {"train": "a"}, "python": "3.11.7",
        "models": {"teacher": {"model.safetensors": "8 bytes, c"}},
    }  # fmt: skip
    first, more = {"from": 0, "steps": 4}, {"from": 4, "steps": 6}

    def claim(*given, **how):
        mark = loop.claim(tmp_path, *given, **how)
        loop.files.write_json(tmp_path / "provenance.json", mark)
        return mark["schedules"]

    assert claim({"sha256": {"train": "b"}}, begin=0, steps=9)  # replaced: nothing was trained
    assert claim(began, begin=0, steps=4) == [first]
    assert claim({**began, "python": "3.12.0"}, begin=2, steps=4) == [first]
    assert claim(began, begin=4, steps=6) == [first, more]
    for other, message in (
        ({"sha256": {"train": "b"}}, "sha256, train was 'a' and is 'b'"),
        ({"models": {}}, "models, teacher was {.*} and is None"),
        (
            {"models": {"teacher": {"model.safetensors": "8 bytes, d"}}},
            "teacher, model.safetensors was '8 bytes, c' and is '8 bytes, d'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            claim({**began, **other}, begin=4, steps=6)
    assert loop.runs.read_mark(tmp_path / "provenance.json")["schedules"] == [first, more]
    (tmp_path / "provenance.json").write_text("")
    with pytest.raises(ValueError, match=r"provenance\.json is damaged"):
        claim(began, begin=4, steps=6)


def test_a_run_is_not_continued_on_other_data(config, tmp_path):
    """The training file was replaced after a checkpoint."""
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    places = config.task_file.split(",")
    data = {split: tasks.load("jsonl", split, places) for split in tasks.SPLITS}
    hashes = tasks.provenance("jsonl", data)["sha256"]
    found = {"sha256": {**hashes, "train": "a"}, "schedules": [{"from": 0, "steps": 8}]}
    (tmp_path / "provenance.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"sha256, train was 'a' and is '\w{64}'\. Name another"):
        train.run(config, tmp_path)
    assert json.loads((tmp_path / "provenance.json").read_text()) == found


def test_one_process_trains_in_a_directory(config, tmp_path):
    with (
        only_writer(tmp_path / "checkpoints"),
        pytest.raises(ValueError, match="is being written by another process"),
    ):
        train.run(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_refused_writes_nothing(config, tmp_path):
    """Data and models are checked first, here by a tokenizer that cannot be made."""
    refused = dataclasses.replace(config, vocab_size=9)
    with pytest.raises(ValueError, match="vocab_size=9: bytes and specials alone"):
        train.run(refused, tmp_path, lambda: pytest.fail("it was not checked"))
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_pairs_are_many(monkeypatch, capsys):
    monkeypatch.setattr(tasks, "stream", lambda *_, **__: [])
    loop.read_data(loop.LoopConfig(task="parse"))
    assert "some 450,000 pairs: that takes minutes. --config.task=jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_draft_learns_its_teachers_probabilities(whole, config, tmp_path):
    directory, _ = whole
    model = str(directory / "model")
    shared = {"tokenizer": model, "teacher": model, "teacher_after": 4}
    narrow = {**TINY, "d_model": 8}
    draft = dataclasses.replace(config, steps=40, model=narrow, **shared)
    final = train.run(draft, tmp_path)
    first, *_, last = [row["train_loss"] for row in _rows(tmp_path) if "train_loss" in row]
    assert last < first
    assert final["parameters"] < 10_000
    assert (
        checkpoints.load(tmp_path / "model").tokenizer.get_vocab()
        == checkpoints.load(model).tokenizer.get_vocab()
    )


def test_a_teacher_must_share_the_vocabulary(whole, config, tmp_path):
    directory, _ = whole
    other = dataclasses.replace(config, teacher=str(directory / "model"), vocab_size=280)
    with pytest.raises(ValueError, match="has another vocabulary: set tokenizer="):
        train.run(other, tmp_path)


def test_a_run_that_grows_starts_where_the_small_one_ended(whole, config, tmp_path):
    directory, final = whole
    model = str(directory / "model")
    larger = dict(TINY, d_ff=2 * TINY["d_ff"], num_decoder_layers=2)
    held = dataclasses.replace(
        config, grow=model, tokenizer=model, model=larger, steps=1, learning_rate=0.0
    )
    grown = train.run(held, tmp_path)
    assert grown["parameters"] > final["parameters"]
    # The small model was written in half precision.
    assert grown["held_out_loss"] == pytest.approx(final["held_out_loss"], abs=2e-3)


def test_diverged_training_stops(config, tmp_path):
    wild = dataclasses.replace(config, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(ValueError, match="lower learning_rate"):
        train.run(wild, tmp_path)


def test_sizes_of_the_embedded_families():
    """A step of parse's decoder reads 50 MB or more; prose's draft is a twentieth of its target."""

    def leaves(name):
        config = configured.get_config(name)
        family = checkpoints.FAMILIES[config.family]
        ids = {"bos_token_id": 1} if config.family == "gpt2" else {}
        shape = family.config_class(
            vocab_size=config.vocab_size, pad_token_id=0, **ids, **config.model
        )
        model = nnx.eval_shape(lambda: family.build(shape, rngs=nnx.Rngs(0), dtype=jnp.float32))
        flat = jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]
        return {jax.tree_util.keystr(path): math.prod(leaf.shape) for path, leaf in flat}

    target = leaves("target")
    read = [n for at, n in target.items() if "decoder" in at and "['cross']['kv']" not in at]
    (head,) = [n for at, n in target.items() if "head" in at]
    assert 4 * (sum(read) + head) >= 50e6
    assert 20 * sum(leaves("gpt-draft").values()) <= sum(leaves("gpt-target").values())
    assert 2 * sum(sum(leaves(n).values()) for n in ("gpt-target", "gpt-draft")) <= 12e6
