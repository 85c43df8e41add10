"""Checkpoints with random weights, made on the spot, and inputs for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.benchmark.cases import SHAPES, Case
from specjax import devices
from specjax.batching import pack
from specjax.checkpoints import Checkpoint
from specjax.drafters.frequent import frequent
from specjax.models.language_model import LanguageModel
from specjax.models.layers import arrange, quantise_weights
from specjax.models.t5 import T5
from specjax.types import Inputs

# What both sides of attention's product come from.
ATTENTION = (("qkv",), ("query",), ("kv",))


def make(name: str, *, dtype: str, weights: str, share: float = 1.0) -> Checkpoint:
    """A T5 of `SHAPES` that no token ends, so that every output has the length it was given.

    Made leaf by leaf in its own dtype and place, so that it takes no more memory than it has.

    Args:
      dtype: of all parameters; "int8": float32, and matrices are rounded to 8 bits.
      weights, share: see `Case`. Below 1 the ids are drawn at random: time depends on how many.
    """
    config, platform = SHAPES[name], devices.find().platform
    floats = jnp.dtype("float32" if dtype == "int8" else dtype)
    abstract = nnx.eval_shape(lambda: arrange(T5(config, rngs=nnx.Rngs(0), dtype=floats), platform))
    graphdef, shapes = nnx.split(abstract)
    head = ("embedding" if config.tie_word_embeddings else "head",)
    filled = {}
    for i, (path, slot) in enumerate(nnx.to_flat_state(shapes)):
        if weights == "agreeing" and path == head:
            array = jnp.zeros(slot.shape, slot.dtype)
        elif path[-1] == "scale":
            array = jnp.ones(slot.shape, slot.dtype)
        else:
            # The width of the model, or of the heads: logits stay near 1, those of attention too.
            std = 1.0 if path == ("embedding",) else min(slot.shape) ** -0.5
            std *= config.d_kv**-0.25 if path[-2:-1] in ATTENTION else 1.0
            key = jax.random.fold_in(jax.random.key(0), i)
            array = _draw(key, std, shape=slot.shape, dtype=slot.dtype)
        filled[path] = slot.replace(array)
    module = nnx.merge(graphdef, nnx.from_flat_state(filled))
    if dtype == "int8":
        module = arrange(quantise_weights(module), platform)
    made = Checkpoint(name, LanguageModel.of(module), config, eos_ids=())
    if share == 1:
        return made
    count = round(share * config.vocab_size)
    return frequent(made, np.random.default_rng(0).choice(config.vocab_size, count, replace=False))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key, std, *, shape, dtype):
    return (jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype)).astype(dtype)


def sources(case: Case) -> list[list[int]]:
    """Random ids, as many for every row."""
    rng = np.random.default_rng(0)
    size = SHAPES[case.target].vocab_size
    return rng.integers(2, size, (case.batch, case.source)).tolist()


def inputs(case: Case, target: Checkpoint) -> Inputs:
    """The same as the loops take them."""
    return pack(sources(case), start_id=target.start_id, rows=case.batch, width=case.source)
