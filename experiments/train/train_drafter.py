"""Training a drafter that belongs to one target.

`run(config, directory)` does everything and can be interrupted at any time: the same call continues
from the latest checkpoint with the batches that would have come. It refuses another target or data.
In the directory:

    drafter/        the result, as `drafters.attached` reads it
    target/         the target that it belongs to, if its last layers were trained along
    checkpoints/    orbax: parameters, optimizer state and step
    metrics.jsonl   a row per `log_every` steps and per evaluation
    curve.png       loss against steps
    provenance.json where the pairs came from, and fingerprints of the target; as in `train`
    final.json      loss and α on the test split

A kind of drafter is a `Trainer`, how to begin and a loss, and a line in `TRAINERS`. Its drafter has
a field `target`, which is shared and frozen; all other floats in it are trained.
"""

import dataclasses
import functools
import os
import pathlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int, Key

from experiments import tasks
from experiments.train import batches, loop
from experiments.train.batches import Batch
from experiments.train.loop import LoopConfig, Progress
from specjax import checkpoints
from specjax.drafters import attached, loading
from specjax.drafters.abilities import seen_by
from specjax.models.checkpoint import Checkpoint
from specjax.models.language_model import LanguageModel
from specjax.support import command_line, files, named
from specjax.types import Model

TRAINERS = {
    "eagle": "experiments.train.eagle:EagleTrainer",
    "kangaroo": "experiments.train.views:KangarooTrainer",
    "medusa": "experiments.train.medusa:MedusaTrainer",
    "shallow": "experiments.train.views:ShallowTrainer",
}


class Known(NamedTuple):
    """A batch of known tokens, and what the target makes of them. Position 0 is the start token."""

    tokens: Int[Array, "B T"]  # that the target read
    following: Int[Array, "B T"]  # the token after each
    real: Float[Array, "B T"]  # 1 where that is no padding, else 0
    hidden: Float[Array, "B T F"]  # the target's after each, as the drafter sees it
    logprobs: Float[Array, "B T V"]  # the target's, of the token after each
    source: Int[Array, "B S"]
    source_len: Int[Array, " B"]


class Losses(NamedTuple):
    """The losses of a batch."""

    total: Float[Array, ""]  # summed over positions
    positions: Float[Array, ""]  # how many
    seen: dict[str, Float[Array, ""]]  # means over positions that are worth a look, such as α


class Trainer(Protocol):
    """A kind of drafter, to be trained."""

    @abstractmethod
    def init(self, target: Checkpoint, counts: Int[np.ndarray, " V"], seed: int) -> Any:
        """A drafter that knows nothing. `counts`: how often each id is in the training data."""
        ...

    @abstractmethod
    def loss(self, drafter: Any, known: Known, key: Key[Array, ""] | None) -> Losses:
        """Pure; without a key, as in evaluation, nothing is random."""
        ...

    def result(self, drafter: Any, target: Checkpoint) -> tuple[Any, Checkpoint]:
        """What is saved of a trained drafter, and the target that it belongs to: both as they
        are, unless the target was trained along."""
        return drafter, target


@dataclasses.dataclass(frozen=True)
class DrafterConfig(LoopConfig):
    """What to train and how; `configs/train.py` has those of the embedded families."""

    drafter: str  # one of TRAINERS, or the import path of a trainer
    target: str  # directory of the model that it belongs to
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the trainer
    _: dataclasses.KW_ONLY
    steps: int = 3000
    decay_share: float = 1.0
    eval_every: int = 1000
    checkpoint_every: int = 250

    @functools.cached_property
    def trainer(self) -> Trainer:
        """As `drafter` and `settings` say."""
        return named.make("trainer", TRAINERS, self.drafter, **self.settings)


