"""What `test_train_mesh` asks of eight virtual CPU devices.

    python train_worker.py < cases.json

Each case is keyword arguments of `steps`. Prints a JSON line for each.
"""

import dataclasses
import json
import os
import re
import sys

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mesh_worker
from experiments.plan import training
from experiments.train import beginning, meshes
from experiments.train.batches import Batch
from experiments.train.meshes import Layout
from experiments.train.modes import Mode
from experiments.train.steps import Trainer
from specjax.models import sharding

SHAPE = dataclasses.replace(mesh_worker.KINDS["t5"], num_decoder_layers=1)
STEPS, ROWS = 3, 24


def batch() -> Batch:
    """Rows of several lengths; on no mesh do their tokens' activations have a matrix's size."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(2, 40, (ROWS, size), np.int32) for size in (6, 5))
    lengths = [rng.integers(1, size + 1, ROWS, np.int32) for size in (6, 5)]
    return Batch(source, lengths[0], target, lengths[1])


def trainer_of(
    graphdef, layout, *, accumulate=2, dropout=0.1, remat=True, dtype="float32"
) -> Trainer:
    # Matrices of this size have factored moments too.
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    return Trainer(
        graphdef, optimizer, layout=layout, accumulate=accumulate, mode=Mode(dropout, remat),
        dtype=jnp.dtype(dtype),
    )  # fmt: skip


def trainer_on(mesh: str, **how):
    """A trainer, and parameters that lie on the mesh."""
    placement = meshes.placement_for(SHAPE, mesh)
    made = beginning.make_model(SHAPE, seed=0)
    graphdef, params = meshes.placed(nnx.merge(*made), placement)
    return trainer_of(graphdef, Layout.of(graphdef, params, placement), **how), params


def traced(mesh, **how) -> jax.stages.Traced:
    """A step on a mesh of devices that this machine need not have, from shapes alone."""
    layout = training.layout_of(SHAPE, mesh)
    trainer = trainer_of(layout.graphdef, layout, **how)
    state = jax.eval_shape(trainer.init, layout.params)
    rows = ROWS // trainer.accumulate

    def like(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def part(x):
        shape = trainer.accumulate, rows, *x.shape[1:]
        rest = [None] * (x.ndim - 1)
        place = layout.placement.sharding(None, sharding.DATA, *rest)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)

    params = jax.tree.map(like, layout.params, layout.shardings)
    state = jax.tree.map(like, state, layout.of_matrices(state))
    return trainer.compiled.trace(params, state, jax.tree.map(part, batch()), None)


def on_first(tree) -> int:
    """Bytes on the first device."""
    shards = (leaf.addressable_shards[0] for leaf in jax.tree.leaves(tree))
    return sum(shard.data.nbytes for shard in shards)


def exchanged(program: str) -> dict[str, list[int]]:
    """Sizes of the arrays that each kind of collective exchanges, in elements.

    XLA puts several arrays into one collective.
    """
    found: dict[str, list[int]] = {}
    for shapes, kind in mesh_worker.COLLECTIVE.findall(program):
        for sizes in re.findall(r"\w+\[([\d,]*)\]", shapes):
            size = int(np.prod([int(size) for size in sizes.split(",") if size]))
            found.setdefault(kind, []).append(size)
    return found


def check_exchanges(found: dict[str, list[int]], mesh: str) -> None:
    """Assert that a step with `remat` exchanges sums and no matrices; `found`: from `exchanged`.

    Over the model axis activations are all-reduced behind each projection that is split by inputs:
    in the forward pass, and where the backward pass computes it again. So are the gradients of what
    each projection reads that is split by outputs, and the embeddings. Over the data axis gradients
    are all-reduced. Only position biases of heads that other devices have are gathered, and the
    optimizer's sums of rows and columns.
    """
    reduced, (data, ways) = found["all-reduce"], meshes.sizes_of(mesh)
    decoder, encoder = SHAPE.num_decoder_layers, SHAPE.num_layers
    if ways > 1:
        here = ROWS // 2 // data * SHAPE.d_model  # elements of each position of a microbatch
        outputs, inputs = (reduced.count(length * here) for length in (5, 6))
        # The head and the embedding; self-attention, attention to the source, feed-forward.
        assert outputs == 2 + (3 + 2 + 3) * decoder, sorted(reduced)
        # The last, for keys and values of the source.
        assert inputs == 1 + (2 + 1 + 2) * encoder + decoder, sorted(reduced)
    if data > 1:
        fused = 3 * SHAPE.num_heads * SHAPE.d_kv * SHAPE.d_model // ways
        assert reduced.count(fused) >= encoder + decoder, sorted(reduced)
    biases = SHAPE.relative_attention_num_buckets * SHAPE.num_heads
    others = [size for kind, of in found.items() if kind != "all-reduce" for size in of]
    assert max(others, default=0) <= biases < SHAPE.d_model * SHAPE.d_ff, found


def steps(mesh: str, **how):
    """Losses of some steps, bytes that a device holds, and the collectives of a step."""
    trainer, params = trainer_on(mesh, **how)
    state = trainer.init(params)
    held = [on_first(tree) for tree in (params, state)]
    where = [x.sharding for x in jax.tree.leaves((params, state))]
    arguments = trainer.arguments(params, state, batch())
    program = trainer.compiled.lower(*arguments).compile()
    losses = []
    for _ in range(STEPS):
        params, state, loss = program(*trainer.arguments(params, state, batch()))
        losses.append(float(loss))
    after = [x.sharding for x in jax.tree.leaves((params, state))]
    return {
        "losses": losses,
        "held": held,
        "kept": where == after,
        "collectives": exchanged(program.as_text()),
    }


if __name__ == "__main__":
    for case in json.load(sys.stdin):
        print(json.dumps(steps(**case)), flush=True)
