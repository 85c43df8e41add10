"""What is decided by platform: by the one that a program is lowered for, or a model is put on."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import t5_variants
from specjax import devices
from specjax.checkpoints import load, outline
from specjax.models.gpt import GPT, GPTConfig
from specjax.models.language_model import LanguageModel

V1_1 = t5_variants.VARIANTS["v1_1"]
CPU = jax.devices("cpu")[0]


def test_a_program_is_decided_when_it_is_lowered():
    """On a CPU, whatever jax's own backend is; elsewhere by the platform that is named."""

    @jax.jit
    def run(x):
        return devices.by_platform(x, cpu=lambda x: x + 1, accelerator=lambda x: x * 3)

    assert run(jnp.float32(2)) == 3
    for platform, there in (("cpu", False), ("cuda", True), ("rocm", True), ("tpu", True)):
        text = run.trace(jnp.float32(2)).lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.multiply" in text) == there
        assert ("stablehlo.add" in text) != there


def test_where_arrays_go():
    """To what is asked for, else where `jax.default_device` says, else where jax would."""
    assert devices.find() == devices.find("cpu") == devices.find(CPU) == CPU
    for chosen in (CPU, "cpu"):
        with jax.default_device(chosen):
            assert devices.find() == CPU
    far = types.SimpleNamespace(platform="gpu")  # stands for another device
    with jax.default_device("cpu"):
        assert devices.find(far) is far
    with pytest.raises(ValueError, match=r"device='xpu' is no platform .* leave it out"):
        devices.find("xpu")


def test_the_default_device_need_not_be_of_the_default_backend(monkeypatch):
    """As on a machine with a GPU whose user has set `jax.default_device` to the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_device(CPU):
        assert devices.find().platform == "cpu"


def test_where_arrays_lie():
    assert devices.device_of({"a": np.ones(2), "b": jnp.ones(2)}) == CPU
    assert devices.device_of(jax.ShapeDtypeStruct((2,), jnp.float32)) == devices.find()
    traced = []
    jax.eval_shape(lambda x: traced.append(devices.device_of(x)), jnp.ones(2))
    assert traced == [devices.find()]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_layout_follows_the_platform(platform):
    config = GPTConfig(31, 16, 8, 1, 2, bos_token_id=1, pad_token_id=0)
    module = GPT(config, rngs=nnx.Rngs(0))
    model = LanguageModel.of(module, platform=platform)
    turned = platform == "cpu"
    assert model.module().input_first == turned
    assert model.params["embedding"].shape == ((8, 31) if turned else (31, 8))
    assert LanguageModel.of(module).module().input_first  # its arrays lie on a CPU


def test_a_model_stays_where_it_is_loaded_to(tmp_path):
    directory = t5_variants.write(tmp_path, V1_1)
    for device in ("cpu", CPU):
        placed = jax.tree.leaves(load(directory, device=device).model)
        assert all(leaf.committed and leaf.devices() == {CPU} for leaf in placed)
    assert not any(leaf.committed for leaf in jax.tree.leaves(load(directory).model))
    for reading in (load, outline):
        with pytest.raises(ValueError, match="device='xpu'"):
            reading(directory, device="xpu")
