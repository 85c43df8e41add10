"""Programs compiled for a TPU v5e of 2 × 4 devices, which libtpu does without a TPU.

    pip install libtpu
    pytest -s tests/lab/test_tpu_programs.py

libtpu is no dependency: elsewhere it is of no use, and has 700 MB. XLA's partitioner knows no
platform, so the collectives are those of eight CPU devices.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import mesh_worker
import train_worker
from specjax import autoregressive, checkpoints, loop, speculative
from specjax.drafters.base import ModelDrafter
from specjax.models import meshes, sharding
from specjax.models.sharding import Placement
from specjax.policies import constant
from specjax.rules import Token
from specjax.sampling import Sampling, row_keys
from table_models import inputs_of

FOUND = importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="needs libtpu"),
    pytest.mark.usefixtures("standard_promotion"),
]
MESHES = ("data=2,model=4", "data=4,model=2", "model=8")


@pytest.fixture(scope="module")
def topology():
    """Devices that nobody has; without the variables libtpu asks the cloud for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        yield topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")


@pytest.fixture
def mesh_of(topology):
    """The mesh of a text, of these devices."""

    def made(text):
        sizes = meshes.sizes_of(text)
        return topologies.make_mesh(topology, tuple(sizes.values()), tuple(sizes))

    return made


@pytest.mark.parametrize("mesh", MESHES)
def test_a_training_step(mesh_of, mesh):
    program = train_worker.traced(mesh_of(mesh), dtype="bfloat16").lower().compile()
    found = train_worker.exchanged(program.as_text())
    print(mesh, {kind: len(sizes) for kind, sizes in found.items()}, program.memory_analysis())
    train_worker.check_exchanges(found, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("draft", [False, True])
def test_the_loop(mesh_of, mesh, draft):
    """An all-reduce for the embedding and for each projection that is split by inputs, and a gather
    of the logits; the replicated draft adds none."""
    made = mesh_of(mesh)
    target, whole = (
        checkpoints.shapes(
            mesh_worker.KINDS["t5"], dtype=jnp.bfloat16, placement=Placement(made, replicate)
        )
        for replicate in (False, True)
    )
    sampling, eos = Sampling(1.0), jnp.int32([1])
    method = autoregressive.Autoregressive(target, sampling, eos)
    if draft:
        drafter = ModelDrafter(whole)
        method = speculative.Speculative(target, drafter, Token(), constant(3), sampling, eos, 3)
    inputs, zeros = inputs_of([[0, 2, 3]] * 16, [[3, 1]] * 16), jnp.zeros((16,), jnp.int32)
    given = inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
    rows = sharding.place_rows(jax.eval_shape(lambda: given), target.placement)
    begin = loop.start.trace(method, *rows, buffer_len=16)
    began = sharding.results_of(begin.lower().compile(), begin.out_info, target.placement)
    program = loop.decode.trace(method, *began).lower().compile()
    found = mesh_worker.collectives(program.as_text())
    print(mesh, found, program.memory_analysis())
    assert (found.pop("scalars", 0) > 0) == ("data" in made.axis_names)
    assert found == {"all-reduce": 1 + 2 * 3, "all-gather": 1}
