"""Training a model on a task, or on a bigger model's probabilities.

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
import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int

from experiments.reproduce import scores
from experiments.train import batches, divergences, loop, meshes, prefixes
from experiments.train import tokenizer as tokenizers
from experiments.train.batches import Batch, Pair
from experiments.train.divergences import Divergence
from experiments.train.exits import Exits
from experiments.train.grow import grow
from experiments.train.loop import LoopConfig, Progress, Stored
from experiments.train.meshes import Layout
from experiments.train.modes import Mode
from experiments.train.prefixes import Prefixes
from specjax import checkpoints, tasks
from specjax.generation import generate
from specjax.models import sharding
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange
from specjax.models.sharding import DATA, Placement
from specjax.models.t5 import T5
from specjax.support import command_line, files
from specjax.support.ranges import number, whole
from specjax.tasks import trees
from specjax.tasks.examples import Example

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """What to train and how; `configs/train.py` has those of the embedded family."""

    tokenizer: str = ""  # directory of a model whose tokenizer to use; "": train one
    vocab_size: int = 2048  # of a tokenizer that is trained
    max_source_len: int = 64
    truncate: bool = False  # inputs to the longest bucket, as decoding does; else they are left out
    family: str = "t5"  # or gpt2, which learns input and target as one text
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of T5Config, GPTConfig
    start: str = ""  # directory or hub name of a model to start from, instead of family and model
    grow: str = ""  # directory of a model to start from; a smaller T5 grows (`grow.py`)
    teacher: str = ""  # directory of a model to learn the probabilities of; "": learn the data
    teacher_after: int = 0  # steps on the data before the teacher's probabilities replace it
    exits: tuple[int, ...] = ()  # layers after which the model learns to exit (`exits.py`)
    exit_weight: float = 1.0  # of the mean loss of the exits, beside 1 for the model's own
    layer_dropout: float = 0.0  # with which the last layer is left out at the end
    divergence: str = "forward_kl"  # from the teacher, see `experiments.train.divergences`
    prefixes: str = "data"  # at which: data, target, draft, or shares such as "data=1, draft=3"
    prefix_temperature: float = 1.0  # of what models write
    prefix_inputs: int = 512  # that a model writes outputs for at once
    refresh_every: int = 100  # steps after which it writes others
    sample_examples: int = 64  # for greedy outputs
    metric: str = ""  # of greedy outputs: bleu or rouge (`experiments.reproduce.scores`)
    mesh: str = ""  # "data=4,model=2"; "": one device
    accumulate: int = 1  # microbatches, one after the other, that a batch is cut into
    dropout: float = 0.0  # of a T5
    remat: bool = False  # whether a T5's layers are computed again in the backward pass
    compute_dtype: str = "float32"  # of products and activations; weights are float32
    save_dtype: str = "float16"  # of model/

    def __post_init__(self):
        super().__post_init__()
        whole("accumulate", self.accumulate, "[1, ∞)")
        meshes.check_rows(self.buckets, self.target_tokens, self.accumulate, self.mesh)
        for name in ("compute_dtype", "save_dtype"):
            if (value := getattr(self, name)) not in DTYPES:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(DTYPES)}.")
        if self.metric not in ("", *scores.METRICS):
            known = ", ".join(scores.METRICS)
            raise ValueError(f"metric={self.metric!r} must be empty, or one of {known}.")
        if self.start and self.grow:
            raise ValueError(f"start={self.start!r} and grow={self.grow!r}: give one of them.")
        whole("prefix_inputs", self.prefix_inputs, "[1, ∞)")
        whole("refresh_every", self.refresh_every, "[1, ∞)")
        whole("sample_examples", self.sample_examples, "[0, ∞)")
        number("teacher_after", self.teacher_after, "[0, ∞]")
        if self.family not in checkpoints.FAMILIES:
            raise ValueError(
                f"family={self.family!r} must be one of {', '.join(checkpoints.FAMILIES)}"
            )
        check_shape(self.family, self.model)
        self.mode.check(self.family)
        Exits(self.exits, self.exit_weight, self.layer_dropout)
        divergences.parse(self.divergence)
        number("prefix_temperature", self.prefix_temperature, "[0, ∞)")
        if prefixes.shares(self.prefixes).keys() != {"data"} and not self.teacher:
            raise ValueError(
                f"prefixes={self.prefixes!r} are to learn a teacher's probabilities at: name the "
                "teacher"
            )

    @property
    def mode(self) -> Mode:
        """Dropout and rematerialisation."""
        return Mode(self.dropout, self.remat)

    @property
    def decoder_only(self) -> bool:
        """Whether input and target are one text to the model."""
        return not checkpoints.FAMILIES[self.family].config_class.is_encoder_decoder


def check_shape(family: str, model: Mapping[str, Any]) -> None:
    """ValueError if `model` has fields that are unknown, or sizes that no model can have."""
    config_class = checkpoints.FAMILIES[family].config_class
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    for name in ("vocab_size", "bos_token_id", "pad_token_id"):
        defaults.pop(name, None)  # the tokenizer has them
    for name, value in model.items():
        if name not in defaults:
            raise ValueError(
                f"model.{name} is no field of family={family!r}; choose from {', '.join(defaults)}."
            )
        if type(defaults[name]) is int:  # of a size whose default is 0, 0 leaves the choice open
            whole(f"model.{name}", value, "[1, ∞)" if defaults[name] else "[0, ∞)")
    config_class(**model)


# --- The model and its loss ---------------------------------------------------------------------


def make_model(
    config: Any, seed: int, small: checkpoints.Checkpoint | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Parameters of a `T5Config`, `GPTConfig` or `LlamaConfig`, ready for training.

    They are the family's own; a T5's are improved by `look_around`, or start as a smaller one.

    Raises:
      ValueError: the small model cannot grow to this shape.
    """
    model = checkpoints.FAMILIES[config.model_type].build(
        config, rngs=nnx.Rngs(seed), dtype=jnp.float32
    )
    if isinstance(model, T5):
        look_around(model)
    if small is not None:
        grow(arrange(small.model.module(), input_first=False), model)
    return nnx.split(model)