def known_tokens(drafter: Any, batch: Batch) -> Known:
    """A batch with what the target of a drafter makes of it, in one call."""
    target = drafter.target
    following = jnp.asarray(batch.target)
    source, source_len = jnp.asarray(batch.source), jnp.asarray(batch.source_len)
    start_id = jnp.full((len(following), 1), target.module().config.start_id, jnp.int32)
    tokens = jnp.concatenate([start_id, following[:, :-1]], axis=1)
    seen = seen_by(drafter, target)
    hidden, logprobs = read(target, tokens, source, source_len, seen=seen)
    real = jnp.asarray(batch.real, jnp.float32)
    return Known(tokens, following, real, hidden, logprobs, source, source_len)


def read(
    model: LanguageModel,
    tokens: Int[Array, "B T"],
    source: Int[Array, "B S"],
    source_len: Int[Array, " B"],
    *,
    seen: Model | None = None,
) -> tuple[Float[Array, "B T F"], Float[Array, "B T V"]]:
    """A model's hidden states after known tokens, and its log-probabilities of the token after
    each, in one call.

    Args:
      seen: the same model, wrapped as a drafter sees it; None: as it is.
    """
    by = seen or model
    context = model.module().encode(source, source_len)
    hidden, _ = by(tokens, jnp.zeros((1,), jnp.int32), context, None)
    return hidden, jax.nn.log_softmax(by.logits(hidden), axis=-1)


def params_of(drafter: Any) -> list[Array]:
    """What is trained: the floats of a drafter that are not its target's."""
    return [leaf for leaf in _own(drafter)[0] if _is_float(leaf)]


def with_params(drafter: Any, params: Sequence[Array]) -> Any:
    """The drafter with others instead of `params_of`."""
    leaves, treedef = _own(drafter)
    left = iter(params)
    own = jax.tree.unflatten(treedef, [next(left) if _is_float(x) else x for x in leaves])
    return dataclasses.replace(own, target=drafter.target)


