"""Both loops lower for every platform, so that a change that only a CPU can run is seen."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export

from specjax import autoregressive, speculative
from specjax.accept import TokenRule
from specjax.draft import ModelDrafter
from specjax.models import language_model
from specjax.models.language_model import LanguageModel
from specjax.models.t5 import T5, T5Config
from specjax.policies import constant
from specjax.sampling import row_keys, sampling
from table_models import inputs_of

PLATFORMS = ("cpu", "cuda", "tpu")
SAMPLINGS = {
    "greedy": sampling(0.0),
    "plain": sampling(0.7),
    "filtered": sampling(0.7, top_k=5, top_p=0.9),
}


def model(layers: int) -> LanguageModel:
    config = T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=layers
    )
    return LanguageModel.of(T5(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))


def check(loop, method):
    """`start` and `decode` lower for all platforms, and `decode` is one loop for each."""
    inputs = inputs_of([[0], [0]], [[3, 1], [4]])
    zeros = jnp.zeros((2,), jnp.int32)
    args = method, inputs, row_keys(jax.random.key(0), zeros, zeros), zeros + 5
    lowered = export.export(loop.start, platforms=PLATFORMS)(*args, buffer_len=12)
    assert lowered.platforms == PLATFORMS
    state = jax.eval_shape(lambda *args: loop.start(*args, buffer_len=12), *args)
    lowered = export.export(loop.decode, platforms=PLATFORMS)(method, *state)
    assert lowered.platforms == PLATFORMS
    assert "stablehlo.while" in lowered.mlir_module()
    assert "stablehlo.custom_call" not in lowered.mlir_module()


@pytest.mark.parametrize("input_first", [True, False])
@pytest.mark.parametrize("law", SAMPLINGS)
def test_loops_lower_for_every_platform(law, input_first, monkeypatch):
    """A tiny T5 pair in bfloat16, with weights as they lie on a CPU and elsewhere."""
    monkeypatch.setattr(language_model, "input_first", lambda: input_first)
    target, chosen, eos = model(2), SAMPLINGS[law], jnp.int32([1])
    check(autoregressive, autoregressive.Autoregressive(target, chosen, eos))
    method = speculative.Speculative(
        target, ModelDrafter(model(1)), TokenRule(), constant(3), chosen, eos, 3
    )
    check(speculative, method)
