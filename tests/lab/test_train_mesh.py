"""Training on a mesh: the same losses, no more held than a device's part, runs that are killed.

A process of its own, `train_worker`, has eight virtual devices.
"""

import dataclasses
import json
import shutil
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import command_line
import several
import train_worker
import workers
from configs import paper as paper_config
from configs import paper_train
from experiments import tasks
from experiments.plan import training
from experiments.train import batches, beginning, evaluation, loop, meshes, train, workdirs
from experiments.train import tokenizer as tokenizers
from experiments.train.batches import Pair
from experiments.train.config import TrainConfig
from experiments.train.loop import fields_of
from experiments.train.meshes import Layout
from experiments.train.modes import Drop
from specjax import checkpoints, generate
from specjax.models import sharding
from specjax.models.llama import Gemma2Config
from specjax.models.meshes import sizes_of
from specjax.models.sharding import Placement
from specjax.models.t5 import T5Config
from specjax.models.t5gemma import T5GemmaConfig

pytestmark = pytest.mark.usefixtures("standard_promotion")

MESHES = ("data=2", "data=2,model=4")


# --- steps on 1, 2, 4 and 8 devices --------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    """What the worker says of some steps, by the mesh."""
    cases = [{"mesh": mesh, "remat": bool(mesh)} for mesh in ("", *MESHES)]
    lines = workers.ask(train_worker, cases)
    return {case["mesh"]: line for case, line in zip(cases, lines, strict=True)}


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(found, mesh):
    """With dropout, whose masks do not depend on the mesh, and with layers that are computed again,
    which one device keeps here."""
    here, there = found[""]["losses"], found[mesh]["losses"]
    assert here[-1] < here[0]
    np.testing.assert_allclose(there, here, rtol=2e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_part_and_the_plan_says_it(found, mesh):
    """To the byte, before a step and after."""
    config = TrainConfig(
        target_tokens=120, buckets=((6, 5),), accumulate=2, mesh=mesh, dropout=0.1, remat=True
    )
    need = training.need(config, train_worker.SHAPE, mesh)
    layout = training.layout_of(train_worker.SHAPE, mesh)
    optimizer = layout.on_matrices(optax.adafactor(1e-2, min_dim_size_to_factor=16))
    state = jax.eval_shape(optimizer.init, layout.params)
    held = need.weights, training._held(state, layout.of_matrices(state))
    assert found[mesh]["held"] == list(held)
    assert found[mesh]["kept"]
    ways = sizes_of(mesh).get("model", 1)
    assert found[mesh]["held"][0] < 1.2 * found[""]["held"][0] / ways


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_exchanges_sums_alone(found, mesh):
    """`check_exchanges` has their numbers."""
    assert not found[""]["collectives"]
    train_worker.check_exchanges(found[mesh]["collectives"], mesh)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_step_lowers_for_a_mesh_of_accelerators(platform):
    """The program calls nothing that a platform lacks, and says where matrices and rows lie."""
    program = train_worker.traced("data=2,model=4", dtype="bfloat16")
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call" not in text
    assert 'sdy.mesh @mesh = <["data"=2, "model"=4]>' in text
    shape = train_worker.SHAPE
    matrices = 4 * shape.num_layers + 7 * shape.num_decoder_layers + 2
    # As arguments, as sums of gradients and as results.
    assert text.count('{"model"}') == 3 * matrices
    assert text.count('{"data"}') == len(train_worker.batch())


# --- the parts of it -----------------------------------------------------------------------------


def test_matrices_are_those_of_a_checkpoint_on_every_mesh():
    """Queries, keys and values by themselves, in a file's order; and back."""
    shape = train_worker.SHAPE
    graphdef, params = beginning.make_model(shape, seed=0)
    mesh = AbstractMesh((4,), ("model",))
    _, placement = sharding.fit(shape, Placement(mesh))
    module = sharding.split(nnx.merge(graphdef, params), placement)
    order = sharding.order(module, placement)
    moved = nnx.from_flat_state(
        (path, x.replace(x[...][order[path]]) if path in order else x)
        for path, x in nnx.to_flat_state(params)
    )
    plain, split = (
        Layout.of(graphdef, params, placement),
        Layout.of(nnx.split(module)[0], moved, placement),
    )
    here, there = plain.apart(params), split.apart(moved)
    assert "decoder/0/attention/qkv/weight/2" in here
    assert jax.tree.all(jax.tree.map(np.array_equal, here, there))
    assert jax.tree.all(jax.tree.map(np.array_equal, split.together(there), moved))
    # A step of Adafactor follows the scale of queries by themselves.
    optimizer = optax.adafactor(1e-2)
    ones = jax.tree.map(jnp.ones_like, moved)
    by_parts = split.on_matrices(optimizer)
    updates, _ = by_parts.update(ones, by_parts.init(moved), moved)
    queries = split.apart(updates)["decoder/0/attention/qkv/weight/0"]
    scale = np.sqrt(np.mean(np.square(here["decoder/0/attention/qkv/weight/0"])))
    np.testing.assert_allclose(queries, -1e-2 * max(scale, 1e-3), rtol=1e-5)


def test_dropout_keeps_the_mean():
    drop = Drop(jax.random.key(0), 0.25)
    first, second = drop(jnp.ones((100, 100))), drop(jnp.ones((100, 100)))
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert (first != second).any()


def test_microbatches_give_the_gradient_of_their_batch():
    """Though they differ in their numbers of tokens."""
    losses, batch = [], train_worker.batch()
    for accumulate in (1, 4):
        trainer, params = train_worker.trainer_on("", accumulate=accumulate, dropout=0.0)
        params, state, _ = trainer.step(params, trainer.init(params), batch)
        losses.append(float(trainer.step(params, state, batch)[2]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("mark", "last"), [([8], 8), ([], 4), ([7], 4)])
def test_inputs_are_cut_before_the_tokenizers_mark(mark, last):
    pairs = [Pair(np.arange(9), np.arange(3)), Pair(np.arange(4), np.arange(3))]
    long, short = batches.truncated(pairs, 5, mark)
    assert long.source.tolist() == [0, 1, 2, 3, last]
    assert short.source.tolist() == [0, 1, 2, 3]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"mesh": "data=3", "target_tokens": 208, "buckets": ((48, 104),)},
            "gives 2 rows of 104 tokens, which accumulate=1 microbatches of data=3 devices do not",
        ),
        (
            {"accumulate": 4, "target_tokens": 208, "buckets": ((48, 104),)},
            "gives 2 rows of 104 tokens, which accumulate=4",
        ),
        ({"mesh": "rows=2"}, "'rows' is no axis that is known"),
        ({"dropout": 1.0}, r"dropout=1.0 must be a number in \[0, 1\)"),
        ({"dropout": 0.1, "family": "gpt2"}, "dropout=0.1 and remat=False are for T5"),
        ({"optimizer": "sgd"}, "optimizer='sgd' must be one of adam, adafactor"),
        ({"metric": "accuracy"}, "metric='accuracy' must be one of empty, bleu"),
        ({"compute_dtype": "int8"}, "compute_dtype='int8' must be one of float32"),
        ({"start": "a", "grow": "b"}, "start='a' and grow='b': give one of them"),
    ],
)
def test_wrong_settings(fields, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**fields)


