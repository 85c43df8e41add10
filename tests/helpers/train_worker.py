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
from experiments.train import beginning, meshes
from experiments.train.batches import Batch
from experiments.train.meshes import Layout
from experiments.train.modes import Mode
from experiments.train.steps import Trainer

SHAPE = dataclasses.replace(mesh_worker.KINDS["t5"], num_decoder_layers=1)
STEPS = 3


def batch() -> Batch:
    """Eight rows, of several lengths."""
    rng = np.random.default_rng(0)
    source, target = (rng.integers(2, 40, (8, size), np.int32) for size in (6, 5))
    lengths = [rng.integers(1, size + 1, 8, np.int32) for size in (6, 5)]
    return Batch(source, lengths[0], target, lengths[1])


def trainer_on(mesh: str, *, accumulate=2, dropout=0.1, remat=True, dtype="float32"):
    """A trainer, and parameters that lie on the mesh."""
    placement = meshes.placement_for(SHAPE, mesh)
    made = beginning.make_model(SHAPE, seed=0)
    graphdef, params = meshes.placed(nnx.merge(*made), placement)
    layout = Layout.of(graphdef, params, placement)
    # Matrices of this size have factored moments too.
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    trainer = Trainer(
        graphdef, optimizer, layout=layout, accumulate=accumulate, mode=Mode(dropout, remat),
        dtype=jnp.dtype(dtype),
    )  # fmt: skip
    return trainer, params


def on_first(tree) -> int:
    """Bytes on the first device."""
    shards = (leaf.addressable_shards[0] for leaf in jax.tree.leaves(tree))
    return sum(shard.data.nbytes for shard in shards)


def collectives(program: str) -> dict[str, int]:
    """The largest array of each kind of collective, by its number of elements."""
    found = {}
    for shapes, kind in mesh_worker.COLLECTIVE.findall(program):
        for sizes in re.findall(r"\w+\[([\d,]*)\]", shapes):
            count = int(np.prod([int(size) for size in sizes.split(",") if size]))
            found[kind] = max(found.get(kind, 0), count)
    return found


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
        "collectives": collectives(program.as_text()),
    }


if __name__ == "__main__":
    for case in json.load(sys.stdin):
        print(json.dumps(steps(**case)), flush=True)