def look_around(model: T5, strength: float = 4.0) -> None:
    """Starts a T5 where copying can be found at once, in place.

    A decoder copies by finding the source position whose left neighbour it has just written. From
    T5's own initialisation that circuit takes a thousand steps to appear in a shallow model, and
    did not appear at all in deep ones (experiments/train/README.md). Two changes put its parts in
    place:

    - Relative position: each head of the encoder starts with a preference for one near neighbour
      (−1, +1, −2, +2, in turn; the last two heads have none if there are more than six), each head
      of the decoder for the token at a distance of 0, 1, 2 or 3.
    - Cross-attention: queries start equal to keys (up to T5's scale), so that a decoder position
      attends to encoder positions with a similar content rather than to random ones.
    """
    heads = model.config.num_heads
    buckets = model.config.relative_attention_num_buckets
    back, ahead = lambda distance: distance, lambda distance: buckets // 2 + distance
    near = [back(1), ahead(1), back(2), ahead(2), back(1), ahead(1)][:heads]
    for bias in model.position_biases("encoder"):
        bias.weight.set_value(_preferring(near, buckets, heads, strength))
    near = [back(0), back(1), back(2), back(3)][:heads]
    for bias in model.position_biases("decoder"):
        bias.weight.set_value(_preferring(near, buckets, heads, strength))
    inner = heads * model.config.d_kv
    for layer in model.decoder:
        keys = layer.cross.kv.weight[...][:inner]
        layer.cross.query.weight.set_value(keys * model.config.d_kv**-0.5)


def _preferring(near: Sequence[int], buckets: int, heads: int, strength: float) -> Array:
    """(buckets, heads): `strength` at bucket near[h] of head h, else 0."""
    weight = np.zeros((buckets, heads), np.float32)
    weight[list(near), range(len(near))] = strength
    return jnp.asarray(weight)


