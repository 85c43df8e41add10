"""The loop of every training run: data, schedule, checkpoints, log and curve.

A run that was interrupted goes on from its latest checkpoint with the batches that would have come.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import plots, tasks
from experiments.tasks import python_source
from experiments.train import batches
from experiments.train.batches import Batch, Pair
from specjax.support import command_line, files, runs
from specjax.support.ranges import number, whole

PAIRS = {"parse": "some 450,000 pairs", "prose": "some 9,400 texts"}
OPTIMIZERS = ("adam", "adafactor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What every run takes: its data, its steps, and what is written when."""

    task: str = "parse"
    task_file: str = ""  # of the jsonl task: "train.jsonl,validation.jsonl,test.jsonl"
    max_examples: int = 0  # of the training split; 0: all
    steps: int = 1000
    target_tokens: int = 1024  # of a batch, padding included
    buckets: tuple[tuple[int, int], ...] = ((16, 24), (24, 40), (32, 64), (48, 104))
    optimizer: str = "adam"  # or adafactor
    learning_rate: float = 1e-3  # of Adafactor, a share of each matrix's scale
    warmup_steps: int = 100
    decay_share: float = 0.4  # the last share of the steps, in which the rate falls to zero
    clip: float = 1.0  # global norm of the gradient; ∞: not clipped
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500
    eval_examples: int = 512  # for held-out losses
    checkpoint_every: int = 500

    def __post_init__(self):
        for name in ("steps", "target_tokens", "log_every", "eval_every", "eval_examples"):
            whole(name, getattr(self, name), "[1, ∞)")
        whole("checkpoint_every", self.checkpoint_every, "[1, ∞)")
        for name in ("max_examples", "warmup_steps", "seed"):
            whole(name, getattr(self, name), "[0, ∞)")
        number("learning_rate", self.learning_rate, "[0, ∞)")
        number("clip", self.clip, "(0, ∞]")
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise ValueError(f"optimizer={self.optimizer!r} must be one of {known}.")
        number("decay_share", self.decay_share, "[0, 1]")
        longest = max(length for _, length in _checked(self.buckets))
        if self.target_tokens < longest:
            raise ValueError(
                f"target_tokens={self.target_tokens} must be at least {longest}, so that a batch "
                f"holds one row of the longest bucket of {self.buckets}."
            )


def _checked(buckets: Any) -> Any:
    """Return buckets; ValueError if they are not pairs of lengths."""
    given = buckets if isinstance(buckets, tuple | list) else ()
    if not given or not all(isinstance(one, tuple | list) and len(one) == 2 for one in given):
        raise ValueError(
            f"buckets={buckets!r} must be pairs of lengths, of source and target, such as "
            "((16, 24), (48, 104))."
        )
    for source, target in given:
        whole("a source in buckets", source, "[0, ∞)")
        whole("a target in buckets", target, "[1, ∞)")
    return buckets


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """An ml_collections ConfigDict as keyword arguments: dicts as dicts, lists as tuples."""

    def plain(value: Any) -> Any:
        if hasattr(value, "items"):
            return {name: plain(inner) for name, inner in value.items()}
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    return plain(config)


def read_data(config: LoopConfig) -> dict[str, Sequence[tasks.Example]]:
    """The examples of all splits."""
    command_line.say(f"Reading the pairs of {config.task}.")
    if config.task in python_source.TASKS:
        command_line.say(
            f"They come from thousands of Python files, {PAIRS[config.task]}: that takes minutes. "
            "--config.task=jsonl and --config.task_file=DIR take pairs of your own at once."
        )
    places = [pathlib.Path(part) for part in config.task_file.split(",") if part]
    data = {split: tasks.stream(config.task, split, files=places) for split in tasks.SPLITS}
    if config.max_examples:
        data["train"] = data["train"][: config.max_examples]
    tasks.warn_of_overlap(config.task, data)
    return data


