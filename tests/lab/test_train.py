"""Training: what is learned, what is written, and that an interrupted run is the same run."""

import dataclasses
import itertools
import json
import math
import os

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tokenizers
from flax import nnx
from matplotlib.figure import Figure
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs import train as configured
from experiments import tasks
from experiments.tasks.examples import Example
from experiments.train import (
    batches,
    beginning,
    divergences,
    evaluation,
    loop,
    steps,
    train,
    workdirs,
)
from experiments.train.batches import Pair
from experiments.train.config import TrainConfig
from experiments.train.train_drafter import DrafterConfig
from specjax import checkpoints
from specjax.models.t5 import T5Config, UMT5Config
from specjax.support import files as files_of
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


# --- checkpoints that are cut --------------------------------------------------------------------


def counted(directory, steps, **options):
    """A run whose only number is how many steps it took."""
    config = loop.LoopConfig(
        steps=steps, checkpoint_every=2, log_every=2, eval_every=9, optimizer="adafactor", **options
    )

    def step(progress, batch, at):
        return progress._replace(params=progress.params + 1), jnp.float32(at)

    batch = batches.collate([Pair(np.ones(1, np.int32), np.ones(1, np.int32))], (1, 1))
    begin = loop.Progress(jnp.zeros(()), jnp.zeros(()))
    done = loop.fit(
        begin, step, lambda *_: itertools.repeat(batch), lambda *_: {}, config, directory
    )
    return float(done.params)


@pytest.mark.parametrize("damage", ["cut", "short of a file", "empty"])
def test_a_damaged_checkpoint_is_left_for_the_one_before(damage, tmp_path, capfd):
    assert counted(tmp_path, 4) == 4
    last = tmp_path / "checkpoints" / "4"
    (last.parent / "4.damaged").mkdir()  # of an earlier time
    (last.parent / "4.damaged" / "file").touch()
    for file in sorted(path for path in last.rglob("*") if path.is_file()):
        if damage == "cut":
            os.truncate(file, file.stat().st_size // 2)
        elif damage == "empty" or "manifest" in file.name or file.name == "_METADATA":
            file.unlink()
    assert counted(tmp_path, 6) == 6
    said = capfd.readouterr().err
    assert "cannot be read" in said
    assert "renamed to 4.damaged-1, and the run goes on from step 2." in said
    assert {path.name for path in last.parent.iterdir()} == {
        "4.damaged", "4.damaged-1", "4", "6"
    }  # fmt: skip
    steps = [row["step"] for row in files_of.read_rows(tmp_path / "metrics.jsonl")]
    assert [step for step in steps if step != 6] == [2, 4]


def test_no_checkpoint_can_be_read(tmp_path):
    counted(tmp_path, 2)
    for file in (tmp_path / "checkpoints" / "2").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"No checkpoint in .* can be read \(of step 2: .* backup"):
        counted(tmp_path, 4)
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Failed writing 'x'\nmore")

    monkeypatch.setattr(loop.ocp.CheckpointManager, "save", full)
    with pytest.raises(ValueError, match=r"step 2 in .* \(RESOURCE.*Make room, and give"):
        counted(tmp_path, 4)


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


# Compiled: an operation at a time takes seconds.
data_loss = jax.jit(steps.data_loss, static_argnums=0)
teacher_forced = jax.jit(steps.teacher_forced, static_argnums=0)


