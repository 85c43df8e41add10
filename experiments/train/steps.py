"""The losses of a model in training, and its jitted training step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.train import divergences
from experiments.train.batches import Batch
from experiments.train.divergences import Divergence
from experiments.train.exits import Exits
from experiments.train.meshes import Layout
from experiments.train.modes import Mode
from specjax.models import sharding
from specjax.models.sharding import DATA


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
    return _sum(token_losses(teacher_forced(graphdef, params, batch, active), target), batch)


def teacher_loss(
    graphdef, params, teacher: tuple[Any, Any], batch: Batch, divergence: Divergence, active=_as_is
) -> tuple[Array, Array]:
    """Sum of divergences from the teacher over the target tokens of a batch, and their number."""
    target = jnp.asarray(batch.target).reshape(-1)
    logits = [teacher_forced(*teacher, batch), teacher_forced(graphdef, params, batch, active)]
    size = min(one.shape[-1] for one in logits)  # either may pad the vocabulary
    theirs, own = (jax.nn.log_softmax(one[:, :size]) for one in logits)
    return _sum(divergence(theirs, own, target), batch)


def _sum(losses: Float[Array, " N"], batch: Batch) -> tuple[Array, Array]:
    real = jnp.asarray(batch.real, jnp.float32).reshape(-1)
    return (losses * real).sum(), real.sum()


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

    def step(self, params, opt_state, batch: Batch, *, taught: bool = False) -> tuple:
        """Take one step. The first two arguments are donated.

        Args:
          taught: whether the loss is the divergence from the teacher, or that on the data.

        Returns:
          parameters, optimizer state, and the loss per token before the step.
        """
        return self.compiled(*self.arguments(params, opt_state, batch, taught=taught))

    def arguments(self, params, opt_state, batch: Batch, *, taught: bool = False) -> tuple:
        """The arguments of `compiled`."""
        teacher = self.teacher if taught else None
        return params, opt_state, self.parts(batch), teacher and teacher[1]

    @functools.cached_property
    def compiled(self):
        """The jitted step, of parameters, optimizer state, microbatches and the teacher's
        parameters (None: learn the data)."""
        optimizer, layout = self._optimizer, self.layout

        def loss(graphdef, params, batch, teacher, active):
            if self.teacher is None or teacher is None:
                return data_loss(graphdef, params, batch, active)
            both = self.teacher[0], teacher
            return teacher_loss(graphdef, params, both, batch, self.divergence, active)

        def total(params, batch, teacher, key, progress):
            active = functools.partial(self.mode, key=key)
            by = functools.partial(loss, batch=batch, teacher=teacher, active=active)
            return self.exits(by, self.graphdef, self._narrow(params), progress)

        def step(params, opt_state, parts, teacher):
            _, done = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0]
            progress = done.astype(jnp.float32) / self.steps
            key = jax.random.fold_in(jax.random.key(self.seed), done)

            def add(sums, part):
                batch, number = part
                own = jax.random.fold_in(key, number)
                found, gradient = jax.value_and_grad(total, has_aux=True)(
                    params, batch, teacher, own, progress
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

        return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*self._where, None))

    def loss(self, params, batch: Batch) -> tuple[Array, Array]:
        """Sum of nats over the target tokens of a batch, and their number."""
        return self._losses(params, self.parts(batch))

    @functools.cached_property
    def _losses(self):
        @jax.jit
        def sums(params, parts):
            narrow = self._narrow(params)
            found = jax.lax.map(lambda batch: data_loss(self.graphdef, narrow, batch), parts)
            return jax.tree.map(jnp.sum, found)

        return sums

    def parts(self, batch: Batch) -> Batch:
        """The microbatches of a batch, (accumulate, rows, …), with rows over the data axis."""

        def cut(x):
            x = np.asarray(x).reshape(self.accumulate, len(x) // self.accumulate, *x.shape[1:])
            if self.layout is None:
                return x
            rest = [None] * (x.ndim - 2)
            return sharding.put_on(x, self.layout.placement.sharding(None, DATA, *rest))

        return Batch(*map(cut, batch))

    def _narrow(self, params):
        return jax.tree.map(lambda x: x.astype(self.dtype), params)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return self.layout.on_matrices(self.optimizer) if self.layout else self.optimizer

    @functools.cached_property
    def _where(self) -> tuple[Any, Any]:
        """The shardings of parameters and of optimizer state; None: they lie where they are."""
        if self.layout is None:
            return None, None
        state = jax.eval_shape(self._optimizer.init, self.layout.params)
        return self.layout.shardings, self.layout.of_matrices(state)


def held_out_loss(trainer: Trainer, params: nnx.State, held_out: Sequence[Batch]) -> float:
    """Nats per target token, EOS included."""
    totals = [trainer.loss(params, batch) for batch in held_out]
    return float(sum(t for t, _ in totals)) / float(sum(n for _, n in totals))