def _as_is(module: Any) -> Any:
    return module


def teacher_forced(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    active: Callable[[Any], Any] = _as_is,
) -> Float[Array, "N V"]:
    """Logits of each target token given those before it, N = B·T rows.

    Rows and positions are one axis: XLA's CPU backend is several times faster at the gradient.

    Args:
      active: changes the module for training, such as a `Mode`.
    """
    model = active(nnx.merge(graphdef, params))
    start_id = jnp.full((batch.target.shape[0], 1), model.config.start_id, jnp.int32)
    shifted = jnp.concatenate([start_id, batch.target[:, :-1]], axis=1)
    context = model.encode(batch.source, batch.source_len)
    # All rows start at 0, so one row of position biases serves them all.
    hidden, _ = model(shifted, jnp.zeros((1,), jnp.int32), context, None)
    return model.logits(hidden.reshape(-1, hidden.shape[-1]))


def token_losses(logits: Float[Array, "N V"], target: Int[Array, " N"]) -> Float[Array, " N"]:
    """Nats of each target token. A masked sum: a gather's gradient is a scatter, which is slow."""
    ids = jnp.arange(logits.shape[-1], dtype=target.dtype)
    chosen = jnp.where(ids[None, :] == target[:, None], logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def data_loss(graphdef, params, batch: Batch, active=_as_is) -> tuple[Array, Array]:
    """Sum of nats over the target tokens of a batch, and their number."""
    target = jnp.asarray(batch.target).reshape(-1)
    real = jnp.asarray(batch.real, jnp.float32).reshape(-1)
    losses = token_losses(teacher_forced(graphdef, params, batch, active), target)
    return (losses * real).sum(), real.sum()


def teacher_loss(
    graphdef, params, teacher: tuple[Any, Any], batch: Batch, divergence: Divergence, active=_as_is
) -> tuple[Array, Array]:
    """Sum of divergences from the teacher's distribution of each token of a batch, and number."""
    target = jnp.asarray(batch.target).reshape(-1)
    real = jnp.asarray(batch.real, jnp.float32).reshape(-1)
    logits = [teacher_forced(*teacher, batch), teacher_forced(graphdef, params, batch, active)]
    size = min(one.shape[-1] for one in logits)  # either may pad the vocabulary
    log_p, log_q = (jax.nn.log_softmax(one[:, :size]) for one in logits)
    losses = divergence(log_p, log_q, target)
    return (losses * real).sum(), real.sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A compiled training step with what is constant in it."""

    compiled: Any
    trainer: "Trainer"
    constants: Any  # the teacher's parameters

    def __call__(self, params, opt_state, batch: Batch):
        return self.compiled(*self.arguments(params, opt_state, batch))

    def arguments(self, params, opt_state, batch: Batch) -> tuple:
        """What `compiled` takes: the first two are donated."""
        return params, opt_state, self.trainer.parts(batch), self.constants


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The jitted functions of a run: one training step, and the loss of one batch."""

    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=optax.identity  # losses alone need none
    )
    teacher: tuple[Any, Any] | None = None  # graphdef and parameters
    divergence: Divergence = dataclasses.field(default_factory=divergences.ForwardKL)
    exits: Exits = dataclasses.field(default_factory=Exits)
    steps: int = 1  # of the run
    layout: Layout | None = None  # on a mesh; None: arrays lie where they are
    accumulate: int = 1  # microbatches of a batch
    mode: Mode = dataclasses.field(default_factory=Mode)
    dtype: Any = jnp.float32  # of products and activations
    seed: int = 0  # of dropout

    @functools.cached_property
    def init(self):
        """params → optimizer state; on a mesh each device makes its part."""
        return jax.jit(self._optimizer.init, out_shardings=self._where[1])

    @functools.cached_property
    def _where(self) -> tuple[Any, Any]:
        """The shardings of parameters and of optimizer state; None: they lie where they are."""
        if self.layout is None:
            return None, None
        state = jax.eval_shape(self._optimizer.init, self.layout.params)
        return self.layout.shardings, self.layout.of_matrices(state)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.layout.on_matrices(self.optimizer) if self.layout else self.optimizer

    @functools.cached_property
    def step(self):
        """(params, optimizer state, batch) → the same after one step, and nats a token."""
        return self._step_of(
            lambda graphdef, params, batch, constants, active: data_loss(
                graphdef, params, batch, active
            ),
            None,
        )

    @functools.cached_property
    def step_with_teacher(self):
        """As `step`, but towards the teacher's probabilities; the loss is the divergence."""
        assert self.teacher is not None
        teacher, teacher_params = self.teacher

        def loss(graphdef, params, batch, constants, active):
            return teacher_loss(
                graphdef, params, (teacher, constants), batch, self.divergence, active
            )

        return self._step_of(loss, teacher_params)

    def _step_of(self, loss, constants):
        optimizer, layout = self._optimizer, self.layout

        def total(params, batch, constants, key, progress):
            active = functools.partial(self.mode, key=key)
            by = functools.partial(loss, batch=batch, constants=constants, active=active)
            return self.exits(by, self.graphdef, self._narrow(params), progress)

        def step(params, opt_state, parts, constants):
            _, done = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0]
            progress = done.astype(jnp.float32) / self.steps
            key = jax.random.fold_in(jax.random.key(self.seed), done)

            def add(sums, part):
                batch, number = part
                own = jax.random.fold_in(key, number)
                found, gradient = jax.value_and_grad(total, has_aux=True)(
                    params, batch, constants, own, progress
                )
                return jax.tree.map(jnp.add, sums, (gradient, *found)), None

            none = jax.tree.map(jnp.zeros_like, params)
            if layout is not None:
                none = jax.lax.with_sharding_constraint(none, layout.shardings)
            # The mean over all tokens, whatever their number in each microbatch.
            (gradient, value, count), _ = jax.lax.scan(
                add,
                (none, jnp.float32(0), jnp.float32(0)),
                (parts, jnp.arange(self.accumulate)),
                unroll=self.accumulate == 1,
            )
            gradient = jax.tree.map(lambda x: x / count, gradient)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value / count

        where = (*self._where, None)
        return Step(jax.jit(step, donate_argnums=(0, 1), out_shardings=where), self, constants)

    def _narrow(self, params):
        return jax.tree.map(lambda x: x.astype(self.dtype), params)

    def parts(self, batch: Batch) -> Batch:
        """The microbatches of a batch, (accumulate, rows, …), with rows over the data axis."""

        def cut(x):
            x = np.asarray(x).reshape(self.accumulate, len(x) // self.accumulate, *x.shape[1:])
            if self.layout is None:
                return x
            rest = [None] * (x.ndim - 2)
            return sharding.put_on(x, self.layout.placement.sharding(None, DATA, *rest))

        return Batch(*map(cut, batch))

    @functools.cached_property
    def loss(self):
        """(params, batch) → sum of nats over target tokens, and their number."""

        @jax.jit
        def sums(params, parts):
            narrow = self._narrow(params)
            found = jax.lax.map(lambda batch: data_loss(self.graphdef, narrow, batch), parts)
            return jax.tree.map(jnp.sum, found)

        return lambda params, batch: sums(params, self.parts(batch))


# --- Evaluation ---------------------------------------------------------------------------------


def held_out_loss(trainer: Trainer, params: nnx.State, held_out: Sequence[Batch]) -> float:
    """Nats per target token, EOS included."""
    totals = [trainer.loss(params, batch) for batch in held_out]
    return float(sum(t for t, _ in totals)) / float(sum(n for _, n in totals))


def shuffled(pairs: Sequence[Pair]) -> list[Pair]:
    """Every target with its neighbour's source: what a model loses by it is what it reads there."""
    sources = [pair.source for pair in pairs]
    return [Pair(s, p.target) for s, p in zip(sources[1:] + sources[:1], pairs, strict=True)]


def as_checkpoint(
    config: Any,
    graphdef,
    params,
    tokenizer,
    *,
    name: str,
    max_source_len: int,
    metadata=None,
    placement: Placement | None = None,
    vocab_size: int | None = None,
) -> checkpoints.Checkpoint:
    """A trained model as the rest of specjax has it; `vocab_size`: of ids that are tokens."""
    module = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    model = LanguageModel.of(module, vocab_size, placement=placement)
    return checkpoints.Checkpoint(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_ids=(tokenizer.eos_token_id,),
        max_source_len=max_source_len,
        metadata=metadata or {},
    )


def greedy_outputs(
    checkpoint: checkpoints.Checkpoint, examples: Sequence[Example], max_new_tokens: int
) -> list[str]:
    """The most likely output of each input."""
    result = generate(
        checkpoint,
        None,
        [example.input for example in examples],
        max_new_tokens=max_new_tokens,
        batch_size=32,
    )
    return result.texts


def score(task: str, outputs: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Shares of outputs that are exact, distinct and, of `parse`, well-formed trees.

    `distinct_targets` is the share of distinct references: what `distinct` can be at best.
    """
    count = len(examples)
    scores = {
        "exact": sum(o == e.target for o, e in zip(outputs, examples, strict=True)) / count,
        "distinct": len(set(outputs)) / count,
        "distinct_targets": len({e.target for e in examples}) / count,
    }
    if task == "parse":
        scores["well_formed"] = sum(map(trees.is_well_formed, outputs)) / count
    return scores


# --- A run --------------------------------------------------------------------------------------


def run(config: TrainConfig, directory: str | os.PathLike) -> dict[str, Any]:
    """Train, or continue training, and export; return what final.json holds.

    Raises:
      ValueError: a field of the config, the data or a file of the directory is at fault; or
        another process trains in the directory.
      FileNotFoundError: a file that the run continues with is gone.
    """
    directory = pathlib.Path(directory)
    with _own(directory) as own:
        return _run(config, own, directory / "checkpoints")


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


def _run(config: TrainConfig, directory: pathlib.Path, saved: pathlib.Path) -> dict[str, Any]:
    known = checkpoints.outline(config.start) if config.start else None
    if known is not None:
        config = dataclasses.replace(config, family=known.config.model_type, model={})
        meshes.check(known.config, config.mesh)
    command_line.say(f"Reading the pairs of {config.task}.")
    data = loop.read_data(config)
    begin = loop.latest_step(saved)
    named = {"teacher": config.teacher, "grow": config.grow, "start": config.start}
    models = {role: checkpoints.fingerprint(name) for role, name in named.items() if name}
    found = tasks.provenance(config.task, data) | {"models": models}
    schedules = loop.claim(directory, found, begin=begin, steps=config.steps)
    if not begin:
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)  # of a start that failed
    command_line.say(
        f"{len(data['train']):,} pairs to train on. Making the tokenizer and the model."
    )
    tokenizer = _tokenizer(config, data["train"], directory, known)
    if known is None:
        shape = _shape(config, tokenizer)
        meshes.check(shape, config.mesh)
    else:
        shape = known.config
        _check_vocabulary(config, "start", known, tokenizer)
    placement = meshes.placement_for(shape, config.mesh)
    graphdef, params = _begun(config, shape, tokenizer, placement)
    layout = Layout.of(graphdef, params, placement)
    exits = Exits(config.exits, config.exit_weight, config.layer_dropout)
    exits.check(nnx.merge(graphdef, params).cache_shape()[0])
    narrow = None if config.compute_dtype == "float32" else config.compute_dtype
    teacher = _other(config, "teacher", tokenizer, mesh=placement.mesh, dtype=narrow)
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
    pairs = _pairs(config, "train", data["train"], tokenizer)
    order = batches.Order(batches.lengths(pairs), config.buckets, config.target_tokens, config.seed)
    samples = loop.open_log(directory / "samples.jsonl", keep_to=begin)
    size = len(tokenizer) if known is None else known.model.vocab_size
    follow = _Evaluation(config, shape, trainer, tokenizer, data, directory, samples, size)

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
        *progress, loss = (trainer.step_with_teacher if taught else trainer.step)(*progress, batch)
        return Progress(*progress), loss

    matrices = layout.of_matrices(jax.eval_shape(layout.apart, layout.params))
    stored = Stored(
        saved,
        jax.jit(layout.apart, out_shardings=matrices),
        jax.jit(layout.together, out_shardings=layout.shardings),
    )
    progress = Progress(params, trainer.init(params))
    progress = loop.fit(progress, one_step, source, follow, config, directory, stored)
    command_line.say("Writing the model and measuring it on the test split.")
    return follow.final(progress.params, schedules)


def _begun(config: TrainConfig, shape: Any, tokenizer, placement: Placement):
    """Graph and parameters before the first step, on the mesh."""
    if config.start:
        mesh = config.mesh or f"{DATA}=1"
        loaded = checkpoints.load(config.start, dtype=jnp.float32, mesh=mesh)
        return meshes.placed(loaded.model.module(), placement, ordered=True)
    made = make_model(shape, config.seed, _other(config, "grow", tokenizer))
    return meshes.placed(nnx.merge(*made), placement)


def _pairs(config: TrainConfig, split: str, examples: Sequence[Example], tokenizer) -> list[Pair]:
    """The ids of a split, with a count of the pairs that no bucket holds."""
    pairs = batches.encode(examples, tokenizer, decoder_only=config.decoder_only)
    if config.truncate:
        pairs = batches.truncated(pairs, max(length for length, _ in config.buckets))
    loop.say_left_out(split, pairs, config.buckets)
    return pairs


class _Evaluation:
    """What is measured during and after a run, on data that training never sees."""

    def __init__(self, config, shape, trainer, tokenizer, data, directory, samples, vocab_size):
        self.config, self.shape, self.trainer = config, shape, trainer
        self.tokenizer, self.data, self.directory = tokenizer, data, directory
        self.samples, self.vocab_size = samples, vocab_size
        self.validation = self._losses_of("validation", config.eval_examples)

    def _losses_of(self, split: str, count: int | None = None) -> dict[str, list[Batch]]:
        """Batches of a split's first pairs, by the loss that is measured on them."""
        examples = self.data[split][:count]
        pairs = _pairs(self.config, split, examples, self.tokenizer)
        cut = functools.partial(
            batches.in_order, buckets=self.config.buckets, target_tokens=self.config.target_tokens
        )
        if self.config.decoder_only:
            return {"held_out_loss": cut(pairs)}
        return {"held_out_loss": cut(pairs), "shuffled_loss": cut(shuffled(pairs))}

    def _outputs(self, params, examples: Sequence[Example]) -> list[str]:
        checkpoint = self.checkpoint(params)
        return greedy_outputs(checkpoint, examples, max_new_tokens=self.config.buckets[-1][1])

    def checkpoint(self, params, metadata=None) -> checkpoints.Checkpoint:
        return as_checkpoint(
            self.shape,
            self.trainer.graphdef,
            params,
            self.tokenizer,
            name=str(self.directory),
            max_source_len=self.config.max_source_len,
            metadata=metadata,
            placement=self.trainer.layout.placement,
            vocab_size=self.vocab_size,
        )

    def __call__(self, progress: Progress, step: int) -> dict[str, float]:
        params = progress.params
        found = {
            name: held_out_loss(self.trainer, params, held_out)
            for name, held_out in self.validation.items()
        }
        examples = self.data["validation"][: self.config.sample_examples]
        if not examples:
            return found
        outputs = self._outputs(params, examples)
        for example, output in list(zip(examples, outputs, strict=True))[:4]:
            row = {"step": step, "input": example.input, "output": output}
            self.samples.append(row | {"target": example.target})
        return found | self._scores(outputs, examples)

    def _scores(self, outputs: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        """The shares of `score`, and the figures of the config's metric."""
        found = score(self.config.task, outputs, examples)
        if self.config.metric:
            references = [example.target for example in examples]
            by = scores.score(self.config.metric, outputs, references)
            found |= {figure.name: figure.value for figure in by}
        return found

    def final(self, params, schedules: list[dict[str, int]]) -> dict[str, Any]:
        """Export the model and measure it on the test split."""
        sizes = [leaf.size for leaf in jax.tree.leaves(params)]
        provenance = files.read_json(self.directory / "provenance.json")
        metadata = {"training_data": json.dumps(provenance, sort_keys=True)}
        made = self.checkpoint(params, metadata)
        whole = dataclasses.replace(made.model, params=sharding.fetch(made.model.params))
        if not jax.process_index():
            made = dataclasses.replace(made, model=whole)
            checkpoints.save(self.directory / "model", made, dtype=self.config.save_dtype)
        examples = self.data["test"]
        test = self._losses_of("test")
        found = {
            name: held_out_loss(self.trainer, params, held_out) for name, held_out in test.items()
        }
        read = sum(int((batch.target_len > 0).sum()) for batch in test["held_out_loss"])
        chosen = examples[: 4 * self.config.sample_examples]
        found |= self._scores(self._outputs(params, chosen), chosen)
        final = {
            "parameters": int(sum(sizes)),
            "steps": self.config.steps,
            "schedules": schedules,
            "test_examples": {"losses": read, "outputs": len(chosen)},
            **found,
        }
        files.write_json(self.directory / "final.json", final)
        return final


def _shape(config: TrainConfig, tokenizer) -> Any:
    """The model's own config."""
    family = checkpoints.FAMILIES[config.family]
    ids = {"bos_token_id": tokenizer.eos_token_id} if config.decoder_only else {}
    pad = tokenizer.pad_token_id
    ids["pad_token_id"] = batches.FILLER if pad is None else pad
    return family.config_class(vocab_size=len(tokenizer), **ids, **config.model)


def _tokenizer(
    config: TrainConfig,
    examples: Sequence[Example],
    directory: pathlib.Path,
    known: checkpoints.Checkpoint | None,
):
    """The run's tokenizer: the one in its directory, else another model's, else a new one."""
    own = directory / "tokenizer"
    if not own.is_dir():
        if config.tokenizer:
            made = tokenizers.load(config.tokenizer)
        elif known is not None:
            if known.tokenizer is None:
                raise ValueError(f"start={config.start!r} has no tokenizer: set tokenizer=DIR.")
            made = known.tokenizer
        else:
            whole = config.decoder_only
            texts = (
                text
                for e in examples
                for text in ([e.input + e.target] if whole else [e.input, e.target])
            )
            made = tokenizers.to_transformers(
                tokenizers.train(texts, config.vocab_size, decoder_only=whole),
                config.max_source_len,
            )
        tokenizers.save(made, own)
    loaded = tokenizers.load(own)
    loaded.model_max_length = 10**9  # buckets decide here what is too long, and need no warning
    return loaded


def _other(config: TrainConfig, field: str, tokenizer, **how: Any) -> checkpoints.Checkpoint | None:
    """The model that a field names, if it names one."""
    name = getattr(config, field)
    if not name:
        return None
    _check_vocabulary(config, field, checkpoints.outline(name), tokenizer)
    return checkpoints.load(name, **how)


def _check_vocabulary(
    config: TrainConfig, field: str, found: checkpoints.Checkpoint, tokenizer
) -> None:
    """Raise ValueError unless the model that a field names was made with this tokenizer, or, if it
    has none, has a row for each id."""
    name, rows = getattr(config, field), found.config.vocab_size
    if found.tokenizer is None:
        if len(tokenizer) > rows:
            raise ValueError(
                f"{field}={name!r} has {rows} rows of ids, and tokenizer={config.tokenizer!r} "
                f"{len(tokenizer)} ids: name the tokenizer that the model was trained with."
            )
    elif found.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"{field}={name!r} has another vocabulary: set tokenizer={name!r}")