def test_losses_against_plain_formulas():
    config = T5Config(vocab_size=11, **TINY)
    graphdef, params = beginning.make_model(config, seed=0)
    pairs = [
        Pair(np.array([3, 4, 1]), np.array([5, 1])),
        Pair(np.array([3, 1]), np.array([6, 0, 1])),  # 0 is a token, as "!" is in GPT-2
    ]
    batch = batches.collate(pairs, (4, 5))
    total, count = data_loss(graphdef, params, batch)
    logprobs = jax.nn.log_softmax(teacher_forced(graphdef, params, batch)).reshape(2, 5, 11)
    expected = -sum(logprobs[r, t, i] for r, p in enumerate(pairs) for t, i in enumerate(p.target))
    assert count == 5
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    padded = T5Config(vocab_size=13, **TINY)  # whose last two ids the draft has not
    teacher = beginning.make_model(padded, seed=1)
    kl = divergences.parse("forward_kl")
    found, count = jax.jit(
        lambda *args: steps.teacher_loss(graphdef, params, (teacher[0], args[0]), batch, kl)
    )(teacher[1])
    theirs = jax.nn.log_softmax(teacher_forced(*teacher, batch)[:, :11]).reshape(2, 5, 11)
    real = np.array([2 * [True] + 3 * [False], 3 * [True] + 2 * [False]])[..., None]
    assert count == 5
    expected = (jnp.exp(theirs) * (theirs - logprobs) * real).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_padding_changes_no_loss():
    graphdef, params = beginning.make_model(T5Config(vocab_size=11, **TINY), seed=0)
    pair = Pair(np.array([3, 4, 1]), np.array([5, 1]))
    losses = [
        data_loss(graphdef, params, batches.collate([pair], shape))[0] for shape in ((3, 2), (7, 9))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("warmup", "share", "expected"),
    [
        (0, 0.4, [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (0, 1.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (5, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2]),
        (2, 0.5, [0, 0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (0, 0.0, [1] * 10),
        (1, 0.0, [0] + [1] * 9),
    ],
)
def test_the_rate_of_each_step(warmup, share, expected):
    """A warmup of 0 steps loses none, and the rate falls to zero, whatever the warmup."""
    of = {"steps": 10, "learning_rate": 2.0, "warmup_steps": warmup, "decay_share": share}
    for config in (TrainConfig(**of), DrafterConfig("eagle", "target", **of)):
        rates = [loop.schedule(config)(step) for step in range(10)]
        np.testing.assert_allclose(rates, 2 * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("kind", [T5Config, UMT5Config])
def test_look_around_prefers_neighbours_and_equal_contents(kind):
    config = kind(vocab_size=11, **{**TINY, "num_heads": 8})
    model = nnx.merge(*beginning.make_model(config, seed=0))
    bias = model.position_biases("encoder")[-1].by_offset(9)
    assert [int(bias[h].argmax()) - 9 for h in range(4)] == [-1, 1, -2, 2]
    assert (bias[6:] == 0).all()
    bias = model.position_biases("decoder")[-1].by_offset(9)
    assert [int(bias[h, :10].argmax()) - 9 for h in range(4)] == [0, -1, -2, -3]
    cross = model.decoder[0].cross
    np.testing.assert_allclose(cross.query.weight[...], cross.kv.weight[...][:32] * 0.5)


def test_the_curve_of_a_short_run_shows_its_points(tmp_path, monkeypatch):
    """One point is a mark, not a line of no length, and its scale has plain numbers."""
    made = []

    def figure(**options):
        made.append(Figure(**options))
        return made[-1]

    monkeypatch.setattr(loop, "Figure", figure)
    losses = {"train_loss": 7.263, "held_out_loss": 7.258}
    loop.draw_curve([{"step": 1, name: loss} for name, loss in losses.items()], tmp_path / "a.png")
    many = [{"step": step, "train_loss": 10.0 / step} for step in range(1, 50)]
    loop.draw_curve(many, tmp_path / "b.png")
    short, long = (figure.axes[0] for figure in made)
    assert [line.get_marker() for line in short.lines] == [".", "."]
    assert [line.get_marker() for line in long.lines] == [""]
    labels = [label.get_text() for label in short.get_yticklabels(which="both")]
    assert "7.26" in labels
    assert all(label == "" or float(label) for label in labels)


def test_shuffling_gives_every_target_another_source():
    pairs = [Pair(np.array([i]), np.array([10 + i])) for i in range(4)]
    mixed = evaluation.shuffled(pairs)
    assert [p.source[0] for p in mixed] == [1, 2, 3, 0]
    assert [p.target[0] for p in mixed] == [10, 11, 12, 13]


@pytest.mark.parametrize("marks", ["$A </s>", "<s> $A", "<s> $A </s>", "$A"])
def test_a_target_ends_once_and_begins_with_no_start_token(marks):
    """Whatever a tokenizer adds; sources are as it makes them."""
    made = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<e>": 4}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>", "<e>"])
    ids = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single=marks, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    examples = [Example("a ", text) for text in ("a b", "<s> b", "b </s> <e>", "b <e>", "")]
    for whole in (False, True):
        pairs = batches.encode(examples, tokenizer, decoder_only=whole, eos_ids=(1, 4))
        found = [pair.target.tolist() for pair in pairs]
        begun = [2] if whole else []
        if not whole:
            assert pairs[0].source.tolist() == tokenizer("a")["input_ids"]
            assert found[1] == [3, 1]
        assert [found[i] for i in (0, 2, 3, 4)] == [
            [*begun, 2, 3, 1], [*begun, 3, 1], [*begun, 3, 4], [*begun, 1]
        ]  # fmt: skip
    assert batches.encode(examples[:1], tokenizer, eos_ids=(4,))[0].target.tolist() == [2, 3, 4]
    behind = batches.encode([Example("a <e> ", "b")], tokenizer, decoder_only=True, eos_ids=(1, 4))
    assert behind[0].target.tolist() == [2, 4, 3, 1]  # a prompt may end as a turn does
    tokenizer.eos_token = None
    assert batches.encode(examples[:1], tokenizer, eos_ids=(4,))[0].target.tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="tokenizer has no EOS, which every target ends with"):
        batches.encode(examples, tokenizer)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([[5, 6, 1], [5, 5, 5]], ""),
        ([[5, 6, 7], [5, 6, 8]], "of 2 greedy outputs none has an end"),
        (
            [[5, 5, 5], [6, 6, 6, 1]],
            "of 2 greedy outputs each is empty, or one token",
        ),
        ([[1], [1]], "of 2 greedy outputs each is empty, or one token"),
        ([[5, 1], [6, 1]], ""),
        ([[], []], ""),
    ],
)
def test_odd_outputs(outputs, said):
    assert evaluation.oddity(outputs, [1]).partition(" over")[0].partition(". If")[0] == said


