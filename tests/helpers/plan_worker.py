"""What `test_plan` asks of four virtual CPU devices, which a process must have from its beginning.

    python plan_worker.py < cases.json

Each case is (family, axes of the mesh, dtype). Prints, as a JSON line for each: what the plan says
and what there is when both models lie on the mesh and a batch has begun.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import tiny_models
from experiments.plan import parts
from specjax import checkpoints
from specjax.checkpoints import Checkpoint
from specjax.decoding import building, starting
from specjax.models.sharding import Placement
from specjax.sampling import Sampling

VOCABULARY, LONGEST, NEW = 32, 10, 6


def outline(family: str, dtype, placement: Placement, layers: int = 2) -> Checkpoint:
    config = tiny_models.config_of(family, VOCABULARY, layers)
    # On a CPU caches are float32; a plan is for accelerators.
    model = checkpoints.shapes(config, dtype=dtype, platform="gpu", placement=placement)
    return Checkpoint(family, model, config, eos_ids=(2,))


def filled(checkpoint: Checkpoint) -> Checkpoint:
    """With weights that lie where the outline says."""
    model = jax.tree.map(
        lambda x: jax.device_put(jnp.full(x.shape, 0.01, x.dtype), x.sharding), checkpoint.model
    )
    return Checkpoint(checkpoint.name, model, checkpoint.config, eos_ids=checkpoint.eos_ids)


def held(tree) -> list[int]:
    """Bytes on each device."""
    found = dict.fromkeys(jax.devices(), 0)
    for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values():
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.size * leaf.dtype.itemsize
    return list(found.values())


def check(family: str, axes: dict[str, int], dtype: str):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(list(axes.values())), tuple(axes))
    split, copies = Placement(mesh), Placement(mesh, replicate=True)
    # The target, and a draft that each device has.
    pairs = [
        (outline(family, one, split), outline(family, one, copies, layers=1))
        for one in (jnp.dtype(dtype), jnp.float32)
    ]

    def run(drafting: bool) -> parts.Plan:
        narrow, wide = (build(target, draft if drafting else None) for target, draft in pairs)
        return parts.Plan(narrow, wide, pairs[1][0], LONGEST, NEW)

    target, draft = map(filled, pairs[0])
    method = build(target, draft)
    begun = starting.prepare(
        method, target, [[3] * LONGEST] * 4, [(i, 0) for i in range(4)], rows=4,
        max_new_tokens=NEW, key=jax.random.key(0),
    )  # fmt: skip
    return {
        "need": run(True).need(4),
        "weights": held(method),
        "kept": held(begun),
        "call": run(False).call(4),
    }


def build(target: Checkpoint, draft: Checkpoint | None):
    return building.build(target, draft, gamma=3, sampling=Sampling(1.0))


if __name__ == "__main__":
    for case in json.load(sys.stdin):
        print(json.dumps(check(*case)), flush=True)
