"""Parts of a training run: checkpoints, losses, rates, targets, scores and wrong settings."""

import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from matplotlib.figure import Figure
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from experiments.tasks.examples import Example
from experiments.train import (
    batches,
    beginning,
    divergences,
    evaluation,
    loop,
    steps,
)
from experiments.train.batches import Pair
from experiments.train.config import TrainConfig
from experiments.train.train_drafter import DrafterConfig
from specjax.models.t5 import T5Config, UMT5Config
from specjax.support import files as files_of
from test_train import TINY

pytestmark = pytest.mark.usefixtures("standard_promotion")


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