def test_a_mesh_divides_the_model():
    shape = T5Config(vocab_size=250, num_heads=6, d_ff=1024)
    meshes.check(shape, "data=4")
    meshes.check(shape, "model=2")
    with pytest.raises(ValueError, match=r"num_heads=6 and vocab_size=250 cannot be split over 4"):
        meshes.check(shape, "data=2,model=4")
    encoder = Gemma2Config(num_attention_heads=8, num_key_value_heads=1)
    shape = T5GemmaConfig(num_attention_heads=8, num_key_value_heads=4, encoder=encoder)
    with pytest.raises(ValueError, match=r"encoder\.num_key_value_heads=1 cannot be split over 4"):
        meshes.check(shape, "model=4")


def test_a_workdir_may_go_on_on_another_mesh(tmp_path):
    """And a checkpoint that was being written when the run ended keeps nothing."""

    def claim(**changes):
        config = ml_collections.ConfigDict({"steps": 8, "seed": 0, "mesh": ""} | changes)
        workdirs.claim(tmp_path, config, may_grow=("steps",), free=("mesh",))()

    claim()
    (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp-1").mkdir(parents=True)
    claim(seed=1)
    (tmp_path / "checkpoints" / "4").mkdir()
    claim(seed=1, mesh="data=2")
    with pytest.raises(ValueError, match="seed was 1 and is 0"):
        claim(mesh="data=2")


# --- from a hub directory to speculative decoding ------------------------------------------------

WORDS = ["time", "house", "water", "light", "night", "stone", "river"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A directory with a tiny v1.1 in the hub's layout, and 64 pairs of three splits."""
    root = tmp_path_factory.mktemp("hub")
    rng = np.random.default_rng(0)
    for split in tasks.SPLITS:
        some = [" ".join(rng.choice(WORDS, 2)) + f" {i}" for i in range(64)]
        rows = [{"input": text, "target": text[::-1]} for text in some]
        if split == "train":
            known = rows
        else:
            rows = known[:8] if split == "validation" else known[8:16]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (root / f"{split}.jsonl").write_text(lines)
    texts = (row[name] for row in known for name in ("input", "target"))
    tokenizer = tokenizers.to_transformers(tokenizers.train(texts, 272), 64)
    shape = T5Config(
        vocab_size=288, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_decoder_layers=2,
        num_heads=4,
    )  # fmt: skip
    made = beginning.make_model(shape, seed=3)
    checkpoint = evaluation.as_checkpoint(
        shape, *made, tokenizer, name="v1.1", max_source_len=64, vocab_size=272
    )
    checkpoints.save(root / "t5-v1_1-tiny", checkpoint)
    return root


def paper_fields(hub, **changes):
    """configs/paper_train.py with lengths and counts of these pairs."""
    config = paper_train.get_config("t5-v1_1-xxl_en-de")
    changes = {
        "task": "jsonl", "task_file": str(hub), "start": str(hub / "t5-v1_1-tiny"), "metric": "",
        "buckets": ((32, 32),), "target_tokens": 512, "accumulate": 2, "steps": 6, "log_every": 2,
        "eval_every": 100, "checkpoint_every": 2, "eval_examples": 8, "sample_examples": 4,
    } | changes  # fmt: skip
    return fields_of(config) | changes


@pytest.fixture(scope="module")
def tuned(hub, tmp_path_factory):
    """A directory with runs/ of the paper's recipe, and the target's figures. It has learned its
    pairs by heart; the draft has learned for a moment."""
    root = tmp_path_factory.mktemp("tuned")
    how = {
        "dropout": 0.0, "learning_rate": 2e-2, "compute_dtype": "float32", "checkpoint_every": 150,
        "log_every": 50,
    }  # fmt: skip
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inputs of test are in the training split
        final = train.run(
            TrainConfig(**paper_fields(hub, steps=150, **how)),
            root / "runs" / "t5-v1_1-xxl_en-de",
        )
    checkpoints.convert(hub / "t5-v1_1-tiny", root / "runs" / "t5-v1_1-small_en-de" / "model")
    return root, final


@pytest.mark.slow
def test_pairs_are_learned_by_heart_and_decoded_speculatively(hub, tuned, monkeypatch):
    """By the recipe of the paper's models, which configs/paper.py then finds."""
    root, final = tuned
    assert final["held_out_loss"] < 0.05
    assert final["exact"] > 0.9
    monkeypatch.chdir(root)
    paper = paper_config.get_config("t5-v1_1-xxl_en-de")
    target, draft = checkpoints.load(paper.target), checkpoints.load(paper.drafts[0])
    assert target.config.vocab_size == 288
    examples = tasks.load("jsonl", "test", files=str(hub))
    texts = [example.input for example in examples]
    plain = generate(target, None, texts, max_new_tokens=16)
    result = generate(target, draft, texts, gamma=3, max_new_tokens=16)
    assert result.tokens == plain.tokens
    assert result.texts == [example.target for example in examples]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:The task jsonl")
def test_from_a_hub_directory_to_the_papers_table(hub, tuned, monkeypatch, capsys):
    """A draft is distilled from the tuned target by its config, and the report has both drafts."""
    root, _ = tuned
    monkeypatch.chdir(root)
    name = "t5-v1_1-small_en-de"
    config = paper_train.get_config(f"{name}_distil")
    fields = paper_fields(hub, steps=100, log_every=50, checkpoint_every=100, learning_rate=1e-2)
    distilled = fields | {"start": config.start, "teacher": config.teacher}
    final = train.run(TrainConfig(**distilled), root / "runs" / f"{name}_distil")
    assert final["held_out_loss"] < 2
    drafts = f"('runs/{name}/model','runs/{name}_distil/model')"
    fewer = {
        "task": "jsonl", "data_dir": hub, "drafts": drafts, "ngrams": "()", "gammas": "(1, 3)",
        "max_new_tokens": 16, "alpha_inputs": 8, "quality_inputs": 8, "timed_inputs": 2,
        "repeats": 1, "metric": "exact", "temperatures": "(0.0,)",
    }  # fmt: skip
    outcome = command_line.run(
        monkeypatch, capsys, "experiments.reproduce",
        f"--config={command_line.ROOT}/configs/paper.py:t5-v1_1-xxl_en-de", "--workdir=paper",
        *(f"--config.{field}={value}" for field, value in fewer.items()), cwd=root,
    )  # fmt: skip
    assert outcome.status == 0, outcome.stderr
    report = (root / "paper" / "report.md").read_text()
    assert "At T=0 both methods give the same outputs." in report
    lines = (root / "paper" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    alpha = {row["draft"]: row["alpha"] for row in rows if row["table"] == "alpha"}
    assert alpha[f"runs/{name}_distil/model"] > alpha[f"runs/{name}/model"] + 0.2


@pytest.mark.filterwarnings("ignore:The task jsonl")
def test_a_tokenizer_that_does_not_fit_is_refused(hub, pair, tmp_path, monkeypatch):
    """Before weights are read."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(hub / "t5-v1_1-tiny" / file, tmp_path / file)
    monkeypatch.setattr(checkpoints, "load", None)
    fields = paper_fields(hub, start=str(tmp_path), tokenizer=pair.target.name)
    with pytest.raises(ValueError, match=r"has 288 rows of ids, and tokenizer=.* 300 ids: name"):
        train.run(TrainConfig(**fields), tmp_path / "run")
    fields = paper_fields(hub, tokenizer=pair.target.name)
    with pytest.raises(ValueError, match="has another vocabulary: set tokenizer="):
        train.run(TrainConfig(**fields), tmp_path / "run")


def test_a_start_that_fails_keeps_nothing(hub, tmp_path):
    """Nor are pairs read before the model is known."""
    gone = TrainConfig(**paper_fields(hub, start=str(hub / "no such"), task_file="nowhere"))
    with pytest.raises(FileNotFoundError, match="no such"):
        train.run(gone, tmp_path)
    odd = TrainConfig(**paper_fields(hub, mesh="model=3", task_file="nowhere"))
    with pytest.raises(ValueError, match=r"num_heads=4 and d_ff=64 cannot be split over 3 devices"):
        train.run(odd, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", paper_train.CHOICES)
def test_configs_of_the_papers_models(name):
    config = paper_train.get_config(name)
    settings = TrainConfig(**fields_of(config))
    assert settings.task in tasks.TASKS
    assert [loop.schedule(settings)(step) for step in (0, 1000)] == pytest.approx([1e-3, 1e-3])
    assert bool(settings.teacher) == name.endswith("_distil")
    for mesh in ("data=2,model=4", "data=4,model=8"):
        dataclasses.replace(settings, mesh=mesh)
    with pytest.raises(ValueError, match="choose one of t5-v1_1-small_en-de"):
        paper_train.get_config("t5-small")


# --- runs that are killed, and several processes -------------------------------------------------


def arguments(hub, workdir, **changes):
    """Flags of `experiments.train`."""
    fields = paper_fields(hub, **changes)
    usual = fields_of(paper_train.get_config("t5-v1_1-xxl_en-de"))
    asked = sorted(name for name in fields if fields[name] != usual[name])
    return [
        f"--workdir={workdir}",
        f"--config={command_line.ROOT}/configs/paper_train.py:t5-v1_1-xxl_en-de",
        *(f"--config.{name}={fields[name]}" for name in asked),
    ]


def start(hub, workdir, devices=4, **changes):
    """`experiments.train` in a process of its own."""
    given = arguments(hub, workdir, **changes)
    return several.start("experiments.train", *given, devices=devices)


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], name): row[name]
        for row in rows
        for name in ("train_loss", "held_out_loss")
        if name in row and row.get("steps_in_mean", 2) == 2
    }


def ended(process):
    found = several.ended(process)
    assert found.status == 0, found.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_ends_as_one_that_is_not(hub, tmp_path):
    """To the digit on the same mesh; within rounding on another."""
    whole, cut, moved = (tmp_path / name for name in ("whole", "cut", "moved"))
    how = {"mesh": "data=2,model=2", "steps": 40}
    ended(start(hub, whole, **how))
    for workdir, mesh in ((cut, "data=2,model=2"), (moved, "model=4")):
        killed = start(hub, workdir, **how)
        while not (workdir / "checkpoints" / "2").is_dir() and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert 2 <= loop.latest_step(workdir / "checkpoints") < 40
        ended(start(hub, workdir, **how | {"mesh": mesh}))
    expected, found = losses(whole), losses(cut)
    assert found.items() <= expected.items()
    assert (40, "train_loss") in found
    for key, value in losses(moved).items():
        assert value == pytest.approx(expected[key], rel=1e-3)  # bfloat16


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_one_model(hub, tmp_path):
    """The losses of one process with as many devices; both write one checkpoint."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for process in several.start_joined(
        "experiments.train", *arguments(hub, together, mesh="model=2")
    ):
        ended(process)
    ended(start(hub, alone, devices=2, mesh="model=2"))
    found = losses(together)
    assert found.keys() == losses(alone).keys()
    for key, value in losses(alone).items():
        assert found[key] == pytest.approx(value, rel=1e-3)  # bfloat16
    made = checkpoints.load(together / "model")
    assert made.config.vocab_size == 288