def test_scores():
    examples = [Example("a", "Pass"), Example("b", "Pass"), Example("c", "Break")]
    assert evaluation.score("parse", ["Pass", "(Pass", "Pass"], examples) == {
        "exact": 1 / 3, "distinct": 2 / 3, "distinct_targets": 2 / 3, "well_formed": 2 / 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"steps": 0}, "steps=0 must be a whole number ≥ 1"),
        ({"decay_share": 2.0}, "decay_share=2.0"),
        ({"refresh_every": 0}, "refresh_every=0 must be a whole number ≥ 1"),
        ({"prefix_inputs": 0}, "prefix_inputs=0 must be a whole number ≥ 1"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a number ≥ 0"),
        ({"clip": -1.0}, "clip=-1.0 must be a number > 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be a whole number ≥ 0"),
        ({"eval_examples": -1}, "eval_examples=-1 must be a whole number ≥ 1"),
        ({"max_examples": -1}, "max_examples=-1 must be a whole number ≥ 0"),
        ({"target_tokens": 1}, "target_tokens=1 must be at least 104"),
        ({"buckets": ()}, r"buckets=\(\) must be pairs of lengths"),
        ({"buckets": 24}, "buckets=24 must be pairs of lengths"),
        ({"buckets": ((24,),)}, "must be pairs of lengths"),
        ({"buckets": ((0, 0),)}, "a target in buckets=0 must be a whole number ≥ 1"),
        ({"model": {"d_model": 0}}, "model.d_model=0 must be a whole number ≥ 1"),
        ({"model": {"num_heads": 0}}, "model.num_heads=0 must be a whole number ≥ 1"),
        ({"model": {"d_kv": "8"}}, "model.d_kv='8' must be a whole number ≥ 1"),
        ({"model": {"width": 8}}, "model.width is no field of family='t5'; choose from d_model"),
        ({"family": "gpt2", "model": {"n_head": 0}}, "model.n_head=0 must be a whole"),
        (
            {"family": "gpt2", "model": {"n_inner": -1}},
            "n_inner=-1 must be a whole number ≥ 0",
        ),
        ({"family": "gpt2", "model": {"n_head": 5}}, "n_embd=768 is not divisible by n_head=5"),
        ({"family": "llama", "model": {"num_attention_heads": 0}}, "num_attention_heads=0 must be"),
        ({"prefix_temperature": -1.0}, r"prefix_temperature=-1.0 must be a number ≥ 0"),
        ({"divergence": "kl"}, "no divergence 'kl': it is one of forward_kl"),
        ({"prefixes": "drafts"}, "'drafts' must be one of data, target, draft"),
        ({"prefixes": "data, data"}, "'data' must be one of .* at most once"),
        ({"prefixes": "data=x"}, "the share of data must be a number above 0"),
        ({"prefixes": "data=1, draft=0"}, "the share of draft must be a number above 0"),
        ({"prefixes": "draft"}, "prefixes='draft' are to learn a teacher's .*: name the teacher"),
    ],
)
def test_wrong_settings(field, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**field)


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
