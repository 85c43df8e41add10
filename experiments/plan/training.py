"""What training takes on each device of a mesh, from shapes alone.

    weights      float32 parameters, as `models.sharding` cuts them
    optimizer    its state: Adam's two moments, or Adafactor's sums of rows and columns
    gradients    a float32 sum over microbatches, and those of one microbatch in `compute_dtype`
    copies       the weights in `compute_dtype`, unless that is float32
    activations  of the largest microbatch: what the forward pass keeps for the backward pass; with
                 `remat` the inputs of all layers, and what one layer of each stack keeps

The first two are exact to the byte; a test compares them with arrays. Activations are counted from
the residuals of `jax.vjp` of the loss: rows are shared out over the data axis, and heads,
feed-forward columns and ids over the model axis. The compiler's temporaries come on top. XLA's CPU
backend merges what `remat` computes again with what was computed first, and so keeps it all.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from experiments.train import loop, meshes
from experiments.train.batches import Batch
from experiments.train.config import TrainConfig
from experiments.train.meshes import Layout
from experiments.train.modes import Mode
from experiments.train.steps import data_loss
from specjax.checkpoints import FAMILIES
from specjax.models import sharding
from specjax.models.meshes import mesh_of, sizes_of
from specjax.models.sharding import DATA, Placement


class Bytes(NamedTuple):
    """Bytes on one device, by part."""

    weights: int
    optimizer: int
    gradients: int
    copies: int
    activations: int


def need(config: TrainConfig, shape: Any, mesh: str) -> Bytes:
    """What training a model of this shape takes on "data=4,model=2".

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    meshes.check(shape, mesh)
    meshes.check_rows(config.buckets, config.target_tokens, config.accumulate, mesh)
    config.mode.check(shape.model_type)
    layout = layout_of(shape, mesh)
    state = jax.eval_shape(layout.on_matrices(loop.optimizer(config)).init, layout.params)
    weights = _held(layout.params, layout.shardings)
    narrow = jnp.dtype(config.compute_dtype).itemsize
    return Bytes(
        weights=weights,
        optimizer=_held(state, layout.of_matrices(state)),
        gradients=weights + weights * narrow // 4,
        copies=weights * narrow // 4 if narrow < 4 else 0,
        activations=max(activations(config, layout, bucket) for bucket in config.buckets),
    )


def tokens_a_second(config: TrainConfig, shape: Any, mesh: str, flops: float) -> float:
    """The most target tokens a second, in rows of the longest bucket.

    Each matrix takes 2 operations for a token that it reads and 4 in the backward pass, and with
    `remat` 2 more. Attention, the optimizer and all that devices send come on top.

    Args:
      flops: operations of one device in a second.
    """
    layout, (source, target) = layout_of(shape, mesh), config.buckets[-1]
    work = 0.0
    for path, slot in nnx.to_flat_state(layout.params):
        looked_up = path == ("embedding",) and not shape.tie_word_embeddings
        if len(slot.shape) == 2 and not looked_up:
            of_source = path[0] == "encoder" or path[-3:-1] == ("cross", "kv")
            work += math.prod(slot.shape) * (source if of_source else target)
    devices = math.prod(meshes.sizes_of(mesh))
    return target * devices * flops / (work * (8 if config.remat else 6))


def layout_of(shape: Any, mesh: str | Mesh | AbstractMesh) -> Layout:
    """The layout of a model of this shape; a mesh by name needs no devices."""
    if isinstance(mesh, str):
        sizes = sizes_of(mesh or f"{DATA}=1")
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    _, placement = sharding.fit(shape, Placement(mesh_of(mesh)))
    build = FAMILIES[shape.model_type].build
    module = nnx.eval_shape(lambda: build(shape, rngs=nnx.Rngs(0), dtype=jnp.float32))
    return Layout.of(*nnx.split(sharding.split(module, placement)), placement)


def _held(tree: Any, where: Any) -> int:
    """Bytes of one device's parts."""

    def size(x: Any, place: Any) -> int:
        return math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, where)))


def activations(config: TrainConfig, layout: Layout, bucket: tuple[int, int]) -> int:
    """Bytes of what one device keeps of a microbatch between the forward and the backward pass."""
    kept = functools.partial(_kept, config, layout, bucket)
    if not config.remat:
        return kept(config.mode)
    inputs = kept(config.mode)
    shape = nnx.merge(layout.graphdef, layout.params).config
    layers = min(shape.num_layers, shape.num_decoder_layers)
    return inputs + max(0, kept(dataclasses.replace(config.mode, remat=False)) - inputs) // layers


def _kept(config: TrainConfig, layout: Layout, bucket: tuple[int, int], mode: Mode) -> int:
    rows = max(1, config.target_tokens // bucket[1]) // config.accumulate
    like: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch = Batch(like((rows, bucket[0])), like((rows,)), like((rows, bucket[1])), like((rows,)))
    dtype = jnp.dtype(config.compute_dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), layout.params)

    def residuals(params: nnx.State, batch: Batch) -> Any:
        active = functools.partial(mode, key=jax.random.key(0))
        return jax.vjp(lambda params: data_loss(layout.graphdef, params, batch, active)[0], params)[
            1
        ]

    with jax.numpy_dtype_promotion("standard"):
        found = jax.tree.leaves(jax.eval_shape(residuals, params, batch))
    own = [x.shape for x in jax.tree.leaves(params)]  # residuals too, and counted as weights
    data, ways = meshes.sizes_of(",".join(f"{k}={v}" for k, v in _sizes(layout).items()))
    split = _split_sizes(layout)
    return sum(
        x.size * x.dtype.itemsize // data // (ways if split.intersection(x.shape) else 1)
        for x in found
        if x.shape not in own and x.shape[::-1] not in own
    )


def _sizes(layout: Layout) -> Mapping[str, int]:
    return dict(layout.placement.mesh.shape)


def _split_sizes(layout: Layout) -> set[int]:
    """Sizes of axes that the model axis cuts: heads, fused outputs, ids."""
    module = nnx.merge(layout.graphdef, layout.params)
    names = sharding.sizes_to_split(module.config)
    heads, _, inner = (getattr(module.config, name) for name in names)
    fused = {int(np.sum(node.parts)) for node in layout.fused.values()}
    return {heads, inner, module.config.vocab_size, *fused}
