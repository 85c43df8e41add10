"""Train a model on a task, or on a bigger model's probabilities.

`run(config, directory)` does everything and can be interrupted at any time: the same call continues
from the latest checkpoint with the batches that would have come. It refuses other data or models.
In the directory:

    tokenizer/      trained on the task's training pairs, or copied from another model
    checkpoints/    orbax: parameters, optimizer state and step
    prefixes/       what models wrote for a draft to learn at, see `experiments.train.prefixes`
    metrics.jsonl   a row per `log_every` steps and per evaluation; `train_loss` is a mean over
                    `steps_in_mean` steps, which are fewer after a resume
    curve.png       loss against steps
    samples.jsonl   greedy outputs of a few held-out inputs, at each evaluation
    provenance.json where the pairs came from: versions, counts, hashes; fingerprints of the models
                    that the run began with; its schedules, one for each number of steps
    model/          the result, a Hugging Face directory in `save_dtype`
    final.json      the figures of the result on the test split
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from experiments import tasks
from experiments.train import batches, beginning, divergences, evaluation, loop, meshes, prefixes
from experiments.train import tokenizer as tokenizers
from experiments.train.batches import Batch
from experiments.train.config import TrainConfig
from experiments.train.evaluation import Evaluation
from experiments.train.exits import Exits
from experiments.train.loop import Progress, Stored
from experiments.train.meshes import Layout
from experiments.train.prefixes import Prefixes
from experiments.train.steps import Trainer
from specjax import checkpoints
from specjax.support import command_line, files


def run(
    config: TrainConfig, directory: str | os.PathLike, checked: Callable[[], Any] = bool
) -> dict[str, Any]:
    """Train, or continue training, and export; return what final.json holds.

    Args:
      checked: is called before anything is written, when config, data and models are checked.

    Raises:
      ValueError: a field of the config, the data or a file of the directory is at fault; or
        another process trains in the directory.
      FileNotFoundError: a file that the run continues with is gone.
    """
    directory = pathlib.Path(directory)
    with _own(directory) as own:
        return _run(config, own, directory / "checkpoints", checked)


@contextlib.contextmanager
def _own(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """The directory, held by this process alone. Of several joined processes the first has it, and
    each other one has a copy of all but checkpoints and model, which is dropped at the end."""
    if jax.process_index():
        with tempfile.TemporaryDirectory() as place:
            own = pathlib.Path(place) / "run"
            if directory.is_dir():
                left = shutil.ignore_patterns("checkpoints", "model", "*.lock", "*.part-*")
                shutil.copytree(directory, own, ignore=left)
            own.mkdir(exist_ok=True)
            multihost_utils.sync_global_devices("a run begins")
            yield own
        return
    with files.only_writer(directory / "checkpoints"):
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("a run begins")
        yield directory


def _run(
    config: TrainConfig, directory: pathlib.Path, saved: pathlib.Path, checked: Callable[[], Any]
) -> dict[str, Any]:
    start = checkpoints.outline(config.start) if config.start else None
    if start is not None:
        config = dataclasses.replace(config, family=start.config.model_type, model={})
        meshes.check(start.config, config.mesh)
    data = loop.read_data(config)
    begin = loop.latest_step(saved)
    named = {"teacher": config.teacher, "grow": config.grow, "start": config.start}
    models = {role: checkpoints.fingerprint(name) for role, name in named.items() if name}
    found = tasks.provenance(config.task, data) | {"models": models}
    mark = loop.claim(directory, found, begin=begin, steps=config.steps)
    command_line.say(
        f"{len(data['train']):,} pairs to train on. Making the tokenizer and the model."
    )
    own = directory / "tokenizer"
    tokenizer = beginning.make_tokenizer(config, data["train"], own if begin else None, start)
    eos_ids = () if start is None else start.eos_ids
    shape = beginning.shape_of(config, tokenizer, start)
    placement = meshes.placement_for(shape, config.mesh)
    graphdef, params = beginning.begin(config, shape, tokenizer, placement)
    layout = Layout.of(graphdef, params, placement)
    exits = Exits(config.exits, config.exit_weight, config.layer_dropout)
    exits.check(nnx.merge(graphdef, params).cache_shape()[0])
    narrow = None if config.compute_dtype == "float32" else config.compute_dtype
    teacher = beginning.load_named(config, "teacher", tokenizer, mesh=placement.mesh, dtype=narrow)
    trainer = Trainer(
        graphdef,
        loop.optimizer(config),
        teacher=None if teacher is None else (teacher.model.graphdef, teacher.model.params),
        divergence=divergences.parse(config.divergence),
        exits=exits,
        steps=config.steps,
        layout=layout,
        accumulate=config.accumulate,
        mode=config.mode,
        dtype=jnp.dtype(config.compute_dtype),
        seed=config.seed,
    )
    pairs = evaluation.pairs_of(config, "train", data["train"], tokenizer, eos_ids)
    order = batches.Order(batches.lengths(pairs), config.buckets, config.target_tokens, config.seed)
    size = len(tokenizer) if start is None else start.model.vocab_size
    follow = Evaluation(config, shape, trainer, tokenizer, data, directory, size, eos_ids, mark)

    def source(begin: int, current: Callable[[], Progress]) -> Iterator[Batch]:
        return Prefixes(
            data["train"],
            pairs,
            order,
            teacher,
            lambda: follow.checkpoint(current().params),
            directory / "prefixes",
            prefixes.shares(config.prefixes),
            after=config.teacher_after,
            temperature=config.prefix_temperature,
            inputs=config.prefix_inputs,
            refresh_every=config.refresh_every,
        ).from_step(begin)

    def one_step(progress: Progress, batch: Batch, at: int) -> tuple[Progress, Array]:
        taught = teacher is not None and at > config.teacher_after
        *found, loss = trainer.step(*progress, batch, taught=taught)
        return Progress(*found), loss

    matrices = layout.of_matrices(jax.eval_shape(layout.apart, layout.params))
    stored = Stored(
        saved,
        jax.jit(layout.apart, out_shardings=matrices),
        jax.jit(layout.together, out_shardings=layout.shardings),
    )
    progress = Progress(params, trainer.init(params))
    checked()
    files.write_json(directory / "provenance.json", mark)
    if not begin:
        shutil.rmtree(own, ignore_errors=True)  # of a start that failed
        tokenizers.save(tokenizer, own)
    tokenizer.model_max_length = 10**9  # that of model/ is max_source_len
    progress = loop.fit(progress, one_step, source, follow, config, directory, stored)
    command_line.say("Writing the model and measuring it on the test split.")
    return follow.final(progress.params)
