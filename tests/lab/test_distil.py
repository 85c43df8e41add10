"""Learning from a teacher: divergences that teach, prefixes from where they should be, a run that
was cut off, and the table of divergences and sources."""

import copy
import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest

from configs import distil as configs_distil
from experiments.distil import __main__ as distil
from experiments.train import batches, beginning, divergences, evaluation, prefixes, steps, train
from experiments.train import tokenizer as tokenizers
from experiments.train.config import TrainConfig
from specjax import checkpoints, tasks
from specjax.models.gpt import GPTConfig
from specjax.support.files import Rows

pytestmark = pytest.mark.usefixtures("standard_promotion")

T5 = {
    "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4,
}  # fmt: skip
GPT = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 16}
FAMILIES = {"t5": (T5, ((24, 32),)), "gpt2": (GPT, ((0, 32),))}


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory):
    """A run that goes on compiles what the one before it did."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("cache")), 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> str:
    directory, names = tmp_path_factory.mktemp("pairs"), []
    for split, numbers in zip(tasks.SPLITS, (range(80), range(80, 88), range(88, 96)), strict=True):
        rows = [{"input": f"x{i} = ", "target": f"{i % 7}; y = {i % 5}"} for i in numbers]
        names.append(directory / f"{split}.jsonl")
        names[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ",".join(map(str, names))


@pytest.fixture(scope="module")
def of_family(files, tmp_path_factory):
    """A draft that learns at all kinds of prefixes from a teacher of its own shape."""

    def made(name):
        with jax.numpy_dtype_promotion("standard"):
            return make(name, files, tmp_path_factory.mktemp("teacher"))

    return functools.cache(made)


@pytest.fixture(scope="module", params=FAMILIES)
def config(request, of_family) -> TrainConfig:
    return of_family(request.param)


def make(family, files, directory) -> TrainConfig:
    shape, buckets = FAMILIES[family]
    config = TrainConfig(
        task="jsonl", task_file=files, vocab_size=265, family=family, model=shape, steps=13,
        target_tokens=128, buckets=buckets, learning_rate=2e-2, warmup_steps=2, log_every=11,
        eval_every=100, eval_examples=4, sample_examples=8, checkpoint_every=7,
        prefixes="data=1, target=1, draft=2", prefix_temperature=0.0, prefix_inputs=8,
        refresh_every=4, teacher="not yet",
    )  # fmt: skip
    texts = (e.input + e.target for e in train_split(config))
    tokenizer = tokenizers.to_transformers(
        tokenizers.train(texts, config.vocab_size, decoder_only=config.decoder_only), 64
    )
    shape = beginning.shape_of(config, tokenizer)
    model = beginning.make_model(shape, seed=1)
    made = evaluation.as_checkpoint(shape, *model, tokenizer, name="teacher", max_source_len=64)
    checkpoints.save(directory / "model", made)
    name = str(directory / "model")
    return dataclasses.replace(config, tokenizer=name, teacher=name)


def train_split(config):
    return tasks.load("jsonl", "train", files=config.task_file.split(","))


def pools(directory):
    return {path.stem: dict(np.load(path)) for path in sorted((directory / "prefixes").iterdir())}


@pytest.mark.slow
def test_a_run_that_was_cut_off_has_the_same_end(of_family, tmp_path, monkeypatch):
    """In the middle of a pool of the draft's: pools begin every 4 steps, the checkpoint is at 7."""
    config, whole, cut = of_family("gpt2"), tmp_path / "whole", tmp_path / "cut"
    final = train.run(config, whole)
    append = Rows.append

    def interrupted(log, row):
        if row.get("step") == 11:
            raise KeyboardInterrupt
        append(log, row)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(config, cut)
    assert list(pools(cut)) == [f"{who}-{i:04d}" for who in ("draft", "target") for i in range(3)]
    (cut / "prefixes" / "target-0001.npz").unlink()  # can be made again
    assert train.run(config, cut) == final
    weights = [checkpoints.load(at / "model").model.params for at in (whole, cut)]
    for a, b in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_array_equal(a, b)
    made = pools(whole)
    jax.tree.map(np.testing.assert_array_equal, made, pools(cut))
    # What the draft writes is what it was when the pool began, which is gone.
    first = started(config)
    same = [
        np.concatenate(greedy(first, config, made[f"draft-{i:04d}"]["inputs"])).tolist()
        == made[f"draft-{i:04d}"]["ids"].tolist()
        for i in range(4)
    ]
    assert same == [True, False, False, False]
    (cut / "prefixes" / "draft-0003.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"draft-0003\.npz is gone.*an empty workdir"):
        train.run(dataclasses.replace(config, steps=14), cut)


def started(config) -> checkpoints.Checkpoint:
    """The draft before its first step."""
    target = checkpoints.load(config.teacher)
    start = beginning.make_model(target.config, config.seed)
    return evaluation.as_checkpoint(
        target.config, *start, target.tokenizer, name="draft", max_source_len=64
    )


def greedy(model, config, inputs):
    """What a model writes for some inputs of the training data, which depends on no key."""
    texts = [example.input for example in train_split(config)]
    asked = [texts[i] for i in inputs]
    return prefixes.write(model, asked, room=32, temperature=0.0, key=jax.random.key(5))


def test_pools_hold_what_models_write(config, tmp_path):
    target, draft = checkpoints.load(config.teacher), started(config)
    config = dataclasses.replace(config, prefixes="target, draft")
    source, made, _ = batches_of(
        config, tmp_path / "prefixes", 9, 0, target, draft, temperature=0.0
    )
    kept = pools(tmp_path)
    assert list(kept) == ["draft-0000", "draft-0001", "target-0000", "target-0001"]
    for name, pool in kept.items():
        assert len(set(pool["inputs"].tolist())) == 8
        outputs = [ids.tolist() for ids in np.split(pool["ids"], pool["ends"][:-1])]
        writer = target if "target" in name else draft
        assert outputs == greedy(writer, config, pool["inputs"])
        assert max(map(len, outputs)) <= 32
        for i, ids in zip(pool["inputs"], outputs, strict=True):
            if config.decoder_only:
                text = train_split(config)[i].input
                begun = target.tokenizer(text, add_special_tokens=False)["input_ids"]
                assert ids[: len(begun)] == begun
    assert set(kept["target-0000"]["inputs"]) != set(kept["target-0001"]["inputs"])
    np.testing.assert_array_equal(kept["target-0001"]["inputs"], kept["draft-0001"]["inputs"])
    assert kept["target-0001"]["ids"].tolist() != kept["draft-0001"]["ids"].tolist()
    # Rows of a batch are inputs of the data with the output that was written for them.
    pool = kept[f"{source.source(0)}-0000"]
    outputs = np.split(pool["ids"], pool["ends"][:-1])
    written = {
        (source.pairs[i].source.tobytes(), np.trim_zeros(ids, "b").tobytes())
        for i, ids in zip(pool["inputs"], outputs, strict=True)
    }
    batch = made[0]
    for ids, size, output in zip(batch.source, batch.source_len, batch.target, strict=True):
        assert (ids[:size].tobytes(), np.trim_zeros(output, "b").tobytes()) in written


def batches_of(config, directory, count, begin=0, target=None, draft=None, temperature=1.0):
    """The source, its batches, and all targets of the data as bytes."""
    data, tokenizer = train_split(config), checkpoints.load(config.teacher).tokenizer
    pairs = batches.encode(data, tokenizer, decoder_only=config.decoder_only)
    order = batches.Order(batches.lengths(pairs), config.buckets, config.target_tokens, config.seed)
    source = prefixes.Prefixes(
        data,
        pairs,
        order,
        target,
        lambda: draft,
        directory,
        prefixes.shares(config.prefixes),
        after=config.teacher_after,
        temperature=temperature,
        inputs=8,
        refresh_every=8,
    )
    found = source.from_step(begin)
    return source, [next(found) for _ in range(count)], {p.target.tobytes() for p in pairs}


def test_batches_have_the_prefixes_that_were_asked_for(config, tmp_path):
    target = checkpoints.load(config.teacher)
    config = dataclasses.replace(config, prefixes="data=1, target=3", teacher_after=6)
    source, made, known = batches_of(config, tmp_path, 40, target=target)

    def of_data(batch):
        return all(row[row > 0].tobytes() in known for row in batch.target)

    names = [source.source(step) for step in range(40)]
    assert names[:6] == ["data"] * 6
    assert 4 <= names[6:].count("data") <= 14  # of 34, a quarter
    for name, batch in zip(names, made, strict=True):
        assert of_data(batch) == (name == "data")
    period = zip(names[6:14], made[6:14], strict=True)
    assert len({b.target.tobytes() for name, b in period if name == "target"}) > 1
    # From any step on they are the same.
    _, again, _ = batches_of(config, tmp_path, 3, begin=21)
    for a, b in zip(made[21:24], again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    # At a temperature above 0 the seed decides what is written.
    for seed, name in ((0, "same"), (9, "other")):
        elsewhere = dataclasses.replace(config, seed=seed)
        batches_of(elsewhere, tmp_path / name, 8, target=target)
    ids = [
        np.load(at / "target-0000.npz")["ids"].tolist()
        for at in (tmp_path, tmp_path / "same", tmp_path / "other")
    ]
    assert ids[0] == ids[1] != ids[2]


def test_data_alone_asks_no_model(config, tmp_path):
    """The batches are the order's own."""
    config = dataclasses.replace(config, prefixes="data")
    source, made, _ = batches_of(config, tmp_path / "none", 3)
    for batch, (bucket, chosen) in zip(made, source.order.from_step(0), strict=False):
        expected = batches.collate([source.pairs[i] for i in chosen], config.buckets[bucket])
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
    assert not (tmp_path / "none").exists()


def test_a_run_starts_from_a_model_of_its_shape(config):
    found = checkpoints.load(config.teacher)
    shape = beginning.shape_of(config, found.tokenizer)
    graphdef, params = beginning.make_model(shape, 7, found)
    again = evaluation.as_checkpoint(
        shape, graphdef, params, found.tokenizer, name="again", max_source_len=64
    )
    for a, b in zip(*(jax.tree.leaves(x.model.params) for x in (found, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_shares():
    assert prefixes.shares("draft") == {"draft": 1.0}
    assert prefixes.shares("data=1, draft=3") == {"data": 0.25, "draft": 0.75}
    assert prefixes.shares("data, target") == {"data": 0.5, "target": 0.5}


def test_each_divergence_teaches():
    """Drafts of one start come nearer to their teacher, each as its divergence measures it."""
    shape = GPTConfig(vocab_size=11, bos_token_id=1, pad_token_id=0, **GPT)
    graphdef, start = beginning.make_model(shape, seed=0)
    sharp = jax.tree.map(lambda x: 5 * x, beginning.make_model(shape, seed=1)[1])
    teacher = graphdef, sharp
    target = np.random.default_rng(0).integers(2, 11, (4, 8), np.int32)
    lengths = np.zeros(4, np.int32), np.full(4, 8, np.int32)
    batch = batches.Batch(np.zeros((4, 0), np.int32), lengths[0], target, lengths[1])
    everyone = [divergences.parse(name) for name in divergences.NAMES]
    adam = optax.adam(1e-2)

    def loss(params, which):
        """One program for all of them."""

        def chosen(*distributions):
            return jax.lax.switch(which, everyone, *distributions)

        total, count = steps.teacher_loss(graphdef, params, teacher, batch, chosen)
        return total / count

    @jax.jit
    def step(params, opt_state, which):
        value, gradient = jax.value_and_grad(loss)(params, which)
        updates, opt_state = adam.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for which, name in enumerate(divergences.NAMES):
        params, opt_state, losses = start, adam.init(start), []
        for _ in range(40):
            params, opt_state, value = step(params, opt_state, which)
            losses.append(float(value))
        assert losses[-1] < 0.7 * losses[0], name


# The table of divergences and sources.


@pytest.fixture(scope="module")
def bench(of_family):
    """The reduced config, on the tiny pair."""
    config = of_family("t5")
    found = configs_distil.get_config("quick")
    found.task = found.train.task = "jsonl"
    found.data_dir = found.train.task_file = config.task_file
    found.target = found.train.teacher = found.train.tokenizer = config.teacher
    found.divergences, found.prefixes = ("tv", "forward_kl"), ("target",)
    found.train.family, found.train.model = config.family, dict(config.model)
    found.train.steps, found.train.refresh_every, found.train.prefix_inputs = 3, 2, 8
    found.train.buckets, found.train.target_tokens = config.buckets, config.target_tokens
    found.train.eval_examples, found.train.sample_examples = 4, 8
    found.start.steps = 2
    found.alpha_inputs, found.tau_inputs, found.max_new_tokens = 8, 8, 32
    found.gamma, found.batch_size = 2, 8
    found.temperatures = (0.5, 1.0)  # which share their programs
    return found


def noisy(settings, directory):
    """Instead of training: the target with noise, and the files that a run leaves."""
    target = checkpoints.load(settings.tokenizer)
    rng = np.random.default_rng(list(f"{settings}".encode()))
    params = jax.tree.map(
        lambda x: x + 0.3 * x.std() * rng.normal(size=x.shape).astype(np.float32),
        target.model.params,
    )
    model = dataclasses.replace(target.model, params=params)
    checkpoints.save(directory / "model", dataclasses.replace(target, model=model))
    (directory / "checkpoints").mkdir(exist_ok=True)
    final = {"steps": settings.steps, "held_out_loss": 1.0}
    (directory / "final.json").write_text(json.dumps(final))
    Rows(directory / "metrics.jsonl").append(
        {"step": settings.steps, "train_loss": 1.0, "seconds_per_step": 20.0}
    )
    if settings.prefixes == "target" and settings.teacher:
        for name in ("target-0000.npz", "target-0001.npz"):
            (directory / "prefixes" / name).touch()


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_table(bench, tmp_path, monkeypatch, capsys, trains):
    """Cut off, gone on with, and marked; with models that were trained, and with any others."""
    lab = distil.Laboratory(bench, tmp_path)
    trained, lent = [], []
    run = train.run if trains else noisy

    def counted(settings, directory):
        trained.append((settings.divergence, settings.prefixes, settings.seed, settings.grow))
        lent.append(len(list((directory / "prefixes").glob("*"))))
        return run(settings, directory)

    monkeypatch.setattr(train, "run", counted)
    append = lab.results.append

    def interrupted(row):
        append(row)
        if len(lab.results.done) == 7:  # the start, no teacher, one run and half of another
            raise KeyboardInterrupt

    monkeypatch.setattr(lab.results, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distil.fill(lab)
    before = lab.results.done.copy()
    again = distil.Laboratory(bench, tmp_path)
    distil.fill(again)
    rows = again.results.done
    assert rows[:7] == before
    start = str(tmp_path / "start" / "model")
    first = [("tv", "target"), ("forward_kl", "target")]
    assert trained[:2] == [("forward_kl", "data", 0, ""), ("forward_kl", "data", 0, start)]
    assert trained[2:4] == [(*pair, 0, start) for pair in first]  # none of them twice
    # All runs of a seed learn at the same outputs of the target.
    assert lent == [0, 0, 0, 2, 0, 2]
    lines = distil.table(bench, rows)
    assert [(line["divergence"], line["prefixes"]) for line in lines[2:]] == first
    marked = {line["mark"]: line for line in lines if line["mark"]}
    scores = [line["score"] for line in lines[2:]]
    assert marked["best"]["score"] == max(scores)
    for line in lines:  # chosen on outputs that report nothing
        chosen = [of[0]["choosing"] for of in line["rows"].values()]
        assert line["score"] == np.mean(chosen)
        assert chosen != [of[0]["alpha"] for of in line["rows"].values()]
    assert marked["worst"]["score"] == min(scores)
    assert [line["seeds"] for line in lines] == [1, 1, 2, 2]
    assert sorted(one[:3] for one in trained[4:]) == sorted((*pair, 1) for pair in first)
    assert len(rows) == 2 * (4 + 2)
    assert [row["steps"] for row in rows] == [2, 2, *[3] * 10]
    for row in rows:
        assert 0 <= row["alpha"] <= 1
        assert 1 <= row["tau"] <= 3
        assert trains or row["seconds"] == 20 * row["steps"]
    assert not list(tmp_path.glob("runs/*/checkpoints"))
    assert len(list(tmp_path.glob("runs/*/model"))) == 5
    distil.show(again)
    shown = (tmp_path / "report.md").read_text()
    assert f"The best is {marked['best']['divergence']} at the prefixes target" in shown
    assert shown.count("| best |") == shown.count("| worst |") == 1
    assert "| start | data | 1 | " in shown
    assert "best" in capsys.readouterr().out


def test_the_budget_is_equal(bench, tmp_path):
    """Runs differ in what they are named by, and in nothing else."""
    lab = distil.Laboratory(bench, tmp_path)
    vars(lab)["start"] = tmp_path
    settings = [lab.settings_of(cell) for cell in distil.cells(bench)[1:]]
    names = ("divergence", "prefixes", "seed", "teacher")
    same = [{k: v for k, v in vars(one).items() if k not in names} for one in settings]
    assert all(one == same[0] for one in same)
    assert [bool(one.teacher) for one in settings] == [False, True, True]


def test_mistakes_are_named_before_the_first_step(bench, tmp_path):
    wrong = copy.deepcopy(bench)
    wrong.divergences = ("tv", "kl")
    with pytest.raises(ValueError, match="no divergence 'kl'"):
        distil.fill(distil.Laboratory(wrong, tmp_path))
    assert not (tmp_path / "start").exists()