def _own(drafter: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(dataclasses.replace(drafter, target=None))


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


# --- a run ---------------------------------------------------------------------------------------


def run(
    config: DrafterConfig, directory: str | os.PathLike, checked: Callable[[], Any] = bool
) -> dict[str, Any]:
    """Train, or continue training, and write the drafter; return what final.json holds.

    Args:
      checked: is called before anything is written, when config, data and target are checked.

    Raises:
      ValueError: a field of the config, the data, the target or a file of the directory is at
        fault; or another process trains in the directory.
    """
    directory = pathlib.Path(directory)
    with files.only_writer(directory / "checkpoints"):
        return _run(config, directory, checked)


def _run(
    config: DrafterConfig, directory: pathlib.Path, checked: Callable[[], Any]
) -> dict[str, Any]:
    command_line.say(f"loading {config.target} …")
    target = checkpoints.load(config.target, dtype=jnp.float32)
    if target.tokenizer is None:
        raise ValueError(
            f"{config.target} has no tokenizer, which the pairs of {config.task} need."
        )
    data = loop.read_data(config)
    provenance = tasks.provenance(config.task, data)
    provenance["models"] = {"target": checkpoints.fingerprint(config.target)}
    begin = loop.latest_step(directory / "checkpoints")
    mark = loop.claim(directory, provenance, begin=begin, steps=config.steps)
    pairs = _pairs(data, target)
    for split, found in pairs.items():
        loop.say_left_out(split, found, config.buckets)
    ids = np.concatenate([pair.target for pair in pairs["train"]])
    counts = np.bincount(ids, minlength=target.model.vocab_size)[: target.model.vocab_size]
    drafter = config.trainer.init(target, counts, config.seed)
    params = [jnp.array(x) for x in params_of(drafter)]  # copies: a step donates them
    optimizer = loop.optimizer(config)
    key = jax.random.key(config.seed)
    order = batches.Order(
        batches.lengths(pairs["train"]), config.buckets, config.target_tokens, config.seed
    )

    def source(begin: int, _: Any) -> Iterator[Batch]:
        for bucket, chosen in order.from_step(begin):
            members = [pairs["train"][i] for i in chosen]
            yield batches.collate(members, config.buckets[bucket])

    def judged(progress: Progress, split: str, count: int | None = None) -> dict[str, float]:
        return measure(config, with_params(drafter, progress.params), pairs[split][:count])

    checked()
    files.write_json(directory / "provenance.json", mark)
    one_step = functools.partial(_step, config.trainer, optimizer)
    progress = loop.fit(
        Progress(params, optimizer.init(params)),
        lambda progress, batch, at: one_step(progress, drafter, batch, jax.random.fold_in(key, at)),
        source,
        lambda progress, _: judged(progress, "validation", config.eval_examples),
        config,
        directory,
    )
    trained, belongs_to = config.trainer.result(with_params(drafter, progress.params), target)
    if belongs_to is not target:
        checkpoints.save(directory / "target", belongs_to, dtype=jnp.float16)
        belongs_to = dataclasses.replace(belongs_to, name=str(directory / "target"))
    attached.save(directory / "drafter", trained, belongs_to)
    final = {
        "parameters": loading.parameters(trained),
        "steps": config.steps,
        "schedules": mark["schedules"],
        "minutes": minutes(files.read_rows(directory / "metrics.jsonl")),
        "test_examples": len(pairs["test"]) - batches.left_out(pairs["test"], config.buckets),
        **judged(progress, "test"),
    }
    files.write_json(directory / "final.json", final)
    return final


def minutes(log: Sequence[Mapping[str, Any]]) -> float:
    """That the steps of a log took, without evaluations and the reading of data."""
    timed = [row for row in log if "seconds_per_step" in row]
    counts = np.diff([0, *(row["step"] for row in timed)])
    return sum(counts * [row["seconds_per_step"] for row in timed]) / 60


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def _step(
    trainer: Trainer,
    optimizer: optax.GradientTransformation,
    progress: Progress,
    begun: Any,
    batch: Batch,
    key: Key[Array, ""],
) -> tuple[Progress, Array]:
    """One step of the optimizer, and the mean loss before it. `begun`: the drafter at first."""

    def mean(params):
        drafter = with_params(begun, params)
        found = trainer.loss(drafter, known_tokens(drafter, batch), key)
        return found.total / jnp.maximum(found.positions, 1)

    loss, gradient = jax.value_and_grad(mean)(progress.params)
    updates, opt_state = optimizer.update(gradient, progress.opt_state, progress.params)
    return Progress(optax.apply_updates(progress.params, updates), opt_state), loss


@functools.partial(jax.jit, static_argnums=0)
def _losses(trainer: Trainer, drafter: Any, batch: Batch) -> Losses:
    return trainer.loss(drafter, known_tokens(drafter, batch), None)


def measure(config: DrafterConfig, drafter: Any, pairs: Sequence[batches.Pair]) -> dict[str, float]:
    """The mean loss over pairs, as `held_out_loss`, and what else the loss shows."""
    cut = batches.in_order(pairs, config.buckets, config.target_tokens)
    found = jax.device_get([_losses(config.trainer, drafter, batch) for batch in cut])
    counts = np.array([losses.positions for losses in found])
    shown = {
        name: float(sum(losses.seen[name] * losses.positions for losses in found) / counts.sum())
        for name in found[0].seen
    }
    return {"held_out_loss": float(sum(f.total for f in found) / counts.sum()), **shown}


def _pairs(
    data: Mapping[str, Sequence[tasks.Example]], target: Checkpoint
) -> dict[str, list[batches.Pair]]:
    """Ids of all splits, by the target's tokenizer."""
    tokenizer, whole = target.tokenizer, not target.config.is_encoder_decoder
    return {
        split: batches.encode(examples, tokenizer, decoder_only=whole, eos_ids=target.eos_ids)
        for split, examples in data.items()
    }