def schedule(config: LoopConfig) -> optax.Schedule:
    """The learning rate by step, from 0: a linear warmup, a constant rate, a linear fall.

    The warmup takes `warmup_steps` from 0 to `learning_rate`; without any the first step has the
    full rate. The fall takes the last `decay_share` of the steps, or what the warmup leaves of
    them, and would reach 0 one step after the last.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    begin = max(warmup, config.steps - round(config.steps * config.decay_share))
    rise = optax.linear_schedule(0.0, rate, warmup) if warmup else optax.constant_schedule(rate)
    fall = optax.linear_schedule(rate, 0.0, max(1, config.steps - begin))
    return optax.join_schedules([rise, fall], [begin])


def optimizer(config: LoopConfig) -> optax.GradientTransformation:
    """Adam or Adafactor with clipped gradients, at the rate of `schedule`.

    Adafactor is T5's (Shazeer and Stern 2018, 1804.04235): factored second moments, steps that
    follow the scale of each matrix and are clipped by their size, no momentum, no weight decay.
    """
    rate = schedule(config)
    if config.optimizer == "adafactor":
        made = optax.adafactor(rate)
    else:
        made = optax.adam(rate, b1=0.9, b2=0.98)
    if np.isinf(config.clip):
        return made
    return optax.chain(optax.clip_by_global_norm(config.clip), made)


class Progress(NamedTuple):
    """What changes from step to step."""

    params: Any
    opt_state: Any


class Stored(NamedTuple):
    """The place and the form in which checkpoints hold parameters."""

    directory: pathlib.Path  # of several joined processes: one that all share
    form: Callable[[Any], Any] = lambda params: params
    params: Callable[[Any], Any] = lambda form: form  # the inverse


def fit(
    progress: Progress,
    step: Callable[[Progress, Batch, int], tuple[Progress, Array]],
    source: Callable[[int, Callable[[], Progress]], Iterator[Batch]],
    evaluate: Callable[[Progress, int], dict[str, float]],
    config: LoopConfig,
    directory: pathlib.Path,
    stored: Stored | None = None,
) -> Progress:
    """Takes the steps that are left, with checkpoints, a log and a curve in the directory.

    Args:
      step: (progress, batch, number of the step) → progress and the loss.
      source: (steps taken, a function that returns the progress of this moment) → batches.
      evaluate: (progress, steps taken) → what `eval_every` steps are measured by.
      stored: None: checkpoints/ in the directory, with parameters as they are.

    Raises:
      ValueError: a loss that is not finite.
    """
    stored = stored or Stored(directory / "checkpoints")

    def kept(progress: Progress) -> Progress:
        return Progress(stored.form(progress.params), progress.opt_state)

    with ocp.CheckpointManager(
        stored.directory.absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
    ) as manager:
        # Each process reads the parts of its devices, whatever the mesh that wrote them.
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), kept(progress)
        )
        begin, found = _restored(manager, _named(like))
        if begin:
            treedef = jax.tree.structure(like)
            params, opt_state = jax.tree.unflatten(treedef, [found[name] for name in sorted(found)])
            progress = Progress(stored.params(params), opt_state)
        log = open_log(directory / "metrics.jsonl", keep_to=begin)
        bar = command_line.Steps(
            range(begin + 1, config.steps + 1),
            initial=begin, total=config.steps, unit="step", mininterval=1.0,
        )  # fmt: skip

        def due(every: int, at: int) -> bool:
            return at % every == 0 or at == config.steps

        def look(at: int) -> None:
            bar.set_description("evaluating")
            log.append({"step": at, **evaluate(progress, at)})
            draw_curve(log.done, directory / "curve.png")

        evaluated = {row["step"] for row in log.done if "held_out_loss" in row}
        if begin and begin not in evaluated and due(config.eval_every, begin):
            look(begin)  # it was interrupted after the checkpoint
        compiled: set[tuple[int, int]] = set()
        losses, since, coming = [], time.perf_counter(), source(begin, lambda: progress)
        for at in bar:
            batch = next(coming)
            shape = batch.source.shape[1], batch.target.shape[1]
            if shape not in compiled:
                compiled.add(shape)
                bar.set_description(f"compiling for {shape}")
            progress, loss = step(progress, batch, at)
            losses.append(loss)
            bar.set_description("training", refresh=False)
            if due(config.log_every, at):
                mean = float(jnp.stack(losses).mean())
                if not np.isfinite(mean):
                    raise ValueError(
                        f"the loss is {mean} at step {at}: lower learning_rate="
                        f"{config.learning_rate} and start again from an empty workdir"
                    )
                seconds = (time.perf_counter() - since) / len(losses)
                row = {"step": at, "train_loss": mean, "steps_in_mean": len(losses)}
                log.append({**row, "seconds_per_step": seconds})
                bar.set_postfix(loss=f"{mean:.3f}")
                losses, since = [], time.perf_counter()
            if due(config.checkpoint_every, at):
                _save(manager, at, _named(kept(progress)))
            if due(config.eval_every, at):
                look(at)
                since = time.perf_counter()
    return progress


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their number: what orbax restores into is as flat as what was saved."""
    return {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _restored(manager: ocp.CheckpointManager, like: Any) -> tuple[int, Any]:
    """Read the latest checkpoint that is whole; 0 and nothing if there is none.

    Later ones, which cannot be read, are renamed.

    Raises:
      ValueError: no checkpoint can be read.
    """
    damaged: dict[int, str] = {}
    place = pathlib.Path(manager.directory)
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            found = manager.restore(step, args=ocp.args.StandardRestore(like))
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # of orbax and tensorstore, of many kinds
            damaged[step] = str(error).strip().split("\n")[0][:200]
            continue
        for other, reason in damaged.items():
            numbers = ("", *map("-{}".format, range(1, 100)))
            names = (f"{other}.damaged{number}" for number in numbers)
            free = next(name for name in names if not (place / name).exists())
            command_line.say(
                f"The checkpoint {place / str(other)} cannot be read ({reason}). It is renamed to "
                f"{free}, and the run goes on from step {step}."
            )
            if not jax.process_index():
                (place / str(other)).rename(place / free)
        if damaged:
            manager.reload()
        return step, found
    if damaged:
        step, reason = damaged.popitem()
        raise ValueError(
            f"No checkpoint in {place} can be read (of step {step}: {reason}). Copy one from a "
            "backup, or name another directory to begin again."
        )
    return 0, None


def _save(manager: ocp.CheckpointManager, step: int, leaves: Any) -> None:
    try:
        manager.save(step, args=ocp.args.StandardSave(leaves))
    except (OSError, ValueError) as error:  # tensorstore: RESOURCE_EXHAUSTED, of a full disk
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(
            f"Cannot write the checkpoint of step {step} in {manager.directory} ({reason}). Make "
            "room, and give the same command again: it goes on from the checkpoint before."
        ) from error


def latest_step(saved: pathlib.Path) -> int:
    """The step of the latest checkpoint in a run's checkpoints/; 0: there is none."""
    found = saved.glob("*")  # those being written have longer names
    return max((int(path.name) for path in found if path.name.isdecimal()), default=0)


def claim(
    directory: pathlib.Path, provenance: Mapping[str, Any], *, begin: int, steps: int
) -> dict[str, Any]:
    """Return what provenance.json is to hold: `provenance`, and the schedules of the run, that is,
    the step that each began at, and the steps that it was made for. A run that is continued with
    more steps has several.

    Args:
      provenance: of the data and models of the run.
      begin: the step of the latest checkpoint. Without a checkpoint the run starts afresh.

    Raises:
      ValueError: the checkpoint is of other data or models, or of more steps.
    """
    mark = directory / "provenance.json"
    found = runs.read_mark(mark) if begin else {}
    if begin > steps:
        raise ValueError(
            f"{directory} has a checkpoint of {begin} steps, more than steps={steps}: name "
            "another directory, or as many steps or more."
        )
    same_data = found.get("sha256") == provenance["sha256"]
    free = {"schedules", *(("python", "packages") if same_data else ())}
    was, now = (
        {name: value for name, value in fields.items() if name not in free}
        for fields in ({**provenance, **found}, {**found, **provenance})
    )
    way_out = "Name another directory, or train with what the run began with."
    runs.check_same(directory, was, now, way_out)
    schedules = found.get("schedules", [])
    if not schedules or schedules[-1]["steps"] != steps:
        schedules = [*schedules, {"from": begin, "steps": steps}]
    return {**provenance, "schedules": schedules}


def say_left_out(split: str, pairs: Sequence[Pair], buckets: Sequence[tuple[int, int]]) -> int:
    """Print how many pairs are longer than every bucket, if any are; return that number."""
    count = batches.left_out(pairs, buckets)
    if count:
        command_line.say(
            f"{count:,} of {len(pairs):,} pairs of {split} are longer than every bucket of "
            f"{tuple(buckets)} and are left out."
        )
    return count


def open_log(path: pathlib.Path, keep_to: int) -> files.Rows:
    """Rows of an earlier run, without those of steps after `keep_to`, which are run again."""
    log = files.Rows(path)
    log.keep(lambda row: row["step"] <= keep_to)
    return log


def draw_curve(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draw training and held-out loss against the step; a short run has one point of each."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    names = {
        "train_loss": "training",
        "held_out_loss": "held out",
        "shuffled_loss": "shuffled inputs",
    }
    for key, label in names.items():
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            marker = "." if len(points) < 10 else ""  # one point makes no line
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
    axes.set(xlabel="step", ylabel="nats per target token", yscale="log")
    values = [row[key] for row in rows for key in names if key in row]
    if max(values, default=0) < 10 * min(values, default=1):
        # Over a wider range, labels between powers of ten would overlap.
        axes.yaxis.set_minor_formatter("{x:.4g}")
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    plots.save(path, figure)
